"""Forks the workers of a local Ray from one process that has imported what all of them need.

Importing Ray and the runtime costs a process about a second of CPU; a fork has both for nothing. The server is started
by the driver, who holds its stdin, and ends with it. Ray starts `forked_worker` in place of its own worker: that asks
here for a fork with its arguments and environment, or runs Ray's worker by itself if none is to be had.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from actors.startup import lean
from pipeline import forked_worker

EARLY = ("pipeline.runtime", "aiohttp.web", "requests", "jsonschema", "yaml", "filelock", "google.protobuf.reflection")
"""What most actors import, and packages that Ray imports. Nothing that starts a thread, and neither torch nor numpy:
they read the environment of their process."""
RAY = ("ray", "ray.actor", "ray._private.node", "ray._private.async_compat", "ray._private.parameter")
RAY += ("ray._private.runtime_env.setup_hook",)
"""Ray reads its part of the environment once, so it is imported with that of the first worker. No `ray.dag`: it draws
an id, and with that seeds a generator that all forks would share."""
REQUEST_S = 5.0
"""Longest that a request may take to come in whole."""
LINGER_S = 5.0


class ForkServer:
    """The driver's end. Its fork server starts at once; `environment` tells Ray's workers of it."""

    def __init__(self, mark: str, log: Path) -> None:
        """`mark` (`NAME=VALUE`) is put into the environment of every worker. The server's output goes to `log`."""
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-"))
        self.address = str(self._folder / "forks")
        name, _, value = mark.partition("=")
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipeline.forks", self.address],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, name: value},
                start_new_session=True,
            )

    def stop(self) -> None:
        """End the server; the workers are Ray's, and stay."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(LINGER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Fork(NamedTuple):
    """What a fork is to become, and the connection that stays open as long as it lives."""

    connection: socket.socket
    request: Mapping[str, Any]


class Server:
    """Answers one caller after another."""

    def __init__(self) -> None:
        self._ray: dict[str, str] | None = None

    def serve(self, listener: socket.socket) -> Fork | None:
        """Until stdin closes; answers None then, and in every fork what it is to become."""
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector, wake, woken:
            for source in (listener, woken, sys.stdin):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if sys.stdin in ready:
                    return None
                if woken in ready:
                    woken.recv(4096)
                    _reap()
                if listener in ready and (fork := self._answer(listener)) is not None:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return fork

    def _answer(self, listener: socket.socket) -> Fork | None:
        """Fork for one caller, if that can be; answers in the fork."""
        connection, _ = listener.accept()
        connection.settimeout(REQUEST_S)
        try:
            with connection.makefile("rb") as file:
                request = json.loads(file.readline())
        except (OSError, ValueError) as error:
            print(f"no request came: {error}", file=sys.stderr, flush=True)
            connection.close()
            return None
        if self._ready(request["environment"]) and not os.fork():
            return Fork(connection, request)
        connection.close()
        return None

    def _ready(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork would be as good as a new process: of one Ray, and with all threads that there are."""
        asked = {name: value for name, value in environment.items() if name.startswith("RAY_")}
        if self._ray is None:
            self._ray = asked
            os.environ.update(asked)
            _import(RAY)
        if asked != self._ray:
            print("no fork: it belongs to another Ray", file=sys.stderr, flush=True)
            return False
        if (threads := _threads()) > 1:
            print(f"no fork: {threads} threads", file=sys.stderr, flush=True)
            return False
        return True


def main(address: str) -> None:
    """Serve forks at a Unix socket until stdin closes; returns in every fork, to be run, as well as at the end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)  # who comes before the imports are done waits
        Path(f"{address}.new").rename(address)  # whoever sees the address is not refused
        _import(EARLY)
        fork = Server().serve(listener)
    if fork is not None:
        _become(fork)
        return
    Path(address).unlink(missing_ok=True)  # a driver that was killed leaves it to us
    with contextlib.suppress(OSError):
        Path(address).parent.rmdir()


def _import(names: Iterable[str]) -> None:
    with lean():
        for name in names:
            importlib.import_module(name)


def _threads() -> int:
    """Threads of this process; a fork would lose all but its own."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


def _reap() -> None:
    """Collect forks that ended: Ray takes a process for alive as long as it is a zombie."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _become(fork: Fork) -> None:
    """Be the worker that was asked for, unless whoever asked has gone: it runs one by itself then."""
    if not _wanted(fork.connection):
        return
    os.setpgid(0, 0)  # when a worker ends Ray kills its group
    os.environ.clear()
    os.environ.update(fork.request["environment"])
    os.chdir(fork.request["directory"])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.argv = fork.request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")
    fork.connection.close()


def _wanted(connection: socket.socket) -> bool:
    try:
        connection.sendall(forked_worker.READY)
        return connection.recv(1) == forked_worker.GO
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1])
