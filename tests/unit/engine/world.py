"""A small world around the engine's core: store, coordinator, trainer, server and callers, all as slow or as quick as
they like. `moves` lists everything that may happen next; `check` and the moves themselves raise `Violation`.

With `ordered=False` an event once published may be delivered at any time, again and again, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from actors.engine.core import EngineCore
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
    Receive,
    Resume,
    Resumed,
    ServerDead,
    ServerReady,
    StartServer,
    Watch,
)
from config.schema import EngineConfig, RefitConfig
from contracts import plan
from contracts.core import Booted, Delivered, Emit, Ref
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import (
    Bucket,
    EngineDrained,
    EngineLoaded,
    EngineQuarantined,
    EngineReady,
    Member,
    PayloadRef,
    Rank,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    TensorSpec,
    TransferOffered,
    TransferStarted,
)

ME = "engine-0"
BUCKETS = (Bucket((TensorSpec("w", "float32", (2,)),), 8),)
PLAN = PayloadRef("plan:1:1", len(plan.encode(BUCKETS)))
DUMMY, PARTIAL = -1, -2
"""Weights of a server that was just started, and of one that received some buckets."""


class Violation(AssertionError):
    """A promise was broken."""


def core() -> EngineCore:
    return EngineCore(ME, EngineConfig(lease_s=10.0, restarts=1000), RefitConfig())


def delivered(event: Any) -> Delivered:
    stream = STREAM_OF[type(event)]
    envelope = Envelope(
        id="refit:1.0", run="r", stream=stream, actor="refit", boot=1, epoch=0, wall_ns=0, mono_ns=0, body=event
    )
    return Delivered(Ref(stream, "1-0"), envelope)


def requested(epoch: int, *boots: int, version: int | None = None, drain: str = "finish") -> RefitRequested:
    return RefitRequested(
        epoch=epoch,
        version=version if version is not None else 10 * epoch,
        step=epoch,
        engines=tuple(Member(ME, boot) for boot in boots),
        gateways=(),
        drain=drain,  # type: ignore[arg-type]
        deadline_at=60.0,
    )


def offered(epoch: int, version: int | None = None, trainer_boot: int = 1, port: int = 5000) -> TransferOffered:
    return TransferOffered(
        epoch=epoch,
        version=version if version is not None else 10 * epoch,
        trainer_boot=trainer_boot,
        address="127.0.0.1",
        port=port,
        bytes=8,
        digest="d",
        payload=PLAN,
    )


def started(epoch: int, *boots: int, group: str = "g", fresh: bool = True) -> TransferStarted:
    members = tuple(Rank(ME, boot, 1, 1) for boot in boots)
    return TransferStarted(epoch=epoch, version=10 * epoch, group=group, fresh=fresh, members=members, world_size=2)


def committed(epoch: int, *boots: int, version: int | None = None) -> RefitCommitted:
    return RefitCommitted(
        epoch=epoch,
        version=version if version is not None else 10 * epoch,
        step=epoch,
        engines=tuple(Member(ME, boot) for boot in boots),
        world_size=2,
        pause_s=1.0,
        drain_s=0.5,
        transfer_s=0.5,
        bytes=8,
    )


def quarantined(epoch: int, boot: int, engine: str = ME) -> EngineQuarantined:
    return EngineQuarantined(epoch=epoch, engine=engine, boot=boot, reason="r")


def failed(epoch: int) -> RefitFailed:
    return RefitFailed(epoch=epoch, version=10 * epoch, phase="drain", reason="r")


class World(msgspec.Struct, frozen=True):
    """`log` holds what was published, `inbox` results of this boot's commands, `seen` is the cursor of the log."""

    engine: EngineState
    boot: int = 1
    log: tuple[Any, ...] = ()
    seen: int = 0
    inbox: frozenset[Any] = frozenset()
    work: tuple[Any, ...] = ()
    """Operations in the order in which the core asked for them; only the first one runs."""
    receiving: bool = False
    weights: int = DUMMY
    running: tuple[int, ...] = ()
    """Version that each running sequence is stamped with."""
    newest: int = 0
    committed: int = 0
    listed: int | None = None
    """Boot that the newest epoch counts on."""
    open: bool = False
    """The newest epoch has neither been committed nor failed."""
    transferring: bool = False
    group: str = ""
    """Group that the last commit left behind."""
    lease: Lease = Lease(0, 0, 0.0)
    fresh: bool = False
    """The reading is younger than a lease."""


class Move(msgspec.Struct, frozen=True):
    """Something that may happen: `apply()` is the world after it, or raises `Violation`."""

    label: str
    apply: Callable[[], World]
    fault: bool = False
    """A fault, or at least haste or delay."""


