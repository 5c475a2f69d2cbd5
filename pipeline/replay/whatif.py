"""What a core would have done had one input not come, or come later. All other inputs stay as they were, except those
that exist only because of what the core then no longer does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from contracts.core import Delivered, Emit, Tick
from pipeline.errors import Exit, PipelineError
from pipeline.replay.recorded import Log, Recorded, Whole
from pipeline.replay.states import command as say
from pipeline.replay.tracks import describe
from pipeline.runtime.journal import Record, fingerprint

AFTER_S = 3600.0
"""How long deadlines are followed after the last input."""
TICKS = 8
"""Deadlines in a row that are followed at most."""
SHOWN = 40
"""Changed steps that are listed."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A step that comes out otherwise. `missing`: events that are no longer emitted; `new`: commands that were not."""

    now: float
    input: str
    missing: tuple[str, ...]
    new: tuple[str, ...]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """`unheard`: inputs left out because their events would not exist. `state`: where the core ends."""

    actor: str
    event: str
    changes: tuple[Change, ...]
    unheard: int
    state: Any


def what_if(recorded: Recorded, event: str, delay_s: float | None) -> list[WhatIf]:
    """For each actor that consumed `event`: without it, or with it `delay_s` later.

    Raises `PipelineError` if the run has no such event, or if no replayed actor took it.
    """
    if event not in recorded.log.by_id:
        raise PipelineError(f"no event {event!r} in this run's log", Exit.USAGE)
    found = [result for track in recorded.tracks.values() if (result := _without(track, recorded.log, event, delay_s))]
    if not found:
        raise PipelineError(f"no replayed actor's state or commands depended on {event}", Exit.USAGE)
    return found


def _without(track: Whole, log: Log, event: str, delay_s: float | None) -> WhatIf | None:
    inputs = [(record, track.input(record)) for record in track.records]
    where = [n for n, (_, input) in enumerate(inputs) if isinstance(input, Delivered) and input.envelope.id == event]
    if not where:
        return None
    return _Branch(track, log).run(inputs, set(where), delay_s, event)


class _Branch:
    """The other course of one core."""

    def __init__(self, track: Whole, log: Log) -> None:
        self._track = track
        self._log = log
        self._gone: set[str] = set()
        self.changes: list[Change] = []
        self.unheard = 0

    def run(
        self, inputs: Sequence[tuple[Record, Any]], left_out: set[int], delay_s: float | None, event: str
    ) -> WhatIf:
        first = min(left_out)
        state, now = self._track.core.initial(), 0.0
        for record, input in inputs[:first]:
            state, _ = self._track.core_of(record.seq).step(state, input, record.now)
            now = record.now
        late = [] if delay_s is None else [(inputs[n][0].now + delay_s, inputs[n][1]) for n in sorted(left_out)]
        for n, (record, input) in enumerate(inputs[first:], first):
            while late and late[0][0] <= record.now:
                at, moved = late.pop(0)
                state = self._step(self._wake(state, now, at), moved, at, None)
                now = at
            state = self._wake(state, now, record.now)
            now = record.now
            if n in left_out:
                missing = self._lose(record, ())
                self.changes.append(Change(now=now, input=f"(left out) {describe(input)}", missing=missing, new=()))
            elif self._exists(input):
                state = self._step(state, input, record.now, record)
            else:
                self.unheard += 1
                self._lose(record, ())
        for at, moved in late:
            state = self._step(self._wake(state, now, at), moved, at, None)
            now = at
        state = self._wake(state, now, now + AFTER_S)
        changes = tuple(self.changes[:SHOWN])
        return WhatIf(actor=self._track.name, event=event, changes=changes, unheard=self.unheard, state=state)

    def _wake(self, state: Any, since: float, now: float) -> Any:
        """Ticks that the other course would have had in between; those of the recorded one come by themselves."""
        for _ in range(TICKS):
            wake = self._track.core.wake(state)
            if wake is None or not since < wake < now:
                return state
            state, since = self._step(state, Tick(), wake, None), wake
        return state

    def _exists(self, input: Any) -> bool:
        """An event whose causes include one that is no longer emitted was never sent."""
        if not isinstance(input, Delivered):
            return True
        cause = input.envelope.id
        while cause is not None:
            if cause in self._gone:
                return False
            known = self._log.by_id.get(cause)
            cause = None if known is None else known[1].causation_id
        return True

    def _step(self, state: Any, input: Any, now: float, record: Record | None) -> Any:
        core = self._track.core if record is None else self._track.core_of(record.seq)
        state, commands = core.step(state, input, now)
        if record is None:
            if commands:
                self.changes.append(Change(now=now, input=describe(input), missing=(), new=tuple(map(say, commands))))
        elif fingerprint(commands) != record.commands:
            missing = self._lose(record, commands)
            logged = [envelope.body for _, envelope in self._track.emitted.get(record.seq, ())]
            new = [c for c in commands if not (isinstance(c, Emit) and c.event in logged)]
            if missing or new:
                change = Change(now=now, input=describe(input), missing=missing, new=tuple(map(say, new)))
                self.changes.append(change)
        return state

    def _lose(self, record: Record, commands: Sequence[Any]) -> tuple[str, ...]:
        """Events of a recorded step that this course does not emit."""
        kept = [command.event for command in commands if isinstance(command, Emit)]
        gone = [e for _, e in self._track.emitted.get(record.seq, ()) if e.body not in kept]
        self._gone.update(envelope.id for envelope in gone)
        return tuple(say(Emit(envelope.body)) for envelope in gone)
