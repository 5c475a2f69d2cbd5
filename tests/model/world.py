"""What a world of the model consists of."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from contracts.events import Member

DUMMY, PARTIAL, OTHER = -1, -2, -3
"""Weights of a server that was just started, of one that received some buckets, and of one that holds wrong ones."""
FLEET, REFIT = 0, 1
"""The two streams of a sender that the coordinator reads; `policy` counts as the trainer's fleet."""


class Note:
    """An event in a world. Equal events have one note, so that worlds are hashed and compared without their fields."""

    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def __str__(self) -> str:
        return str(self.event)


_notes: dict[Any, Note] = {}


def note(event: Any) -> Note:
    """The one note of this event."""
    return _notes.get(event) or _notes.setdefault(event, Note(event))


Queue = tuple[Note, ...]


class Engine(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """`core` numbers a state of the real core; `inbox` is what it has not read of the refit stream.

    `ops` are operations in the order in which the core asked for them; only the first one runs. `lease` is the epoch
    that the last reading of the registers confirmed, 0 when it confirmed none or is too old. `frozen`: generation is
    paused, and what runs is held still.
    """

    core: int
    boot: int = 1
    inbox: Queue = ()
    ops: tuple[Any, ...] = ()
    receiving: bool = False
    weights: int = DUMMY
    lease: int = 0
    frozen: bool = False
    given_up: Any = None


class Gate(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """`inboxes`: what it has not read, of the coordinator, of each engine, of itself."""

    core: int
    boot: int = 1
    inboxes: tuple[Queue, ...] = ()


class Call(msgspec.Struct, frozen=True, cache_hash=True, gc=False, order=True):
    """A request on its way to an engine (`net`), running there (`run`), or answered (`ok`, `cut`, `infra`).

    `number` is the gateway's, 0 once nobody waits for the answer. `sampled`: the versions that its tokens are from.
    """

    place: str
    number: int
    engine: int
    boot: int
    epoch: int
    version: int
    aborting: bool = False
    sampled: tuple[int, ...] = ()


class Trainer(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """`first` is the oldest version of this boot, `version` the newest; `sending`: the epoch being broadcast, or 0."""

    boot: int = 1
    first: int = 0
    version: int = 0
    sending: int = 0
    inbox: Queue = ()


class History(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """What the checks need of the past.

    `requested` and `committed` are the store's registers. `started`: who the newest transfer was started for; `loads`:
    who holds the newest epoch's weights, whole; `sources`: (version, engine, boot) of every commit; `barred`: who was
    quarantined since its last commit.
    """

    requested: int = 0
    committed: int = 0
    version: int = -1
    started: frozenset[Member] = frozenset()
    loads: frozenset[Member] = frozenset()
    members: frozenset[Member] = frozenset()
    sources: frozenset[tuple[int, str, int]] = frozenset()
    barred: frozenset[Member] = frozenset()


class World(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """`buffer` numbers a state of the buffer. `writes`: the epoch on its way to disk, or 0.

    `queues`: what the coordinator has not read.
    """

    coordinator: int
    engines: tuple[Engine, ...]
    gate: Gate
    buffer: int
    queues: tuple[Queue, ...]
    trainer: Trainer = Trainer()
    calls: tuple[Call, ...] = ()
    writes: int = 0
    faults: int = 0
    steps: int = 0
    """Optimizer steps that may still be made."""
    history: History = History()
    wrong: str = ""


def tell(world: World, sender: int, stream: int, *messages: Any) -> World:
    """Append to what the coordinator will read."""
    index, queues = 2 * sender + stream, world.queues
    return replace(world, queues=(*queues[:index], (*queues[index], *map(note, messages)), *queues[index + 1 :]))


def tell_gate(world: World, inbox: int, *messages: Any) -> World:
    """Append to what the gateway will read."""
    boxes = world.gate.inboxes
    boxes = (*boxes[:inbox], (*boxes[inbox], *map(note, messages)), *boxes[inbox + 1 :])
    return replace(world, gate=replace(world.gate, inboxes=boxes))


def set_engine(world: World, index: int, **changes: Any) -> World:
    return put_engine(world, index, replace(world.engines[index], **changes))


def put_engine(world: World, index: int, engine: Engine) -> World:
    engines = list(world.engines)
    engines[index] = engine
    return replace(world, engines=tuple(engines))


def runs(world: World, index: int) -> bool:
    """Whether a sequence runs on the engine."""
    return any(c.place == "run" and c.engine == index for c in world.calls)


def move_call(world: World, call: Call, **changes: Any) -> World:
    """Change one call."""
    return swap_call(world, call, replace(call, **changes))


def swap_call(world: World, call: Call, other: Call) -> World:
    """Put `other` in the place of one call."""
    rest = list(world.calls)
    rest.remove(call)
    return replace(world, calls=tuple(sorted((*rest, other))))


def orphan(call: Call) -> Call:
    """What is left of a call that nobody waits for: while it runs, that it does."""
    if call.place == "run":
        return Call("run", 0, call.engine, 0, 0, 0)
    return replace(call, number=0, aborting=False)


def drop_call(world: World, call: Call) -> World:
    rest = list(world.calls)
    rest.remove(call)
    return replace(world, calls=tuple(rest))


def end_runs(world: World, index: int, place: str) -> World:
    """Whatever runs on the engine ends; callers that still wait are answered."""
    calls = []
    for call in world.calls:
        if call.place != "run" or call.engine != index:
            calls.append(call)
        elif call.number:
            calls.append(replace(call, place=place))
    return replace(world, calls=tuple(sorted(calls)))
