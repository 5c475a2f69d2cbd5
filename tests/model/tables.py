"""Real cores as tables: states are numbered, with their times relative to now; steps are remembered.

Equal situations must be equal worlds, so whatever only metrics, messages and waits show is taken out of states and
events, and numbers that only tell things apart start again where nothing refers to older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import msgspec
from msgspec.structs import replace

from actors.buffer.state import State as BufferState
from actors.engine.state import EngineState
from actors.gateway import state as gateway
from actors.refit.state import Log, RefitState, Watch
from contracts.core import Booted, Delivered, Emit, Raise, Ref, Tick
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import (
    EngineDrained,
    EngineLoaded,
    EngineReady,
    GateClosed,
    RefitCommitted,
    RefitRequested,
    StepFinished,
    TransferFinished,
    WaitEnded,
    WaitStarted,
)
from tests.model.world import Note

TICK = Tick()
SILENT = (WaitStarted, WaitEnded)
NEVER = 1e9
"""A deadline that no search comes to."""

Outputs = tuple[Any, ...]


class Stepped(msgspec.Struct, frozen=True):
    """`step.finished`, in a form that can be a part of a world."""

    boot: int
    version: int


class Table:
    """One core. `canonical(state, now)` is the state as it would be at time 0."""

    def __init__(self, core: Any, canonical: Callable[[Any, float], Any]) -> None:
        self.core = core
        self.states: list[Any] = []
        self._canonical = canonical
        self._numbers: dict[bytes, int] = {}
        self._steps: dict[tuple[int, Hashable], tuple[int, Outputs]] = {}
        self.first = self._number(core.initial(), 0.0)

    def _number(self, state: Any, now: float) -> int:
        canonical = self._canonical(state, now)
        key = msgspec.msgpack.encode(canonical)
        if key not in self._numbers:
            self._numbers[key] = len(self.states)
            self.states.append(canonical)
        return self._numbers[key]

    def step(self, number: int, input: Any) -> tuple[int, Outputs]:
        """Next state, and what came out: events as they are, other commands, register changes left out."""
        known = self._steps.get((number, input))
        if known is None:
            known = self._steps[number, input] = self._take(number, input)
        return known

    def _take(self, number: int, input: Any) -> tuple[int, Outputs]:
        if isinstance(input, Note):
            input = input.event
        state = self.states[number]
        now = (self.core.wake(state) or 0.0) if input is TICK else 0.0
        after, commands = self.core.step(state, _input(input), now)
        said = (_plain(c.event, now) if isinstance(c, Emit) else c for c in commands)
        heard = tuple(x for x in said if not isinstance(x, (*SILENT, Raise, Log, Watch)))
        return self._number(after, now), heard

    def forget(self) -> None:
        """The core has changed: what it did before is no guide."""
        self._steps.clear()

    def wakes(self, number: int) -> bool:
        """Whether the core wants to be told the time, within this search."""
        wake = self.core.wake(self.states[number])
        return wake is not None and wake < NEVER / 2


def _input(input: Any) -> Any:
    if isinstance(input, Stepped):
        input = StepFinished(
            version=input.version,
            parent_version=input.version - 1,
            step=input.version,
            trainer_boot=input.boot,
            batch=input.version,
            metrics={},
            seconds=0.0,
            waited_s=0.0,
            tokens=1,
            tasks=(),
        )
    if type(input) not in STREAM_OF:
        return input
    stream = STREAM_OF[type(input)]
    boot = input.boot if isinstance(input, EngineReady) else 1
    actor = input.engine if isinstance(input, EngineReady) else "x"
    envelope = Envelope(
        id="x", run="r", stream=stream, actor=actor, boot=boot, epoch=0, wall_ns=0, mono_ns=0, body=input
    )
    return Delivered(Ref(stream, "1-0"), envelope)


def _plain(event: Any, now: float) -> Any:
    """An event without measurements, its deadlines counted from now."""
    match event:
        case RefitRequested():
            return replace(event, deadline_at=event.deadline_at - now)
        case RefitCommitted():
            return replace(event, pause_s=0.0, drain_s=0.0, transfer_s=0.0)
        case EngineDrained():
            return replace(event, seconds=0.0, held=0)
        case EngineReady() | EngineLoaded() | TransferFinished():
            return replace(event, seconds=0.0)
        case GateClosed():
            return replace(event, seconds=0.0, held=0, interrupted=0, running=0)
    return event


def coordinator(state: RefitState, now: float) -> RefitState:
    barrier = state.barrier
    if barrier is not None:
        barrier = replace(
            barrier,
            requested_at=0.0,
            drain_at=max(0.0, barrier.drain_at - now),
            deadline_at=max(0.0, barrier.deadline_at - now),
            started_at=None if barrier.started_at is None else 0.0,
        )
    engines = {
        n: replace(
            e,
            eligible_at=max(0.0, e.eligible_at - now),
            restarts=0,
            restart_at=None if e.restart_at is None else max(0.0, e.restart_at - now),
        )
        for n, e in sorted(state.engines.items())
    }
    return replace(
        state,
        boot=1,
        barrier=barrier,
        engines=engines,
        gateways=dict(sorted(state.gateways.items())),
        retry_at=max(0.0, state.retry_at - now),
        wait=None,
    )


def engine(state: EngineState, now: float) -> EngineState:
    return replace(state, waiting=None, unserved=min(state.unserved, 1))


def gate(state: gateway.State, now: float) -> gateway.State:
    drain = state.drain
    if drain is not None:
        drain = gateway.Drain(0.0, max(0.0, drain.abort_at - now), max(0.0, drain.end_at - now), drain.hold)
    avoided = {n: gateway.Avoided(max(0.0, a.until - now), 1) for n, a in sorted(state.avoided.items())}
    requests = {n: replace(r, held_since=0.0, held_s=0.0, failures=0) for n, r in sorted(state.requests.items())}
    return replace(
        state,
        drain=drain,
        avoided={n: a for n, a in avoided.items() if a.until > 0.0},
        requests=requests,
        addresses=dict(sorted(state.addresses.items())),
        expire_at=min((request.deadline_at for request in requests.values()), default=None),
        loads=dict(sorted(state.loads.items())),
        interrupted=0,
        last_call=max(state.calls, default=0),
        waits={},
    )


def buffer(state: BufferState, now: float) -> BufferState:
    """What decides whether tokens count."""
    return BufferState(
        versions=dict(sorted(state.versions.items())),
        sources=state.sources,
        barred=dict(sorted(state.barred.items())),
        abandoned=state.abandoned,
    )


def booted(table: Table, number: int, boot: int) -> tuple[int, Outputs]:
    """The first step of a process."""
    return table.step(number, Booted(boot))
