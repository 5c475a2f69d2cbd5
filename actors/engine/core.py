"""What one engine may do when: it serves under a lease on the last commit, and holds unknown weights otherwise.

starting -> uncertain -> draining -> drained -> loading -> loaded -> resuming -> serving <-> lapsed. Only a complete
load in the newest epoch, committed with this boot, leads to serving; every other way out of the barrier ends in
uncertain. With engine.release there are epochs without a load: serving -> releasing -> uncertain. One boot of the actor
is one boot of its server: when the server is gone, so is the boot.

Invariants: nothing is admitted unless serving, and weights are received only after a proof that nothing runs, or that
all that runs is held still and goes on after the commit only (S1, S4);
an admission needs a fresh reading of the store that names the served epoch as committed and as newest (S2); epochs only
rise, and results of older ones change nothing (S3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from actors.engine.state import (
    BARRIER,
    SERVED,
    Abandon,
    Drain,
    Drained,
    DrainFailed,
    EngineState,
    Exit,
    Lease,
    LeaseLapsed,
    LeaseRenewed,
    Loaded,
    LoadFailed,
    Local,
    Mode,
    Part,
    Receive,
    Release,
    Released,
    Resume,
    Resumed,
    ServerDead,
    ServerReady,
    StartServer,
    Waiting,
    Watch,
)
from config.schema import EngineConfig, RefitConfig
from contracts.core import Booted, Delivered, Emit, LeaseLost, Tick
from contracts.events import (
    EngineDead,
    EngineDrained,
    EngineFailed,
    EngineLoaded,
    EngineQuarantined,
    EngineReady,
    EngineReleased,
    Event,
    FleetScaled,
    Member,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    ReleaseRequested,
    RunStarted,
    RunStopping,
    TransferOffered,
    TransferStarted,
    WaitEnded,
    WaitStarted,
)

ABORT_SHARE = {"finish": 0.8, "interrupt": 0.5, "in_flight": 0.0}
"""Part of the drain deadline after which the engine itself aborts what runs; gateways have done so before. Under
in_flight an engine that serves holds what runs, and on any other nothing runs that anybody waits for."""
RELEASE_SHARE = 0.9
"""Part of the drain deadline within which memory is given back; the rest is for the end of a server that did not."""
BACKOFF_MAX_S = 30.0
"""Longest pause before the start of a server whose predecessors never served."""

Outcome = tuple[EngineState, list[Any]]


class EngineCore:
    """Decides for the engine `actor`. See `contracts.core.Core`."""

    state_type = EngineState
    local_type = Local
    work: tuple[str, ...] = ()
    watch = ("refit", "control")

    def __init__(self, actor: str, engine: EngineConfig, refit: RefitConfig) -> None:
        self._actor = actor
        self._index = int(actor.rpartition("-")[2])
        self._restarts = engine.restarts
        self._backoff_s = engine.restart_backoff_s
        self._deadline_s = refit.deadline_s
        self._drain_s = min(refit.drain_deadline_s, refit.deadline_s)
        # a barrier goes on without this engine after the drain deadline: no lease may outlast it
        self.lease_s = min(engine.lease_s, self._drain_s)
        self._events: Mapping[type, Callable[[EngineState, Any], Outcome]] = {
            RefitRequested: self._asked,
            ReleaseRequested: self._release,
            TransferOffered: self._offered,
            TransferStarted: self._begun,
            RefitCommitted: self._committed,
            RefitFailed: _given_up,
            EngineQuarantined: self._quarantined,
            FleetScaled: self._scaled,
            RunStarted: _stop,
            RunStopping: _stop,
        }
        self._results: Mapping[type, tuple[Mode, Callable[[EngineState, Any], Outcome]]] = {
            ServerReady: ("starting", self._ready),
            Drained: ("draining", self._drained),
            DrainFailed: ("draining", self._drain_failed),
            Loaded: ("loading", self._loaded),
            LoadFailed: ("loading", self._load_failed),
            Released: ("releasing", self._released),
            Resumed: ("resuming", _resumed),
            LeaseLapsed: ("serving", _lapsed),
            LeaseRenewed: ("lapsed", _renewed),
        }
        """Result -> the mode in which it counts, and what becomes of it."""

    def initial(self) -> EngineState:
        return EngineState()

    def intake(self, state: EngineState) -> Mapping[str, int]:
        return {}

    def wake(self, state: EngineState) -> float | None:
        return None

    def done(self, state: EngineState) -> bool:
        """An epoch that this engine takes part in is brought to its end first; one that is served, when scaled down."""
        leaving = state.stopping or (state.retiring and state.mode not in SERVED)
        return leaving and state.mode not in BARRIER

    # --- admission ---------------------------------------------------------------------------------------------------

    def admits(self, state: EngineState, epoch: int, lease: Lease, now: float) -> bool:
        """Whether a request sent under `epoch` may run; `now` is on the clock of `lease`."""
        return (
            state.mode == "serving"
            and epoch == state.epoch
            and lease.confirms(epoch)
            and now - lease.seen_at < self.lease_s
        )

    def refusal(self, state: EngineState, epoch: int, lease: Lease, now: float) -> str:
        """Why `admits` says no."""
        if state.mode != "serving":
            return f"{self._actor} is {state.mode} in epoch {state.epoch}"
        if epoch != state.epoch:
            return f"{self._actor} serves epoch {state.epoch}, the request was sent under epoch {epoch}"
        return (
            f"{self._actor} serves epoch {epoch}; {now - lease.seen_at:.1f} s ago epoch {lease.committed_epoch} was "
            f"committed and {lease.newest_epoch} was the newest (engine.lease_s={self.lease_s:g})"
        )

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, state: EngineState, input: Any, now: float) -> tuple[EngineState, Sequence[Any]]:
        kind = type(input)
        if kind is Booted:
            after, commands = self._booted(state, input.boot)
        elif state.mode == "dead" or kind is Tick or kind is LeaseLost:
            return state, ()
        elif kind is Delivered:
            after, commands = self._event(state, input.envelope.body)
        else:
            after, commands = self._local(state, input)
        after, waits = self._announce(after, now)
        return after, (*commands, *waits)

    def _event(self, state: EngineState, event: Event) -> Outcome:
        handle = self._events.get(type(event))
        return (state, []) if handle is None else handle(state, event)

    def _asked(self, state: EngineState, event: RefitRequested) -> Outcome:
        return self._requested(state, event) if event.epoch > state.epoch else (state, [])

    def _offered(self, state: EngineState, event: TransferOffered) -> Outcome:
        if state.part is None or event.epoch != state.epoch:
            return state, []
        return _offered(state, state.part, event), []

    def _begun(self, state: EngineState, event: TransferStarted) -> Outcome:
        if state.part is None or event.epoch != state.epoch:
            return state, []
        return self._started(state, state.part, event)

    def _quarantined(self, state: EngineState, event: EngineQuarantined) -> Outcome:
        mine = event.epoch >= state.epoch and self._me(state) == (event.engine, event.boot)
        return _retreat(state, event.epoch) if mine else (state, [])

    def _scaled(self, state: EngineState, event: FleetScaled) -> Outcome:
        return replace(state, retiring=self._index >= event.engines), []

    def _local(self, state: EngineState, input: Any) -> Outcome:
        """A result counts in its mode and epoch only; the end of the server always does."""
        kind = type(input)
        if kind is ServerDead:
            return self._dead(state, input.reason)
        mode, handle = self._results[kind]
        late = state.mode != mode or (kind is not ServerReady and input.epoch != state.epoch)
        return (state, []) if late else handle(state, input)

    def _load_failed(self, state: EngineState, input: LoadFailed) -> Outcome:
        return self._failed(state, input.phase, input.error, input.reason)

    def _drain_failed(self, state: EngineState, input: DrainFailed) -> Outcome:
        return self._failed(state, "drain", input.error, input.reason)

    # --- boots -------------------------------------------------------------------------------------------------------

    def _me(self, state: EngineState) -> tuple[str, int]:
        return self._actor, state.boot

    def _booted(self, state: EngineState, boot: int) -> Outcome:
        """The server died with the process before; so did its weights and its groups."""
        unserved = state.unserved + 1
        after = EngineState(boot=boot, epoch=state.epoch, unserved=unserved, waiting=state.waiting)
        if unserved > 1 + self._restarts:
            reason = (
                f"{unserved - 1} servers of {self._actor} in a row ended before they served "
                f"(engine.restarts={self._restarts}): see its log"
            )
            return replace(after, mode="dead", unserved=0), [Exit(reason, fatal=True)]
        delay_s = 0.0 if unserved == 1 else min(BACKOFF_MAX_S, self._backoff_s * 2.0 ** min(unserved - 2, 16))
        return after, [StartServer(delay_s)]

    def _ready(self, state: EngineState, input: ServerReady) -> Outcome:
        ready = EngineReady(
            engine=self._actor, boot=state.boot, url=input.url, ranks=input.ranks, seconds=input.seconds
        )
        return replace(state, mode="uncertain"), [Emit(ready), Watch()]

    def _dead(self, state: EngineState, reason: str) -> Outcome:
        dead = EngineDead(engine=self._actor, boot=state.boot, reason=reason)
        return replace(state, mode="dead", version=None, part=None), [Emit(dead), Exit(reason, fatal=False)]

    # --- the barrier -------------------------------------------------------------------------------------------------

    def _requested(self, state: EngineState, event: RefitRequested) -> Outcome:
        """Admissions end here. What an older epoch left undone is given up before the drain begins."""
        if Member(*self._me(state)) not in event.engines or state.mode == "starting":
            return _retreat(state, event.epoch)
        commands: list[Any] = []
        if state.mode in BARRIER:
            state, commands = _retreat(state, event.epoch)
        began_at = event.deadline_at - self._deadline_s
        hold = event.drain == "in_flight" and state.mode == "serving"
        drain = Drain(
            epoch=event.epoch,
            abort_at=began_at + ABORT_SHARE[event.drain] * self._drain_s,
            deadline_at=began_at + self._drain_s,
            hold=hold,
        )
        part = Part(event.deadline_at, hold)
        after = replace(state, epoch=event.epoch, mode="draining", version=None, part=part)
        return after, [*commands, drain]

    def _release(self, state: EngineState, event: ReleaseRequested) -> Outcome:
        """Admissions end here too, until the commit of an epoch to come."""
        if event.epoch <= state.epoch:
            return state, []
        if Member(*self._me(state)) not in event.engines or state.mode == "starting":
            return _retreat(state, event.epoch)
        commands: list[Any] = []
        if state.mode in BARRIER:
            state, commands = _retreat(state, event.epoch)
        began_at = event.deadline_at - self._deadline_s
        release = Release(
            epoch=event.epoch,
            abort_at=began_at + ABORT_SHARE[event.drain] * self._drain_s,
            deadline_at=began_at + RELEASE_SHARE * self._drain_s,
        )
        part = Part(began_at + self._drain_s)
        return replace(state, epoch=event.epoch, mode="releasing", version=None, part=part), [*commands, release]

    def _released(self, state: EngineState, input: Released) -> Outcome:
        released = EngineReleased(
            epoch=state.epoch,
            engine=self._actor,
            boot=state.boot,
            tags=input.tags,
            seconds=input.seconds,
            release_s=input.release_s,
        )
        return replace(state, mode="uncertain", part=None), [_emit(released, state.epoch)]

    def _drained(self, state: EngineState, input: Drained) -> Outcome:
        drained = EngineDrained(
            epoch=state.epoch, engine=self._actor, boot=state.boot, seconds=input.seconds, held=input.held
        )
        return replace(state, mode="drained"), [_emit(drained, state.epoch)]

    def _started(self, state: EngineState, part: Part, event: TransferStarted) -> Outcome:
        me = self._me(state)
        rank = next((m for m in event.members if (m.engine, m.boot) == me), None)
        if rank is None:
            return _retreat(state, state.epoch)
        if part.version is not None:  # repeated: the transfer is under way, or over
            return state, []
        if state.mode != "drained":
            return self._failed(state, "join", "NotDrained", f"the transfer started while {self._actor} was draining")
        offer = part.offer
        if offer is None or offer.version != event.version:
            held = "nothing" if offer is None else f"version {offer.version}"
            return self._failed(state, "join", "NoOffer", f"version {event.version} is to be sent, {held} was offered")
        if not event.fresh and event.group != state.group:
            reason = f"group {event.group!r} is to be used again, the server is in {state.group!r}"
            return self._failed(state, "join", "UnknownGroup", reason)
        receive = Receive(
            epoch=event.epoch,
            version=event.version,
            group=event.group,
            fresh=event.fresh,
            leave=state.group if event.fresh else None,
            offset=rank.offset,
            world_size=event.world_size,
            address=offer.address,
            port=offer.port,
            buckets=offer.buckets,
            deadline_at=part.deadline_at,
            hold=part.hold,
            checksum=offer.checksum,
        )
        part = replace(part, version=event.version)
        return replace(state, mode="loading", part=part, group=event.group), [receive]

    def _loaded(self, state: EngineState, input: Loaded) -> Outcome:
        loaded = EngineLoaded(
            epoch=state.epoch,
            engine=self._actor,
            boot=state.boot,
            digest=input.digest,
            seconds=input.seconds,
            probe=input.probe,
            phases=input.phases,
            receiver=input.receiver,
            fallback=input.fallback,
            fingerprint=input.fingerprint,
        )
        return replace(state, mode="loaded"), [_emit(loaded, state.epoch)]

    def _committed(self, state: EngineState, event: RefitCommitted) -> Outcome:
        """The coordinator counts on its members: one that can't serve what it committed has to boot again."""
        if event.epoch < state.epoch:
            return state, []
        if Member(*self._me(state)) not in event.engines:
            return _retreat(state, event.epoch)
        held = state.version if state.part is None else state.part.version
        if event.epoch == state.epoch and event.version == held:
            if state.mode == "loaded":
                return replace(state, mode="resuming"), [Resume(event.epoch)]
            if state.mode in ("resuming", *SERVED):
                return state, []
        return self._dead(state, f"epoch {event.epoch} was committed with this boot while it was {state.mode}")

    def _failed(self, state: EngineState, phase: str, error: str, reason: str) -> Outcome:
        failed = EngineFailed(
            epoch=state.epoch, engine=self._actor, boot=state.boot, phase=phase, error=error, reason=reason
        )
        after, commands = _retreat(state, state.epoch)
        return after, [_emit(failed, state.epoch), *commands]

    # --- waits -------------------------------------------------------------------------------------------------------

    def _announce(self, state: EngineState, now: float) -> Outcome:
        """From readiness to a commit the engine waits for the coordinator; in a lapse, for the store."""
        held = state.waiting
        on = None if state.mode in ("starting", "serving", "dead") else "store" if state.mode == "lapsed" else "refit"
        if on == (None if held is None else held.on):
            return state, []
        commands: list[Any] = []
        if held is not None:
            commands.append(Emit(WaitEnded(actor=self._actor, on=held.on, seconds=now - held.since)))
        if on is None:
            return replace(state, waiting=None), commands
        cause = "its lease ran out" if on == "store" else "it may serve after the next commit only"
        deadline_at = None if state.part is None else state.part.deadline_at
        commands.append(Emit(WaitStarted(actor=self._actor, on=on, cause=cause, deadline_at=deadline_at)))
        return replace(state, waiting=Waiting(on, now)), commands


