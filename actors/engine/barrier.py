"""An engine's part in an epoch: drain, load and wait for the commit; or drain and give memory back.

Admissions end with the request, and begin again only with a commit that names this very boot. Whatever goes wrong
between, and any newer epoch, ends this one here: what is performed is given up, and what the server holds is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import asdict, replace

from actors.engine.state import (
    BARRIER,
    SERVED,
    Abandon,
    Drain,
    Drained,
    DrainFailed,
    EngineState,
    Exit,
    Loaded,
    LoadFailed,
    Mode,
    Part,
    Receive,
    Release,
    Released,
    Resume,
    Resumed,
)
from config.schema import RefitConfig
from contracts.core import Emit
from contracts.events import (
    DrainPolicy,
    EngineDead,
    EngineDrained,
    EngineFailed,
    EngineLoaded,
    EngineQuarantined,
    EngineReleased,
    Event,
    Member,
    Rank,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    ReleaseRequested,
    TransferOffered,
    TransferStarted,
)

ABORT_SHARE: Mapping[DrainPolicy, float] = {"finish": 0.8, "interrupt": 0.5, "in_flight": 0.0}
"""Part of the drain deadline after which the engine itself aborts what runs; gateways have done so before. Under
in_flight an engine that serves holds what runs, and on any other nothing runs that anybody waits for."""
RELEASE_SHARE = 0.9
"""Part of the drain deadline within which memory is given back; the rest is for the end of a server that did not."""

Outcome = tuple[EngineState, list[Any]]


class Barriers:
    """The rules of an epoch for the engine `actor`."""

    def __init__(self, actor: str, refit: RefitConfig) -> None:
        self._actor = actor
        self._deadline_s = refit.deadline_s
        self.drain_s = min(refit.drain_deadline_s, refit.deadline_s)
        self.events: Mapping[type, Callable[[EngineState, Any], Outcome]] = {
            RefitRequested: _if_newer(self.requested),
            ReleaseRequested: _if_newer(self._release),
            TransferOffered: _offered,
            TransferStarted: self._begun,
            RefitCommitted: self._committed,
            RefitFailed: _given_up,
            EngineQuarantined: self._quarantined,
        }
        self.results: Mapping[type, tuple[Mode, Callable[[EngineState, Any], Outcome]]] = {
            Drained: ("draining", self.drained),
            DrainFailed: ("draining", self._drain_failed),
            Loaded: ("loading", self.loaded),
            LoadFailed: ("loading", self._load_failed),
            Released: ("releasing", self._released),
            Resumed: ("resuming", _resumed),
        }
        """Result -> the mode in which it counts, and what becomes of it."""

    # --- requests ----------------------------------------------------------------------------------------------------

    def requested(self, state: EngineState, event: RefitRequested) -> Outcome:
        """Drain, for weights to come."""
        began_at = event.deadline_at - self._deadline_s
        hold = event.drain == "in_flight" and state.mode == "serving"
        drain = Drain(
            epoch=event.epoch,
            abort_at=began_at + ABORT_SHARE[event.drain] * self.drain_s,
            deadline_at=began_at + self.drain_s,
            hold=hold,
        )
        return self._enter(state, event, "draining", drain, Part(event.deadline_at, hold))

    def _release(self, state: EngineState, event: ReleaseRequested) -> Outcome:
        """Drain, for a step of the trainer: the commit that ends this is one of an epoch to come."""
        began_at = event.deadline_at - self._deadline_s
        release = Release(
            epoch=event.epoch,
            abort_at=began_at + ABORT_SHARE[event.drain] * self.drain_s,
            deadline_at=began_at + RELEASE_SHARE * self.drain_s,
        )
        return self._enter(state, event, "releasing", release, Part(began_at + self.drain_s))

    def _enter(
        self,
        state: EngineState,
        event: RefitRequested | ReleaseRequested,
        mode: Mode,
        command: Drain | Release,
        part: Part,
    ) -> Outcome:
        """Admissions end here. What an older epoch left undone is given up before the drain begins."""
        if self._me(state) not in event.engines or state.mode == "starting":
            return _retreat(state, event.epoch)
        commands: list[Any] = []
        if state.mode in BARRIER:
            state, commands = _retreat(state, event.epoch)
        return replace(state, epoch=event.epoch, mode=mode, version=None, part=part), [*commands, command]

    def drained(self, state: EngineState, input: Drained) -> Outcome:
        """Ready to receive."""
        return replace(state, mode="drained"), [self._say(state, EngineDrained, input)]

    def _drain_failed(self, state: EngineState, input: DrainFailed) -> Outcome:
        return self.failed(state, "drain", input.error, input.reason)

    def _released(self, state: EngineState, input: Released) -> Outcome:
        return replace(state, mode="uncertain", part=None), [self._say(state, EngineReleased, input)]

    # --- the transfer ------------------------------------------------------------------------------------------------

    def _begun(self, state: EngineState, event: TransferStarted) -> Outcome:
        if state.part is None or event.epoch != state.epoch:
            return state, []
        return self.started(state, state.part, event)

    def started(self, state: EngineState, part: Part, event: TransferStarted) -> Outcome:
        """Receive what was offered, if all is as the coordinator believes."""
        rank = next((m for m in event.members if (m.engine, m.boot) == (self._actor, state.boot)), None)
        if rank is None:
            return _retreat(state, state.epoch)
        if part.version is not None:  # repeated: the transfer is under way, or over
            return state, []
        if state.mode != "drained":
            return self.failed(state, "join", "NotDrained", f"the transfer started while {self._actor} was draining")
        offer = part.offer
        if offer is None or offer.version != event.version:
            held = "nothing" if offer is None else f"version {offer.version}"
            return self.failed(state, "join", "NoOffer", f"version {event.version} is to be sent, {held} was offered")
        if not event.fresh and event.group != state.group:
            reason = f"group {event.group!r} is to be used again, the server is in {state.group!r}"
            return self.failed(state, "join", "UnknownGroup", reason)
        part = replace(part, version=event.version)
        receive = _receive(state, part, offer, event, rank)
        return replace(state, mode="loading", part=part, group=event.group), [receive]

    def loaded(self, state: EngineState, input: Loaded) -> Outcome:
        """Complete: the commit may come."""
        return replace(state, mode="loaded"), [self._say(state, EngineLoaded, input)]

    def _load_failed(self, state: EngineState, input: LoadFailed) -> Outcome:
        return self.failed(state, input.phase, input.error, input.reason)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _committed(self, state: EngineState, event: RefitCommitted) -> Outcome:
        """The coordinator counts on its members: one that can't serve what it committed has to boot again."""
        if event.epoch < state.epoch:
            return state, []
        if self._me(state) not in event.engines:
            return _retreat(state, event.epoch)
        held = state.version if state.part is None else state.part.version
        if event.epoch == state.epoch and event.version == held:
            if state.mode == "loaded":
                return replace(state, mode="resuming"), [Resume(event.epoch)]
            if state.mode in ("resuming", *SERVED):
                return state, []
        reason = f"epoch {event.epoch} was committed with this boot while it was {state.mode}"
        return died(self._actor, state, reason)

    def failed(self, state: EngineState, phase: str, error: str, reason: str) -> Outcome:
        """Out of this epoch, and say why."""
        after, commands = _retreat(state, state.epoch)
        return after, [self._say(state, EngineFailed, LoadFailed(state.epoch, phase, error, reason)), *commands]

    def _quarantined(self, state: EngineState, event: EngineQuarantined) -> Outcome:
        mine = event.epoch >= state.epoch and self._me(state) == Member(event.engine, event.boot)
        return _retreat(state, event.epoch) if mine else (state, [])

    # --- parts of a step ---------------------------------------------------------------------------------------------

    def _me(self, state: EngineState) -> Member:
        return Member(self._actor, state.boot)

    def _say(
        self, state: EngineState, kind: Callable[..., Event], result: Drained | Loaded | LoadFailed | Released
    ) -> Emit:
        """The event that tells others of a result: it has the result's fields, and who says it."""
        event = kind(engine=self._actor, boot=state.boot, **asdict(result))
        return Emit(event, correlation=f"refit-{result.epoch}")


