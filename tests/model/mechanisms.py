"""The cores with one mechanism taken out, or several."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from actors.engine.barrier import Barriers as EngineBarriers
from actors.engine.core import EngineCore
from actors.engine.state import Drained, Lease, Loaded
from actors.gateway.core import GatewayCore
from actors.gateway.state import Drain, gate
from actors.refit.barrier import Barriers
from actors.refit.core import RefitCore
from actors.refit.state import Barrier
from config.schema import EngineConfig, GatewayConfig, LaunchConfig, RefitConfig
from contracts.events import DrainPolicy, Rank, RefitRequested, TransferOffered, TransferStarted

Without = set[str]
"""What is taken out; shared by all cores of a model, which first come to serve with everything in."""


class MutatedCoordinator(RefitCore):
    def __init__(self, refit: RefitConfig, engines: int, without: Without) -> None:
        super().__init__(refit, EngineConfig(count=engines), GatewayConfig(), LaunchConfig())
        self._without = without
        self.barriers = self.members.barriers = MutatedBarriers(refit, self, without)

    def _opened(self, turn: Any, input: Any) -> None:
        if "one request" in self._without:
            turn.set(phase="opening", barrier=None)
        super()._opened(turn, input)


class MutatedBarriers(Barriers):
    def __init__(self, refit: RefitConfig, core: RefitCore, without: Without) -> None:
        super().__init__(refit, core.fleet, core.faults)
        self._without = without

    def epoch_matches(self, barrier: Barrier, event: Any) -> bool:
        return "ack epoch" in self._without or super().epoch_matches(barrier, event)

    def digest_accepted(self, offered: str, digest: str) -> bool:
        return "digest" in self._without or super().digest_accepted(offered, digest)

    def gates_closed(self, barrier: Barrier) -> bool:
        return "wait for gates" in self._without or super().gates_closed(barrier)

    def engines_drained(self, barrier: Barrier) -> bool:
        return "wait for drains" in self._without or super().engines_drained(barrier)

    def trainer_booted(self, turn: Any, boot: int) -> None:
        if "trainer boot" not in self._without:
            super().trainer_booted(turn, boot)


class MutatedEngine(EngineCore):
    def __init__(self, actor: str, without: Without) -> None:
        super().__init__(actor, EngineConfig(lease_s=10.0, restarts=1000), REFIT)
        self._without = without
        self.barriers = MutatedEngineBarriers(actor, without)

    def admits(self, state: Any, epoch: int, lease: Lease, now: float) -> bool:
        if "request epoch" in self._without:
            epoch = state.epoch
        if "lease" in self._without:
            return state.mode == "serving" and epoch == state.epoch
        if "serving only" in self._without:
            return lease.confirms(epoch)
        return super().admits(state, epoch, lease, now)

    def _local(self, state: Any, input: Any) -> Any:
        if "result epoch" in self._without and hasattr(input, "epoch"):
            input = replace(input, epoch=state.epoch)
        return super()._local(state, input)


class MutatedEngineBarriers(EngineBarriers):
    def __init__(self, actor: str, without: Without) -> None:
        super().__init__(actor, REFIT)
        self._without = without

        offered = self.events[TransferOffered]
        self.events = {**self.events, TransferOffered: lambda state, event: self._offer(*offered(state, event), event)}

    def _offer(self, state: Any, commands: Any, event: TransferOffered) -> Any:
        """Without "intent" the engine begins when it is offered something."""
        if "intent" not in self._without or state.mode != "drained" or event.epoch != state.epoch:
            return state, commands
        me = Rank(self._actor, state.boot, 1, 1)
        begun = TransferStarted(
            epoch=event.epoch, version=event.version, group="g", fresh=True, members=(me,), world_size=2
        )
        return self.started(state, state.part, begun)

    def requested(self, state: Any, event: RefitRequested) -> Any:
        after, commands = super().requested(state, event)
        if "drain" in self._without and after.mode == "draining":
            return self.drained(after, Drained(after.epoch, 0.0))
        return after, commands

    def started(self, state: Any, part: Any, event: TransferStarted) -> Any:
        if "drained before load" in self._without and state.mode == "draining":
            state = replace(state, mode="drained")
        return super().started(state, part, event)

    def failed(self, state: Any, phase: str, error: str, reason: str) -> Any:
        if "whole loads" in self._without and phase == "receive":
            return self.loaded(state, Loaded(state.epoch, f"d{state.part.version}", 0.0))
        return super().failed(state, phase, error, reason)


class MutatedGateway(GatewayCore):
    def __init__(self, without: Without) -> None:
        super().__init__("gateway-0", GatewayConfig(retries=1000), REFIT)
        self._without = without

    def _dispatch(self, state: Any, now: float) -> Any:
        if "gate" in self._without and state.committed is not None and gate(state) != "open":
            opened = replace(state, epoch=state.committed.epoch, current=True)
            after, commands = super()._dispatch(opened, now)
            return replace(after, epoch=state.epoch, current=state.current), commands
        return super()._dispatch(state, now)

    def _report(self, state: Any, drain: Drain, now: float) -> Any:
        if "count calls" in self._without:
            after, commands = super()._report(replace(state, calls={}), drain, now)
            return replace(after, calls=state.calls), commands
        return super()._report(state, drain, now)


REFIT = RefitConfig(failures=1000, retry_backoff_s=1.0, drain_deadline_s=100.0, deadline_s=1000.0, drain="interrupt")


def coordinator(engines: int, without: Without, drain: DrainPolicy, backoff_s: float) -> RefitCore:
    refit = replace(REFIT, drain=drain, retry_backoff_s=backoff_s)
    return MutatedCoordinator(refit, engines, without)
