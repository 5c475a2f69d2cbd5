"""Runs a program that starts others, and ends all of them: `python keeper.py GRACE_S PROGRAM ARGS...`.

When stdin closes (whoever started the keeper is gone), or SIGTERM or SIGINT comes, the program gets SIGINT, as from a
terminal. Once it has ended, or after GRACE_S seconds, everything below the keeper is killed, also what moved to a
session of its own: the keeper adopts it (Linux). It uses the standard library alone, and leaves with the program's exit
status, 128 + n for signal n.
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


def main(grace_s: float, command: list[str]) -> int:
    """Run `command` until it ends or has to; answers its exit status."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A shell's background jobs ignore SIGINT, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
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
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    os._exit(main(float(sys.argv[1]), sys.argv[2:]))
