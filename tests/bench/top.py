"""`python -m tests.bench.top [EVENTS] [RUN]`: what `pipeline top` takes to read a log of 1,000,000 events.

Prints how long its feed reads, memory, and how long it takes to reach an earlier moment. CPU seconds are those of this
process alone.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from pipeline.rundir import RunDir, config_of
from pipeline.top.feed import Feed
from tests.bench import longlog
from tests.bench.ui import memory


def main(events: int, folder: Path) -> None:
    run = RunDir.open(folder if (folder / "run.json").exists() else longlog.write(folder, events))
    feed = Feed(run, config_of(run))
    before, cpu, wall = memory(), time.process_time(), time.perf_counter()
    feed.start()
    assert feed.wait_loaded(600.0)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    count = feed.history.board.position
    print(f"opened {count:,} events: {cpu:.1f} s CPU, {wall:.1f} s wall, {cpu / count * 1e6:.1f} us an event")
    print(f"memory: {before} MiB before, {memory()} MiB at most")
    for share in (0.25, 0.9):
        cpu, wall = time.process_time(), time.perf_counter()
        board = feed.at(round(count * share))
        print(f"at {board.position:,}: {time.process_time() - cpu:.2f} s CPU, {time.perf_counter() - wall:.2f} s wall")


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as held:
        main(number, Path(sys.argv[2]) if len(sys.argv) > 2 else Path(held) / "run")
