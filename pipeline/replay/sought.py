"""A recorded run of which only those parts are read that a question needs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, overload

import msgspec

from actors.recorder.ordering import numbers
from config.schema import RunConfig
from contracts.core import Entry
from contracts.envelope import ContractError, Envelope, decode
from pipeline.errors import Exit, PipelineError
from pipeline.moments import Moment
from pipeline.replay import journals
from pipeline.replay.blocks import Blocks, Reached, heads, of_events, of_journals, step_of
from pipeline.replay.index import Index, Known
from pipeline.replay.recorded import Log, Recorded, eras_of, nobody, order, torn
from pipeline.replay.tracks import Course, Events, Track
from pipeline.rundir import RunDir
from pipeline.runtime.journal import Record

_records = msgspec.msgpack.Decoder(Record)


class Sought(Course):
    """A run that is read as it is asked for."""

    log: Filed

    def __init__(
        self, log: Filed, tracks: Mapping[str, Track], events: Blocks[Page], found: Blocks[dict[str, list[bytes]]]
    ) -> None:
        self.events, self.journals = events, found
        self.steps = {name: found.behind(name) for name in tracks}
        super().__init__(log, tracks, _bounds(found, tracks))

    def chain_of(self, actor: str, seq: int) -> bytes | None:
        """Of the journals up to the end of the file that holds a step; None while that is written."""
        return _chain_of(self.journals, self.steps[actor], seq)


def open_course(run: RunDir, config: RunConfig, index: Index, actor: str | None = None) -> Sought | Recorded:
    """A run as far as it is asked for; with `actor`, that actor only. `index` learns what is found out.

    Raises `PipelineError` if the archive is damaged, or holds no such journal.
    """
    found = _journals(run, index)
    events = Blocks(run.events, of_events, Page, index.content.events)
    index.content.events = events.tables
    log = Filed(events, run.info().written_by)
    if not log.in_order:
        return Recorded.read(run, config, actor)
    names = {name for block in found.blocks for name in block.spans}
    if not names or actor not in (None, *names):
        raise nobody(run, actor, sorted(names))
    wanted = sorted(names, key=order) if actor is None else [actor]
    return Sought(log, _tracks(run, config, index, found, wanted, log), events, found)


def last_states(
    run: RunDir, config: RunConfig, index: Index, wanted: Collection[str], position: int | None = None
) -> dict[str, tuple[Any, float]]:
    """Actor -> (its state at the end of the journals, when it took its last input), of those that have any.

    `position`: at this place of the log instead. Raises `PipelineError` as `open_course` does.
    """
    found = _journals(run, index)
    names = [name for name in wanted if any(name in block.spans for block in found.blocks)]
    log: Events = Log([]) if position is None else _log_of(run, index)
    tracks = _tracks(run, config, index, found, names, log)
    counts = {name: len(track.records) for name, track in tracks.items()}
    if position is not None:
        place = log.place(Moment(position=position))
        counts = {name: count for name, track in tracks.items() if (count := track.count_at(place))}
    states = Course(log, tracks, _bounds(found, names)).states_after(counts)
    return {name: (state, tracks[name].records[count - 1].now) for name, (count, state) in states.items()}


def _log_of(run: RunDir, index: Index) -> Events:
    events = Blocks(run.events, of_events, Page, index.content.events)
    index.content.events = events.tables
    log = Filed(events, run.info().written_by)
    return log if log.in_order else Log.read(run)


def _journals(run: RunDir, index: Index) -> Blocks[dict[str, list[bytes]]]:
    found = Blocks(journals.folder(run), of_journals, by_actor, index.content.journals)
    index.content.journals = found.tables
    return found


def _tracks(
    run: RunDir, config: RunConfig, index: Index, found: Blocks[Any], names: Iterable[str], log: Events
) -> dict[str, Track]:
    eras, tracks = run.info().eras, dict[str, Track]()
    for name in names:
        _check_whole(name, found)
        steps, cores = found.behind(name), eras_of(name, config, eras)
        known = Known(index.content, name, cores[-1][1], partial(_chain_of, found, steps))
        tracks[name] = Track(name, cores, Records(name, found, steps), log, known)
    return tracks


def _bounds(found: Blocks[Any], names: Iterable[str]) -> list[dict[str, int]]:
    """The last step of each actor at the end of each block."""
    steps = {name: found.behind(name) for name in names}
    return [{name: each.at(number) for name, each in steps.items()} for number in range(len(found.blocks))]


def _chain_of(found: Blocks[Any], steps: Reached, seq: int) -> bytes | None:
    return found.chains[steps.block_of(seq)] if 0 < seq <= steps.end else None


def _check_whole(name: str, found: Blocks[Any]) -> None:
    last = 0
    for block in found.blocks:
        if name not in block.spans:
            continue
        if block.spans[name][0] != last + 1:
            raise torn(name, last + 1, block.spans[name][0])
        if name in block.gap:
            raise torn(name, *block.gap[name])
        last = block.spans[name][1]


def by_actor(entries: Sequence[Entry]) -> dict[str, list[bytes]]:
    """The records of each actor, in order."""
    found: dict[str, list[bytes]] = {}
    for entry in entries:
        if entry.stream.startswith(journals.JOURNAL):
            found.setdefault(entry.stream.removeprefix(journals.JOURNAL), []).append(entry.data)
    return found


class Records(Sequence[Record]):
    """The journal of one actor, read as it is asked for: those behind number `start`, up to `stop`."""

    def __init__(
        self,
        actor: str,
        found: Blocks[dict[str, list[bytes]]],
        steps: Reached,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self._actor, self._found, self._steps = actor, found, steps
        self._start, self._stop = start, steps.end if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, place: int) -> Record: ...
    @overload
    def __getitem__(self, place: slice) -> Records: ...
    def __getitem__(self, place: int | slice) -> Record | Records:
        if isinstance(place, slice):
            start, stop, _ = place.indices(len(self))
            ends = self._start + start, self._start + max(start, stop)
            return Records(self._actor, self._found, self._steps, *ends)
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        seq = (self._start if place >= 0 else self._stop) + place + 1
        block = self._steps.block_of(seq)
        first, _ = self._found.blocks[block].spans[self._actor]
        return _records.decode(self._found.at(block)[self._actor][seq - first])

    def __iter__(self) -> Iterator[Record]:
        seq = self._start
        while seq < self._stop:
            block = self._steps.block_of(seq + 1)
            first, last = self._found.blocks[block].spans[self._actor]
            upto = min(last, self._stop)
            yield from map(_records.decode, self._found.at(block)[self._actor][seq + 1 - first : upto + 1 - first])
            seq = upto


class Page:
    """The events of a block."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.places = numbers(entries)

    @cached_property
    def heads(self) -> Sequence[Any]:
        return heads(self.entries)

    @cached_property
    def steps(self) -> dict[str, list[tuple[int, int, Entry]]]:
        """Actor -> (place, step, entry) of each of its events."""
        found: dict[str, list[tuple[int, int, Entry]]] = {}
        for place, head, entry in zip(self.places, self.heads, self.entries, strict=True):
            seq = step_of(head.id, head.actor)
            if seq is not None:
                found.setdefault(head.actor, []).append((place, seq, entry))
        return found