def _if_newer(handle: Callable[[EngineState, Any], Outcome]) -> Callable[[EngineState, Any], Outcome]:
    """Epochs only rise: a request of another one changes nothing."""
    return lambda state, event: handle(state, event) if event.epoch > state.epoch else (state, [])


def died(actor: str, state: EngineState, reason: str) -> Outcome:
    """This boot is over: what its server held is gone, and the process ends."""
    dead = EngineDead(engine=actor, boot=state.boot, reason=reason)
    return replace(state, mode="dead", version=None, part=None), [Emit(dead), Exit(reason, fatal=False)]


def _offered(state: EngineState, event: TransferOffered) -> Outcome:
    """A newer boot of the trainer replaces what an older one offered."""
    part = state.part
    if part is None or event.epoch != state.epoch:
        return state, []
    if part.offer is not None and part.offer.trainer_boot >= event.trainer_boot:
        return state, []
    return replace(state, part=replace(part, offer=event)), []


def _receive(state: EngineState, part: Part, offer: TransferOffered, event: TransferStarted, rank: Rank) -> Receive:
    return Receive(
        epoch=event.epoch,
        version=event.version,
        group=event.group,
        fresh=event.fresh,
        leave=state.group if event.fresh else None,
        offset=rank.offset,
        world_size=event.world_size,
        address=offer.address,
        port=offer.port,
        plan=offer.payload.key,
        deadline_at=part.deadline_at,
        hold=part.hold,
        checksum=offer.checksum,
        nccl=offer.nccl,
    )


def _resumed(state: EngineState, _: Resumed) -> Outcome:
    assert state.part is not None
    return replace(state, mode="serving", version=state.part.version, part=None, unserved=0), []


def _given_up(state: EngineState, event: RefitFailed) -> Outcome:
    return _retreat(state, event.epoch) if event.epoch >= state.epoch else (state, [])


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
