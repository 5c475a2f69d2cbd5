"""`replay --check`: do the cores of this version decide as the recorded ones did?"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from contracts.core import Booted, Emit
from contracts.events import ActorBooted, kind
from pipeline.replay.recorded import Recorded, Track, describe
from pipeline.runtime.journal import Record, fingerprint

NOTHING = fingerprint(())


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first step of `actor` that answers otherwise: `recorded` and `answered` are commands in words."""

    actor: str
    seq: int
    position: int
    now: float
    input: str
    recorded: tuple[str, ...]
    answered: tuple[str, ...]
    why: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found: how much was compared, and each actor's first divergence, the first one first."""

    actors: int
    steps: int
    events: int
    divergences: tuple[Divergence, ...]


def check(recorded: Recorded) -> Verdict:
    """Run every core over its journalled inputs and compare what comes out with journal and log."""
    found: list[Divergence] = []
    steps = 0
    with without_collector():
        for track in recorded.tracks.values():
            divergence, count = _check(track)
            steps += count
            if divergence is not None:
                found.append(divergence)
    found.sort(key=lambda each: (each.position, each.now, each.actor))
    events = len(recorded.log.events)
    return Verdict(actors=len(recorded.tracks), steps=steps, events=events, divergences=tuple(found))


@contextmanager
def without_collector() -> Iterator[None]:
    """States are trees of immutable values: looking for cycles in them is of no use."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check(track: Track) -> tuple[Divergence | None, int]:
    core_of, state, decode, emitted = track.core_of, track.core.initial(), track.input, track.emitted
    last_logged = max(emitted, default=0)
    count = 0
    for record in track.records:
        input = decode(record)
        try:
            state, commands = core_of(record.seq).step(state, input, record.now)
        except Exception as error:
            return _differs(track, record, input, (), f"it raises {type(error).__name__}: {error}"), count
        count += 1
        if commands:
            if fingerprint(commands) != record.commands:
                return _differs(track, record, input, commands, "it answers other commands"), count
            if record.seq <= last_logged and not _logged(track, record, input, commands):
                return _differs(track, record, input, commands, "the log holds other events than it emits"), count
        elif record.commands != NOTHING:
            return _differs(track, record, input, commands, "it answers nothing"), count
        elif record.seq in emitted and not isinstance(input, Booted):
            return _differs(track, record, input, commands, "the log holds events that it does not emit"), count
    return None, count


def _logged(track: Track, record: Record, input: Any, commands: Sequence[Any]) -> bool:
    """The log holds exactly the events that the step emits."""
    events = [command.event for command in commands if type(command) is Emit]
    logged = track.emitted.get(record.seq)
    if logged is None:
        return not events
    bodies = [envelope.body for _, envelope in logged]
    if isinstance(input, Booted):
        bodies = [body for body in bodies if type(body) is not ActorBooted]
    return events == bodies


def _differs(track: Track, record: Record, input: Any, commands: Sequence[Any], why: str) -> Divergence:
    logged = track.emitted.get(record.seq, [])
    shown = [f"emit {kind(envelope.body)} {envelope.body}" for _, envelope in logged]
    if record.commands != NOTHING:
        shown.append(f"(the journal holds the hash of all commands: {record.commands.hex()})")
    answered = [text(command) for command in commands]
    if commands:
        answered.append(f"(hash {fingerprint(commands).hex()})")
    return Divergence(
        actor=track.name,
        seq=record.seq,
        position=min((position for position, _ in logged), default=_next_position(track, record.seq)),
        now=record.now,
        input=describe(input),
        recorded=tuple(shown) or ("nothing",),
        answered=tuple(answered) or ("nothing",),
        why=why,
    )


def _next_position(track: Track, seq: int) -> int:
    """Where the log goes on after a step that left nothing in it."""
    after = [min(position for position, _ in track.emitted[later]) for later in track.emitted if later > seq]
    return min(after, default=2**62)


def text(command: Any) -> str:
    """A command in one line."""
    if isinstance(command, Emit):
        return f"emit {kind(command.event)} {command.event}"
    return str(command)
