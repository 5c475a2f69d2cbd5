"""What goes wrong in a simulated run, and when: drawn from the world's generator, so that a seed names a schedule."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.simulate.process import SimActor, Trap
from pipeline.simulate.rebuilt import rebuilt
from pipeline.simulate.serving import EngineSim
from pipeline.simulate.shells import RefitSim
from pipeline.simulate.store import MemoryStore
from pipeline.simulate.weights import TrainerSim

if TYPE_CHECKING:
    from pipeline.simulate.world import World

TRAPS: tuple[Trap, ...] = ("unread", "uncommitted", "unperformed", "unanswered")
LOOK_S = 0.5
"""How often the driver looks whether the store still has what it read from it."""


class Faults(msgspec.Struct, frozen=True):
    """How many faults of each kind fall into the first `window_s` seconds; each hits a random victim at some time.

    `kills`: kill -9 of an actor. `pauses`: SIGSTOP of an actor, which goes on with what it believed. `ghosts`: an actor
    is replaced while it still runs. `traps`: an actor's next commit ends badly, see `Trap`. `deaf`: what the store has
    for an actor arrives late. `redeliveries`: a work entry is handed out twice more. `outages`: the store is killed and
    comes back whole. `leaps`: an actor's monotonic clock jumps ahead. `skew_s`: every start of a process finds the wall
    clock off by up to this much. `blackouts`: everything is killed at once, the last `lost_s` seconds at most of the
    store are lost (0: appendfsync always), and the run is resumed. `rewinds`: the same loss while the actors live on.
    `wipes`: everything is killed and the store is lost altogether; the resume rebuilds it from the archive, which lacks
    up to `behind` of the last events and of each journal's records. `tears`: the trainer is killed, and its newest
    checkpoint is found damaged.
    """

    kills: int = 0
    pauses: int = 0
    pause_s: tuple[float, float] = (1.0, 60.0)
    ghosts: int = 0
    traps: int = 0
    deaf: int = 0
    deaf_s: tuple[float, float] = (0.05, 5.0)
    redeliveries: int = 0
    outages: int = 0
    outage_s: tuple[float, float] = (0.1, 20.0)
    leaps: int = 0
    leap_s: tuple[float, float] = (0.1, 30.0)
    skew_s: float = 0.0
    blackouts: int = 0
    rewinds: int = 0
    lost_s: float = 0.0
    wipes: int = 0
    behind: int = 30
    tears: int = 0
    window_s: float = 15.0


def schedule(world: World, faults: Faults) -> None:
    """Put every fault on the world's calendar."""
    world.skew_s = faults.skew_s
    names = list(world.actors)

    def victim() -> SimActor:
        return world.actors[world.random.choice(names)]

    def at(work: Any) -> None:
        world.later(world.random.uniform(0.0, faults.window_s), work)

    for _ in range(faults.kills):
        at(victim().kill)
    for _ in range(faults.pauses):
        at(partial(victim().pause, world.draw(faults.pause_s)))
    for _ in range(faults.ghosts):
        at(victim().haunt)
    for _ in range(faults.traps):
        at(partial(victim().set_trap, world.random.choice(TRAPS)))
    for _ in range(faults.deaf):
        at(partial(victim().deafen, world.draw(faults.deaf_s)))
    for _ in range(faults.leaps):
        at(partial(victim().leap, world.draw(faults.leap_s)))
    for _ in range(faults.redeliveries):
        at(partial(_redeliver, world))
    for _ in range(faults.outages):
        at(partial(world.outage, world.draw(faults.outage_s)))
    for _ in range(faults.tears):
        at(partial(_tear, world))
    for _ in range(faults.wipes):
        at(partial(_wipe, world, faults.behind, world.draw(faults.outage_s)))
    for strike in (*[_blackout] * faults.blackouts, *[_rewind] * faults.rewinds):
        _lose(world, faults, strike)


def _tear(world: World) -> None:
    trainer = world.actors["trainer"]
    if trainer.machine is not None and isinstance(trainer.shell, TrainerSim):
        trainer.shell.damage()
        trainer.kill()


def _redeliver(world: World) -> None:
    """Hand a pending entry to a reader of its stream, and a little later to another, or the same, again."""
    for seconds in (0.0, world.random.uniform(0.0, 0.5)):
        world.later(seconds, lambda: _once_more(world))


def _once_more(world: World) -> None:
    pending = [(name, entry) for name, stream in world.store.streams.items() for entry in stream.pending]
    if pending and not world.down:
        stream, entry = world.random.choice(pending)
        readers = [actor for actor in world.actors.values() if stream in actor.core.work]
        world.random.choice(readers).redeliver(stream, entry)


def _lose(world: World, faults: Faults, strike: Any) -> None:
    """The store that comes back is the one of some moment before."""
    lost = world.random.uniform(0.0, faults.lost_s)
    at = world.random.uniform(max(lost, faults.window_s / 4), faults.window_s)
    seconds = world.draw(faults.outage_s)
    kept: list[MemoryStore] = []
    world.later(at - lost, lambda: kept.append(world.store.copy()))
    world.later(at, lambda: strike(world, kept[0] if lost else world.store.copy(), seconds))


def _blackout(world: World, earlier: MemoryStore, seconds: float) -> None:
    """The machine loses power and is started again; then `pipeline up --resume`."""
    for actor in world.actors.values():
        actor.perish()
    _resume(world, earlier, seconds)


def _wipe(world: World, behind: int, seconds: float) -> None:
    """The machine is lost but for its run directory; then `pipeline up --resume`."""
    for actor in world.actors.values():
        actor.perish()
    _resume(world, rebuilt(world, behind), seconds)


def _resume(world: World, store: MemoryStore, seconds: float) -> None:
    world.lose(store, seconds)
    repair(world)
    for actor in world.actors.values():
        world.later(seconds + world.draw(world.pace.restart), actor.boot_again())


def repair(world: World) -> None:
    """What a resume puts right before anything starts: epochs that were used, checkpoints that the log knows not of."""
    for actor in world.actors.values():
        if isinstance(actor.shell, RefitSim):
            epochs = world.store.registers
            epochs["epoch"] = max(epochs["epoch"], actor.shell.high)
        if isinstance(actor.shell, TrainerSim):
            actor.shell.set_aside(world.versions())
        if isinstance(actor.shell, EngineSim):
            actor.shell.version = None


def _rewind(world: World, earlier: MemoryStore, seconds: float) -> None:
    """The store lost what it had acknowledged, under actors that live: whoever is ahead of it halts the run."""
    known = len(world.store.log), world.store.log[-1].data
    world.lose(earlier, seconds)

    def look() -> None:
        number, data = known
        if len(world.store.log) < number or world.store.log[number - 1].data != data:
            world.halt(f"the store went back: entry {number}-0 was read from it before and is gone")

    world.later(seconds + world.random.uniform(0.0, LOOK_S), look)
