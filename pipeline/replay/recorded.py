"""A recorded run in memory: its log, and each actor's journal with the place that it has in the log."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from actors import registry
from actors.recorder import archive
from actors.recorder.ordering import number
from config.schema import RunConfig
from contracts.core import Booted, Core, Delivered, Entry, LeaseLost, Ref, Tick
from contracts.envelope import Envelope
from contracts.events import kind
from pipeline import eventlog
from pipeline.cores import core_of
from pipeline.errors import Exit, PipelineError
from pipeline.moments import Moment
from pipeline.replay import journals
from pipeline.rundir import CODE, Era, RunDir
from pipeline.runtime.journal import Record


class _Slim(msgspec.Struct, frozen=True, gc=False, tag="delivered"):
    """`Delivered` with its envelope left undecoded: the log holds the same one."""

    ref: Ref
    envelope: msgspec.Raw
    deliveries: int = 1


class Place(msgspec.Struct, frozen=True):
    """A moment of the log: everything up to entry `position`, and what happened until `at` without leaving an entry."""

    position: int
    at: float


class Log:
    """Every archived event, by its place."""

    def __init__(
        self, events: Sequence[tuple[int, Envelope[Any]]], entries: Callable[[], Iterable[Entry]] = tuple
    ) -> None:
        """`entries` reads once more what `events` were decoded from."""
        self.events = events
        self._entries = entries
        self._bodies: dict[str, dict[int, dict[str, Any]]] = {}
        self.positions = [position for position, _ in events]
        self.by_position = dict(events)
        self.by_id = {envelope.id: (position, envelope) for position, envelope in events}
        self.emitted: dict[str, dict[int, list[tuple[int, Envelope[Any]]]]] = {}
        """Actor -> sequence number of a step -> what it emitted, in order."""
        for position, envelope in events:
            actor, _, rest = envelope.id.rpartition(":")
            seq, _, ordinal = rest.partition(".")
            if seq.isdigit() and ordinal.isdigit() and actor == envelope.actor:
                self.emitted.setdefault(actor, {}).setdefault(int(seq), []).append((position, envelope))

    @classmethod
    def read(cls, run: RunDir) -> Log:
        """Read a run's archive. Raises `PipelineError` if it is damaged or empty."""
        events = [(number(entry.entry), envelope) for entry, envelope in eventlog.archived(run)]
        if not events:
            raise PipelineError(f"{run.path} holds no events: nothing was archived", Exit.USAGE)
        return cls(sorted(events, key=lambda event: event[0]), lambda: archive.read(run.events))

    def written(self, position: int) -> dict[str, Any] | None:
        """The event at a place as it is written there: without fields that its kind got since, which have defaults."""
        wanted = kind(self.by_position[position].body)
        if wanted not in self._bodies:
            found = ((number(entry.entry), entry.data) for entry in self._entries())
            self._bodies[wanted] = {
                place: msgspec.msgpack.decode(data)["body"]
                for place, data in found  # a run that goes on has more of them by now
                if place in self.by_position and kind(self.by_position[place].body) == wanted
            }
        return self._bodies[wanted].get(position)

    def place(self, moment: Moment | None) -> Place:
        """Where a moment is; None: the end. Raises `PipelineError` if it lies outside or names no event of the run."""
        last, first = self.events[-1][1], self.events[0][1]
        if moment is None:
            return Place(self.positions[-1], float("inf"))
        if moment.id is not None:
            if moment.id not in self.by_id:
                raise PipelineError(f"no event {moment.id!r} in this run's log", Exit.USAGE)
            position, envelope = self.by_id[moment.id]
            return Place(position, envelope.wall_ns / 1e9)
        if moment.position is not None:
            if moment.position not in self.by_position:
                held = f"{self.positions[0]} to {self.positions[-1]}"
                raise PipelineError(f"entry {moment.position} is not in the log, which holds {held}", Exit.USAGE)
            return Place(moment.position, self.by_position[moment.position].wall_ns / 1e9)
        at = moment.time(first.wall_ns / 1e9)
        if at < first.wall_ns / 1e9:
            raise PipelineError(f"the run began {first.wall_ns / 1e9 - at:.1f} s after that moment", Exit.USAGE)
        if at >= last.wall_ns / 1e9:
            return Place(self.positions[-1], at)
        behind = next(place for place, (_, envelope) in enumerate(self.events) if envelope.wall_ns / 1e9 > at)
        return Place(self.positions[behind - 1], at)


