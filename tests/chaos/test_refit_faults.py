"""Faults at chosen moments of a refit, on virtual time: the run trains on, and no promise is broken.

Every run is the same up to the fault. The checker holds its log to docs/reference/invariants.md (no token of an engine
that was not committed enters a batch), and the simulated servers raise `Broken` when a sequence mixes versions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from actors.refit.fleet import UP
from config.schema import BufferConfig, EngineConfig, LaunchConfig, RefitConfig, RolloutConfig, RunConfig
from contracts.envelope import decode
from contracts.events import RefitCommitted, RefitFailed, RunStarted, kind
from pipeline.simulate.shells import shells
from pipeline.simulate.weights import TrainerSim
from pipeline.simulate.world import World
from pipeline.verify import Verifier

CONFIG = RunConfig(
    steps=4,
    engine=EngineConfig(count=3),
    launch=LaunchConfig(collectors=1),
    buffer=BufferConfig(groups=2, max_staleness=1),
    rollout=RolloutConfig(samples=2, open_groups=4),
    refit=RefitConfig(drain="interrupt"),
)
EPOCH = 2
"""The refit that is struck: the first one that interrupts generation."""
Strike = Callable[[World], None]


def play(strike: Strike | None = None, at: tuple[str, str] | None = None, after_s: float = 0.0) -> World:
    """Run to the end; `strike` comes `after_s` seconds after the event (kind, actor) of `EPOCH`."""
    world = World(7)
    for name, shell in shells(CONFIG).items():
        world.add(name, shell)
    add = world.store.add
    waiting = [at] if at is not None else []

    def added(stream: str, data: bytes) -> str:
        entry = add(stream, data)
        envelope = decode(stream, data)
        here = (kind(envelope.body), envelope.actor)
        if here in waiting and getattr(envelope.body, "epoch", None) == EPOCH:
            waiting.clear()
            struck = strike
            assert struck is not None
            world.later(after_s, lambda: struck(world))
        return entry

    world.store.add = added  # type: ignore[method-assign]
    world.start()
    world.post(RunStarted(config_digest="simulated"), "start")
    trainer = world.actors["trainer"]
    assert world.run(lambda: trainer.state is not None and trainer.state.phase == "finished", 3600.0), world.halted
    assert not waiting, f"no {at} in epoch {EPOCH}"
    findings = Verifier.of(CONFIG).apply_all(decode(e.stream, e.data) for e in world.store.log).findings()
    assert findings == []
    assert isinstance(trainer.shell, TrainerSim)
    assert trainer.shell.memory == [1, 2, 3, 4]
    return world


def events(world: World) -> list[Any]:
    return [decode(entry.stream, entry.data).body for entry in world.store.log]


@cache
def boundaries() -> tuple[tuple[str, str], ...]:
    """Every event of the epoch when nothing goes wrong."""
    found = []
    for entry in play().store.log:
        envelope = decode(entry.stream, entry.data)
        if entry.stream == "refit" and getattr(envelope.body, "epoch", None) == EPOCH:
            found.append((kind(envelope.body), envelope.actor))
    return tuple(dict.fromkeys(found))


def kill(actor: str) -> Strike:
    return lambda world: world.actors[actor].kill()


def test_an_epoch_has_all_the_events_that_are_struck_below() -> None:
    kinds = {name for name, _ in boundaries()}
    assert kinds == {
        "refit.requested",
        "gate.closed",
        "engine.drained",
        "transfer.offered",
        "transfer.started",
        "transfer.finished",
        "engine.loaded",
        "refit.committed",
    }
    assert len(boundaries()) == 12


@pytest.mark.parametrize("number", range(12))
def test_the_coordinator_is_killed_at_every_boundary_of_the_barrier(number: int) -> None:
    world = play(kill("refit"), boundaries()[number])
    assert max(e.epoch for e in events(world) if isinstance(e, RefitCommitted)) > EPOCH


@pytest.mark.parametrize("number", range(12))
def test_a_second_coordinator_takes_over_while_the_first_still_runs(number: int) -> None:
    play(lambda world: world.actors["refit"].haunt(), boundaries()[number])


def test_the_trainer_is_killed_in_the_middle_of_a_broadcast() -> None:
    world = play(kill("trainer"), ("transfer.started", "refit"), after_s=0.008)
    assert EPOCH in [e.epoch for e in events(world) if isinstance(e, RefitFailed)]


@pytest.mark.parametrize(
    ("at", "after_s"),
    [
        (("refit.requested", "refit"), 0.002),
        (("engine.drained", "engine-1"), 0.0),
        (("transfer.started", "refit"), 0.008),
        (("engine.loaded", "engine-1"), 0.0),
        (("transfer.finished", "trainer"), 0.0),
        (("refit.committed", "refit"), 0.0),
    ],
    ids=["draining", "drained", "loading", "loaded", "before the commit", "resuming"],
)
@pytest.mark.parametrize("how", ["KILL", "STOP"])
def test_an_engine_is_killed_or_stopped_at_any_stage(how: str, at: tuple[str, str], after_s: float) -> None:
    def strike(world: World) -> None:
        if how == "KILL":
            world.actors["engine-1"].kill()
        else:
            world.actors["engine-1"].pause(45.0)

    world = play(strike, at, after_s)
    assert max(e.epoch for e in events(world) if isinstance(e, RefitCommitted)) > EPOCH


@pytest.mark.parametrize("at", ["refit.requested", "transfer.started", "engine.loaded"])
def test_the_store_is_restarted_in_the_middle_of_the_barrier(at: str) -> None:
    actor = "engine-1" if at == "engine.loaded" else "refit"
    play(lambda world: world.outage(3.0), (at, actor))


def test_a_group_is_formed_with_an_absent_rank() -> None:
    """A new member makes a new group; one of its ranks never comes to the meeting."""
    stopped: list[float] = []

    def strike(world: World) -> None:
        world.actors["engine-0"].kill()  # its successor's epoch has a fresh group
        world.later(2.0, lambda: wait(world))

    def wait(world: World) -> None:
        barrier = world.actors["refit"].state and world.actors["refit"].state.barrier
        if barrier is not None and barrier.started_at is None and not stopped:
            stopped.append(world.now())
            world.actors["engine-2"].pause(90.0)
        elif not stopped:
            world.later(0.001, lambda: wait(world))

    world = play(strike, ("refit.requested", "refit"))
    assert stopped
    state = world.actors["refit"].state
    assert any(e.health in UP for e in state.engines.values())
