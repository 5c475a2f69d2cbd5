"""A recorded run in memory: its log, and each actor's journal."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from actors import registry
from actors.recorder import archive
from actors.recorder.ordering import number
from config.schema import RunConfig
from contracts.core import Core, Entry
from contracts.envelope import Envelope
from contracts.events import kind
from pipeline import eventlog
from pipeline.cores import core_of
from pipeline.errors import Exit, PipelineError
from pipeline.replay import journals
from pipeline.replay.blocks import step_of
from pipeline.replay.tracks import Course, Events, Track
from pipeline.rundir import CODE, Era, RunDir
from pipeline.runtime.journal import Record


class Log(Events):
    """Every archived event, by its place."""

    def __init__(
        self, events: Sequence[tuple[int, Envelope[Any]]], entries: Callable[[], Iterable[Entry]] = tuple
    ) -> None:
        """`entries` reads once more what `events` were decoded from."""
        self.events = events
        self._entries = entries
        self._bodies: dict[str, dict[int, dict[str, Any]]] = {}
        self._marks: dict[str, tuple[list[int], list[int]]] = {}
        self.positions = [position for position, _ in events]
        self.held = self.by_position = dict(events)
        self.by_id = {envelope.id: (position, envelope) for position, envelope in events}
        self.emitted: dict[str, dict[int, list[tuple[int, Envelope[Any]]]]] = {}
        """Actor -> sequence number of a step -> what it emitted, in order."""
        for position, envelope in events:
            seq = step_of(envelope.id, envelope.actor)
            if seq is not None:
                self.emitted.setdefault(envelope.actor, {}).setdefault(seq, []).append((position, envelope))

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

    # --- by places ---

    @property
    def ends(self) -> tuple[int, int]:
        return self.positions[0], self.positions[-1]

    def find(self, id: str) -> int | None:
        found = self.by_id.get(id)
        return None if found is None else found[0]

    def envelope(self, position: int) -> Envelope[Any] | None:
        return self.by_position.get(position)

    def until(self, at: float) -> int:
        behind = next(place for place, (_, envelope) in enumerate(self.events) if envelope.wall_ns / 1e9 > at)
        return self.positions[behind - 1]

    def around(self, actor: str, position: int) -> tuple[int, int | None]:
        seqs, marks = self._marked(actor)
        known = bisect_right(marks, position)
        return seqs[known - 1] if known else 0, seqs[known] if known < len(seqs) else None

    def _marked(self, actor: str) -> tuple[list[int], list[int]]:
        """The steps of an actor that left entries, and the place of the first entry of each."""
        if actor not in self._marks:
            emitted = self.emitted.get(actor, {})
            seqs = sorted(emitted)
            self._marks[actor] = seqs, [min(position for position, _ in emitted[seq]) for seq in seqs]
        return self._marks[actor]


class Whole(Track):
    """A track whose log is in memory. `emitted`: sequence number of a step -> what it emitted, with its places."""

    def __init__(
        self, name: str, eras: Sequence[tuple[int | None, Core[Any]]], records: Sequence[Record], log: Log
    ) -> None:
        super().__init__(name, eras, records, log)
        self.turn_to(log)

    def turn_to(self, log: Log) -> None:
        """Take the events of `log` for those emitted."""
        self._log = log
        self.emitted: Mapping[int, list[tuple[int, Envelope[Any]]]] = log.emitted.get(self.name, {})
        self.written = log.written


class Recorded(Course):
    """A run to be replayed, in memory. `past`: the settings of earlier eras, oldest first."""

    log: Log
    tracks: Mapping[str, Whole]

    def __init__(
        self,
        config: RunConfig,
        log: Log,
        records: Mapping[str, Sequence[Record]],
        past: Sequence[Era] = (),
        code: str | None = None,
    ) -> None:
        """`code`: digest of the code that the run was started with (`rundir.versions`)."""
        self.code = code
        tracks: dict[str, Whole] = {}
        for name, found in records.items():
            _check_whole(name, found)
            tracks[name] = Whole(name, eras_of(name, config, past), found, log)
        super().__init__(log, tracks)

    @classmethod
    def read(cls, run: RunDir, config: RunConfig, actor: str | None = None) -> Recorded:
        """Read the archive of a run; with `actor`, that actor's journal only. Raises `PipelineError`."""
        log = Log.read(run)
        records = journals.grouped(run, None if actor is None else {actor})
        if not records:
            raise nobody(run, actor, journals.actors(run))
        info = run.info()
        ordered = {name: records[name] for name in sorted(records, key=order)}
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


def nobody(run: RunDir, actor: str | None, known: Iterable[str]) -> PipelineError:
    """There is no journal of whom somebody asked for; None: of anybody."""
    what = "journals" if actor is None else f"journal of {actor!r}"
    return PipelineError(f"{run.path} holds no {what}; it has those of {', '.join(known) or 'nobody'}", Exit.USAGE)


def order(name: str) -> tuple[int, str]:
    kind = registry.kind_of(name)
    return (registry.KINDS.index(kind) if kind in registry.KINDS else len(registry.KINDS), name)


def _check_whole(name: str, records: Sequence[Record]) -> None:
    for place, record in enumerate(records, 1):
        if record.seq != place:
            raise torn(name, place, record.seq)


def torn(name: str, place: int, found: int) -> PipelineError:
    text = f"the journal of {name} lacks record {place}: it goes on with {found}, so it can't be replayed"
    return PipelineError(text, Exit.FAILED)
