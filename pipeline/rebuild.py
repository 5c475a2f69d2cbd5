"""What a lost store held, worked out from the archive: pure.

The archive of events and the archived journals end at different places, so first a cut is chosen: a moment of the log
at which every actor's state is known. Nothing of it is guessed: the cores take the journalled inputs again, and what
they answer (emits, acks, registers, releases) is what was committed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from actors.recorder.ordering import number
from contracts.core import Ack, Booted, Core, Delivered, Emit, Entry, LeaseLost, Raise, Ref, Release
from contracts.envelope import BROADCAST_STREAMS, WORK_STREAMS, ContractError, Envelope, decode
from contracts.events import ActorBooted, Event, PolicyReady, StepFinished, TrajectoryFinished
from pipeline.runtime.journal import Journal, fingerprint

LAST = 4096
"""Steps at the end of a journal whose states are kept while it is folded: the cut is seldom further back."""
Eras = Sequence[tuple[int | None, Core[Any]]]
"""The cores of one actor, oldest first: each decided up to a sequence number, the last (None) up to now."""


class NotRebuildable(Exception):
    """The archive does not hold what the store held. The message says what is missing."""


class Held(msgspec.Struct, frozen=True):
    """A work stream's group: entries up to `delivered` were handed out; `pending` are not acked: (entry, owner)."""

    delivered: int
    pending: tuple[tuple[int, str], ...]


class Plan(msgspec.Struct, frozen=True):
    """What goes into an empty store. `cut`: number of the last event that counts; what is archived behind it does not.

    `states`: actor -> (sequence number, encoded state). `events` are the entries that somebody has yet to read or to
    ack. `payloads` are the keys of trajectories that somebody still needs; the plan of a transfer is written again by
    every boot of the trainer.
    """

    cut: int
    events: tuple[Entry, ...]
    states: dict[str, tuple[int, bytes]]
    begun: dict[str, int]
    """The last step that the log names of actors whose state is not rebuilt: they begin anew, behind it."""
    boots: dict[str, int]
    cursors: dict[str, dict[str, str]]
    registers: dict[str, int]
    work: dict[str, Held]
    payloads: tuple[str, ...]
    version: int
    """The highest version that the log knows."""


class _Step(msgspec.Struct, frozen=True):
    """One journalled step, as far as the store is concerned."""

    seq: int
    now: float
    delivered: Ref | None
    lost: tuple[Ref, ...]
    emits: tuple[str, ...]
    acks: tuple[Ref, ...]
    raises: tuple[tuple[str, int], ...]
    releases: tuple[str, ...]


def plan(events: Iterable[Entry], journals: Mapping[str, Sequence[bytes]], cores: Mapping[str, Eras]) -> Plan:
    """The store at the latest moment that the archive knows whole.

    `journals`: actor -> its records from the first on. Raises `NotRebuildable`.
    """
    log = _Log(events)
    folded = {actor: _folded(actor, records, cores[actor]) for actor, records in journals.items() if actor in cores}
    steps = {actor: found for actor, (found, _) in folded.items()}
    cut, seqs = _cut(log, steps)
    kept = {actor: [step for step in found if step.seq <= seqs[actor]] for actor, found in steps.items()}
    cursors = {actor: _cursors(cores[actor][-1][1], found) for actor, found in kept.items()}
    work = {stream: _held(stream, log, cut, kept, cores) for stream in WORK_STREAMS}
    registers: dict[str, int] = {}
    for found in kept.values():
        for name, value in (raised for step in found for raised in step.raises):
            registers[name] = max(value, registers.get(name, 0))
    released = {key for found in kept.values() for step in found for key in step.releases}
    return Plan(
        cut=cut,
        events=tuple(_needed(log, cut, cursors, work)),
        states={
            actor: (seq, _state(journals[actor], cores[actor], seq, folded[actor][1])) for actor, seq in seqs.items()
        },
        begun={actor: max(said)[0] for actor, said in log.by_actor().items() if actor not in cores},
        boots=log.boots,
        cursors=cursors,
        registers=registers,
        work=work,
        payloads=tuple(key for at, key in log.payloads if at <= cut and key not in released),
        version=max((version for at, version in log.versions if at <= cut), default=-1),
    )


