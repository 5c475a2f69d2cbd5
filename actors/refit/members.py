"""Who the run has, and which boot of each: the trainer and its versions, engines and gateways, as they come and go.

A newer boot replaces what is known of an older one. The epoch, or release, that counts on a boot is told of its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from actors.refit.barrier import Barriers
from actors.refit.faults import COLLECTIVE_STRIKES, Faults
from actors.refit.fleet import Fleet
from actors.refit.needs import Needs
from actors.refit.release import Releases
from actors.refit.state import Engine, Gateway, Heard, Missed, Trainer, Turn, Watch
from contracts.core import Emit
from contracts.envelope import Envelope
from contracts.events import (
    ActorBooted,
    EngineDead,
    EngineQuarantined,
    EngineReady,
    Event,
    GatewayReady,
    Member,
    PolicyReady,
    StepFinished,
)


class Members:
    """Every method works on a `Turn`. `events` and `inputs`: what each kind is handed to."""

    def __init__(self, needs: Needs, fleet: Fleet, faults: Faults, barriers: Barriers, releases: Releases) -> None:
        self._needs = needs
        self._fleet = fleet
        self._faults = faults
        self.barriers = barriers
        self._releases = releases
        self.events: Mapping[type, Callable[[Turn, Any, Envelope[Event]], None]] = {
            PolicyReady: self._policy_ready,
            StepFinished: self._step_finished,
            EngineReady: self._engine_ready,
            EngineDead: self._engine_dead,
            GatewayReady: self._gateway_ready,
            ActorBooted: self._actor_booted,
        }
        self.inputs: Mapping[type, Callable[[Turn, Any], None]] = {Missed: self._missed, Heard: self._heard}

    # --- the trainer -------------------------------------------------------------------------------------------------

    def _policy_ready(self, turn: Turn, event: PolicyReady, envelope: Envelope[Event]) -> None:
        known = turn.state.trainer
        if known is not None and event.trainer_boot < known.boot:
            return
        turn.set(trainer=Trainer(event.trainer_boot, ((event.version, event.step),), envelope.run))
        self._trainer_booted(turn, event.trainer_boot)

    def _step_finished(self, turn: Turn, event: StepFinished, _: Envelope[Event]) -> None:
        trainer = turn.state.trainer
        if trainer is None or trainer.boot != event.trainer_boot:
            return
        kept = () if turn.state.barrier is None else trainer.versions
        turn.set(trainer=replace(trainer, versions=(*kept, (event.version, event.step))))
        self._releases.over(turn)

    def _trainer_booted(self, turn: Turn, boot: int) -> None:
        self._releases.over(turn)
        if turn.state.barrier is not None:
            self.barriers.trainer_booted(turn, boot)

    # --- engines and gateways ----------------------------------------------------------------------------------------

    def _engine_ready(self, turn: Turn, event: EngineReady, envelope: Envelope[Event]) -> None:
        actor_boot, known = envelope.boot, turn.state.engines.get(event.engine)
        if known is not None and (event.boot < known.boot or (event.boot == known.boot and known.up)):
            return
        if known is not None and event.engine not in self._needs.names(turn.state):
            return
        if known is not None and event.boot > known.boot:
            self._engine_down(turn, event.engine, "Restarted", f"was restarted as boot {event.boot}")
            known = turn.state.engines[event.engine]
        known = Engine(event.boot, actor_boot, event.ranks) if known is None else known
        engine = replace(known, boot=event.boot, actor_boot=actor_boot, ranks=event.ranks, url=event.url)
        engine = replace(engine, up=True, serving=False)
        turn.set(engines={**turn.state.engines, event.engine: engine})
        self._fleet.happen(turn, event.engine, "ready", f"boot {event.boot} is up")
        turn.do(Watch(event.engine, event.boot, event.url))

    def _engine_dead(self, turn: Turn, event: EngineDead, _: Envelope[Event]) -> None:
        known = turn.state.engines.get(event.engine)
        if known is not None and known.boot == event.boot:
            self._engine_down(turn, event.engine, "Died", f"died: {event.reason}")
            self._fleet.happen(turn, event.engine, "died", event.reason)

    def _engine_down(self, turn: Turn, name: str, error: str, reason: str) -> None:
        state = turn.state
        member = Member(name, state.engines[name].boot)
        turn.set_engine(name, up=False, serving=False)
        if state.group is not None and any(m.engine == name for m in state.group.members):
            turn.set(group=None)
        if state.barrier is not None:
            self.barriers.engine_lost(turn, member.actor, member.boot, error, reason)
        elif state.release is not None:
            self._releases.engine_lost(turn, member, reason)
        elif member in state.suspects:
            turn.set(suspects=tuple(s for s in state.suspects if s != member))
            self._faults.strike(turn, name, COLLECTIVE_STRIKES)

    def _missed(self, turn: Turn, input: Missed) -> None:
        """An engine that answers no probe is out of the commit; one that comes back needs a load in a newer epoch."""
        engine, gateway = turn.state.engines.get(input.name), turn.state.gateways.get(input.name)
        if gateway is not None and gateway.boot == input.boot:
            self._fleet.gateway_missed(turn, input.name, input.misses)
        if engine is None or engine.boot != input.boot or not engine.up:
            return
        if input.misses < self._fleet.misses:
            self._fleet.happen(turn, input.name, "missed", input.reason)
            return
        served, committed = engine.serving, turn.state.committed
        reason = f"answered none of {input.misses} probes: {input.reason}"
        self._engine_down(turn, input.name, "Unreachable", reason)
        self._fleet.happen(turn, input.name, "lost", reason)
        if served and committed is not None and turn.state.barrier is None:
            cut = EngineQuarantined(epoch=committed.epoch, engine=input.name, boot=input.boot, reason=reason)
            turn.do(Emit(cut, correlation=f"refit-{committed.epoch}"))

    def _heard(self, turn: Turn, input: Heard) -> None:
        engine, gateway = turn.state.engines.get(input.name), turn.state.gateways.get(input.name)
        if gateway is not None and gateway.boot == input.boot:
            self._fleet.gateway_heard(turn, input.name)
        if engine is None or engine.boot != input.boot:
            return
        if self._fleet.happen(turn, input.name, "answered", "it answers again") and not engine.up:
            turn.set_engine(input.name, up=True)

    def _gateway_ready(self, turn: Turn, event: GatewayReady, _: Envelope[Event]) -> None:
        known = turn.state.gateways.get(event.gateway)
        if known is not None and (event.boot < known.boot or (event.boot == known.boot and known.up)):
            return
        self._gateway_booted(turn, event.gateway, Gateway(event.boot, up=True, url=event.url))
        turn.do(Watch(event.gateway, event.boot, event.url))

    def _gateway_booted(self, turn: Turn, name: str, gateway: Gateway) -> None:
        turn.set(gateways={**turn.state.gateways, name: gateway})
        if turn.state.barrier is not None:
            self.barriers.gateway_booted(turn, name, gateway.boot)

    def _actor_booted(self, turn: Turn, event: ActorBooted, _: Envelope[Event]) -> None:
        state, name, boot = turn.state, event.actor, event.boot
        if name in state.engines and boot > state.engines[name].actor_boot:
            self._engine_down(turn, name, "Restarted", f"was restarted as boot {boot}")
            turn.set_engine(name, actor_boot=boot)
            self._fleet.happen(turn, name, "booted", f"its process runs as boot {boot}")
        elif name in state.gateways and boot > state.gateways[name].boot:
            self._gateway_booted(turn, name, Gateway(boot, up=False))
        elif name == "trainer" and state.trainer is not None and boot > state.trainer.boot:
            turn.set(trainer=Trainer(boot))
            self._trainer_booted(turn, boot)
