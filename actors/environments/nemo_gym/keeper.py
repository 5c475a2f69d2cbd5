"""Runs a program that starts others, and ends all of them: `python keeper.py GRACE_S LOG PROGRAM ARGS...`.

When stdin closes (whoever started the keeper is gone), or SIGTERM or SIGINT comes, the program gets SIGINT, as from a
terminal. Once it has ended, or after GRACE_S seconds, everything below the keeper is killed, also what moved to a
session of its own: the keeper adopts it (Linux). It uses the standard library alone, and leaves with the program's exit
status, 128 + n for signal n.

What they print goes to the file LOG, which begins anew with every start and whenever it has `LOG_BYTES`; the one before
is kept as LOG.1.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
SWEEPS, PAUSE_S = 50, 0.1
LOG_BYTES = 16 * 2**20
DRAIN_S = 2.0
"""How long the last words of processes that were ended are waited for."""


class Log:
    """A file that never grows beyond `limit` bytes; what it held before is in a second one."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        self._path, self._limit = path, limit
        self._begin()

    def write(self, data: bytes) -> None:
        if self._size and self._size + len(data) > self._limit:
            self._file.close()
            self._begin()
        self._file.write(data)
        self._size += len(data)

    def copy(self, source: int) -> None:
        """Until nobody can write to `source` any more."""
        while data := os.read(source, 65_536):
            self.write(data)

    def _begin(self) -> None:
        if self._path.exists():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._file = self._path.open("wb", buffering=0)
        self._size = 0


def below(root: int) -> list[int]:
    """All processes that descend from `root`."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, open_ = [], [root]
    while open_:
        open_ = [child for pid in open_ for child in children.get(pid, ())]
        found += open_
    return found


def sweep() -> None:
    """Kill what is left below this process until there is nothing."""
    for _ in range(SWEEPS):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        pids = below(os.getpid())
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)


def main(grace_s: float, path: Path, command: list[str]) -> int:
    """Run `command` until it ends or has to; answers its exit status."""
    log = Log(path)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A shell's background jobs ignore SIGINT, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    said, sink = os.pipe()
    try:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
    except OSError as error:
        log.write(f"{command[0]} can't be run: {error}\n".encode())
        return 127
    os.close(sink)
    copying = threading.Thread(target=log.copy, args=(said,), daemon=True)
    copying.start()
    asked = threading.Event()

    def stop(*_: Any) -> None:
        if not asked.is_set():
            asked.set()
            with contextlib.suppress(ProcessLookupError):
                os.kill(program.pid, signal.SIGINT)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=watch, daemon=True).start()
    status: int | None = None
    give_up_at: float | None = None
    while status is None:
        status = program.poll()
        if asked.is_set() and status is None:
            give_up_at = give_up_at or time.monotonic() + grace_s
            if time.monotonic() > give_up_at:
                program.kill()
        time.sleep(0.02 if asked.is_set() else PAUSE_S)
    sweep()
    copying.join(DRAIN_S)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    os._exit(main(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
