"""Actors through a recorded run: the inputs that each took, the place that they have in the log, and its states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from actors.recorder.ordering import number
from contracts.core import Booted, Core, Delivered, LeaseLost, Ref, Tick
from contracts.envelope import Envelope
from contracts.events import kind
from pipeline.errors import Exit, PipelineError
from pipeline.moments import Moment
from pipeline.replay import journals
from pipeline.runtime.journal import Record


class _Slim(msgspec.Struct, frozen=True, gc=False, tag="delivered"):
    """`Delivered` with its envelope left undecoded: a log in memory holds the same one."""

    ref: Ref
    envelope: msgspec.Raw
    deliveries: int = 1


class Place(msgspec.Struct, frozen=True):
    """A moment of the log: everything up to entry `position`, and what happened until `at` without leaving an entry."""

    position: int
    at: float


class Events(ABC):
    """The log of a run, by places. Times are seconds since the Unix epoch. `held`: the events that are in memory."""

    held: Mapping[int, Envelope[Any]] = {}

    @property
    @abstractmethod
    def ends(self) -> tuple[int, int]:
        """The first and the last place."""

    @abstractmethod
    def find(self, id: str) -> int | None:
        """The place of an event."""

    @abstractmethod
    def envelope(self, position: int) -> Envelope[Any] | None:
        """The event at a place; None if there is none."""

    @abstractmethod
    def until(self, at: float) -> int:
        """The last place before the first event later than `at`, which there is, and which is not the first."""

    @abstractmethod
    def around(self, actor: str, position: int) -> tuple[int, int | None]:
        """The last step of an actor that left an entry by this place, 0 if none did; the first after it that did."""

    def wall(self, position: int) -> float:
        found = self.envelope(position)
        assert found is not None
        return found.wall_ns / 1e9

    def place(self, moment: Moment | None) -> Place:
        """Where a moment is; None: the end. Raises `PipelineError` if it lies outside or names no event of the run."""
        first, last = self.ends
        if moment is None:
            return Place(last, float("inf"))
        if moment.id is not None:
            position = self.find(moment.id)
            if position is None:
                raise PipelineError(f"no event {moment.id!r} in this run's log", Exit.USAGE)
            return Place(position, self.wall(position))
        if moment.position is not None:
            if self.envelope(moment.position) is None:
                text = f"entry {moment.position} is not in the log, which holds {first} to {last}"
                raise PipelineError(text, Exit.USAGE)
            return Place(moment.position, self.wall(moment.position))
        begun = self.wall(first)
        at = moment.time(begun)
        if at < begun:
            raise PipelineError(f"the run began {begun - at:.1f} s after that moment", Exit.USAGE)
        return Place(last if at >= self.wall(last) else self.until(at), at)


class States(Protocol):
    """States of one actor that are known without folding all of its inputs."""

    def before(self, count: int) -> tuple[int, Any] | None:
        """The last one that is known of those after at most so many steps, and after how many."""
        ...

    def offer(self, seq: int, state: Any) -> None:
        """A state was folded; it is kept if that is of use."""
        ...


class Track:
    """One actor: the inputs that it took, in order, and its cores.

    A resume may change settings, so each core has taken the inputs up to a sequence number; None: up to the end.
    """

    def __init__(
        self,
        name: str,
        eras: Sequence[tuple[int | None, Core[Any]]],
        records: Sequence[Record],
        log: Events,
        states: States | None = None,
    ) -> None:
        self.name = name
        self.eras = eras
        self.core = core = eras[-1][1]
        self.records = records
        self.states = states
        self._log = log
        self._held = log.held
        self._inputs = msgspec.msgpack.Decoder(_Slim | Booted | Tick | LeaseLost | core.local_type)
        self._whole = journals.Reader(core)

    def input(self, record: Record) -> Any:
        """The input of a record. Raises `PipelineError` if this version can't read it."""
        if not self._held:
            return self._whole.input(record)
        try:
            found = self._inputs.decode(record.input)
        except msgspec.ValidationError:
            return self._whole.input(record)
        if type(found) is not _Slim:
            return found
        envelope = self._held.get(int(found.ref.entry[:-2]))
        if envelope is None:
            return self._whole.input(record)
        return Delivered(found.ref, envelope, found.deliveries)

    def core_of(self, seq: int) -> Core[Any]:
        """The core that took the input with this sequence number."""
        for until, core in self.eras[:-1]:
            if until is not None and seq <= until:
                return core
        return self.core

    def steps(self, start: int = 0, state: Any = None) -> Iterator[tuple[Record, Any, Any, Sequence[Any]]]:
        """(record, its input, the state after it, the commands) of each step after number `start`, from `state`."""
        state = self.core.initial() if state is None else state
        read, step = self.input, self.core.step if len(self.eras) == 1 else None
        for record in self.records[start:]:
            found = read(record)
            state, commands = (step or self.core_of(record.seq).step)(state, found, record.now)
            yield record, found, state, commands

    def count_at(self, place: Place) -> int:
        """How many inputs the actor had taken at `place`.

        All up to the last one that left an entry of the log by then, and those after it that left none, took no later
        entry, and were taken before.
        """
        seq, following = self._log.around(self.name, place.position)
        count = min(seq, len(self.records))
        for record in self.records[count:]:
            if record.seq == following or record.now > place.at or self._later(record, place.position):
                break
            count += 1
        return count

    def _later(self, record: Record, position: int) -> bool:
        found = self.input(record)
        return isinstance(found, Delivered) and number(found.ref.entry) > position

    def nearest(self, count: int) -> tuple[int, Any]:
        """The last state that is known of those after at most so many steps, and after how many."""
        found = None if self.states is None else self.states.before(count)
        return (0, self.core.initial()) if found is None else found

    def fold(self, seq: int, state: Any, upto: int) -> Any:
        """The state after step `upto`, from that after step `seq`."""
        read, step = self.input, self.core.step if len(self.eras) == 1 else None
        for record in self.records[seq:upto]:
            state, _ = (step or self.core_of(record.seq).step)(state, read(record), record.now)
        if self.states is not None and upto > seq:
            self.states.offer(upto, state)
        return state

    def state_at(self, place: Place) -> Any:
        """The core's state at `place`."""
        count = self.count_at(place)
        return self.fold(*self.nearest(count), count)


