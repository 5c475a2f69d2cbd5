"""When the archive is flushed, when a segment ends, and what may be trimmed.

Nothing is trimmed before it is durable, nor before every actor of the run has booted once: an actor reads the broadcast
streams from their start, and protects what it has not read by storing its cursors before it announces its boot. What is
trimmed was durable one trimming interval ago, which leaves time for followers that store no cursor (driver, `pipeline
log --follow`). Payloads go when they were released, so nobody needs them, and are archived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from actors.recorder.ordering import START, number
from config.schema import RecorderConfig
from contracts.core import ARCHIVED_CHECKPOINT, Booted, Emit, Raise
from contracts.events import ActorFailed

FLUSH_S = 0.75
"""Longest time that a record stays in memory."""
FLUSH_BYTES = 4 << 20
TRIM_S = 10.0
OWN_JOURNAL = "journal:recorder"
"""Not archived: archiving it would add to it. The store keeps what a restart needs."""
EVERYTHING = f"{2**63}-0"


class Recovered(msgspec.Struct, frozen=True, tag="recovered"):
    """The archive ends with these entries."""

    last: dict[str, str]


class Appended(msgspec.Struct, frozen=True, tag="appended"):
    """Records were taken into memory. `booted`: actors that announced themselves; `finished`: the log is complete.

    `checkpoint`: version of the newest checkpoint that they announce, 0 without any.
    """

    bytes: int
    booted: tuple[str, ...] = ()
    finished: bool = False
    checkpoint: int = 0


class Flushed(msgspec.Struct, frozen=True, tag="flushed"):
    """Everything up to `cursors` is durable. `bytes` written; `rotated`: the segment was closed."""

    cursors: dict[str, str]
    bytes: int
    rotated: bool


class Follow(msgspec.Struct, frozen=True):
    """Read the log from where the archive ends, until it is complete."""


class Flush(msgspec.Struct, frozen=True):
    """Make durable what was taken; with `rotate`, close the segment."""

    rotate: bool


class Trim(msgspec.Struct, frozen=True):
    """Delete from the store entries below these floors, and payloads released up to `archived`."""

    floors: dict[str, str]
    archived: str


class State(msgspec.Struct, frozen=True):
    """`cursors`: what is durable. `floors`: what was durable at the last trimming, so may go at the next.

    Versions of checkpoints whose announcement was `taken` into memory, is `going` to the disk, and is `archived`.
    """

    cursors: dict[str, str] = {}
    floors: dict[str, str] = {}
    booted: tuple[str, ...] = ()
    unflushed: int = 0
    dirty_since: float | None = None
    flushing: bool = False
    segment_bytes: int = 0
    segment_since: float | None = None
    trim_at: float | None = None
    finished: bool = False
    closed: bool = False
    taken: int = 0
    going: int = 0
    archived: int = 0


class RecorderCore:
    """`contracts.core.Core`. Its shell reads the streams itself, undecoded, so it watches none."""

    state_type = State
    local_type = Recovered | Appended | Flushed
    work = ()
    watch = ()

    def __init__(self, config: RecorderConfig, actors: Sequence[str]) -> None:
        self._config = config
        self._actors = frozenset(actors)

    def initial(self) -> State:
        return State()

    def step(self, state: State, input: Any, now: float) -> tuple[State, Sequence[Any]]:
        match input:
            case Booted():
                return self._boot(state, now), (Follow(),)
            case Recovered():
                return state, self._compare(state, input)
            case Appended():
                state = self._append(state, input, now)
            case Flushed():
                state, raised = self._flushed(state, input)
                state, commands = self._decide(state, now)
                return state, (*raised, *commands)
        return self._decide(state, now)

    def wake(self, state: State) -> float | None:
        if state.closed:
            return None
        due = [state.trim_at]
        if state.dirty_since is not None and not state.flushing:
            due.append(state.dirty_since + FLUSH_S)
        return min((at for at in due if at is not None), default=None)

    def intake(self, state: State) -> Mapping[str, int]:
        return {}

    def done(self, state: State) -> bool:
        return state.closed

    # --- inputs ---

    def _boot(self, state: State, now: float) -> State:
        """What was in memory is gone; it is read again from where the archive ends."""
        return State(cursors=state.cursors, booted=state.booted, trim_at=now + TRIM_S, archived=state.archived)

    def _compare(self, state: State, recovered: Recovered) -> Sequence[Any]:
        """An archive that ends before what was once durable has lost records."""
        behind = {
            stream: (recovered.last.get(stream, START), entry)
            for stream, entry in state.cursors.items()
            if number(recovered.last.get(stream, START)) < number(entry)
        }
        if not behind:
            return ()
        text = ", ".join(f"{stream} ends at {last} instead of {entry}" for stream, (last, entry) in behind.items())
        message = (
            f"the archive lost records that were durable: {text}. What the store still holds is archived again; "
            "was the run directory changed, or is it not shared between nodes?"
        )
        return (Emit(ActorFailed(actor="recorder", error="ArchiveBehind", message=message, fatal=False)),)

    def _append(self, state: State, input: Appended, now: float) -> State:
        booted = tuple(sorted({*state.booted, *input.booted}))
        taken = max(state.taken, input.checkpoint)
        state = replace(state, booted=booted, finished=state.finished or input.finished, taken=taken)
        if not input.bytes:
            return state
        return replace(
            state,
            unflushed=state.unflushed + input.bytes,
            dirty_since=now if state.dirty_since is None else state.dirty_since,
            segment_since=now if state.segment_since is None else state.segment_since,
        )

    def _flushed(self, state: State, input: Flushed) -> tuple[State, Sequence[Any]]:
        complete = state.finished and input.rotated and not state.unflushed
        raised = (Raise(ARCHIVED_CHECKPOINT, state.going),) if state.going > state.archived else ()
        state = replace(
            state,
            cursors=input.cursors,
            flushing=False,
            segment_bytes=0 if input.rotated else state.segment_bytes + input.bytes,
            segment_since=state.dirty_since if input.rotated else state.segment_since,
            closed=complete,
            archived=max(state.archived, state.going),
        )
        return state, raised

    # --- decisions ---

    def _decide(self, state: State, now: float) -> tuple[State, Sequence[Any]]:
        commands: list[Any] = []
        if self._flush_due(state, now):
            commands.append(Flush(rotate=state.finished or self._segment_full(state, now)))
            state = replace(state, flushing=True, unflushed=0, dirty_since=None, going=state.taken)
        if state.trim_at is not None and now >= state.trim_at and not state.closed:
            if state.floors:
                commands.append(Trim({**state.floors, OWN_JOURNAL: EVERYTHING}, _archived(state.cursors)))
            complete = self._actors <= set(state.booted)
            state = replace(state, floors=state.cursors if complete else {}, trim_at=now + TRIM_S)
        return state, commands

    def _flush_due(self, state: State, now: float) -> bool:
        if state.flushing or state.closed:
            return False
        waited = state.dirty_since is not None and now >= state.dirty_since + FLUSH_S
        return state.finished or waited or state.unflushed >= FLUSH_BYTES

    def _segment_full(self, state: State, now: float) -> bool:
        aged = state.segment_since is not None and now >= state.segment_since + self._config.segment_s
        return aged or state.segment_bytes >= self._config.segment_mib * 2**20


def _archived(cursors: Mapping[str, str]) -> str:
    """The last event of the log that is durable. The log is archived in order, so all before it are too."""
    events = [entry for stream, entry in cursors.items() if not stream.startswith("journal:")]
    return max(events, key=number, default=START)
