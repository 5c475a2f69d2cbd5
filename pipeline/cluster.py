"""Ray: one process an actor, restarted when it dies, on this machine or on a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from actors import registry
from actors.startup import uncollected
from config.schema import RunConfig
from pipeline import host, local_ray, logs, reaper
from pipeline.errors import Exit, PipelineError
from pipeline.forks import ForkServer
from pipeline.host import Host, Left
from pipeline.inject import Process
from pipeline.reaper import Reaper

STORE_BYTES = 80 << 20
"""Ray's object store, which nothing is put into; about the least it accepts."""
HEAVY = ("trainer", "engine")
"""Kinds whose processes take longest to become useful; they are created first."""
HEAD_START_S = 4.0
"""How much earlier, where there are fewer cores than actors: so long takes what their imports compute."""

ANSWER_S = 10.0
"""Longest wait for the head node to accept a connection; Ray itself goes on trying for minutes."""
STARTS = 2
"""Tries of a local Ray: it gives its own node 30 s, which a busy machine may exceed."""


class Cluster:
    """The processes of a run. `start` on the main thread: local Ray ends with the thread that started it."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._local = config.launch.ray_address is None
        self._started = False
        self._session: Path | None = None
        self._mark = secrets.token_hex(16)
        self._reaper: Reaper | None = None
        self._forks: ForkServer | None = None
        self._exits: dict[str, asyncio.Task[Left]] = {}
        self._handles: dict[str, Any] = {}
        self._launched = 0
        self._pending: asyncio.TimerHandle | None = None

    @staticmethod
    def library() -> Any:
        """Ray, which takes half a second to import; any thread may do so beforehand."""
        _inherited()
        with uncollected():
            return importlib.import_module("ray")

    def prepare(self) -> None:
        """Begin with what takes a while and needs nothing: Ray's import here, and the server that forks its workers."""
        _inherited()
        Thread(target=self.library, name="import-ray", daemon=True).start()
        if self._local:
            self._reaper = Reaper(self._mark)
            self._forks = ForkServer(f"{reaper.MARK}={self._mark}", self._run_dir / "logs" / "forks.log")

    def start(self) -> None:
        """Start Ray here, or join the cluster at launch.ray_address. Raises `PipelineError`."""
        self._started = True
        if self._local:
            os.environ[reaper.MARK] = self._mark
            self._reaper = self._reaper or Reaper(self._mark)
        ray = self.library()
        self._knock()
        options: dict[str, Any] = {"address": self._config.launch.ray_address, "namespace": "sluice"}
        options |= {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._local:
            cores = len(registry.names(self._config))
            options |= {"address": "local", "num_cpus": cores, "object_store_memory": STORE_BYTES}
            options |= {"include_dashboard": False}
        for remaining in reversed(range(STARTS if self._local else 1)):
            try:
                with self._starting():
                    ray.init(**options)
                return
            except Exception as error:  # a node that is late on a loaded machine is a bare Exception in Ray
                ray.shutdown()
                if not remaining:
                    raise PipelineError(self._refused(error), Exit.FAILED) from error

    def _session_begins(self, folder: Path) -> None:
        assert self._reaper is not None
        self._session = folder
        self._reaper.remove(folder)

    def _knock(self) -> None:
        """Raise `PipelineError` unless somebody listens at launch.ray_address, where that is a host and a port."""
        place = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d{1,5})", self._config.launch.ray_address or "")
        if place is None or not 0 < int(place[2]) < 65536:
            return
        try:
            socket.create_connection((place[1], int(place[2])), timeout=ANSWER_S).close()
        except OSError as error:
            raise PipelineError(self._refused(error), Exit.FAILED) from error

    def _refused(self, error: Exception) -> str:
        address = self._config.launch.ray_address
        if self._local:
            return (
                f"Ray can't be started here (launch.ray_address=null): {error}. {self._keep_logs()}It needs room in "
                f"{tempfile.gettempdir()} and {STORE_BYTES >> 20} MiB of /dev/shm, and a host name that resolves. "
                "launch.ray_address=HOST:PORT uses a Ray that runs, launch.mode=external none"
            )
        auth = "auth" in str(error).lower()
        token = " RAY_AUTH_MODE, and the token that it asks for, must be the same here as there." if auth else ""
        return (
            f"Ray can't be reached (launch.ray_address={address}): {error}.{token} `ray status --address={address}` "
            "tells whether it runs and `ray start --head` starts one; leave the setting out for a Ray of the run's own"
        )

    def _keep_logs(self) -> str:
        """Copy what Ray wrote into the run's directory, since its own folder goes; answers where it is, in words."""
        if self._session is None or not (self._session / "logs").is_dir():
            return ""
        kept = self._run_dir / "logs" / "ray"
        try:
            shutil.copytree(self._session / "logs", kept, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            return f"Its logs are lost: {error}. "
        return f"Its logs are in {kept}. "

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        with _inside(self._run_dir), contextlib.ExitStack() as stack:
            if self._reaper is not None:
                stack.enter_context(local_ray.lean(self._forks.address if self._forks else None, self._session_begins))
            yield

    def launch(self, names: Sequence[str], url: str, run: str) -> None:
        """Create the actors' processes and run them; on the event loop's thread.

        Where there are fewer cores than actors, the heavy ones get a head start: they would be the last to be ready.
        """
        heavy = [name for kind in HEAVY for name in names if registry.kind_of(name) == kind]
        light = [name for name in names if name not in heavy]
        self._create(heavy, url, run)
        if heavy and self._local and (os.cpu_count() or 1) < len(names):
            self._pending = asyncio.get_running_loop().call_later(HEAD_START_S, self._create, light, url, run)
        else:
            self._create(light, url, run)

    def _create(self, names: Sequence[str], url: str, run: str) -> None:
        import ray

        remote: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Host)
        driver = host.installation()
        for name in names:
            env = actor_environment(self._config, name)
            if name in self._handles:  # it left, and comes again
                ray.kill(self._handles.pop(name))
            self._launched += 1
            handle = remote.options(name=f"{run}/{name}/{self._launched}").remote(
                name, url, run, str(self._run_dir), env
            )
            self._handles[name] = handle
            self._exits[name] = asyncio.create_task(_wait(handle.run.remote(driver, same_root=self._local)))

    def restart(self, name: str, process: Process | None) -> str:
        """End the process of an actor, so that Ray starts another; answers what came of it."""
        import ray

        if process is not None and process.here and process.kill():
            return "killed"
        if name not in self._handles:
            return "not started by this driver"
        ray.kill(self._handles[name], no_restart=False)
        return "killed by Ray"

    def left(self) -> dict[str, Left]:
        """Actors that have left for good, and why."""
        return {name: _outcome(task) for name, task in self._exits.items() if task.done()}

    async def wait(self, names: Sequence[str], timeout: float) -> list[str]:
        """Wait until these have left; answers those that have not within `timeout` seconds."""
        tasks = {self._exits[name]: name for name in names if name in self._exits}
        if not tasks:
            return []
        _, late = await asyncio.wait(tasks, timeout=max(timeout, 0.0))
        return sorted(tasks[task] for task in late)

    def stop(self) -> None:
        """End all processes: ours with local Ray, only the actors on a cluster."""
        if self._started:
            self._end()
        if self._forks is not None:
            self._forks.stop()
        if self._reaper is not None:
            self._reaper.sweep()
            os.environ.pop(reaper.MARK, None)

    def _end(self) -> None:
        import ray

        if self._pending is not None:
            self._pending.cancel()
        for task in self._exits.values():
            task.cancel()
        if ray.is_initialized():
            if not self._local:
                for handle in self._handles.values():
                    ray.kill(handle)
            ray.shutdown()


def actor_environment(config: RunConfig, name: str) -> dict[str, str | None]:
    """Environment variables of one actor's process; None unsets.

    Threads are set before torch is loaded: as many as the trainer is given, one elsewhere.
    """
    threads: str | None = "1"
    if registry.kind_of(name) == "trainer":
        threads = str(config.trainer.threads) if config.trainer.threads else None
    return {"OMP_NUM_THREADS": threads, "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false", logs.CONSOLE: "none"}


def _inherited() -> None:
    for variable, value in local_ray.ENVIRONMENT.items():
        os.environ.setdefault(variable, value)


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """Ray puts the working directory first on the workers' sys.path, so it must hold no module."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


async def _wait(ref: Any) -> Left:
    return await ref


def _outcome(task: asyncio.Task[Left]) -> Left:
    if task.cancelled():
        return Left("fatal", "cancelled")
    error = task.exception()
    return task.result() if error is None else Left("fatal", f"{type(error).__name__}: {error}")
