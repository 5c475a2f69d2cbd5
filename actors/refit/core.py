"""What the refit coordinator decides: when a barrier begins, for which version, and who takes part.

idle -> opening (the epoch's number goes to disk) -> draining -> transferring -> idle. The rules within an epoch are in
`actors.refit.barrier`, those of who comes and goes in `members`. With engine.release there are epochs without a
transfer, opening -> releasing -> idle: `release`. Invariants: at most one commit an epoch, and none after a newer epoch
began; only engines whose load was acknowledged by (epoch, boot), with the digest that was offered, are committed;
nothing is transferred before all gates are closed and all receivers are drained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from actors.refit.barrier import Barriers
from actors.refit.faults import Faults
from actors.refit.fleet import Fleet
from actors.refit.members import Members
from actors.refit.needs import Needs
from actors.refit.release import Releases
from actors.refit.state import (
    Barrier,
    FsyncHigh,
    Gate,
    HighWritten,
    Local,
    RefitState,
    Turn,
    Wait,
)
from config.schema import EngineConfig, FleetConfig, GatewayConfig, LaunchConfig, RefitConfig, TrainerConfig
from contracts.core import Booted, Delivered, Emit, Raise
from contracts.envelope import Envelope
from contracts.events import (
    ActorFailed,
    EngineReleased,
    Event,
    FleetScaled,
    Member,
    MemoryWanted,
    RefitRequested,
    RunStarted,
    RunStopping,
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
        self._refit = refit
        self._start_deadline_s = launch.start_deadline_s
        self._actor = actor
        self._needs = Needs(refit.every, engine.count, gateway.count)
        self.fleet = Fleet(fleet, engine, launch.start_deadline_s, actor)
        self.faults = Faults(refit, self.fleet, actor)
        self.barriers = Barriers(refit, self.fleet, self.faults)
        self.releases = Releases(refit, self.faults, trainer.step_deadline_s, actor)
        self.members = Members(self._needs, self.fleet, self.faults, self.barriers, self.releases)
        self._inputs: Mapping[type, Callable[[Turn, Any], None]] = {
            **self.members.inputs,
            Booted: self._booted,
            HighWritten: self._opened,
        }
        self._events: Mapping[type, Callable[[Turn, Any, Envelope[Event]], None]] = {
            **self.members.events,
            MemoryWanted: lambda turn, event, _: self.releases.wanted(turn, event),
            EngineReleased: lambda turn, event, _: self.releases.ack(turn, event),
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
        """Also after a stop of the run that this process, begun in a resume, hears of before that."""
        size = None if event.resumed else turn.state.size
        turn.set(gathering=turn.state.gathering or event.resumed, size=size, stopping=False)

    def _stopping(self, turn: Turn, _: RunStopping, __: Envelope[Event]) -> None:
        turn.set(stopping=True)

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