class Track:
    """One actor: the inputs that it took, in order, and its cores.

    A resume may change settings, so each core has taken the inputs up to a sequence number; None: up to the end.
    """

    def __init__(
        self, name: str, eras: Sequence[tuple[int | None, Core[Any]]], records: Sequence[Record], log: Log
    ) -> None:
        self.name = name
        self.eras = eras
        self.core = core = eras[-1][1]
        self.records = records
        self.emitted: Mapping[int, list[tuple[int, Envelope[Any]]]] = log.emitted.get(name, {})
        self._log = log
        self.written = log.written
        self._inputs = msgspec.msgpack.Decoder(_Slim | Booted | Tick | LeaseLost | core.local_type)
        self._whole = journals.Reader(core)
        self._seqs = sorted(self.emitted)
        self._marks = [min(position for position, _ in self.emitted[seq]) for seq in self._seqs]

    def input(self, record: Record) -> Any:
        """The input of a record. Raises `PipelineError` if this version can't read it."""
        try:
            found = self._inputs.decode(record.input)
        except msgspec.ValidationError:
            return self._whole.input(record)
        if type(found) is not _Slim:
            return found
        envelope = self._log.by_position.get(int(found.ref.entry[:-2]))
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
        read, only = self.input, self.core if len(self.eras) == 1 else None
        for record in self.records[start:]:
            found = read(record)
            state, commands = (only or self.core_of(record.seq)).step(state, found, record.now)
            yield record, found, state, commands

    def count_at(self, place: Place) -> int:
        """How many inputs the actor had taken at `place`.

        All up to the last one that left an entry of the log by then, and those after it that left none, took no later
        entry, and were taken before.
        """
        known = bisect_right(self._marks, place.position)
        count = min(self._seqs[known - 1] if known else 0, len(self.records))
        while count < len(self.records):
            record = self.records[count]
            if record.seq in self.emitted or record.now > place.at or self._later(record, place.position):
                return count
            count += 1
        return count

    def _later(self, record: Record, position: int) -> bool:
        found = self.input(record)
        return isinstance(found, Delivered) and number(found.ref.entry) > position

    def state_at(self, place: Place) -> Any:
        """The core's state at `place`."""
        state = self.core.initial()
        for _, _, after, _ in islice(self.steps(), self.count_at(place)):
            state = after
        return state


class Recorded:
    """A run to be replayed: its log and its actors' tracks. `past`: the settings of earlier eras, oldest first."""

    def __init__(
        self,
        config: RunConfig,
        log: Log,
        records: Mapping[str, Sequence[Record]],
        past: Sequence[Era] = (),
        code: str | None = None,
    ) -> None:
        """`code`: digest of the code that the run was started with (`rundir.versions`)."""
        self.config = config
        self.log = log
        self.code = code
        self.tracks: dict[str, Track] = {}
        for name, found in records.items():
            _check_whole(name, found)
            self.tracks[name] = Track(name, eras_of(name, config, past), found, log)

    @classmethod
    def read(cls, run: RunDir, config: RunConfig, actor: str | None = None) -> Recorded:
        """Read the archive of a run; with `actor`, that actor's journal only. Raises `PipelineError`."""
        log = Log.read(run)
        records = journals.grouped(run, None if actor is None else {actor})
        if not records:
            known = ", ".join(journals.actors(run))
            what = "journals" if actor is None else f"journal of {actor!r}"
            raise PipelineError(f"{run.path} holds no {what}; it has those of {known or 'nobody'}", Exit.USAGE)
        info = run.info()
        ordered = {name: records[name] for name in sorted(records, key=_order)}
        return cls(config, log, ordered, info.eras, info.versions.get(CODE))


def eras_of(name: str, config: RunConfig, past: Sequence[Era]) -> list[tuple[int | None, Core[Any]]]:
    """(last sequence number, core) of an actor for each set of settings that the run has had.

    Raises `PipelineError` for an actor of a kind that this version does not have.
    """
    if registry.kind_of(name) not in registry.KINDS:
        raise PipelineError(
            f"the journals hold actor {name!r}, of a kind that this version has no core for, so it can't be replayed: "
            f"look at the others one by one, with --actor ({', '.join(registry.names(config))}), or use the version "
            "that wrote it (versions in run.json)",
            Exit.FAILED,
        )
    before = [(era.seqs.get(name, 0), core_of(msgspec.convert(era.config, RunConfig), name)) for era in past]
    return [*before, (None, core_of(config, name))]


def _order(name: str) -> tuple[int, str]:
    kind = registry.kind_of(name)
    return (registry.KINDS.index(kind) if kind in registry.KINDS else len(registry.KINDS), name)


def _check_whole(name: str, records: Sequence[Record]) -> None:
    for place, record in enumerate(records, 1):
        if record.seq != place:
            text = f"the journal of {name} lacks record {place}: it goes on with {record.seq}, so it can't be replayed"
            raise PipelineError(text, Exit.FAILED)


def describe(input: Any) -> str:
    """An input in a few words."""
    if isinstance(input, Delivered):
        envelope = input.envelope
        again = f", delivery {input.deliveries}" if input.deliveries > 1 else ""
        return f"{kind(envelope.body)} ({envelope.id}, entry {input.ref.entry}{again})"
    tag = input.__struct_config__.tag if isinstance(input, msgspec.Struct) else type(input).__name__
    return str(tag)
