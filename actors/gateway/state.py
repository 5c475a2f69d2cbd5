"""What the gateway's core takes, asks for and remembers, and how requests are named on engines."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from actors.states import without
from contracts.events import Member

replace = msgspec.structs.replace

PIECE, PIECES = 128, 16
"""Sessions in a piece of those whose engine is remembered, and pieces; the oldest piece is forgotten first."""

Finish = Literal["stop", "length", "abort"]
FailKind = Literal["infra", "data", "timeout"]

# --- local inputs ----------------------------------------------------------------------------------------------------


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """Result of `Announce`: the server accepts callers at `url`."""

    url: str


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """A valid request for `n` samples. Numbers rise and are never reused within a boot."""

    request: int
    n: int
    session: str
    deadline_at: float


class Part(msgspec.Struct, frozen=True):
    """What one call added to one sample; `abort` means that the sample must go on."""

    sample: int
    tokens: int
    finish: Finish


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """A call ended with checked tokens for each of its samples."""

    call: int
    parts: tuple[Part, ...]


class CallFailed(msgspec.Struct, frozen=True, tag="call_failed"):
    """A call ended without any token. `not_serving`: the engine holds no lease for our epoch."""

    call: int
    kind: Literal["infra", "not_serving", "data"]
    reason: str


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The caller closed its connection."""

    request: int


# --- commands --------------------------------------------------------------------------------------------------------


class Announce(msgspec.Struct, frozen=True):
    """Let callers in, and say where (`Listening`)."""


class Call(msgspec.Struct, frozen=True):
    """Generate `samples` of `request` on an engine; their tokens are stamped (version, engine, boot)."""

    call: int
    request: int
    samples: tuple[int, ...]
    engine: str
    boot: int
    url: str
    epoch: int
    version: int
    rid: str
    """Prefix of the request ids of this call; see `rid_prefix`."""


class AbortCall(msgspec.Struct, frozen=True):
    """End a call: abort it at the engine, keep what it produced; at `deadline_at` cut the connection instead."""

    call: int
    deadline_at: float


class AbortAll(msgspec.Struct, frozen=True):
    """Abort at `urls` whatever runs under these request id prefixes, as far as they can be reached."""

    urls: tuple[str, ...]
    prefixes: tuple[str, ...]


class Reply(msgspec.Struct, frozen=True):
    """All samples of `request` are finished: answer the caller."""

    request: int
    held_s: float


class Refuse(msgspec.Struct, frozen=True):
    """Answer the caller with an error."""

    request: int
    kind: FailKind
    reason: str


# --- state -----------------------------------------------------------------------------------------------------------


class Address(msgspec.Struct, frozen=True):
    boot: int
    url: str


class Commit(msgspec.Struct, frozen=True):
    epoch: int
    version: int
    engines: tuple[Member, ...]


class InFlight(msgspec.Struct, frozen=True):
    """A call that may run on an engine. Its request may be gone already."""

    request: int
    engine: str
    boot: int
    samples: tuple[int, ...]
    aborting: bool = False
    drained: bool = False
    """The abort came from a drain: its request counts as interrupted."""


class Request(msgspec.Struct, frozen=True):
    """`pending` samples wait for a call since `held_since`; those of `call` are in flight; the others are finished."""

    session: str
    deadline_at: float
    pending: tuple[int, ...]
    held_since: float
    held_s: float = 0.0
    failures: int = 0
    call: int | None = None


class Avoided(msgspec.Struct, frozen=True):
    until: float
    failures: int


class Drain(msgspec.Struct, frozen=True):
    """With `hold` calls stay where they are: their engines hold them still, and go on after the commit."""

    since: float
    abort_at: float
    end_at: float
    hold: bool = False


class State(msgspec.Struct, frozen=True):
    """`epoch` is the newest epoch heard of, `acked` the last one reported closed by this boot.

    `current`: this boot has read the log up to its own start, so that no older refit can be news to it. `ghosts`:
    earlier boots whose calls may still run on an engine. What follows from `requests` and `calls` is kept beside them,
    so that a step costs the same however many there are: `waiting`, the requests with samples to send in order of
    arrival; `expire_at`, no later than any deadline; `loads`, samples in flight by engine. `homes`: the engine of each
    of the last sessions, newest first, in pieces so that one more does not copy them all.
    """

    boot: int = 0
    epoch: int = 0
    committed: Commit | None = None
    current: bool = False
    acked: int = 0
    drain: Drain | None = None
    interrupted: int = 0
    addresses: dict[str, Address] = {}
    avoided: dict[str, Avoided] = {}
    requests: dict[int, Request] = {}
    calls: dict[int, InFlight] = {}
    waiting: tuple[int, ...] = ()
    expire_at: float | None = None
    loads: dict[str, int] = {}
    last_call: int = 0
    homes: tuple[dict[str, str], ...] = ()
    ghosts: tuple[int, ...] = ()
    waits: dict[str, float] = {}
    stopping: bool = False


