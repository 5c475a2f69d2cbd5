"""What the page draws and searches, folded together, and what of it one process hands to another."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from contracts import events as ev
from pipeline.eventlog import Batch
from pipeline.ui._index import Index, IndexPart
from pipeline.ui._samples import Samples
from pipeline.ui._timeline import Timeline, TimelinePart


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What was folded since the part before it, up to the `position`-th event of the log.

    `bad`: places of events that could not be read.
    """

    position: int
    bad: list[int]
    index: IndexPart
    timeline: TimelinePart
    samples: list[bytes]


class Drawing:
    """Feed `extend` in log order, or `merge` the parts that another one was drained of: the result is the same."""

    def __init__(self, slim: Mapping[type, type] | None = None) -> None:
        """`slim`: what may stand in for each kind of event, see `_slim`."""
        self.index = Index()
        self.timeline = Timeline()
        self.samples = Samples()
        if slim:
            self.index.know(slim)
            self.timeline.samples = tuple(each for each, kind in slim.items() if kind is ev.TrajectoryFinished)

    def extend(self, batch: Batch) -> None:
        """Consume the next events."""
        envelopes = batch.envelopes
        first = self.index.extend(batch)
        rows = self.timeline.extend(first, envelopes)
        self.samples.extend(rows, [envelopes[row - first].body for row in rows])

    def drain(self, position: int, bad: list[int]) -> Part:
        """Let go of what was folded since the last time. What is left can only be extended and drained."""
        return Part(position, bad, self.index.drain(), self.timeline.drain(), self.samples.drain())

    def merge(self, part: Part) -> None:
        """Take what another process folded; between the first and the last part there may be nothing else."""
        self.index.merge(part.index)
        self.timeline.merge(part.timeline)
        self.samples.merge(part.samples)