# --- parts of a step -------------------------------------------------------------------------------------------------


def _resumed(state: EngineState, _: Resumed) -> Outcome:
    assert state.part is not None
    return replace(state, mode="serving", version=state.part.version, part=None, unserved=0), []


def _lapsed(state: EngineState, _: LeaseLapsed) -> Outcome:
    return replace(state, mode="lapsed"), []


def _renewed(state: EngineState, _: LeaseRenewed) -> Outcome:
    return replace(state, mode="serving"), []


def _given_up(state: EngineState, event: RefitFailed) -> Outcome:
    return _retreat(state, event.epoch) if event.epoch >= state.epoch else (state, [])


def _stop(state: EngineState, event: RunStarted | RunStopping) -> Outcome:
    return replace(state, stopping=type(event) is RunStopping), []


def _emit(event: Event, epoch: int) -> Emit:
    return Emit(event, correlation=f"refit-{epoch}")


def _offered(state: EngineState, part: Part, event: TransferOffered) -> EngineState:
    """A newer boot of the trainer replaces what an older one offered."""
    if part.offer is not None and part.offer.trainer_boot >= event.trainer_boot:
        return state
    return replace(state, part=replace(part, offer=event))


def _retreat(state: EngineState, epoch: int) -> Outcome:
    """Serve nothing until a commit of a later epoch, and give up what is performed or runs for the present one."""
    old, group = state.epoch, state.group
    if state.mode == "starting":
        return replace(state, epoch=epoch), []
    after = replace(state, epoch=epoch, mode="uncertain", version=None, part=None)
    holds = state.part is not None and state.part.hold
    if state.mode in ("uncertain", "drained", "loaded") and not holds:
        return after, []
    if state.mode != "loading":
        return after, [Abandon(old, None)]
    return replace(after, group=None), [Abandon(old, group)]