class Course:
    """A run to be looked at: its log and its actors' tracks. `bounds`: how far to fold each actor at a time, so that
    what is read of the archive serves all of them."""

    def __init__(self, log: Events, tracks: Mapping[str, Track], bounds: Iterable[Mapping[str, int]] = ()) -> None:
        self.log = log
        self.tracks = tracks
        self._bounds = bounds

    def chosen(self, actor: str | None) -> list[Track]:
        return list(self.tracks.values()) if actor is None else [self.tracks[actor]]

    def states_at(self, place: Place, actor: str | None = None) -> dict[str, tuple[int, Any]]:
        """Of each actor how many inputs it had taken at a place, and its state."""
        return self.states_after({track.name: track.count_at(place) for track in self.chosen(actor)})

    def states_after(self, counts: Mapping[str, int]) -> dict[str, tuple[int, Any]]:
        """Of each of these actors how many inputs it is to have taken, and its state then."""
        at = {name: self.tracks[name].nearest(count) for name, count in counts.items()}
        for bound in (*self._bounds, counts):
            for name, count in counts.items():
                seq, state = at[name]
                upto = min(count, bound.get(name, 0))
                if upto > seq:
                    at[name] = (upto, self.tracks[name].fold(seq, state, upto))
        return at


def describe(input: Any) -> str:
    """An input in a few words."""
    if isinstance(input, Delivered):
        envelope = input.envelope
        again = f", delivery {input.deliveries}" if input.deliveries > 1 else ""
        return f"{kind(envelope.body)} ({envelope.id}, entry {input.ref.entry}{again})"
    tag = input.__struct_config__.tag if isinstance(input, msgspec.Struct) else type(input).__name__
    return str(tag)
