"""A search through the whole log of a run, up to the moment that is shown."""

from __future__ import annotations

from collections import deque

from pipeline.eventlog import Batch
from pipeline.top.board import RECENT
from pipeline.top.tables import Row, events


class Search:
    """`found`: rows of the newest events that hold `text`, newest first. It has seen the log up to place `seen`."""

    def __init__(self, text: str, upto: int, zero: float) -> None:
        """`text` in lower case; `upto`: where the search ends; `zero`: the time of the run's first event."""
        self.text = text
        self.upto = upto
        self.seen = 0
        self.count = 0
        self.found: deque[Row] = deque(maxlen=RECENT)
        self.done = False
        self._zero = zero

    def take(self, batch: Batch) -> None:
        """Look at the next events of the log; `done` once the end is reached."""
        within = batch.within(self.seen, self.upto)
        items = list(zip(within.entries, within.envelopes, strict=True))
        for row in reversed(list(events(items, self._zero))):
            if holds(row, self.text):
                self.count += 1
                self.found.appendleft(row)
        self.seen = max([self.seen, *within.positions[-1:]])
        self.done = bool(batch.positions) and batch.positions[-1] >= self.upto

    def go_on(self, upto: int) -> None:
        """The log has grown."""
        self.upto, self.done = upto, False

    def end(self) -> None:
        """The archive ends here: what a live run has added is not in it yet."""
        self.upto, self.done = self.seen, True

    def line(self) -> str:
        """How far it is, and what it found."""
        how = f"searched all {self.upto:,} events" if self.done else f"searching: {self.seen:,} of {self.upto:,} events"
        shown = f", the newest {len(self.found)} of them are listed" if self.count > len(self.found) else ""
        return f"{how} up to this moment: {self.count:,} hold {self.text!r}{shown}"


def holds(row: Row, text: str) -> bool:
    """Whether the row of an event, as it is listed, holds a text in lower case."""
    return text in " ".join(row).lower()
