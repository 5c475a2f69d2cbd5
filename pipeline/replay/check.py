"""`replay --check`: do the cores of this version decide as the recorded ones did?"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from contracts.core import Booted, Emit
from contracts.envelope import Envelope
from contracts.events import ActorBooted, kind
from pipeline import rundir
from pipeline.replay.recorded import Recorded, Whole
from pipeline.replay.tracks import describe
from pipeline.runtime.journal import Record, fingerprint

NOTHING = fingerprint(())
NOWHERE = 2**62
"""Behind all places of a log."""

Next = Callable[[int], int]
"""Where the log goes on after a step."""


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
    absent: tuple[str, ...] = ()
    """Fields that events of the log were written without (`engine.loaded.receiver`): compared without them."""
    other_code: bool = False
    """The run was started by other code than this."""


def check(recorded: Recorded) -> Verdict:
    """Run every core over its journalled inputs and compare what comes out with journal and log."""
    absent: set[str] = set()
    done: list[Stretch] = []
    with without_collector():
        for track in recorded.tracks.values():
            last = max(track.emitted, default=0)
            done.append(Stretch(0, track.core.initial()))
            go_on(done[-1], track, len(track.records), last, absent, partial(_next_position, track))
    found = [stretch.found for stretch in done if stretch.found is not None]
    return judged(recorded.code, [stretch.seq for stretch in done], len(recorded.log.events), found, absent)


def judged(
    code: str | None, steps: Sequence[int], events: int, found: Iterable[Divergence], absent: Iterable[str]
) -> Verdict:
    """The verdict on a run that was started with this `code`, of whose actors so many steps were checked."""
    return Verdict(
        actors=len(steps),
        steps=sum(steps),
        events=events,
        divergences=tuple(sorted(found, key=lambda each: (each.position, each.now, each.actor))),
        absent=tuple(sorted(absent)),
        other_code=code is not None and code != rundir.code(),
    )


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


class Stretch(msgspec.Struct):
    """How far the check of one actor has come: after step `seq`, in `state`; `found` is what ended it."""

    seq: int
    state: Any
    found: Divergence | None = None


def go_on(stretch: Stretch, track: Whole, upto: int, last_logged: int, absent: set[str], after: Next) -> None:
    """Check the steps of a track up to number `upto`, whose events its log holds.

    `last_logged`: the last step that left an event. `after`: where the log goes on after a step that left none.
    """
    step = track.core.step if len(track.eras) == 1 else None
    state, decode, emitted, why = stretch.state, track.input, track.emitted, None
    for record in track.records[stretch.seq : upto]:
        input = decode(record)
        try:
            state, commands = (step or track.core_of(record.seq).step)(state, input, record.now)
        except Exception as error:
            why = f"it raises {type(error).__name__}: {error}"
            stretch.found, stretch.seq = _differs(track, record, input, (), why, after), record.seq - 1
            return
        if commands:
            if fingerprint(commands) != record.commands and not _as_written(track, record, input, commands, absent):
                why = "it answers other commands"
            elif record.seq <= last_logged and not _logged(track, record, input, commands):
                why = "the log holds other events than it emits"
        elif record.commands != NOTHING:
            why = "it answers nothing"
        elif record.seq in emitted and not isinstance(input, Booted):
            why = "the log holds events that it does not emit"
        if why is not None:
            stretch.found, stretch.seq = _differs(track, record, input, commands, why, after), record.seq
            return
    stretch.seq, stretch.state = max(stretch.seq, min(upto, len(track.records))), state


def _logged(track: Whole, record: Record, input: Any, commands: Sequence[Any]) -> bool:
    """The log holds exactly the events that the step emits."""
    events = [command.event for command in commands if type(command) is Emit]
    return events == [envelope.body for _, envelope in _emitted(track, record, input)]


def _emitted(track: Whole, record: Record, input: Any) -> list[tuple[int, Envelope[Any]]]:
    """What the log holds of a step, with its places, less what the runtime itself said."""
    logged = track.emitted.get(record.seq, [])
    if isinstance(input, Booted):
        return [(place, envelope) for place, envelope in logged if type(envelope.body) is not ActorBooted]
    return logged


def _as_written(track: Whole, record: Record, input: Any, commands: Sequence[Any], absent: set[str]) -> bool:
    """The commands are those recorded but for fields that an older version's events lack; `absent` collects these."""
    places = [place for place, _ in _emitted(track, record, input)]
    if sum(type(command) is Emit for command in commands) != len(places):
        return False
    bodies = map(track.written, places)
    written, lacking = [], set[str]()
    for command in commands:
        plain = msgspec.to_builtins(command, builtin_types=(bytes,), enc_hook=repr)
        if type(command) is Emit:
            plain["event"] = _restricted(plain["event"], next(bodies), plain["event"]["kind"], lacking)
        written.append(plain)
    if fingerprint(commands, written) != record.commands:
        return False
    absent |= lacking
    return True


def _restricted(value: Any, model: Any, path: str, lacking: set[str]) -> Any:
    """`value` with the keys only that `model` has, all the way down."""
    if isinstance(value, dict) and isinstance(model, dict):
        lacking.update(f"{path}.{key}" for key in value.keys() - model.keys())
        return {k: _restricted(v, model[k], f"{path}.{k}", lacking) for k, v in value.items() if k in model}
    if isinstance(value, list | tuple) and isinstance(model, list) and len(value) == len(model):
        return [_restricted(v, m, path, lacking) for v, m in zip(value, model, strict=True)]
    return value


def _differs(track: Whole, record: Record, input: Any, commands: Sequence[Any], why: str, after: Next) -> Divergence:
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
        position=min((position for position, _ in logged), default=None) or after(record.seq),
        now=record.now,
        input=describe(input),
        recorded=tuple(shown) or ("nothing",),
        answered=tuple(answered) or ("nothing",),
        why=why,
    )


def _next_position(track: Whole, seq: int) -> int:
    """Where the log goes on after a step that left nothing in it."""
    after = [min(position for position, _ in track.emitted[later]) for later in track.emitted if later > seq]
    return min(after, default=NOWHERE)


def text(command: Any) -> str:
    """A command in one line."""
    if isinstance(command, Emit):
        return f"emit {kind(command.event)} {command.event}"
    return str(command)
