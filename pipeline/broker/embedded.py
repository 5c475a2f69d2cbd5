"""The broker: a server somebody else runs, or one of our own in the run directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec
import structlog

from config.schema import BrokerConfig
from pipeline.broker import supervise
from pipeline.bus import redact

SOCKET_PATH_LIMIT = 100
"""Bytes of a socket path that every system accepts (Linux takes 107, macOS 103)."""
GRACE_S = 10.0
"""How long the server may take to flush its append-only file before it is killed."""
RESTARTS, WINDOW_S = 10, 60.0
"""Deaths of the server within the window that are answered by a restart."""
LOCK_SHARE = 0.5
"""Part of `start_deadline_s` that a predecessor in the directory may take to end."""
PING_S = 0.01
LOG_TAIL = 2000


class BrokerError(Exception):
    """No server can be had. The message says what was tried and what would help."""


class Binary(msgspec.Struct, frozen=True):
    """A server that can be started: where it is, what it says it is, and why it was taken."""

    path: Path
    version: str
    why: str


class Happening(msgspec.Struct, frozen=True):
    """What befell the embedded server. `started` (pid); `exited` (pid, code): it is started again after `pause_s`;
    `gave_up`: it, or its supervisor, died too often, so the run can't go on; `locked`: its files are in use.
    """

    event: Literal["started", "exited", "gave_up", "locked"]
    pid: int = 0
    code: int | None = None
    pause_s: float | None = None


class Broker:
    """A server that answers at `url`. As a context manager it is stopped at the end."""

    kind: Literal["external", "embedded"]
    url: str

    def describe(self) -> str:
        """One line for the log: which server, and why this one; without passwords."""
        raise NotImplementedError

    def stop(self, deadline_s: float = GRACE_S) -> None:
        """Stop what we started, within `deadline_s`; may be called again."""
        raise NotImplementedError

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


class External(Broker):
    """A server that is not ours to start or stop."""

    kind = "external"

    def __init__(self, url: str, server: str) -> None:
        self.url = url
        self._server = server

    def describe(self) -> str:
        return f"external {self._server} at {redact(self.url)} (REDIS_URL is set)"

    def stop(self, deadline_s: float = GRACE_S) -> None:
        """Nothing: it isn't ours."""


