"""`python -m tests.bench.seek [RUN | STEPS]`: how long a look into the middle of a recorded run takes, and its check.

Takes a copy of RUN, or simulates one of so many steps (75 events each; 13,400 of them take a quarter of an hour). Each
question is asked twice, by a process of its own: without an index, and with the one that the first left. Prints wall
and CPU seconds, the starts of Python in them, and the peak of memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from config import loading
from pipeline import eventlog
from pipeline.replay.index import NAME
from pipeline.rundir import RunDir
from pipeline.simulate import archive
from pipeline.simulate.run import simulate


def main(given: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if given.isdigit():
            config = loading.load("simulated", [f"steps={given}", "engine.count=4", "launch.collectors=2"])
            archive.write(simulate(config, 1, limit_s=1e9).world, config, run)
        else:
            shutil.copytree(given, run, ignore=shutil.ignore_patterns(NAME, "payloads", "checkpoints"))
        events = sum(segment.records for segment in eventlog.segments(RunDir.open(run)))
        middle = str(events // 2)
        print(f"{events:,} events, load {os.getloadavg()[0]:.1f}")
        timed("start alone", ["replay", "--help"])
        for words in (["--until", middle, "--actor", "buffer"], ["--until", middle, "--json"], ["--check"]):
            (run / NAME).unlink(missing_ok=True)
            for which in ("first", "second"):
                timed(f"{' '.join(words)}, {which}", ["replay", str(run), *words])
        print(f"{NAME}: {(run / NAME).stat().st_size:,} bytes, load {os.getloadavg()[0]:.1f}")


def timed(name: str, words: list[str]) -> None:
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "pipeline", *words], stdout=subprocess.DEVNULL)
    _, _, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    cpu = used.ru_utime + used.ru_stime
    print(f"{name:<42} {wall:7.2f} s wall {cpu:7.2f} s CPU {used.ru_maxrss / 1024:6.0f} MiB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "400")
