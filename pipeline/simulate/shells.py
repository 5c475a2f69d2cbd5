"""Simulated shells: what the real ones do outside the store, as delays and bookkeeping on virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.buffer.core import BufferCore
from actors.collector import core as collector
from actors.engine import core as engine_core
from actors.gateway import core as gateway_core
from actors.refit import core as refit_core
from actors.refit import state as refit
from actors.source import core as source
from actors.trainer.core import TrainerCore
from config.schema import RunConfig
from contracts.events import Provenance
from pipeline.simulate.quiet import Quiet
from pipeline.simulate.serving import EngineSim, EngineTable, GatewaySim, GatewayTable
from pipeline.simulate.weights import TrainerSim, Wires

if TYPE_CHECKING:
    from pipeline.simulate.process import SimActor


class SourceSim(Quiet):
    """An endless producer."""

    def perform(self, actor: SimActor, command: Any) -> None:
        first = int(command.cursor or 0)
        numbers = range(first, first + command.n)
        tasks = tuple(source.FetchedTask(f"t{n}", b"{}", str(n + 1)) for n in numbers)
        actor.after(actor.world.draw(actor.world.pace.hop), source.Fetched(command.split, tasks))


class CollectorSim(Quiet):
    """Each group is one request at the gateway; rewards are coin flips."""

    def __init__(self, core: Any, gateways: GatewayTable) -> None:
        super().__init__(core)
        self._gateways = gateways

    def perform(self, actor: SimActor, command: Any) -> None:
        match command:
            case collector.Rollout():
                self._roll_out(actor, command)
            case collector.CancelAll():
                actor.after(0.0, collector.Cancelled())
            case collector.Restart():
                actor.kill()
            case collector.Cancel() | collector.Discard():
                pass

    def _roll_out(self, actor: SimActor, command: collector.Rollout) -> None:
        started = actor.now()

        def done(sources: list[tuple[Provenance, ...]]) -> None:
            for attempt, spans in zip(command.tries, sources, strict=True):
                actor.after(
                    actor.world.draw(actor.world.pace.score), self._result(actor, command, attempt, spans, started)
                )

        def refused(kind: str, reason: str) -> None:
            for attempt in command.tries:
                actor.after(0.0, collector.SampleProblem(command.ref, attempt.sample, attempt.attempt, kind, reason))  # type: ignore[arg-type]

        def gone() -> None:
            actor.after(0.0, collector.GatewayGone(command.ref, command.tries, command.url, "connection reset"))

        self._gateways.request(actor, command.url, command.task.task, len(command.tries), done, refused, gone)

    @staticmethod
    def _result(actor: SimActor, command: Any, attempt: Any, spans: tuple[Provenance, ...], started: float) -> Any:
        reward = float(actor.world.random.random() < 0.5)
        return collector.SampleDone(
            ref=command.ref,
            sample=attempt.sample,
            attempt=attempt.attempt,
            reward=reward,
            components={},
            mask_reason=None,
            prompt_tokens=4,
            completion_tokens=4,
            sources=spans,
            stop_reason="stop",
            handle=f"{command.ref.entry}/{attempt.sample}/{attempt.attempt}",
            size=8,
            seconds=actor.now() - started,
        )


class RefitSim(Quiet):
    """Its disk, with the highest epoch used, is instant and outlives everything."""

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.high = 0

    def booting(self, actor: SimActor) -> None:
        known = max(actor.world.store.registers["epoch"], actor.state.epoch)
        if self.high > known:
            actor.world.halt(f"the store knows epoch {known}, but {self.high} was used")

    def perform(self, actor: SimActor, command: Any) -> None:
        if not isinstance(command, refit.FsyncHigh):
            return
        if command.epoch <= self.high:
            actor.kill()
            return
        self.high = command.epoch
        actor.after(0.001, refit.HighWritten(command.epoch))


def shells(config: RunConfig) -> dict[str, Any]:
    """A simulated shell for every actor of the run but the recorder, which decides nothing for the others."""
    gateways, engines, wires = GatewayTable(), EngineTable(), Wires()
    made: dict[str, Any] = {
        "refit": RefitSim(
            refit_core.RefitCore(
                config.refit, config.engine, config.gateway, config.launch, config.fleet, trainer=config.trainer
            )
        ),
        "trainer": TrainerSim(TrainerCore(config), wires),
        "buffer": Quiet(BufferCore(config)),
        "source": SourceSim(source.SourceCore(config, "source")),
    }
    for n in range(config.gateway.count):
        core = gateway_core.GatewayCore(f"gateway-{n}", config.gateway, config.refit)
        made[f"gateway-{n}"] = GatewaySim(core, gateways, engines, config.gateway.request_deadline_s)
    for n in range(config.engine.count):
        core = engine_core.EngineCore(f"engine-{n}", config.engine, config.refit)
        made[f"engine-{n}"] = EngineSim(core, engines, wires)
    for n in range(config.launch.collectors):
        made[f"collector-{n}"] = CollectorSim(collector.CollectorCore(config.rollout, f"collector-{n}"), gateways)
    return made
