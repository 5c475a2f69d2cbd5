"""Drives the coordinator's core step by step, and keeps what it said."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from actors.refit.core import RefitCore
from actors.refit.state import FsyncHigh, HighWritten, Log, RefitState, Watch
from config.schema import EngineConfig, GatewayConfig, LaunchConfig, RefitConfig
from contracts.core import Booted, Delivered, Emit, Raise, Ref, Tick
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import (
    ActorBooted,
    EngineDrained,
    EngineFailed,
    EngineHealth,
    EngineLoaded,
    EngineReady,
    Event,
    GateClosed,
    GatewayReady,
    PolicyReady,
    StepFinished,
    TransferFinished,
    TransferOffered,
)

E = TypeVar("E")
DIGEST = "d1"


def core(engines: int = 2, **refit: Any) -> RefitCore:
    return RefitCore(
        msgspec.structs.replace(RefitConfig(), **refit),
        EngineConfig(count=engines),
        GatewayConfig(),
        LaunchConfig(start_deadline_s=100.0),
    )


class Drive:
    """A coordinator from its boot on; `now` moves only when a test says so."""

    def __init__(self, engines: int = 2, **refit: Any) -> None:
        self.core = core(engines, **refit)
        self.state: RefitState = self.core.initial()
        self.now = 1000.0
        self.said: list[Any] = []
        """What the last step said, but for what it said of the fleet."""
        self.health: list[EngineHealth] = []
        self.watched: list[Watch] = []
        self.step(Booted(1))

    def step(self, input: Any) -> list[Any]:
        self.state, commands = self.core.step(self.state, input, self.now)
        wake = self.core.wake(self.state)
        assert wake is None or wake > self.now or isinstance(input, Delivered | HighWritten | Booted), "would spin"
        self.health += [c.event for c in commands if isinstance(c, Emit) and isinstance(c.event, EngineHealth)]
        self.watched += [c for c in commands if isinstance(c, Watch)]
        barred = [c for c in commands if not isinstance(c, Watch)]
        self.said = [c for c in barred if not (isinstance(c, Emit) and isinstance(c.event, EngineHealth))]
        assert sum(isinstance(c, FsyncHigh) for c in commands) <= 1
        return self.said

    def hear(self, *events: Event, boot: int = 1) -> list[Any]:
        """Deliver events; answers the commands of them all."""
        said: list[Any] = []
        for event in events:
            stream = STREAM_OF[type(event)]
            envelope = Envelope(
                id="x:1.0", run="r", stream=stream, actor="x", boot=boot, epoch=0, wall_ns=0, mono_ns=0, body=event
            )
            said += self.step(Delivered(Ref(stream, "1-0"), envelope))
        self.said = said
        return said

    def at(self, now: float) -> list[Any]:
        """Let the time come and tick."""
        self.now = now
        return self.step(Tick())

    def wake(self) -> list[Any]:
        """Tick at the core's own wish."""
        wake = self.core.wake(self.state)
        assert wake is not None
        return self.at(max(wake, self.now))

    # --- what it said ---

    def emitted(self, kind: type[E]) -> list[E]:
        return [c.event for c in self.said if isinstance(c, Emit) and isinstance(c.event, kind)]

    def one(self, kind: type[E]) -> E:
        (event,) = self.emitted(kind)
        return event

    def raised(self) -> list[tuple[str, int]]:
        return [(c.register, c.value) for c in self.said if isinstance(c, Raise)]

    def logged(self) -> list[str]:
        return [c.text for c in self.said if isinstance(c, Log)]

    @property
    def epoch(self) -> int:
        return self.state.epoch

    # --- usual courses ---

    def fleet(self, version: int = 0, step: int = 0) -> list[Any]:
        """All members become ready, as boot 1."""
        engines = [engine_ready(n) for n in range(len(self.core._needs.names(self.state)))]
        return self.hear(GatewayReady(gateway="gateway-0", boot=1, url="g"), *engines, policy_ready(version, step))

    def open(self) -> list[Any]:
        """The high-water mark is written."""
        return self.step(HighWritten(self.epoch))

    def drain(self, engines: tuple[int, ...] = (0, 1)) -> list[Any]:
        """Gate, engines and offer: everything the transfer waits for."""
        return self.hear(self.gate(), *(self.drained(n) for n in engines), self.offer())

    def load(self, engines: tuple[int, ...] = (0, 1)) -> list[Any]:
        """The broadcast ends and the engines acknowledge."""
        return self.hear(self.sent(), *(self.loaded(n) for n in engines))

    def committed(self, engines: tuple[int, ...] = (0, 1)) -> list[Any]:
        """A whole epoch, from opening to commit."""
        self.open()
        self.drain(engines)
        return self.load(engines)

    def boot(self, engine: int) -> int:
        return self.state.engines[f"engine-{engine}"].boot

    # --- answers ---

    def gate(self, boot: int = 1, epoch: int | None = None) -> GateClosed:
        number = self.epoch if epoch is None else epoch
        return GateClosed(epoch=number, gateway="gateway-0", boot=boot, held=0, interrupted=0, seconds=0.1)

    def drained(self, engine: int, boot: int | None = None, epoch: int | None = None) -> EngineDrained:
        return EngineDrained(
            epoch=self.epoch if epoch is None else epoch,
            engine=f"engine-{engine}",
            boot=self.boot(engine) if boot is None else boot,
            seconds=0.1,
        )

    def offer(self, version: int | None = None, boot: int | None = None, epoch: int | None = None) -> TransferOffered:
        assert self.state.trainer is not None
        return TransferOffered(
            epoch=self.epoch if epoch is None else epoch,
            version=self.state.trainer.versions[-1][0] if version is None else version,
            trainer_boot=self.state.trainer.boot if boot is None else boot,
            address="h",
            port=1,
            bytes=400,
            digest=DIGEST,
        )

    def sent(self, epoch: int | None = None) -> TransferFinished:
        return TransferFinished(epoch=self.epoch if epoch is None else epoch, version=0, seconds=0.5, bytes=400)

    def loaded(
        self, engine: int, digest: str = DIGEST, boot: int | None = None, epoch: int | None = None
    ) -> EngineLoaded:
        return EngineLoaded(
            epoch=self.epoch if epoch is None else epoch,
            engine=f"engine-{engine}",
            boot=self.boot(engine) if boot is None else boot,
            digest=digest,
            seconds=0.2,
        )

    def failed(self, engine: int, phase: str) -> EngineFailed:
        return EngineFailed(
            epoch=self.epoch,
            engine=f"engine-{engine}",
            boot=self.boot(engine),
            phase=phase,
            error="CallError",
            reason="broken",
        )


def engine_ready(engine: int, boot: int = 1, ranks: int = 1) -> EngineReady:
    return EngineReady(engine=f"engine-{engine}", boot=boot, url="u", ranks=ranks, seconds=1.0)


def booted(actor: str, boot: int) -> ActorBooted:
    return ActorBooted(actor=actor, boot=boot, pid=1, host="h")


def policy_ready(version: int, step: int, boot: int = 1) -> PolicyReady:
    return PolicyReady(version=version, step=step, parent_version=None, trainer_boot=boot)


def stepped(version: int, step: int, boot: int = 1) -> StepFinished:
    return StepFinished(
        version=version,
        parent_version=version - 1,
        step=step,
        trainer_boot=boot,
        batch=step,
        metrics={},
        seconds=1.0,
        waited_s=0.0,
        tokens=1,
        tasks=(),
    )