class _Log:
    """The archived events by their number, and what is looked up in them."""

    def __init__(self, events: Iterable[Entry]) -> None:
        self.entries: dict[int, Entry] = {}
        self.ids: dict[str, int] = {}
        self.boots: dict[str, int] = {}
        self.payloads: list[tuple[int, str]] = []
        self.versions: list[tuple[int, int]] = []
        for entry in events:
            self.entries[number(entry.entry)] = entry
            try:
                self._index(number(entry.entry), decode(entry.stream, entry.data))
            except ContractError:
                continue
        self.whole = 0
        while self.whole + 1 in self.entries:
            self.whole += 1
        if self.entries and not self.whole:
            raise NotRebuildable(f"the archive begins with event {min(self.entries)}, not with the run's first")

    def _index(self, at: int, envelope: Envelope[Event]) -> None:
        self.ids[envelope.id] = at
        match envelope.body:
            case ActorBooted(actor=actor, boot=boot):
                self.boots[actor] = max(boot, self.boots.get(actor, 0))
            case TrajectoryFinished(payload=payload):
                self.payloads.append((at, payload.key))
            case PolicyReady(version=version) | StepFinished(version=version):
                self.versions.append((at, version))

    def by_actor(self) -> dict[str, list[tuple[int, int]]]:
        """actor -> (sequence number of the step, number in the log) of every event that a step emitted."""
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for id, at in self.ids.items():
            actor, _, place = id.partition(":")
            seq, dot, _ = place.partition(".")
            if dot and seq.isdecimal():
                found[actor].append((int(seq), at))
        return found


def _folded(actor: str, records: Sequence[bytes], eras: Eras) -> tuple[list[_Step], dict[int, Any]]:
    """Take the inputs of a whole journal again: its steps, and the states after the last of them by their number.

    Raises `NotRebuildable` where it is not what the cores would say.
    """
    found: list[_Step] = []
    last: deque[tuple[int, Any]] = deque(maxlen=LAST)
    for record, input, commands, state in _fold(actor, records, eras):
        last.append((record.seq, state))
        extra = (Emit(None),) if isinstance(input, Booted) else ()  # type: ignore[arg-type]
        emits = [o for o, command in enumerate((*commands, *extra)) if isinstance(command, Emit)]
        found.append(
            _Step(
                seq=record.seq,
                now=record.now,
                delivered=input.ref if isinstance(input, Delivered) else None,
                lost=input.refs if isinstance(input, LeaseLost) else (),
                emits=tuple(f"{actor}:{record.seq}.{ordinal}" for ordinal in emits),
                acks=tuple(command.ref for command in commands if isinstance(command, Ack)),
                raises=tuple((c.register, c.value) for c in commands if isinstance(c, Raise)),
                releases=tuple(key for c in commands if isinstance(c, Release) for key in c.keys),
            )
        )
    return found, dict(last)


def _fold(actor: str, records: Sequence[bytes], eras: Eras) -> Iterable[tuple[Any, Any, Sequence[Any], Any]]:
    """(record, input, commands, state after it) of each step."""
    cores = iter(eras)
    upto, core = next(cores)
    journal, state, seq = Journal(core), core.initial(), 0
    for data in records:
        record, input = journal.read(data)
        if record.seq != seq + 1:
            raise NotRebuildable(f"the archived journal of {actor} jumps from {seq} to {record.seq}")
        while upto is not None and record.seq > upto:
            upto, core = next(cores)
        state, commands = core.step(state, input, record.now)
        if fingerprint(commands) != record.commands:
            raise NotRebuildable(
                f"step {record.seq} of {actor} ({type(input).__name__}) decides otherwise than it did: this is another "
                "release, or its settings in run.json were changed by hand"
            )
        seq = record.seq
        yield record, input, commands, state