class Moves:
    """What may happen in a world with this core, up to `epochs` refits and `boots` boots."""

    def __init__(self, core: EngineCore, epochs: int, boots: int, ordered: bool) -> None:
        self.core = core
        self.epochs = epochs
        self.boots = boots
        self.ordered = ordered

    def begin(self) -> World:
        return self._feed(World(self.core.initial()), Booted(1))

    def __call__(self, world: World) -> Iterator[Move]:
        yield from self._coordinator(world)
        yield from self._deliveries(world)
        yield from self._operations(world)
        yield from self._store(world)
        yield from self._callers(world)
        if world.boot < self.boots:
            yield Move("the process is restarted", partial(self._restart, world), fault=True)

    def _restart(self, world: World) -> World:
        boot = world.boot + 1
        gone = replace(world, boot=boot, inbox=frozenset(), work=(), receiving=False, weights=DUMMY, running=())
        return self._feed(gone, Booted(boot))

    def _feed(self, world: World, input: Any) -> World:
        after, commands = self.core.step(world.engine, input, 0.0)
        if after.epoch < world.engine.epoch:
            raise Violation(f"S3: the epoch fell from {world.engine.epoch} to {after.epoch}")
        world = replace(world, engine=after)
        for command in commands:
            world = _obey(world, command)
        check(world)
        return world

    # --- the coordinator and the trainer -----------------------------------------------------------------------------

    def _coordinator(self, world: World) -> Iterator[Move]:
        ready = max((e.boot for e in world.log if isinstance(e, EngineReady)), default=None)
        last = next((e for e in reversed(world.log) if isinstance(e, RefitCommitted)), None)
        serves = last is not None and Member(ME, world.boot) in last.engines
        if world.newest < self.epochs:
            epoch = world.newest + 1
            for boot in {ready} if serves else {None, ready}:  # who serves is never passed over
                event = requested(epoch) if boot is None else requested(epoch, boot)
                began = replace(world, newest=epoch, listed=boot, open=True, transferring=False)
                # the trainer's offer comes in any order with what others say, but always behind the request
                after = partial(_publish, began, event, offered(epoch))
                yield Move(f"request {epoch} with boot {boot}", after, fault=world.open or boot != ready)
        if world.open:
            yield from self._epoch(world, world.newest, world.listed)

    def _epoch(self, world: World, epoch: int, boot: int | None) -> Iterator[Move]:
        ended = replace(world, open=False)
        told = {type(e) for e in world.log if isinstance(e, EngineDrained | EngineLoaded) and _says(e, epoch, boot)}
        yield Move(f"epoch {epoch} fails", partial(_publish, ended, failed(epoch)), fault=True)
        if not world.transferring:
            under_way = replace(world, transferring=True, group="")
            if boot is not None and EngineDrained in told:
                fresh = started(epoch, boot, group=f"g{epoch}")
                yield Move(f"start {epoch}, new group", partial(_publish, under_way, fresh))
                if world.group:
                    again = started(epoch, boot, group=world.group, fresh=False)
                    yield Move(f"start {epoch}, old group", partial(_publish, under_way, again))
            others = partial(_publish, under_way, started(epoch))
            yield Move(f"start {epoch} with others", others, fault=boot is not None)
        elif boot is not None and EngineLoaded in told:
            group = next(e.group for e in world.log if isinstance(e, TransferStarted) and e.epoch == epoch)
            done = replace(ended, committed=epoch, group=group)
            yield Move(f"commit {epoch}", partial(_publish, done, committed(epoch, boot)))
        if boot is not None:
            out = replace(world, listed=None)
            # at the drain deadline, which no lease taken before the request outlasts
            out = out if world.lease.newest_epoch == epoch else replace(out, fresh=False, running=())
            yield Move(f"expel boot {boot}", partial(_publish, out, quarantined(epoch, boot)), fault=True)
        elif world.transferring:
            without = replace(ended, committed=epoch)
            yield Move(f"commit {epoch} without it", partial(_publish, without, committed(epoch)))

    # --- what reaches the core ---------------------------------------------------------------------------------------

    def _deliveries(self, world: World) -> Iterator[Move]:
        for at, event in enumerate(world.log):
            if at == world.seen:
                after = partial(self._feed, replace(world, seen=at + 1), delivered(event))
                yield Move(f"<- {event}", after)
            elif not self.ordered:
                yield Move(f"<- {event}", partial(self._feed, world, delivered(event)), fault=True)
        for result in sorted(world.inbox, key=repr):
            taken = partial(self._feed, replace(world, inbox=world.inbox - {result}), result)
            yield Move(f"<- {result}", taken)
            if not self.ordered:
                yield Move(f"<- {result}, again later", partial(self._feed, world, result), fault=True)

    # --- the shell and the server ------------------------------------------------------------------------------------

    def _operations(self, world: World) -> Iterator[Move]:
        if not world.work:
            return
        command, rest = world.work[0], world.work[1:]
        match command:
            case Drain():
                late = DrainFailed(command.epoch, "e", "r")
                yield Move("the drain fails", partial(_finish, world, rest, late), fault=True)
                if not world.running:
                    yield Move("the drain succeeds", partial(_finish, world, rest, Drained(command.epoch, 0.0)))
            case Receive() if not world.receiving:
                yield Move("buckets arrive", partial(_receive, world))
            case Receive():
                whole = replace(world, weights=command.version)
                yield Move("the last one arrives", partial(_finish, whole, rest, Loaded(command.epoch, "d", 0.0)))
                broken = LoadFailed(command.epoch, "receive", "e", "r")
                yield Move("the transfer breaks", partial(_finish, world, rest, broken), fault=True)
            case Resume():
                yield Move("generation goes on", partial(_finish, world, rest, Resumed(command.epoch)))
                yield Move("it does not go on", partial(_finish, world, rest, ServerDead("r")), fault=True)

    def _store(self, world: World) -> Iterator[Move]:
        if world.engine.mode not in ("resuming", *SERVED):  # no other mode looks at it
            return
        reading = replace(world, lease=Lease(world.committed, world.newest, 0.0), fresh=True)
        if reading.lease.confirms(world.engine.epoch) and world.engine.mode == "lapsed":
            reading = replace(reading, inbox=reading.inbox | {LeaseRenewed(world.engine.epoch)})
        if reading != world:
            yield Move("the registers are read", lambda: reading)
        if world.fresh:
            old = replace(world, fresh=False)
            if world.engine.mode in SERVED:
                old = replace(old, running=(), inbox=old.inbox | {LeaseLapsed(world.engine.epoch)})
            yield Move("the reading grows old", lambda: old, fault=True)

    def _callers(self, world: World) -> Iterator[Move]:
        if world.running:
            yield Move("a sequence ends", lambda: replace(world, running=()))
            return
        for epoch in range(1, world.newest + 1):
            if self.core.admits(world.engine, epoch, world.lease, 0.0 if world.fresh else self.core.lease_s):
                yield Move(f"a sequence of epoch {epoch} begins", partial(_admit, world, epoch))


