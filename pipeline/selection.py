"""Which events of a log somebody wants to see."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import get_args

import msgspec

from actors.recorder.ordering import number
from contracts.core import Entry
from contracts.envelope import STREAMS, Envelope
from contracts.events import Event, kind
from pipeline.errors import Exit, PipelineError
from pipeline.moments import Moment

KINDS = sorted(each.__struct_config__.tag for each in get_args(Event))


class Filter(msgspec.Struct, frozen=True):
    """Which events are wanted; what is empty or None wants all. Kinds may hold `*`.

    `causes`: ids of events; wanted are they and whatever followed from them. `since` and `until` include the events at
    those moments.
    """

    streams: Sequence[str] = ()
    kinds: Sequence[str] = ()
    actors: Sequence[str] = ()
    causes: Sequence[str] = ()
    since: Moment | None = None
    until: Moment | None = None

    def check(self) -> None:
        """Raises `PipelineError` for a stream or a kind that no run has."""
        unknown = sorted(set(self.streams) - set(STREAMS))
        if unknown:
            raise PipelineError(f"no stream {unknown[0]!r}; streams are {', '.join(STREAMS)}", Exit.USAGE)
        for pattern in self.kinds:
            if not any(fnmatchcase(each, pattern) for each in KINDS):
                near = get_close_matches(pattern, KINDS, 3, 0.5) or [f"{each}.*" for each in _families()]
                raise PipelineError(
                    f"--kind {pattern!r}: no event is of that kind; there are {', '.join(near)}", Exit.USAGE
                )

        if not _in_order(self.since, self.until):
            raise PipelineError("--since lies behind --until, so nothing is between them: exchange them", Exit.USAGE)

    def accepts(self, envelope: Envelope[Event]) -> bool:
        """Whether streams, kinds and actors let one event pass."""
        return (
            (not self.streams or envelope.stream in self.streams)
            and (not self.actors or envelope.actor in self.actors)
            and (not self.kinds or any(fnmatchcase(kind(envelope.body), pattern) for pattern in self.kinds))
        )


def _in_order(since: Moment | None, until: Moment | None) -> bool:
    """False if two moments of one form can't enclose anything."""
    pairs = [(getattr(since, form, None), getattr(until, form, None)) for form in ("position", "at", "after_s")]
    return not any(first is not None and last is not None and first > last for first, last in pairs)


def _families() -> list[str]:
    return sorted({each.partition(".")[0] for each in KINDS})


class Selection:
    """One pass of a filter over a log, in its order: causes and moments need what came before."""

    def __init__(self, wanted: Filter) -> None:
        self._wanted = wanted
        self._followed = set(wanted.causes)
        self._started: float | None = None
        self._begun = wanted.since is None
        self.unmet = {m.id for m in (wanted.since, wanted.until) if m is not None and m.id} | self._followed
        """Ids that were asked for and have not come."""
        self.over = False
        """Nothing further is wanted."""

    def takes(self, entry: Entry, envelope: Envelope[Event]) -> bool:
        """Whether the next event of the log is wanted."""
        wall, position = envelope.wall_ns / 1e9, number(entry.entry)
        self._started = wall if self._started is None else self._started
        self.unmet.discard(envelope.id)
        caused = self._caused(envelope)
        since, until = self._wanted.since, self._wanted.until
        if not self._begun and since is not None:
            self._begun = envelope.id == since.id or _reached(since, position, wall, self._started)
        if until is not None and until.passed(position, envelope.id, wall, self._started):
            self.over = True
        taken = self._begun and not self.over and caused and self._wanted.accepts(envelope)
        if until is not None and until.id == envelope.id:
            self.over = True
        return taken

    def _caused(self, envelope: Envelope[Event]) -> bool:
        if not self._wanted.causes:
            return True
        if envelope.causation_id in self._followed:
            self._followed.add(envelope.id)
        return envelope.id in self._followed


def _reached(since: Moment, position: int, wall: float, started: float) -> bool:
    if since.position is not None:
        return position >= since.position
    if since.id is not None:
        return False
    return wall >= since.time(started)
