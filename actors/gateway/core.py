"""The gate: which request runs where, under which commit, and which ones wait.

Requests are known by number only; their tokens stay in the shell. The gate is open while the newest epoch heard of is a
committed one. A newer `refit.requested` or `release.requested` closes it: new requests are held, calls in flight end by
themselves or are aborted, and what they had not finished goes out again after the commit. A call is stamped with the
commit under which it was dispatched, and no call outlives its commit. Under drain policy in_flight calls do, on engines
that are members of the next commit too; those engines say which version sampled which token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from actors.gateway.faults import (
    Outcome,
    abort,
    avoid,
    dead,
    leave,
    quarantined,
    rebooted,
    refuse,
    stop,
)
from actors.gateway.state import (
    AbortAll,
    Address,
    Announce,
    Answered,
    Arrived,
    Call,
    CallFailed,
    Commit,
    Drain,
    InFlight,
    Left,
    Listening,
    Refuse,
    Reply,
    State,
    arrived,
    boot_prefix,
    cause_of,
    ended,
    finished,
    gate,
    holding,
    home_of,
    housed,
    load_of,
    reachable,
    rid_prefix,
)
from actors.states import without
from config.schema import GatewayConfig, RefitConfig
from contracts.core import Booted, Delivered, Emit
from contracts.events import (
    ActorBooted,
    EngineDead,
    EngineQuarantined,
    EngineReady,
    GateClosed,
    GatewayReady,
    RefitCommitted,
    RefitRequested,
    ReleaseRequested,
    RunStarted,
    RunStopping,
    WaitEnded,
    WaitStarted,
)

ABORT_SHARE, END_SHARE = 0.7, 0.9
"""Parts of the drain deadline after which calls are aborted and cut off; the rest is for the engines' own proof."""
GRACE_MAX_S = 5.0
"""Longest a call may take to end after the abort of its request; less where a drain is shorter."""
PACE_S = 0.005
"""A turn is two inputs, and hundreds of episodes send theirs one by one: each waits so long at most for others."""
_replace = msgspec.structs.replace


