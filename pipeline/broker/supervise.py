"""Keeps one server process alive exactly as long as its parent wants it.

Run by path (`python -I -S supervise.py SPEC`), standard library only, so that it starts in milliseconds. SPEC is JSON:
command, log (file for the server's output), lock (file), lock_s, grace_s, restarts, window_s, scratch (directory to
remove at the end, or null).

The parent holds our stdin. When it closes (also by the parent's SIGKILL), when we are reparented or get SIGTERM, the
server is sent SIGTERM, which makes it flush its append-only file, and SIGKILL after `grace_s`. Should we ourselves be
killed, Linux sends the server SIGTERM. A server that dies by itself is started again, after a pause that doubles, up to
`restarts` times within `window_s`. Each happening is one line of JSON on stdout.

The lock is inherited by the server and so held until the last process that may write the files is gone; two servers
never share a directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PARENT_CHECK_S = 0.5
"""How often we look whether we were reparented; needed only if a fork of the parent keeps our stdin open."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 5.0
PR_SET_PDEATHSIG = 1
STOPPED, GAVE_UP, LOCKED = 0, 1, 3


class Supervisor:
    """Runs `spec["command"]` until asked to stop; `stdin` and `stdout` are the descriptors that lead to the parent."""

    def __init__(self, spec: dict[str, Any], stdin: int, stdout: int) -> None:
        self._spec = spec
        self._stdin = stdin
        self._stdout = stdout
        self._parent = os.getppid()
        self._stopping = False
        self._deaths: list[float] = []
        self._wake, self._waker = _pipe()
        self._bound: Callable[[], object] | None = None
        if sys.platform == "linux":
            self._bound = functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, int(signal.SIGTERM))

    def run(self) -> int:
        """Answers how it ended: STOPPED, GAVE_UP or LOCKED."""
        handlers = {signal.SIGTERM: self._terminated, signal.SIGCHLD: _noted, signal.SIGINT: signal.SIG_IGN}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        wakeup = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        try:
            with open(self._spec["lock"], "a") as lock:
                return self._supervise(lock.fileno()) if self._locked(lock.fileno()) else LOCKED
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wake)
            os.close(self._waker)
            if self._spec["scratch"]:
                shutil.rmtree(self._spec["scratch"], ignore_errors=True)

    def _locked(self, lock: int) -> bool:
        deadline = time.monotonic() + self._spec["lock_s"]
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() > deadline or self._asked(0.05):
                self._tell(event="locked")
                return False

    def _supervise(self, lock: int) -> int:
        while True:
            server = self._start(lock)
            self._tell(event="started", pid=server.pid)
            while server.poll() is None:
                if self._asked(PARENT_CHECK_S):
                    self._stop(server)
                    return STOPPED
            pause = self._pause()
            self._tell(event="exited" if pause else "gave_up", pid=server.pid, code=server.returncode, pause_s=pause)
            if not pause:
                return GAVE_UP
            until = time.monotonic() + pause
            while (left := until - time.monotonic()) > 0:
                if self._asked(left):
                    return STOPPED

    def _start(self, lock: int) -> subprocess.Popen[bytes]:
        with open(self._spec["log"], "ab") as log:
            return subprocess.Popen(
                self._spec["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                preexec_fn=self._bound,
            )

    def _stop(self, server: subprocess.Popen[bytes]) -> None:
        server.terminate()
        try:
            server.wait(self._spec["grace_s"])
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    def _pause(self) -> float | None:
        """How long to wait before the next start; None if the budget is used up."""
        now = time.monotonic()
        self._deaths = [death for death in self._deaths if death > now - self._spec["window_s"]] + [now]
        if len(self._deaths) > self._spec["restarts"]:
            return None
        return min(FIRST_PAUSE_S * 2 ** (len(self._deaths) - 1), LAST_PAUSE_S)

    def _asked(self, timeout: float) -> bool:
        """Wait for anything to happen, at most `timeout` seconds; are we to stop?"""
        ready, _, _ = select.select([self._stdin, self._wake], [], [], min(timeout, PARENT_CHECK_S))
        if self._wake in ready:
            os.read(self._wake, 4096)
        closed = self._stdin in ready and not os.read(self._stdin, 4096)
        self._stopping |= closed or os.getppid() != self._parent
        return self._stopping

    def _terminated(self, *_: Any) -> None:
        self._stopping = True

    def _tell(self, **fact: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stdout, json.dumps(fact).encode() + b"\n")


def _noted(*_: Any) -> None:
    """The wake-up descriptor does the work."""


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write


if __name__ == "__main__":
    sys.exit(Supervisor(json.loads(sys.argv[1]), sys.stdin.fileno(), sys.stdout.fileno()).run())