class Embedded(Broker):
    """A server in the run directory, under a supervisor process that outlives neither us nor its purpose.

    It listens on a Unix socket only, writes an append-only file in `run_dir/broker` (a later server there goes on from
    it) and its log to `run_dir/logs/broker.log`. `run_dir/broker.json` tells other processes the URL. Raises
    BrokerError with the end of the log if it doesn't answer within `start_deadline_s`.
    """

    kind = "embedded"

    def __init__(
        self, binary: Binary, run_dir: Path, config: BrokerConfig, on_event: Callable[[Happening], None] | None = None
    ) -> None:
        run_dir = run_dir.resolve()
        self._binary = binary
        self._config = config
        self._on_event = on_event
        self._data = run_dir / "broker"
        self._log = run_dir / "logs" / "broker.log"
        self._file = run_dir / "broker.json"
        self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log.parent.mkdir(exist_ok=True)
        self._scratch, self._socket = _socket_path(run_dir)
        self.url = f"unix://{quote(str(self._socket))}"
        self._logger = structlog.get_logger().bind(broker=self.url)
        self._stopping = False
        self._ready = False
        self._news = threading.Condition()
        self._last: Happening | None = None
        self._supervisor = self._spawn()
        self._monitor = threading.Thread(target=self._watch, name="broker", daemon=True)
        self._monitor.start()
        try:
            self._await_answer()
        except BaseException:
            self.stop(1.0)
            raise
        self._file.write_bytes(msgspec.json.encode({"url": self.url, "supervisor": self._supervisor.pid}))

    def describe(self) -> str:
        binary, config = self._binary, self._config
        return (
            f"embedded {binary.version} at {self.url} ({binary.why}; REDIS_URL is not set), "
            f"appendfsync {config.appendfsync}, files in {self._data}"
        )

    def stop(self, deadline_s: float = GRACE_S) -> None:
        """Let the server flush and end; what is left of it after `deadline_s` is killed."""
        self._stopping = True
        stdin = self._supervisor.stdin
        assert stdin is not None
        stdin.close()
        try:
            self._supervisor.wait(deadline_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._supervisor.pid, signal.SIGKILL)
            self._supervisor.wait()
        self._monitor.join()
        if self._ready:
            self._file.unlink(missing_ok=True)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    # --- starting ---

    def _spawn(self) -> subprocess.Popen[bytes]:
        spec = {
            "command": self._command(),
            "log": str(self._log),
            "lock": str(self._data / "lock"),
            "lock_s": LOCK_SHARE * self._config.start_deadline_s,
            "grace_s": GRACE_S,
            "restarts": RESTARTS,
            "window_s": WINDOW_S,
            "scratch": self._scratch and str(self._scratch),
        }
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", supervise.__file__, msgspec.json.encode(spec).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._data),
            "logfile": str(self._log),
            "loglevel": "notice",
            "save": "",
            "appendonly": "yes",
            "appendfsync": self._config.appendfsync,
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [str(self._binary.path), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _await_answer(self) -> None:
        deadline = time.monotonic() + self._config.start_deadline_s
        with self._news:
            while not (self._last and self._last.event == "started" and _answers(self._socket)):
                if self._last and self._last.event != "started":
                    raise BrokerError(self._why(self._last))
                if time.monotonic() > deadline:
                    raise BrokerError(
                        f"{self._binary.path} did not answer at {self._socket} within broker.start_deadline_s="
                        f"{self._config.start_deadline_s:g}; end of {self._log}:\n{self._tail()}"
                    )
                self._news.wait(PING_S)
            self._ready = True

    def _why(self, last: Happening) -> str:
        if last.event == "locked":
            return (
                f"{self._data} is in use by another server (its lock was not free within broker.start_deadline_s="
                f"{self._config.start_deadline_s:g}): stop that run, or choose another run_dir"
            )
        return f"{self._binary.path} exited with code {last.code}; end of {self._log}:\n{self._tail()}"

    def _tail(self) -> str:
        return self._log.read_bytes()[-LOG_TAIL:].decode(errors="replace")

    # --- watching ---

    def _watch(self) -> None:
        """Pass on what the supervisor tells; replace it when it was killed."""
        supervisors = 1
        while True:
            stdout = self._supervisor.stdout
            assert stdout is not None
            with stdout:
                for line in stdout:
                    self._tell(msgspec.json.decode(line, type=Happening))
            code = self._supervisor.wait()
            if self._stopping or (self._last and self._last.event in ("gave_up", "locked")):
                return
            if supervisors > RESTARTS:
                self._tell(Happening("gave_up", self._supervisor.pid, code))
                return
            supervisors += 1
            self._logger.warning("broker supervisor died", code=code)
            self._supervisor = self._spawn()

    def _tell(self, happening: Happening) -> None:
        with self._news:
            self._last = happening
            self._news.notify_all()
            ready = self._ready
        if not ready or self._stopping:
            return
        report = self._logger.info if happening.event == "started" else self._logger.error
        report(f"broker {happening.event}", pid=happening.pid, code=happening.code, pause_s=happening.pause_s)
        if self._on_event is not None:
            self._on_event(happening)


def _socket_path(run_dir: Path) -> tuple[Path | None, Path]:
    """(a private directory made for the socket, or None; the socket): in the run directory unless that is too long."""
    path = run_dir / "broker.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_LIMIT:
        return None, path
    scratch = Path(tempfile.mkdtemp(prefix="sluice-"))
    return scratch, scratch / "broker.sock"


def _answers(path: Path) -> bool:
    """Does a server that has loaded its data answer at `path`?"""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        connection.settimeout(1.0)
        connection.connect(str(path))
        connection.sendall(b"PING\r\n")
        return connection.recv(64).startswith(b"+PONG")
    return False
