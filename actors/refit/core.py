"""What the refit coordinator decides: when a barrier begins, for which version, and who takes part.

idle -> opening (the epoch's number goes to disk) -> draining -> transferring -> idle; `actors.refit.barrier` has the
rules within an epoch. With engine.release there are epochs without a transfer, opening -> releasing -> idle, for which
`actors.refit.release` has the rules. Invariants: at most one commit an epoch, and none after a newer epoch began; only
engines whose load was acknowledged by (epoch, boot), with the digest that was offered, are committed; nothing is
transferred before all gates are closed and all receivers are drained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from actors.refit.barrier import COLLECTIVE_STRIKES, Barriers
from actors.refit.fleet import Fleet
from actors.refit.needs import Needs
from actors.refit.release import Releases
from actors.refit.state import (
    Barrier,
    Engine,
    FsyncHigh,
    Gate,
    Gateway,
    Heard,
    HighWritten,
    Local,
    Missed,
    RefitState,
    Trainer,
    Turn,
    Wait,
    Watch,
)
from config.schema import EngineConfig, FleetConfig, GatewayConfig, LaunchConfig, RefitConfig, TrainerConfig
from contracts.core import Booted, Delivered, Emit, Raise
from contracts.envelope import Envelope
from contracts.events import (
    ActorBooted,
    ActorFailed,
    EngineDead,
    EngineQuarantined,
    EngineReady,
    EngineReleased,
    Event,
    FleetScaled,
    GatewayReady,
    Member,
    MemoryWanted,
    PolicyReady,
    RefitRequested,
    RunStarted,
    RunStopping,
    StepFinished,
)

FLEET_DEFAULTS, TRAINER_DEFAULTS = FleetConfig(), TrainerConfig()
FLEET = "fleet:"
"""Key of the wait for members, before their names: it is announced anew, with its old deadline, as they change."""


class RefitCore:
    """The coordinator. `barriers` holds the rules of an epoch."""

    state_type = RefitState
    local_type = Local
    work: tuple[str, ...] = ()
    watch = ("policy", "refit", "fleet", "control")

    def __init__(
        self,
        refit: RefitConfig,
        engine: EngineConfig,
        gateway: GatewayConfig,
        launch: LaunchConfig,
        fleet: FleetConfig = FLEET_DEFAULTS,
        actor: str = "refit",
        trainer: TrainerConfig = TRAINER_DEFAULTS,
    ) -> None:
        self.fleet = Fleet(fleet, engine, launch.start_deadline_s, actor)
        self.barriers = Barriers(refit, self.fleet, actor)
        self.releases = Releases(refit, self.barriers, trainer.step_deadline_s, actor)
        self._refit = refit
        self._start_deadline_s = launch.start_deadline_s
        self._needs = Needs(refit.every, engine.count, gateway.count)
        self._actor = actor
        self._inputs: Mapping[type, Callable[[Turn, Any], None]] = {
            Booted: self._booted,
            HighWritten: self._opened,
            Missed: self._missed,
            Heard: self._heard,
        }
        self._events: Mapping[type, Callable[[Turn, Any, Envelope[Event]], None]] = {
            PolicyReady: self._policy_ready,
            StepFinished: self._step_finished,
            MemoryWanted: lambda turn, event, _: self.releases.wanted(turn, event),
            EngineReleased: lambda turn, event, _: self.releases.ack(turn, event),
            EngineReady: self._engine_ready,
            EngineDead: self._engine_dead,
            GatewayReady: self._gateway_ready,
            ActorBooted: self._actor_booted,
            FleetScaled: self._scaled,
            RunStarted: self._started,
            RunStopping: self._stopping,
        }

    def initial(self) -> RefitState:
        """Nothing is known yet."""
        return RefitState()

    def intake(self, state: RefitState) -> Mapping[str, int]:
        """It takes no work."""
        return {}

    def done(self, state: RefitState) -> bool:
        """The last epoch has come to its end."""
        return state.stopping and state.phase == "idle"

    def wake(self, state: RefitState) -> float | None:
        """The next deadline, the end of a pause between epochs, or a restart that is due."""
        times = (self._wake(state), self.fleet.wake(state))
        return min((at for at in times if at is not None), default=None)

    def _wake(self, state: RefitState) -> float | None:
        if state.barrier is not None:
            return self.barriers.wake(state.barrier)
        if state.release is not None:
            return state.release.drain_at
        if state.phase == "opening" or state.stopping or state.halted:
            return None
        if state.yielded is not None:
            return state.yielded.deadline_at
        if state.wait is not None:
            return state.wait.deadline_at
        if state.failures:
            return state.retry_at
        return min((e.eligible_at for e in state.engines.values() if e.up and not e.serving), default=None)

    def step(self, state: RefitState, input: Any, now: float) -> tuple[RefitState, Sequence[Any]]:
        """Take one input, then go as far as it allows."""
        turn = Turn(state, now)
        kind = type(input)
        if kind is Delivered:
            self._event(turn, input.envelope)
        elif (handle := self._inputs.get(kind)) is not None:
            handle(turn, input)
        self.barriers.advance(turn)
        self.releases.advance(turn)
        if not (turn.state.stopping or turn.state.halted):
            self.fleet.advance(turn)
        if turn.state.phase == "idle":
            self._idle(turn)
        self._announce(turn)
        return turn.state, tuple(turn.commands)

    def _booted(self, turn: Turn, input: Booted) -> None:
        """Only the write of a high-water mark dies with a process. Its number may be on disk: it is not taken again.

        The process may also belong to a run that is resumed long after it ended.
        """
        failures = 0 if turn.state.halted else turn.state.failures
        turn.set(boot=input.boot, stopping=False, halted=False, failures=failures)
        self.fleet.watch_all(turn)
        if turn.state.barrier is None:
            turn.announce(self._actor, None, "")
        if turn.state.phase == "opening":
            self._begin(turn)

    def _event(self, turn: Turn, envelope: Envelope[Event]) -> None:
        event = envelope.body
        handle = self._events.get(type(event))
        if handle is not None:
            handle(turn, event, envelope)
        elif turn.state.barrier is not None:
            self.barriers.ack(turn, event)

    def _scaled(self, turn: Turn, event: FleetScaled, _: Envelope[Event]) -> None:
        turn.set(size=event.engines)

    def _started(self, turn: Turn, event: RunStarted, _: Envelope[Event]) -> None:
        size = None if event.resumed else turn.state.size
        turn.set(gathering=turn.state.gathering or event.resumed, size=size)

    def _stopping(self, turn: Turn, _: RunStopping, __: Envelope[Event]) -> None:
        turn.set(stopping=True)

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
        self.releases.over(turn)

    def _trainer_booted(self, turn: Turn, boot: int) -> None:
        self.releases.over(turn)
        if turn.state.barrier is not None:
            self.barriers.trainer_booted(turn, boot)

    # --- the fleet ---------------------------------------------------------------------------------------------------

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
        self.fleet.happen(turn, event.engine, "ready", f"boot {event.boot} is up")
        turn.do(Watch(event.engine, event.boot, event.url))

    def _engine_dead(self, turn: Turn, event: EngineDead, _: Envelope[Event]) -> None:
        known = turn.state.engines.get(event.engine)
        if known is not None and known.boot == event.boot:
            self._engine_down(turn, event.engine, "Died", f"died: {event.reason}")
            self.fleet.happen(turn, event.engine, "died", event.reason)

    def _engine_down(self, turn: Turn, name: str, error: str, reason: str) -> None:
        state = turn.state
        member = Member(name, state.engines[name].boot)
        turn.set_engine(name, up=False, serving=False)
        if state.group is not None and any(m.engine == name for m in state.group.members):
            turn.set(group=None)
        if state.barrier is not None:
            self.barriers.engine_lost(turn, member.actor, member.boot, error, reason)
        elif state.release is not None:
            self.releases.engine_lost(turn, member, reason)
        elif member in state.suspects:
            turn.set(suspects=tuple(s for s in state.suspects if s != member))
            self.barriers.strike(turn, name, COLLECTIVE_STRIKES)

    def _missed(self, turn: Turn, input: Missed) -> None:
        """An engine that answers no probe is out of the commit; one that comes back needs a load in a newer epoch."""
        engine, gateway = turn.state.engines.get(input.name), turn.state.gateways.get(input.name)
        if gateway is not None and gateway.boot == input.boot:
            self.fleet.gateway_missed(turn, input.name, input.misses)
        if engine is None or engine.boot != input.boot or not engine.up:
            return
        if input.misses < self.fleet.misses:
            self.fleet.happen(turn, input.name, "missed", input.reason)
            return
        served, committed = engine.serving, turn.state.committed
        reason = f"answered none of {input.misses} probes: {input.reason}"
        self._engine_down(turn, input.name, "Unreachable", reason)
        self.fleet.happen(turn, input.name, "lost", reason)
        if served and committed is not None and turn.state.barrier is None:
            cut = EngineQuarantined(epoch=committed.epoch, engine=input.name, boot=input.boot, reason=reason)
            turn.do(Emit(cut, correlation=f"refit-{committed.epoch}"))

    def _heard(self, turn: Turn, input: Heard) -> None:
        engine, gateway = turn.state.engines.get(input.name), turn.state.gateways.get(input.name)
        if gateway is not None and gateway.boot == input.boot:
            self.fleet.gateway_heard(turn, input.name)
        if engine is None or engine.boot != input.boot:
            return
        if self.fleet.happen(turn, input.name, "answered", "it answers again") and not engine.up:
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
            self.fleet.happen(turn, name, "booted", f"its process runs as boot {boot}")
        elif name in state.gateways and boot > state.gateways[name].boot:
            self._gateway_booted(turn, name, Gateway(boot, up=False))
        elif name == "trainer" and state.trainer is not None and boot > state.trainer.boot:
            turn.set(trainer=Trainer(boot))
            self._trainer_booted(turn, boot)

    # --- the beginning of an epoch -----------------------------------------------------------------------------------

    def _idle(self, turn: Turn) -> None:
        self._shrink(turn)
        self.releases.overdue(turn)
        state, now = turn.state, turn.now
        if not self._needs.due(state, now):
            if self.releases.due(state):
                self._begin(turn)
            return
        missing = self._needs.missing(state)
        if not missing and now >= state.retry_at:
            self._begin(turn)
        elif missing and state.wait is not None and _for_fleet(state.wait) and now >= state.wait.deadline_at:
            message = (
                f"no refit can begin, {', '.join(missing)} not ready after {now - state.wait.since:.0f} s: "
                f"see their logs, or raise launch.start_deadline_s (now {self._start_deadline_s:g})"
            )
            turn.do(Emit(ActorFailed(actor=self._actor, error="StartTimeout", message=message, fatal=True)))
            turn.set(halted=True)

    def _shrink(self, turn: Turn) -> None:
        """Engines that the run was scaled down by; they serve until a commit without them."""
        names = self._needs.names(turn.state)
        for name, engine in turn.state.engines.items():
            if name not in names and engine.health != "retired":
                self.fleet.retire(turn, name, f"the run was scaled to {len(names)} engines")
                if turn.state.group is not None and any(m.engine == name for m in turn.state.group.members):
                    turn.set(group=None)

    def _begin(self, turn: Turn) -> None:
        epoch = turn.state.epoch + 1
        turn.set(phase="opening", epoch=epoch)
        turn.do(FsyncHigh(epoch))

    def _opened(self, turn: Turn, input: HighWritten) -> None:
        """The number is durable: ask for the barrier, unless what called for it is gone."""
        state = turn.state
        if state.phase != "opening" or input.epoch != state.epoch:
            return
        turn.set(phase="idle")
        due = self._needs.due(state, turn.now)
        if due and not self._needs.missing(state):
            self._request(turn)
        elif not due and self.releases.due(state):
            self.releases.begin(turn)

    def _request(self, turn: Turn) -> None:
        """From here on nothing serves until a commit says so."""
        state, now = turn.state, turn.now
        assert state.trainer is not None
        version, step = state.trainer.versions[-1]
        barrier = Barrier(
            epoch=state.epoch,
            version=version,
            step=step,
            trainer_boot=state.trainer.boot,
            requested_at=now,
            drain_at=now + min(self._refit.drain_deadline_s, self._refit.deadline_s),
            deadline_at=now + self._refit.deadline_s,
            seats=self._needs.seats(state, now),
            gates=tuple(Gate(name, g.boot, silent=g.silent) for name, g in sorted(state.gateways.items())),
        )
        turn.set(
            phase="draining",
            barrier=barrier,
            suspects=(),
            trainer=replace(state.trainer, versions=((version, step),)),
            engines={name: replace(e, serving=False) for name, e in state.engines.items()},
            gateways={name: replace(g, open=False) for name, g in state.gateways.items()},
        )
        turn.do(Raise("epoch", state.epoch))
        request = RefitRequested(
            epoch=state.epoch,
            version=version,
            step=step,
            engines=tuple(Member(s.engine, s.boot) for s in barrier.seats),
            gateways=tuple(Member(g.gateway, g.boot) for g in barrier.gates),
            drain=self._refit.drain,
            deadline_at=barrier.deadline_at,
        )
        turn.emit(request)
        turn.log(
            "refit requested",
            engines=[m.actor for m in request.engines],
            gateways=[m.actor for m in request.gateways],
        )

    # --- waits -------------------------------------------------------------------------------------------------------

    def _announce(self, turn: Turn) -> None:
        state, held = turn.state, turn.state.wait
        barrier = state.barrier
        if barrier is None:
            turn.announce(self._actor, *self._wait(state, turn.now))
        elif held is None or held.key != self.barriers.awaited(barrier):
            turn.announce(self._actor, *self.barriers.wait(barrier))

    def _wait(self, state: RefitState, now: float) -> tuple[Wait | None, str]:
        """What is waited for between two epochs that transfer weights."""
        released = self.releases.wait(state)
        if released is not None:
            return released
        if state.phase != "idle" or not self._needs.due(state, now):
            return None, ""
        missing = self._needs.missing(state)
        if not missing:
            return None, ""
        on = ",".join(missing)
        since = state.wait.since if state.wait is not None and _for_fleet(state.wait) else now
        wait = Wait(f"{FLEET}{on}", on, since, since + self._start_deadline_s)
        return wait, f"a refit is due and {on} not ready"


def _for_fleet(wait: Wait) -> bool:
    """Not for an answer in an epoch, whose deadline may have passed in the very step that ends it."""
    return wait.key.startswith(FLEET)