def _says(event: Any, epoch: int, boot: int | None) -> bool:
    return event.epoch == epoch and event.boot == boot


def _receive(world: World) -> World:
    if world.running:
        raise Violation(f"S1: weights arrive while sequences of {world.running} run")
    return replace(world, receiving=True, weights=PARTIAL)


def _admit(world: World, epoch: int) -> World:
    version = world.engine.version
    commit = next((e for e in world.log if isinstance(e, RefitCommitted) and e.epoch == world.committed), None)
    if commit is None or epoch != world.committed:
        raise Violation(f"S2: admitted under epoch {epoch}, committed is {world.committed}")
    if Member(ME, world.boot) not in commit.engines or version != commit.version:
        raise Violation(f"S2: boot {world.boot} serves version {version}, the commit says {commit}")
    if world.weights != version:
        raise Violation(f"S4: version {version} is served from weights {world.weights}")
    return replace(world, running=(world.weights,))


def _publish(world: World, *events: Any) -> World:
    return replace(world, log=(*world.log, *events))


def _finish(world: World, rest: tuple[Any, ...], result: Any) -> World:
    return replace(world, work=rest, receiving=False, inbox=world.inbox | {result})


def _obey(world: World, command: Any) -> World:
    match command:
        case Emit():
            if not isinstance(command.event, EngineReady | EngineDrained | EngineLoaded) or command.event in world.log:
                return world
            if command.event.boot != world.boot:
                raise Violation(f"S3: boot {world.boot} says {command.event}")
            return _publish(world, command.event)
        case Watch() | Exit():
            return world
        case StartServer():
            return replace(world, inbox=world.inbox | {ServerReady("u", 1, 0.0)})
        case Abandon():
            kept = tuple(op for op in world.work if op.epoch > command.epoch)
            return replace(world, work=kept, receiving=world.receiving and kept[:1] == world.work[:1], running=())
        case _:
            return replace(world, work=(*world.work, command))


def check(world: World) -> None:
    """What holds in every world."""
    state = world.engine
    if (state.part is not None) != (state.mode in BARRIER):
        raise Violation(f"a part in the epoch while {state.mode}")
    if (state.version is not None) != (state.mode in SERVED):
        raise Violation(f"version {state.version} while {state.mode}")
    if any(version != world.weights for version in world.running):
        raise Violation(f"S1: sequences of {world.running} run on weights {world.weights}")
    if state.mode in SERVED and state.version != world.weights:
        raise Violation(f"S4: serves {state.version} from weights {world.weights}")
    if sum(op.epoch == state.epoch for op in world.work) > 1 and not any(isinstance(op, Resume) for op in world.work):
        raise Violation(f"two operations for one epoch: {world.work}")
