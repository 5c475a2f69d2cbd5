"""From the command to the first training step: seconds, and who used the processors meanwhile.

`python -m tests.bench.startup [--warm] [key=value ...]`. Without --warm no model is made yet, as on a fresh
machine. Linux only. Exit code 1 if the step came later than the goal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipeline.eventlog import archived
from pipeline.rundir import RunDir

PIPELINE = Path(sys.executable).parent / "pipeline"
GOAL_S = 20.0
TICKS = os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> dict[int, float]:
    """CPU seconds used so far by `root` and everything that it started."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return {pid: used[pid] for pid in family if pid in used}


def title(pid: int) -> str:
    """A short name of a process that is no actor."""
    try:
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().rstrip("\0").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return "?"
    if "-m" in words:
        return words[words.index("-m") + 1]
    return Path(words[0].split(" ")[0]).name if not words[0].endswith(("python", "python3")) else Path(words[-1]).name


def main(arguments: list[str]) -> int:
    """Measure one start."""
    warm = "--warm" in arguments
    words = [word for word in arguments if word != "--warm"]
    with tempfile.TemporaryDirectory() as scratch:
        folder, output = Path(scratch) / "run", Path(scratch) / "out"
        env = dict(os.environ) if warm else {**os.environ, "SLUICE_CACHE": str(Path(scratch) / "cache")}
        command = [PIPELINE, "up", "quickstart", "steps=1", "target_reward=null", f"run_dir={folder}", *words]
        used: dict[int, float] = {}
        titles: dict[int, str] = {}
        begin = time.monotonic()
        with output.open("wb") as sink:
            driver = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=env)
        while '"event": "step"' not in output.read_text():
            if driver.poll() is not None:
                print(output.read_text())
                return 1
            for pid, seconds in descendants(driver.pid).items():
                used[pid] = seconds
                titles.setdefault(pid, title(pid))
            time.sleep(0.1)
        took = time.monotonic() - begin
        driver.wait()
        actors = {e.body.pid: e.actor for _, e in archived(RunDir.open(folder)) if hasattr(e.body, "pid")}
    for pid, seconds in sorted(used.items(), key=lambda item: -item[1]):
        if seconds >= 0.05:
            print(f"{seconds:6.2f} s  {actors.get(pid) or titles[pid]}")
    print(f"{sum(used.values()):6.2f} s  of CPU in all, on {os.cpu_count()} cores")
    print(f"first step after {took:.1f} s (goal {GOAL_S:.0f} s), models {'kept' if warm else 'made'}")
    return int(took > GOAL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