def refitting(state: State) -> bool:
    """A refit newer than the last commit was requested."""
    return state.epoch > (state.committed.epoch if state.committed else 0)


def gate(state: State) -> Literal["open", "closing", "closed"]:
    """Open: calls may be dispatched. Closing: none may, and some are still in flight."""
    if state.current and state.committed is not None and not refitting(state):
        return "open"
    return "closing" if state.calls else "closed"


def holding(state: State) -> bool:
    """Calls in flight outlive the refit that is under way."""
    return state.drain is not None and state.drain.hold


def reachable(state: State) -> list[Member]:
    """Members of the last commit whose address is known."""
    found: list[Member] = []
    addresses = state.addresses
    for member in state.committed.engines if state.committed else ():
        address = addresses.get(member.actor)
        if address is not None and address.boot == member.boot:
            found.append(member)
    return found


def load_of(state: State, now: float) -> dict[str, int]:
    """Samples in flight on each engine that may be sent more."""
    loads = state.loads
    load = {member.actor: loads.get(member.actor, 0) for member in reachable(state)}
    for name, avoided in state.avoided.items():
        if now < avoided.until:
            load.pop(name, None)
    return load


def loaded(loads: dict[str, int], engine: str, samples: int) -> dict[str, int]:
    """`loads` with `samples` more, or fewer, in flight on `engine`."""
    changed = {**loads, engine: loads.get(engine, 0) + samples}
    if not changed[engine]:
        del changed[engine]
    return changed


def home_of(homes: tuple[dict[str, str], ...], session: str) -> str:
    """The engine of a session, empty if it is not remembered."""
    for piece in homes:
        if session in piece:
            return piece[session]
    return ""


def housed(homes: tuple[dict[str, str], ...], session: str, engine: str) -> tuple[dict[str, str], ...]:
    """`homes` with the engine of one more session, or another engine of a known one."""
    if not homes or len(homes[0]) >= PIECE:
        return ({session: engine}, *homes[: PIECES - 1])
    return ({**homes[0], session: engine}, *homes[1:])


def cause_of(state: State) -> str:
    """Why requests are held."""
    if gate(state) == "open":
        return "no engine of the committed fleet answers"
    return f"the gate is closed for the refit of epoch {state.epoch}" if state.epoch else "no refit is committed yet"


def boot_prefix(gateway: str, boot: int) -> str:
    """What the ids of all requests of one boot begin with, and no other id does."""
    return f"{gateway}-{boot:08d}-"


def rid_prefix(gateway: str, boot: int, call: int) -> str:
    """What the ids of all requests of one call begin with. Engines abort by prefix, hence the fixed widths."""
    return f"{gateway}-{boot:08d}-{call:010d}-"


def rid(prefix: str, sample: int) -> str:
    """The id of one sample's request in the call with this prefix."""
    return f"{prefix}{sample:04d}"


# --- changes ---------------------------------------------------------------------------------------------------------


def arrived(state: State, input: Arrived, now: float) -> tuple[State, list[Any]]:
    """A request waits for its first call."""
    request = Request(input.session, input.deadline_at, tuple(range(input.n)), now)
    expire_at = state.expire_at
    if expire_at is None or input.deadline_at < expire_at:
        expire_at = input.deadline_at
    requests = {**state.requests, input.request: request}
    return replace(state, requests=requests, waiting=(*state.waiting, input.request), expire_at=expire_at), []


def ended(state: State, number: int, call: InFlight) -> State:
    """Forget a call; its engine is free of it."""
    loads = loaded(state.loads, call.engine, -len(call.samples))
    return replace(state, calls=without(state.calls, number), loads=loads)


def finished(state: State, number: int, call: InFlight) -> State:
    """Forget a call that answered all it was asked for, and its request; unless it was aborted, its engine is well."""
    requests = without(state.requests, call.request)
    return replace(
        state,
        calls=without(state.calls, number),
        loads=loaded(state.loads, call.engine, -len(call.samples)),
        avoided=state.avoided if call.aborting else without(state.avoided, call.engine),
        requests=requests,
        expire_at=state.expire_at if requests else None,
    )


def gone(state: State, number: int) -> State:
    """Forget a request."""
    waiting = tuple(other for other in state.waiting if other != number) if number in state.waiting else state.waiting
    requests = without(state.requests, number)
    return replace(state, requests=requests, waiting=waiting, expire_at=state.expire_at if requests else None)
