"""`python -m tests.bench.replay [STEPS]`: how fast recorded runs go through the real cores, on one core.

Prints log events and journalled steps a second of CPU time: decoding alone, folding (states only), and the whole check
(fold, hash of every step's commands, comparison with the log). Then the same fold in stretches of 32 steps, each at its
shortest of nine, which what else runs on the machine hardly touches.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.replay.check import check, without_collector
from pipeline.replay.recorded import Recorded
from pipeline.rundir import RunDir, config_of
from pipeline.simulate import archive
from tests.bench import longlog

STRETCH, TIMES = 32, 9
"""Steps of a stretch, and times that each is measured."""


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
            report("decode", cpu(decode), events, count)
            report("fold", cpu(fold), events, count)
            report("check", cpu(lambda: check(recorded)), events, count)
            shortest = {name: stretches(track.steps) for name, track in recorded.tracks.items()}
        report("at best", sum(shortest.values()), events, count)
        for name, seconds in shortest.items():
            steps_of = len(recorded.tracks[name].records)
            print(f"  {name:<12} {steps_of:>7} steps {1e6 * seconds / steps_of:6.1f} us each")


def stretches(fold: Callable[[], Iterable[Any]]) -> float:
    """Seconds of `fold` if each stretch of it takes as long as its shortest of several times."""
    best: list[float] = []
    for _ in range(TIMES):
        steps, times = iter(fold()), []
        begun = time.perf_counter()
        while deque(islice(steps, STRETCH), maxlen=1):
            ended = time.perf_counter()
            times.append(ended - begun)
            begun = ended
        best = [min(pair) for pair in zip(best, times, strict=True)] if best else times
    return sum(best)


def cpu(work: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(3):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best


def report(name: str, seconds: float, events: int, steps: int) -> None:
    print(f"{name:<8} {events / seconds:>10,.0f} events/s {steps / seconds:>10,.0f} steps/s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
