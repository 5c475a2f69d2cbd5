"""How far the reading of a long log is, told on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from contracts.envelope import STREAMS, Envelope
from contracts.events import Event
from pipeline import eventlog
from pipeline.eventlog import Batch
from pipeline.rundir import RunDir

FIRST_S = 1.0
"""What is read sooner says nothing."""
EVERY_S = 0.25
CLEAR = "\r\x1b[K"


def told(run: RunDir, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same batches of a run's events; how many have passed is written to stderr, if that is a terminal.

    Raises `PipelineError` if the archive's index is damaged.
    """
    if not sys.stderr.isatty():
        yield from batches
        return
    total = sum(segment.records for segment in eventlog.segments(run))
    seen, due, written = 0, time.monotonic() + FIRST_S, False
    try:
        for batch in batches:
            yield batch
            seen += len(batch)
            if time.monotonic() >= due:
                due, written = time.monotonic() + EVERY_S, True
                whole = f" of {total:,}" if total >= seen else ""
                sys.stderr.write(f"{CLEAR}reading {run.path.name}: {seen:,}{whole} events")
                sys.stderr.flush()
    finally:
        if written:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()


def numbered(run: RunDir, behind: int = 0) -> Iterator[tuple[int, Envelope[Event]]]:
    """Every archived event behind a place, with its place in the log. Raises `PipelineError` if it is damaged."""
    batches = told(run, eventlog.batches(run, dict.fromkeys(STREAMS, behind) if behind else None))
    return (item for batch in batches for item in zip(batch.positions, batch.envelopes, strict=True))
