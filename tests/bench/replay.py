"""`python -m tests.bench.replay [STEPS]`: how fast recorded runs go through the real cores, on one core.

Prints log events and journalled steps a second of CPU time: decoding alone, folding (states only), and the whole check
(fold, hash of every step's commands, comparison with the log).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.replay.check import check, without_collector
from pipeline.replay.recorded import Recorded
from pipeline.rundir import RunDir, config_of
from pipeline.simulate import archive
from tests.bench import longlog


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world, config = longlog.simulated(steps)
        run: RunDir = archive.write(world, config, Path(folder) / "run")
        recorded = Recorded.read(run, config_of(run))
        events = len(recorded.log.events)
        count = sum(len(track.records) for track in recorded.tracks.values())
        print(f"{events} events, {count} journalled steps of {len(recorded.tracks)} actors")

        def decode() -> None:
            for track in recorded.tracks.values():
                for record in track.records:
                    track.input(record)

        def fold() -> None:
            for track in recorded.tracks.values():
                deque(track.steps(), maxlen=0)

        with without_collector():
            report("decode", decode, events, count)
            report("fold", fold, events, count)
            report("check", lambda: check(recorded), events, count)
        for name, track in recorded.tracks.items():
            seconds = cpu(lambda track=track: deque(track.steps(), maxlen=0))
            print(f"  {name:<12} {len(track.records):>7} steps {1e6 * seconds / len(track.records):6.1f} us each")


def cpu(work: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(3):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best


def report(name: str, work: Callable[[], Any], events: int, steps: int) -> None:
    seconds = cpu(work)
    print(f"{name:<8} {events / seconds:>10,.0f} events/s {steps / seconds:>10,.0f} steps/s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
