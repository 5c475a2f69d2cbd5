"""Kills what a driver left behind, however the driver ended.

The driver marks its environment, which every process below it inherits, and holds the stdin of this program (run by
path, `python -I -S reaper.py NAME=VALUE LEFTOVERS`, standard library only). When stdin closes, also by SIGKILL of the
driver, all processes that carry the mark are killed, LEFTOVERS (a program) removes their files, and the folders go
whose paths, a line each, came over stdin. Needs /proc; elsewhere it kills nothing, and Ray's own processes end by
themselves within about a minute.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "SLUICE_DRIVER"
"""Environment variable that marks what a driver started; its value is unique to the driver."""
LEFTOVERS = "actors/leftovers.py"
SWEEPS, PAUSE_S = 20, 0.1
"""Sweeps until none finds a process, since a process may start another while the first is swept."""


class Reaper:
    """The driver's end. Start it before anything that shall be swept is started, with the mark in the environment."""

    def __init__(self, mark: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, f"{MARK}={mark}", str(Path(__file__).parents[1] / LEFTOVERS)],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def remove(self, folder: Path) -> None:
        """Have this folder removed at the end, when nobody lives who uses it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed: then nobody sweeps
            self._process.stdin.write(f"{folder}\n".encode())
            self._process.stdin.flush()

    def sweep(self) -> None:
        """Kill what is left now, and wait for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SWEEPS * PAUSE_S + 5.0)


def marked(mark: str) -> list[int]:
    """Processes whose environment holds `mark` (`NAME=VALUE`), zombies apart."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def sweep(mark: str) -> None:
    """Kill marked processes until there are none."""
    for _ in range(SWEEPS):
        pids = marked(mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folders = sys.stdin.buffer.read().decode().splitlines()
    sweep(sys.argv[1])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    runpy.run_path(sys.argv[2])["sweep"]()
