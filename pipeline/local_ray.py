"""A local Ray without what a run on one machine does not need, and its workers as forks.

Ray has no settings for most of it, so some of its functions are replaced while it starts, as far as this release has
them. That saves some 300 MB, a third of the CPU time of a start, and 5 s of it on two cores.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

from pipeline import forked_worker, idle

ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",
    # the trainer and the engines start first, a few at a time: they take longest to become useful
    "RAY_enable_worker_prestart": "false",
    "RAY_prestart_worker_first_driver": "false",
    "RAY_worker_maximum_startup_concurrency": "2",
}
"""What Ray's own processes inherit: safe imports, no chatter, accelerators and priorities left as they are."""
UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's node that start its autoscaler, its log shipper and its API server."""
AGENT = "_build_python_executable_command_memory_profileable"
"""The function that begins the command line of the node's agents: for a dashboard, and for runtime environments."""
PORTS = ("METRICS_AGENT_PORT_NAME", "METRICS_EXPORT_PORT_NAME", "DASHBOARD_AGENT_LISTEN_PORT_NAME")
PORTS += ("RUNTIME_ENV_AGENT_PORT_NAME",)
"""Where the node waits for its agents to say that they listen; -1 says that they never will."""
NODE_S, LOOK_EVERY_S = 30.0, 0.05
"""How long to look for a local Ray's own node, and how often."""


@contextlib.contextmanager
def lean(forks: str | None, session: Callable[[Path], None]) -> Iterator[None]:
    """Start a local Ray inside. Its workers are forks of the server at the Unix socket `forks`, if there is one.

    `session` is told of the folder for Ray's sockets and logs before it is made: a start may be interrupted anywhere.
    """
    from ray import _raylet
    from ray._private import services
    from ray._private.node import Node

    wanted: list[tuple[Any, str, Any]] = [(Node, name, lambda *_, **__: None) for name in UNUSED]
    wanted.append((Node, "_init_temp", partialmethod(_init_temp, getattr(Node, "_init_temp", None), session)))
    wanted.append((services, "get_node", partial(_get_node, getattr(services, "get_node", None))))
    silent = all(hasattr(_raylet, name) for name in (*PORTS, "persist_port")) and hasattr(services, AGENT)
    if issubclass(getattr(services, "ConsolePopen", type), subprocess.Popen):
        wanted.append((services, "ConsolePopen", partial(services.ConsolePopen, start_new_session=True)))
    if silent:
        wanted.append((services, AGENT, lambda *_, **__: [sys.executable, "-I", "-S", idle.__file__]))
    start = partial(_start_raylet, getattr(services, "start_raylet", None), silent=silent, forks=forks is not None)
    wanted.append((services, "start_raylet", start))
    found = [(owner, name, getattr(owner, name), new) for owner, name, new in wanted if hasattr(owner, name)]
    for owner, name, _, new in found:
        setattr(owner, name, new)
    if forks is not None:
        os.environ[forked_worker.ADDRESS] = forks
    try:
        yield
    finally:
        os.environ.pop(forked_worker.ADDRESS, None)
        for owner, name, old, _ in found:
            setattr(owner, name, old)


def _init_temp(node: Any, original: Any, session: Callable[[Path], None], *args: Any) -> Any:
    """Ray's `Node._init_temp`, which makes the folder."""
    from ray._common.utils import get_default_ray_temp_dir

    session(Path(node._ray_params.temp_dir or get_default_ray_temp_dir(), node._session_name))
    return original(node, *args)


def _start_raylet(original: Any, *args: Any, silent: bool, forks: bool, **kwargs: Any) -> Any:
    """Ray's `start_raylet`, told beforehand that its node's agents serve nobody, and what its workers are."""
    raylet = importlib.import_module("ray._raylet")
    given = inspect.signature(original).bind(*args, **kwargs)
    if silent:
        for name in PORTS:
            raylet.persist_port(given.arguments["session_dir"], given.arguments["node_id"], getattr(raylet, name), -1)
    if forks:
        given.arguments["worker_path"] = forked_worker.__file__
    return original(*given.args, **given.kwargs)


def _get_node(original: Any, address: str, node: str) -> Any:
    """What Ray's `get_node` answers, which by itself looks once a second whether its node is there."""
    from ray._private import services
    from ray._private.state import GlobalState

    state = GlobalState()
    state._initialize_global_state(services._get_gcs_client_options(address))
    until = time.monotonic() + NODE_S
    while time.monotonic() < until and not any(row["NodeID"] == node and row["Alive"] for row in state.node_table()):
        time.sleep(LOOK_EVERY_S)
    state.disconnect()
    return original(address, node)
