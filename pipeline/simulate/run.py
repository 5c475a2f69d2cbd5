"""One simulated run from start to end, with seeded faults, and what the checker says of its log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from config.schema import RunConfig
from contracts.envelope import Envelope, decode
from contracts.events import Event, RunStarted
from pipeline.simulate.shells import TrainerSim, shells
from pipeline.simulate.world import Pace, World
from pipeline.verify import Finding, Summary, Verifier


class Faults(msgspec.Struct, frozen=True):
    """How many faults of each kind fall into the first `window_s` seconds; each hits a random actor at some time."""

    kills: int = 0
    pauses: int = 0
    pause_s: tuple[float, float] = (1.0, 60.0)
    window_s: float = 15.0


class Result(msgspec.Struct, frozen=True):
    """`finished`: all steps were trained within the limit. `trained`: the batches that the final weights saw."""

    finished: bool
    seconds: float
    trained: tuple[int, ...]
    findings: tuple[Finding, ...]
    summary: Summary
    world: Any

    def log(self) -> Iterator[Envelope[Event]]:
        """Every event in log order."""
        return (decode(entry.stream, entry.data) for entry in self.world.store.log)

    @property
    def ok(self) -> bool:
        """Finished, nothing broken, and every batch trained once and in order."""
        return self.finished and not self.findings and self.trained == tuple(range(1, len(self.trained) + 1))


def simulate(
    config: RunConfig, seed: int, faults: Faults | None = None, pace: Pace | None = None, limit_s: float = 3600.0
) -> Result:
    """Run `config` on virtual time. Same arguments, same log. Raises `shells.Broken` if a version is mixed."""
    faults = faults or Faults()
    world = World(seed, pace)
    start = world.now()
    for name, shell in shells(config).items():
        world.add(name, shell)
    world.start()
    world.post(RunStarted(config_digest="simulated"), "start")
    _schedule(world, faults)
    trainer = world.actors["trainer"]
    finished = world.run(lambda: trainer.state is not None and trainer.state.phase == "finished", limit_s)
    staleness = 0 if config.sync else config.buffer.max_staleness
    verifier = Verifier(staleness).apply_all(decode(entry.stream, entry.data) for entry in world.store.log)
    assert isinstance(trainer.shell, TrainerSim)
    return Result(
        finished=finished,
        seconds=world.now() - start,
        trained=tuple(trainer.shell.memory),
        findings=tuple(verifier.findings()),
        summary=verifier.summary(),
        world=world,
    )


def _schedule(world: World, faults: Faults) -> None:
    names = list(world.actors)
    for _ in range(faults.kills):
        victim = world.actors[world.random.choice(names)]
        world.later(world.random.uniform(0.0, faults.window_s), victim.kill)
    for _ in range(faults.pauses):
        victim = world.actors[world.random.choice(names)]
        seconds = world.draw(faults.pause_s)
        world.later(
            world.random.uniform(0.0, faults.window_s), lambda victim=victim, seconds=seconds: victim.pause(seconds)
        )