class GatewayCore:
    """Admits, routes, holds and continues requests. See `contracts.core.Core`."""

    state_type = State
    local_type = Listening | Arrived | Answered | CallFailed | Left
    work: tuple[str, ...] = ()
    watch = ("refit", "fleet", "control")
    pace_s = PACE_S

    def __init__(self, actor: str, gateway: GatewayConfig, refit: RefitConfig) -> None:
        self._actor = actor
        self._retries = gateway.retries
        self._refit = refit
        self._grace = min(GRACE_MAX_S, (END_SHARE - ABORT_SHARE) * refit.drain_deadline_s)
        self._inputs: Mapping[type, Callable[[State, Any, float], Outcome]] = {
            Delivered: self._event,
            Arrived: arrived,
            Answered: self._answered,
            CallFailed: self._failed,
            Left: self._left,
            Booted: self._booted,
            Listening: self._listening,
        }
        self._events: Mapping[type, Callable[[State, Any, float], Outcome]] = {
            RefitRequested: self._requested,
            ReleaseRequested: self._requested,
            RefitCommitted: self._committed,
            EngineReady: self._ready,
            EngineQuarantined: quarantined,
            EngineDead: dead,
            ActorBooted: rebooted,
            GatewayReady: self._current,
            RunStarted: stop,
            RunStopping: stop,
        }

    def initial(self) -> State:
        return State()

    def intake(self, state: State) -> dict[str, int]:
        return {}

    def done(self, state: State) -> bool:
        return state.stopping and not state.requests and not state.calls

    def wake(self, state: State) -> float | None:
        times = [] if state.expire_at is None else [state.expire_at]
        if state.drain and not holding(state) and any(not call.aborting for call in state.calls.values()):
            times.append(state.drain.abort_at)
        if gate(state) == "open" and state.waiting:
            times += [state.avoided[m.actor].until for m in reachable(state) if m.actor in state.avoided]
        return min(times, default=None)

    def step(self, state: State, input: Any, now: float) -> tuple[State, Sequence[Any]]:
        handle = self._inputs.get(type(input))
        state, commands = (state, []) if handle is None else handle(state, input, now)
        if state.expire_at is not None and now >= state.expire_at:
            state, commands = _then(commands, self._expire(state, now))
        if state.drain is not None:
            state, commands = _then(commands, self._drain(state, state.drain, now))
        if state.waiting:
            state, commands = _then(commands, self._dispatch(state, now))
        if state.drain is not None:
            state, commands = _then(commands, self._report(state, state.drain, now))
        if state.waiting or state.waits or state.drain is not None:
            state, commands = _then(commands, self._waits(state, now))
        return state, commands

    def _event(self, state: State, input: Delivered, now: float) -> Outcome:
        event = input.envelope.body
        handle = self._events.get(type(event))
        return (state, []) if handle is None else handle(state, event, now)

    def _ready(self, state: State, event: EngineReady, _: float) -> Outcome:
        avoided = without(state.avoided, event.engine)
        addresses = {**state.addresses, event.engine: Address(event.boot, event.url)}
        return _replace(state, addresses=addresses, avoided=avoided), []

    def _current(self, state: State, event: GatewayReady, _: float) -> Outcome:
        mine = (event.gateway, event.boot) == (self._actor, state.boot)
        return _replace(state, current=True) if mine else state, []

    def _listening(self, state: State, input: Listening, _: float) -> Outcome:
        return state, [Emit(GatewayReady(gateway=self._actor, boot=state.boot, url=input.url))]

    def _left(self, state: State, input: Left, now: float) -> Outcome:
        return leave(state, input.request, now + self._grace) if input.request in state.requests else (state, [])

    def _booted(self, state: State, input: Booted, _: float) -> Outcome:
        """The connections of the boot before are gone; what it started on engines is of use to nobody."""
        ghosts = (*state.ghosts, state.boot) if state.boot else ()
        state = _replace(
            state,
            boot=input.boot,
            current=False,
            acked=0,
            interrupted=0,
            ghosts=ghosts,
            requests={},
            calls={},
            waiting=(),
            expire_at=None,
            loads={},
            homes=(),
            avoided={},
            stopping=False,
        )
        urls = tuple(address.url for address in state.addresses.values())
        if not ghosts or not urls:
            return state, [Announce()]
        return state, [Announce(), AbortAll(urls, tuple(boot_prefix(self._actor, ghost) for ghost in ghosts))]

    def _requested(self, state: State, event: RefitRequested | ReleaseRequested, now: float) -> Outcome:
        if event.epoch <= state.epoch:
            return state, []
        began_at = event.deadline_at - self._refit.deadline_s
        abort_at = now if event.drain == "interrupt" else began_at + ABORT_SHARE * self._refit.drain_deadline_s
        end_at = began_at + END_SHARE * self._refit.drain_deadline_s
        drain = Drain(now, abort_at, end_at, hold=event.drain == "in_flight")
        return _replace(state, epoch=event.epoch, drain=drain), []

    def _committed(self, state: State, event: RefitCommitted, now: float) -> Outcome:
        """Every engine of a commit proved itself idle: ghosts are gone, and a call still open is a broken one.

        Not so for one that held its sequences.
        """
        if state.committed is not None and event.epoch <= state.committed.epoch:
            return state, []
        hold = holding(state)
        kept = {(member.actor, member.boot) for member in event.engines} if hold else set()
        broken = tuple(n for n, call in state.calls.items() if (call.engine, call.boot) not in kept)
        state, commands = abort(state, broken, now)
        state = _replace(
            state,
            committed=Commit(event.epoch, event.version, event.engines),
            epoch=max(state.epoch, event.epoch),
            drain=state.drain if event.epoch < state.epoch else None,
            avoided={},
            homes=(),
            ghosts=state.ghosts if hold else (),
        )
        return state, commands

    def _answered(self, state: State, input: Answered, now: float) -> Outcome:
        call = state.calls.get(input.call)
        if call is None:
            return state, []
        unfinished = tuple([part.sample for part in input.parts if part.finish == "abort"])
        if not unfinished:
            request = state.requests.get(call.request)
            return finished(state, input.call, call), [] if request is None else [Reply(call.request, request.held_s)]
        state = ended(state, input.call, call)
        # an engine that fails its part in a refit aborts what it held
        unasked = not call.aborting and not holding(state)
        if unasked:
            state = avoid(state, call.engine, now)
        elif not call.aborting:
            state = _replace(state, avoided=without(state.avoided, call.engine))
        charged = unasked and not any(part.tokens for part in input.parts if part.finish == "abort")
        return self._again(state, call, unfinished, now, "it aborts what nobody asked it to" if charged else "")

    def _failed(self, state: State, input: CallFailed, now: float) -> Outcome:
        call = state.calls.get(input.call)
        if call is None:
            return state, []
        state = ended(state, input.call, call)
        if input.kind == "data":
            return refuse(state, call, "data", input.reason)
        if not call.aborting:
            state = avoid(state, call.engine, now)
        charged = input.kind == "infra" and not call.aborting
        return self._again(state, call, call.samples, now, input.reason if charged else "")

    def _again(self, state: State, call: InFlight, samples: tuple[int, ...], now: float, fault: str) -> Outcome:
        """Samples of an ended call wait for another one; a `fault` counts against the request's retries."""
        old = state.requests.get(call.request)
        if old is None:
            return state, []
        failures = old.failures + bool(fault)
        if failures > self._retries:
            return refuse(state, call, "infra", f"{failures} calls failed, the last one so: {fault}")
        request = _replace(old, pending=samples, call=None, held_since=now, failures=failures)
        return _replace(
            state,
            requests={**state.requests, call.request: request},
            waiting=tuple(sorted((*state.waiting, call.request))),
            interrupted=state.interrupted + call.drained,
        ), []

    # --- after every input -------------------------------------------------------------------------------------------

    def _expire(self, state: State, now: float) -> Outcome:
        commands: list[Any] = []
        for number, request in state.requests.items():
            if now >= request.deadline_at:
                if request.call is not None:
                    where = f"generating on {state.calls[request.call].engine}"
                else:
                    where = cause_of(state)
                commands.append(Refuse(number, "timeout", f"the deadline passed while {where}"))
                state, more = leave(state, number, now + self._grace)
                commands += more
        expire_at = min((request.deadline_at for request in state.requests.values()), default=None)
        return _replace(state, expire_at=expire_at), commands

    def _drain(self, state: State, drain: Drain, now: float) -> Outcome:
        if drain.hold or now < drain.abort_at:
            return state, []
        return abort(state, tuple(state.calls), drain.end_at, drained=True)

    def _dispatch(self, state: State, now: float) -> Outcome:
        if gate(state) != "open" or not (load := load_of(state, now)):
            return state, []
        requests, calls, loads = state.requests.copy(), state.calls.copy(), state.loads.copy()
        homes, last = state.homes, state.last_call
        commands: list[Any] = []
        for number in state.waiting:
            request = requests[number]
            samples, engine = request.pending, home_of(homes, request.session)
            if engine not in load:
                engine = _least(load, request.session)
                homes = housed(homes, request.session, engine)
            last += 1
            commands.append(command := self._call(state, last, number, samples, engine))
            calls[last] = InFlight(number, engine, command.boot, samples)
            held_s = request.held_s + now - request.held_since
            requests[number] = _replace(request, pending=(), call=last, held_s=held_s)
            load[engine] += len(samples)
            loads[engine] = loads.get(engine, 0) + len(samples)
        return _replace(
            state, requests=requests, calls=calls, waiting=(), loads=loads, homes=homes, last_call=last
        ), commands

    def _call(self, state: State, call: int, request: int, samples: tuple[int, ...], engine: str) -> Call:
        assert state.committed is not None
        address = state.addresses[engine]
        return Call(
            call=call,
            request=request,
            samples=samples,
            engine=engine,
            boot=address.boot,
            url=address.url,
            epoch=state.committed.epoch,
            version=state.committed.version,
            rid=rid_prefix(self._actor, state.boot, call),
        )

    def _report(self, state: State, drain: Drain, now: float) -> Outcome:
        """Tell the coordinator, once an epoch and boot, that nothing of ours runs, or may begin to."""
        if not state.current or state.acked == state.epoch or (state.calls and not drain.hold):
            return state, []
        closed = GateClosed(
            epoch=state.epoch,
            gateway=self._actor,
            boot=state.boot,
            held=len(state.waiting),
            interrupted=state.interrupted,
            seconds=now - drain.since,
            running=len(state.calls),
        )
        return _replace(state, acked=state.epoch, interrupted=0), [Emit(closed)]

    def _waits(self, state: State, now: float) -> Outcome:
        """Announce what this step began or ceased to wait for."""
        wanted: dict[str, tuple[str, float]] = {}
        if gate(state) == "closing" and state.drain and not state.drain.hold:
            cause = f"{len(state.calls)} calls must end before the refit of epoch {state.epoch}"
            wanted["drain"] = (cause, state.drain.end_at)
        if state.waiting:
            on = "engine" if gate(state) == "open" else "refit"
            wanted[on] = (cause_of(state), min(state.requests[number].deadline_at for number in state.waiting))
        over = [on for on in state.waits if on not in wanted]
        started = [on for on in wanted if on not in state.waits]
        if not over and not started:
            return state, []
        commands = [Emit(WaitEnded(actor=self._actor, on=on, seconds=now - state.waits[on])) for on in over]
        for on in started:
            cause, deadline_at = wanted[on]
            commands.append(Emit(WaitStarted(actor=self._actor, on=on, cause=cause, deadline_at=deadline_at)))
        return _replace(state, waits={on: state.waits.get(on, now) for on in wanted}), commands


# --- parts of a step -------------------------------------------------------------------------------------------------


def _then(commands: list[Any], outcome: Outcome) -> Outcome:
    """`outcome`, with the commands that came before it."""
    state, more = outcome
    return state, commands + more


def _least(load: dict[str, int], session: str) -> str:
    """The engine with the least in flight; of several, the session decides."""
    least = min(load.values())
    found = [name for name, held in load.items() if held == least]
    if len(found) == 1:
        return found[0]
    begun = zlib.crc32(f"{session}/".encode())
    return min(found, key=lambda name: zlib.crc32(name.encode(), begun))
