"""What one engine may do when: it serves under a lease on the last commit, and holds unknown weights otherwise.

starting -> uncertain -> draining -> drained -> loading -> loaded -> resuming -> serving <-> lapsed. Only a complete
load in the newest epoch, committed with this boot, leads to serving; every other way out of the barrier ends in
uncertain. With engine.release there are epochs without a load: serving -> releasing -> uncertain. The rules within an
epoch are in `actors.engine.barrier`. One boot of the actor is one boot of its server: when the server is gone, so is
the boot.

Invariants: nothing is admitted unless serving, and weights are received only after a proof that nothing runs, or that
all that runs is held still and goes on after the commit only (S1, S4); an admission needs a fresh reading of the store
that names the served epoch as committed and as newest (S2); epochs only rise, and results of older ones change nothing
(S3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from actors.engine.barrier import Barriers, Outcome, died
from actors.engine.state import (
    BARRIER,
    SERVED,
    EngineState,
    Exit,
    Lease,
    LeaseLapsed,
    LeaseRenewed,
    Local,
    Mode,
    ServerDead,
    ServerHeard,
    ServerReady,
    ServerSilent,
    StartServer,
    Waiting,
    Watch,
)
from config.schema import EngineConfig, RefitConfig
from contracts.core import Booted, Delivered, Emit, LeaseLost, Tick
from contracts.events import (
    EngineReady,
    Event,
    FleetScaled,
    RunStarted,
    RunStopping,
    WaitEnded,
    WaitStarted,
)

COMMIT_S = 1.0
"""How long a request waits for the commit that it was sent under: gateways may hear of it before engines do."""
LOOK_S = 0.002
"""Pause between two looks whether it came."""
SERVER = "server"
"""Whom an engine waits for that is not answered by its server."""
BACKOFF_MAX_S = 30.0
"""Longest pause before the start of a server whose predecessors never served."""


class EngineCore:
    """Decides for the engine `actor`; `barriers` holds the rules of an epoch. See `contracts.core.Core`."""

    state_type = EngineState
    local_type = Local
    work: tuple[str, ...] = ()
    watch = ("refit", "control")

    def __init__(self, actor: str, engine: EngineConfig, refit: RefitConfig) -> None:
        self._actor = actor
        self.index = int(actor.rpartition("-")[2])
        self._restarts = engine.restarts
        self._backoff_s = engine.restart_backoff_s
        self.barriers = Barriers(actor, refit)
        # a barrier goes on without this engine after the drain deadline: no lease may outlast it
        self.lease_s = min(engine.lease_s, self.barriers.drain_s)
        self._events: Mapping[type, Callable[[EngineState, Any], Outcome]] = {
            FleetScaled: self._scaled,
            RunStarted: _stop,
            RunStopping: _stop,
        }
        self._results: Mapping[type, tuple[Mode, Callable[[EngineState, Any], Outcome]]] = {
            ServerReady: ("starting", self._ready),
            LeaseLapsed: ("serving", _lapsed),
            LeaseRenewed: ("lapsed", _renewed),
        }
        """As `Barriers.results`."""

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

    def about_to_serve(self, state: EngineState, epoch: int, waited_s: float) -> bool:
        """Whether a request sent under `epoch` goes on waiting: the commit of that epoch is on its way to here."""
        return epoch == state.epoch and state.mode in ("loaded", "resuming") and waited_s < COMMIT_S

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
        after, server = self._announce_silence(after, now)
        return after, (*commands, *waits, *server)

    def _event(self, state: EngineState, event: Event) -> Outcome:
        kind = type(event)
        handle = self.barriers.events.get(kind) or self._events.get(kind)
        return (state, []) if handle is None else handle(state, event)

    def _scaled(self, state: EngineState, event: FleetScaled) -> Outcome:
        return replace(state, retiring=self.index >= event.engines), []

    def _local(self, state: EngineState, input: Any) -> Outcome:
        """A result counts in its mode and epoch only; what is seen of the server always does."""
        kind = type(input)
        if kind is ServerDead:
            return died(self._actor, state, input.reason)
        if kind is ServerSilent or kind is ServerHeard:
            return replace(state, silent=getattr(input, "reason", None)), []
        mode, handle = self._results.get(kind) or self.barriers.results[kind]
        late = state.mode != mode or (kind is not ServerReady and input.epoch != state.epoch)
        return (state, []) if late else handle(state, input)

    # --- boots -------------------------------------------------------------------------------------------------------

    def _booted(self, state: EngineState, boot: int) -> Outcome:
        """The server died with the process before; so did its weights and its groups."""
        unserved = state.unserved + 1
        after = EngineState(
            boot=boot, epoch=state.epoch, unserved=unserved, waiting=state.waiting, unanswered=state.unanswered
        )
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
            engine=self._actor,
            boot=state.boot,
            url=input.url,
            ranks=input.ranks,
            seconds=input.seconds,
            nccl=input.nccl,
        )
        return replace(state, mode="uncertain"), [Emit(ready), Watch()]

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
        part = (
            None if state.mode == "releasing" else state.part
        )  # the trainer's step comes between, with its own deadline
        deadline_at = None if part is None else part.deadline_at
        commands.append(Emit(WaitStarted(actor=self._actor, on=on, cause=cause, deadline_at=deadline_at)))
        return replace(state, waiting=Waiting(on, now)), commands

    def _announce_silence(self, state: EngineState, now: float) -> Outcome:
        """A server that does not answer is waited for; what it owes has deadlines of its own."""
        silent, held = None if state.mode == "dead" else state.silent, state.unanswered
        if (silent is None) == (held is None):
            return state, []
        if held is not None:
            ended = WaitEnded(actor=self._actor, on=held.on, seconds=now - held.since)
            return replace(state, unanswered=None), [Emit(ended)]
        deadline_at = None if state.part is None else state.part.deadline_at
        cause = f"no answer to a probe: {silent}"
        wait = WaitStarted(actor=self._actor, on=SERVER, cause=cause, deadline_at=deadline_at)
        return replace(state, unanswered=Waiting(SERVER, now)), [Emit(wait)]


def _lapsed(state: EngineState, _: LeaseLapsed) -> Outcome:
    return replace(state, mode="lapsed"), []


def _renewed(state: EngineState, _: LeaseRenewed) -> Outcome:
    return replace(state, mode="serving"), []


def _stop(state: EngineState, event: RunStarted | RunStopping) -> Outcome:
    return replace(state, stopping=type(event) is RunStopping), []
