"""What becomes of calls, requests and engines when one of them fails, leaves or is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actors.gateway.state import AbortCall, Avoided, FailKind, InFlight, Refuse, State, gone, replace
from actors.states import without
from contracts.events import ActorBooted, EngineDead, EngineQuarantined, RunStarted, RunStopping

BACKOFF_S, BACKOFF_MAX_S = 0.25, 5.0
"""How long an engine is left alone after its first failure in a row, and at most."""
Outcome = tuple[State, list[Any]]


def abort(state: State, numbers: Iterable[int], deadline_at: float, drained: bool = False) -> Outcome:
    """Abort those calls that are not being aborted already."""
    fresh = [number for number in numbers if not state.calls[number].aborting]
    if not fresh:
        return state, []
    marked = {number: replace(state.calls[number], aborting=True, drained=drained) for number in fresh}
    return replace(state, calls={**state.calls, **marked}), [AbortCall(number, deadline_at) for number in fresh]


def leave(state: State, number: int, deadline_at: float) -> Outcome:
    """Forget a request; its call stays counted until it ends."""
    call = state.requests[number].call
    return abort(gone(state, number), () if call is None else (call,), deadline_at)


def forget(state: State, engine: str, boot: int) -> State:
    """Boots of `engine` up to `boot` are gone for good."""
    address = state.addresses.get(engine)
    if address is None or address.boot > boot:
        return state
    return replace(state, addresses=without(state.addresses, engine))


def stop(state: State, event: RunStarted | RunStopping, _: float) -> Outcome:
    return replace(state, stopping=type(event) is RunStopping), []


def dead(state: State, event: EngineDead, now: float) -> Outcome:
    return lose(forget(state, event.engine, event.boot), event.engine, event.boot, now)


def rebooted(state: State, event: ActorBooted, now: float) -> Outcome:
    return lose(forget(state, event.actor, event.boot - 1), event.actor, event.boot - 1, now)


def quarantined(state: State, event: EngineQuarantined, now: float) -> Outcome:
    return lose(state, event.engine, event.boot, now)


def lose(state: State, engine: str, boot: int, now: float) -> Outcome:
    """Boots of `engine` up to `boot` serve no more: cut their calls off."""
    if state.committed is not None:
        kept = tuple(m for m in state.committed.engines if m.actor != engine or m.boot > boot)
        state = replace(state, committed=replace(state.committed, engines=kept))
    lost = [number for number, call in state.calls.items() if call.engine == engine and call.boot <= boot]
    return abort(state, lost, now)


def avoid(state: State, engine: str, now: float) -> State:
    old = state.avoided.get(engine, Avoided(now, 0))
    if now < old.until:
        return state
    pause = min(BACKOFF_S * 2.0**old.failures, BACKOFF_MAX_S)
    return replace(state, avoided={**state.avoided, engine: Avoided(now + pause, old.failures + 1)})


def refuse(state: State, call: InFlight, kind: FailKind, reason: str) -> Outcome:
    if call.request not in state.requests:
        return state, []
    refusal = Refuse(call.request, kind, f"{call.engine}: {reason}")
    return gone(state, call.request), [refusal]