def _state(records: Sequence[bytes], eras: Eras, seq: int, last: Mapping[int, Any]) -> bytes:
    """The state after `seq`: one of the `last`, else the journal is folded again up to there."""
    state = last.get(seq)
    if state is None:
        states = deque((state for _, _, _, state in _fold("", records[:seq], eras)), maxlen=1)
        state = states[0] if states else eras[0][1].initial()
    return Journal(eras[-1][1]).snapshot(state)


def _cut(log: _Log, steps: Mapping[str, Sequence[_Step]]) -> tuple[int, dict[str, int]]:
    """The last event of a consistent log, and the last step of each actor in it.

    A step counts when everything that it took and everything that it emitted counts; an event counts when the step that
    emitted it does.
    """
    emitted = log.by_actor()
    cut = log.whole
    while True:
        seqs = {actor: _reach(log, found, cut) for actor, found in steps.items()}
        orphans = [
            at
            for actor, events in emitted.items()
            for seq, at in events
            if at <= cut and actor in seqs and seq > seqs[actor]
        ]
        if not orphans:
            return cut, seqs
        cut = min(orphans) - 1


def _reach(log: _Log, steps: Sequence[_Step], cut: int) -> int:
    seq = 0
    for step in steps:
        taken = 0 if step.delivered is None else number(step.delivered.entry)
        if taken > cut or any(log.ids.get(id, cut + 1) > cut for id in step.emits):
            break
        seq = step.seq
    return seq


def _cursors(core: Core[Any], steps: Sequence[_Step]) -> dict[str, str]:
    """How far an actor has read. What it read since and ignored, it will be told again."""
    cursors = dict.fromkeys(core.watch, "0-0")
    for step in steps:
        if step.delivered is not None and step.delivered.stream in cursors:
            cursors[step.delivered.stream] = step.delivered.entry
    return cursors


def _held(stream: str, log: _Log, cut: int, steps: Mapping[str, Sequence[_Step]], cores: Mapping[str, Eras]) -> Held:
    """Whoever took an entry last, and did not ack or lose it, has it."""
    readers = [actor for actor, eras in cores.items() if stream in eras[-1][1].work]
    owners: dict[int, tuple[float, str]] = {}
    acked: set[int] = set()
    delivered = 0
    for actor in readers:
        mine: dict[int, float] = {}
        for step in steps.get(actor, ()):
            if step.delivered is not None and step.delivered.stream == stream:
                mine[number(step.delivered.entry)] = step.now
                delivered = max(delivered, number(step.delivered.entry))
            for ref in step.lost:
                mine.pop(number(ref.entry), None)
            acked.update(number(ref.entry) for ref in step.acks if ref.stream == stream)
        for at, now in mine.items():
            owners[at] = max(owners.get(at, (now, actor)), (now, actor))
    open_ = (at for at, entry in log.entries.items() if entry.stream == stream and at <= min(cut, delivered))
    pending = [(at, owners[at][1] if at in owners else readers[0]) for at in sorted(open_) if at not in acked]
    return Held(delivered, tuple(pending))


def _needed(log: _Log, cut: int, cursors: Mapping[str, Mapping[str, str]], work: Mapping[str, Held]) -> Iterable[Entry]:
    """Entries that somebody has yet to read, or holds."""
    floors = {stream: min(at for at, _ in (*held.pending, (held.delivered + 1, ""))) for stream, held in work.items()}
    for stream in {*BROADCAST_STREAMS, *(stream for mine in cursors.values() for stream in mine)}:
        read = [number(mine[stream]) for mine in cursors.values() if stream in mine]
        floors[stream] = min(floors.get(stream, cut + 1), min(read, default=cut) + 1)
    for at in range(1, cut + 1):
        entry = log.entries[at]
        if at >= floors[entry.stream]:
            yield entry
