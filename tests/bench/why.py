"""`python -m tests.bench.why [EVENTS]`: how long `pipeline why` takes on an archived log of 100,000 events.

Prints CPU seconds: decoding alone, decoding and folding, the whole command, the diagnosis, and the look into the
actors, which is taken only when a run is stuck.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import eventlog
from pipeline.replay import journals
from pipeline.rundir import RunDir, config_of
from pipeline.why import load
from pipeline.why.diagnosis import diagnose
from pipeline.why.model import Model
from tests.bench import longlog


def timed(name: str, work: Callable[[], Any]) -> Any:
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    print(f"{name:<28} {time.process_time() - cpu:6.2f} s CPU {time.perf_counter() - wall:6.2f} s wall")
    return result


def main(events: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.open(longlog.write(Path(folder) / "run", events))
        config = config_of(run)
        count = timed("decode", lambda: sum(1 for _ in eventlog.archived(run)))
        timed("decode, fold", lambda: Model().apply_all(envelope for _, envelope in eventlog.archived(run)))
        case, found = timed("pipeline why", lambda: load.explain(run, config))
        timed("diagnose", lambda: diagnose(case.model, config, case.now, case.evidence))
        print(f"{count} events; {found.headline}")
        steps = sum(map(len, journals.grouped(run).values()))
        timed("look into stuck actors", lambda: load.look_into(run, config))
        print(f"  {steps} journalled steps in the archive, those of gateways, collectors and engines are folded")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
