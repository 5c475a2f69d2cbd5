"""One simulated run from start to end, with seeded faults, and what the checker says of its log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from config.schema import RunConfig
from contracts.envelope import Envelope, decode
from contracts.events import Event, RunStarted
from pipeline.simulate import faults as chaos
from pipeline.simulate.faults import Faults
from pipeline.simulate.shells import shells
from pipeline.simulate.weights import TrainerSim
from pipeline.simulate.world import Pace, World
from pipeline.verify import Finding, Summary, Verifier


class Result(msgspec.Struct, frozen=True):
    """`finished`: all steps were trained within the limit. `trained`: the batches that the final weights saw.

    `halted`: why the run ended with an error. `seconds` are virtual, `cpu_s` is the time that this process computed.
    """

    finished: bool
    halted: str | None
    seconds: float
    cpu_s: float
    trained: tuple[int, ...]
    findings: tuple[Finding, ...]
    summary: Summary
    world: Any

    def log(self) -> Iterator[Envelope[Event]]:
        """Every event in log order."""
        return (decode(entry.stream, entry.data) for entry in self.world.store.log)

    @property
    def safe(self) -> bool:
        """Nothing broken so far, and every batch trained once and in order; finished or not."""
        return not self.findings and self.trained == tuple(range(1, len(self.trained) + 1))

    @property
    def ok(self) -> bool:
        """Safe, and finished."""
        return self.finished and self.safe

    @property
    def cpu_ms_per_trajectory(self) -> float:
        """Of everything: cores, journals, encoding, the store, and the simulation itself."""
        return 1000 * self.cpu_s / max(1, self.summary.trajectories)

    @property
    def events_per_cpu_s(self) -> float:
        return self.summary.events / self.cpu_s


def simulate(
    config: RunConfig, seed: int, faults: Faults | None = None, pace: Pace | None = None, limit_s: float = 3600.0
) -> Result:
    """Run `config` on virtual time. Same arguments, same log.

    Raises `pipeline.simulate.process.Broken` when a version is mixed or a fenced process commits.
    """
    begun = time.process_time()
    world = World(seed, pace)
    start = world.now()
    for name, shell in shells(config).items():
        world.add(name, shell)
    world.start()
    world.post(RunStarted(config_digest="simulated"), "start")
    chaos.schedule(world, faults or Faults())
    trainer = world.actors["trainer"]
    finished = world.run(lambda: trainer.state is not None and trainer.state.phase == "finished", limit_s)
    cpu_s = time.process_time() - begun
    verifier = Verifier.of(config).apply_all(decode(entry.stream, entry.data) for entry in world.store.log)
    assert isinstance(trainer.shell, TrainerSim)
    return Result(
        finished=finished,
        halted=world.halted,
        seconds=world.now() - start,
        cpu_s=cpu_s,
        trained=tuple(trainer.shell.memory),
        findings=tuple(verifier.findings()),
        summary=verifier.summary(),
        world=world,
    )