class Filed(Events):
    """The log of a run, read as it is asked for."""

    def __init__(self, found: Blocks[Page], written_by: str) -> None:
        self._found = found
        self._blocks = found.blocks
        self._firsts = [block.first for block in found.blocks]
        self._written_by = written_by

    @property
    def in_order(self) -> bool:
        """Whether there are events, and no two of them in another order than their places."""
        ends = [place for block in self._blocks for place in (block.first, block.last)]
        inner = all(block.first <= block.last for block in self._blocks)
        return bool(ends) and inner and all(a < b for a, b in zip(ends[1::2], ends[2::2], strict=False))

    @property
    def ends(self) -> tuple[int, int]:
        return self._blocks[0].first, self._blocks[-1].last

    def _block_of(self, position: int) -> int:
        """The last block that begins at a place or before it."""
        return bisect_right(self._firsts, position) - 1

    def find(self, id: str) -> int | None:
        actor = id.rpartition(":")[0]
        seq = step_of(id, actor)
        for number in reversed(range(len(self._blocks))):
            block = self._blocks[number]
            low, high = block.spans.get(actor, (1, 0))
            if id in block.strangers or (seq is not None and low <= seq <= high):
                page = self._found.at(number)
                places = [place for place, head in zip(page.places, page.heads, strict=True) if head.id == id]
                if places:
                    return places[-1]
        return None

    def envelope(self, position: int) -> Envelope[Any] | None:
        number = self._block_of(position)
        if number < 0:
            return None
        page = self._found.at(number)
        place = bisect_left(page.places, position)
        if place == len(page.places) or page.places[place] != position:
            return None
        return self.read(page.entries[place])

    def read(self, entry: Entry) -> Envelope[Any]:
        """An event, decoded. Raises `PipelineError` if this version can't read it."""
        try:
            return decode(entry.stream, entry.data)
        except ContractError as error:
            text = f"event {entry.entry}: {error}; this log was written by another version, {self._written_by}"
            raise PipelineError(f"{text}: use that one", Exit.FAILED) from error

    def until(self, at: float) -> int:
        number = next(n for n, block in enumerate(self._blocks) if block.latest_ns / 1e9 > at)
        page = self._found.at(number)
        place = next(n for n, head in enumerate(page.heads) if head.wall_ns / 1e9 > at)
        return page.places[place - 1] if place else self._blocks[number - 1].last

    def around(self, actor: str, position: int) -> tuple[int, int | None]:
        number = self._block_of(position)
        seq = 0
        for n in reversed(range(number + 1)):
            if actor in self._blocks[n].spans:
                steps = self._found.at(n).steps[actor]
                seq = max((step for place, step, _ in steps if place <= position), default=0)
                if seq:
                    break
        for n in range(number, len(self._blocks)):
            if self._blocks[n].spans.get(actor, (0, 0))[1] > seq:
                later = [step for _, step, _ in self._found.at(n).steps[actor] if step > seq]
                return seq, min(later)
        return seq, None

    def after(self, actor: str, seq: int) -> int | None:
        """Where the log goes on after a step of an actor."""
        for number, block in enumerate(self._blocks):
            if block.spans.get(actor, (0, 0))[1] > seq:
                return min(place for place, step, _ in self._found.at(number).steps[actor] if step > seq)
        return None
