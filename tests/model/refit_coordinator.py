"""The coordinator's real core as a table of numbered states, and the ways to break it."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec.structs import replace

from actors.refit.barrier import Barriers
from actors.refit.core import RefitCore
from actors.refit.state import Barrier, FsyncHigh, HighWritten, RefitState, Seat
from config.schema import EngineConfig, GatewayConfig, LaunchConfig, RefitConfig
from contracts.core import Booted, Delivered, Emit, Ref, Tick
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import (
    ActorBooted,
    EngineDead,
    EngineDrained,
    EngineFailed,
    EngineLoaded,
    EngineQuarantined,
    EngineReady,
    Event,
    GateClosed,
    GatewayReady,
    PolicyReady,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    StepFinished,
    TransferFailed,
    TransferFinished,
    TransferOffered,
    TransferStarted,
)

Message = tuple[Any, ...]
"""Kind first; small and without times, so that equal situations are equal."""
ENGINES = ("engine-0", "engine-1")

# --- mutations -------------------------------------------------------------------------------------------------------


class Mutated(Barriers):
    """The rules with one mechanism taken out."""

    def __init__(self, refit: RefitConfig, without: str | None) -> None:
        super().__init__(refit, "refit")
        self._without = without

    def epoch_matches(self, barrier: Barrier, event: Any) -> bool:
        return self._without == "ack_epoch" or super().epoch_matches(barrier, event)

    def seat(self, barrier: Barrier, engine: str, boot: int) -> Seat | None:
        if self._without == "ack_boot":
            return next((s for s in barrier.seats if s.engine == engine), None)
        return super().seat(barrier, engine, boot)

    def digest_accepted(self, offered: str, digest: str) -> bool:
        return self._without == "digest" or super().digest_accepted(offered, digest)

    def gates_closed(self, barrier: Barrier) -> bool:
        return self._without == "gate_wait" or super().gates_closed(barrier)

    def engines_drained(self, barrier: Barrier) -> bool:
        return self._without == "drain_wait" or super().engines_drained(barrier)


# --- the coordinator -------------------------------------------------------------------------------------------------


@cache
def event_of(sender: str, message: Message) -> Event:
    """The event behind a message to the coordinator."""
    kind, *rest = message
    number = rest[0]
    match kind:
        case "booted":
            return ActorBooted(actor=sender, boot=number, pid=1, host="h")
        case "ready" if sender == "gateway-0":
            return GatewayReady(gateway=sender, boot=number, url="u")
        case "ready" if sender == "trainer":
            return PolicyReady(version=rest[1], step=rest[1], parent_version=None, trainer_boot=number)
        case "ready":
            return EngineReady(engine=sender, boot=number, url="u", ranks=1, seconds=0.0)
        case "dead":
            return EngineDead(engine=sender, boot=number, reason="killed")
        case "stepped":
            return step_finished(number, rest[1])
        case "closed":
            return GateClosed(epoch=number, gateway=sender, boot=rest[1], held=0, interrupted=0, seconds=0.0)
        case "drained":
            return EngineDrained(epoch=number, engine=sender, boot=rest[1], seconds=0.0)
        case "loaded":
            return EngineLoaded(epoch=number, engine=sender, boot=rest[1], digest=rest[2], seconds=0.0)
        case "failed":
            return EngineFailed(epoch=number, engine=sender, boot=rest[1], phase=rest[2], error="E", reason="r")
        case "offered":
            return TransferOffered(
                epoch=number,
                version=rest[2],
                trainer_boot=rest[1],
                address="a",
                port=1,
                buckets=(),
                bytes=1,
                digest=digest(rest[2]),
            )
        case "sent":
            return TransferFinished(epoch=number, version=0, seconds=0.0, bytes=1)
        case "broke":
            return TransferFailed(epoch=number, phase="send", error="E", reason="r")
    raise AssertionError(message)


def step_finished(boot: int, version: int) -> StepFinished:
    return StepFinished(
        version=version,
        parent_version=version - 1,
        step=version,
        trainer_boot=boot,
        batch=version,
        metrics={},
        seconds=0.0,
        waited_s=0.0,
        tokens=1,
        tasks=(),
    )


def digest(version: int) -> str:
    return f"d{version}"


def message_of(event: Event) -> Message | None:
    """What the others read of an event of the coordinator."""
    match event:
        case RefitRequested():
            return "requested", event.epoch, event.version, tuple(m.actor for m in event.engines)
        case TransferStarted():
            return "started", event.epoch, event.version, tuple(m.engine for m in event.members)
        case RefitCommitted():
            return "committed", event.epoch, event.version, event.engines
        case RefitFailed():
            return "aborted", event.epoch
        case EngineQuarantined():
            return "expelled", event.epoch, event.engine, event.boot
    return None


class Coordinator:
    """The real core as a table: states are numbered, with their times relative to now; steps are remembered."""

    def __init__(self, without: str | None) -> None:
        refit = RefitConfig(failures=1000, retry_backoff_s=1.0, drain_deadline_s=100.0, deadline_s=1000.0)
        self.core = RefitCore(refit, EngineConfig(count=2), GatewayConfig(), LaunchConfig())
        self.core.barriers = Mutated(refit, without)
        self._without = without
        self.states: list[RefitState] = []
        self._numbers: dict[bytes, int] = {}
        self._steps: dict[tuple[int, Any], tuple[int, tuple[Message, ...], int]] = {}
        self.first = self._number(self.core.initial(), 0.0)

    def _number(self, state: RefitState, now: float) -> int:
        canonical = relative(state, now)
        key = msgspec.msgpack.encode(canonical)
        if key not in self._numbers:
            self._numbers[key] = len(self.states)
            self.states.append(canonical)
        return self._numbers[key]

    def step(self, number: int, input: Any) -> tuple[int, tuple[Message, ...], int]:
        """(next state, events for the others, epoch whose number goes to disk or 0)."""
        known = self._steps.get((number, input))
        if known is None:
            known = self._steps[number, input] = self._take(number, input)
        return known

    def _take(self, number: int, input: Any) -> tuple[int, tuple[Message, ...], int]:
        state, now = self.states[number], 0.0
        if input == "tick":
            now, taken = self.wake(number) or 0.0, Tick()
        elif input == "boot":
            taken = Booted(1)
        elif isinstance(input, int):
            taken = HighWritten(input)
        else:
            event = event_of(*input)
            stream = STREAM_OF[type(event)]
            boot = event.boot if isinstance(event, EngineReady) else 1
            taken = Delivered(
                Ref(stream, "1-0"),
                Envelope(
                    id="x", run="r", stream=stream, actor=input[0], boot=boot, epoch=0, wall_ns=0, mono_ns=0, body=event
                ),
            )
        after, commands = self.core.step(state, taken, now)
        said = [message_of(c.event) for c in commands if isinstance(c, Emit)]
        opened = sum(c.epoch for c in commands if isinstance(c, FsyncHigh))
        return self._number(after, now), tuple(m for m in said if m is not None), opened

    def wake(self, number: int) -> float | None:
        """When the core wants to be told the time; never without `deadlines`."""
        return None if self._without == "deadlines" else self.core.wake(self.states[number])


def relative(state: RefitState, now: float) -> RefitState:
    """The state as it would be at time 0, without what only metrics and messages show."""
    barrier = state.barrier
    if barrier is not None:
        barrier = replace(
            barrier,
            requested_at=0.0,
            drain_at=max(0.0, barrier.drain_at - now),
            deadline_at=max(0.0, barrier.deadline_at - now),
            started_at=None if barrier.started_at is None else 0.0,
        )
    engines = {n: replace(e, eligible_at=max(0.0, e.eligible_at - now)) for n, e in sorted(state.engines.items())}
    return replace(
        state,
        boot=1,
        barrier=barrier,
        engines=engines,
        gateways=dict(sorted(state.gateways.items())),
        retry_at=max(0.0, state.retry_at - now),
        wait=None,
    )
