"""What `top` shows of a run at one moment, folded from its events. Pure: reads no clock."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Iterable
from itertools import chain

from actors.recorder.metrics import Row
from contracts.core import Entry
from contracts.envelope import Envelope
from contracts.events import Event
from pipeline.eventlog import Batch
from pipeline.view import View
from pipeline.why.model import Model

RECENT = 200
"""Newest events that are listed."""
KEPT = 512
"""Newest steps and refits that are plotted."""
MARKS = 48
"""Copies of the board along an archive, from which any of its moments is reached."""


class Board:
    """Feed `extend` in log order; the attributes then describe the run up to the last event."""

    def __init__(self) -> None:
        self.model = Model()
        self.view = View(keep=KEPT)
        self.recent: deque[tuple[Entry, Envelope[Event]]] = deque(maxlen=RECENT)
        self.streams: Counter[str] = Counter()
        """Stream -> events so far."""

    @property
    def position(self) -> int:
        """Place of the last event in the log, 0 before the first."""
        return self.model.position

    @property
    def at(self) -> float:
        """Time of the last event."""
        return self.model.last_at

    def extend(self, batch: Batch) -> list[Row]:
        """Consume the next events; answers the rows of the steps that they finished."""
        self.model.extend(batch.envelopes, batch.positions)
        self.recent.extend(zip(batch.entries[-RECENT:], batch.envelopes[-RECENT:], strict=True))
        self.streams.update([entry.stream for entry in batch.entries])
        return self.view.extend(batch.envelopes)

    def copy(self) -> Board:
        """A board that goes on by itself. Events, and what is over, are never changed, so both may hold them."""
        made = Board()
        model, view = self.model, self.view
        done = chain(self.recent, view.rows, view.refits, view.generated, model.past, model.results)
        kept = {id(each): each for each in chain(done, *model.waited.values())}
        made.model, made.view = copy.deepcopy((self.model, self.view), kept)
        made.recent.extend(self.recent)
        made.streams.update(self.streams)
        return made


class History:
    """The board of a log's end, and marks along it: boards of earlier moments, one every `every` events."""

    def __init__(self, every: int) -> None:
        """`every`: see `spacing`."""
        self.board = Board()
        self._every = every
        self._marks: list[Board] = [Board()]

    def extend(self, batch: Batch) -> None:
        self.board.extend(batch)
        if self.board.position - self._marks[-1].position >= self._every:
            self._mark()

    def _mark(self) -> None:
        self._marks.append(self.board.copy())
        if len(self._marks) > 2 * MARKS:
            del self._marks[1::2]
            self._every *= 2

    def before(self, position: int) -> Board:
        """A board of its own at or before `position`: the events from there on lead to it."""
        known = [mark for mark in self._marks if mark.position <= position]
        return known[-1].copy()


def spacing(events: int) -> int:
    """Events from one mark to the next for a log of that many."""
    return max(2000, events // MARKS)


def at(history: History, position: int, later: Iterable[Batch]) -> Board:
    """The board at `position`. `later`: the log's events, at least those behind `history.before(position)`."""
    board = history.before(position)
    for batch in later:
        board.extend(batch.within(board.position, position))
        if batch.positions[-1] > position:
            break
    return board
