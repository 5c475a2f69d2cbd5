"""Seeded schedules of faults, and the command that runs any number of them.

    python -m tests.chaos.schedules --seeds 100            both modes
    python -m tests.chaos.schedules --seed 17 --mode safety  one of them again, and its log with --out DIR

Safety: faults of every kind never stop, and at any moment no promise may be broken, whether or not the run gets
anywhere. Liveness: the faults stop after `CALM_S`, and the run must then end by itself with every step trained; clocks
stay as far apart as they came, which is less than a refit's deadline. The
promises are those of `pipeline verify`, besides what the simulated components watch themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from config.schema import (
    BufferConfig,
    CheckpointConfig,
    EngineConfig,
    GatewayConfig,
    LaunchConfig,
    RefitConfig,
    RolloutConfig,
    RunConfig,
)
from contracts.events import ActorFailed, DrainPolicy
from pipeline.simulate import archive
from pipeline.simulate.faults import Faults
from pipeline.simulate.process import Broken
from pipeline.simulate.run import Result, simulate

CALM_S = 15.0
"""Liveness: virtual seconds after which nothing goes wrong any more."""
LIMIT_S = 3600.0
"""Liveness: virtual time for the rest."""
STORM_S = 20.0
"""Safety: virtual seconds of faults, and of the run."""
MODES = ("safety", "liveness")


DRAINS: tuple[DrainPolicy, ...] = ("finish", "interrupt", "in_flight")
DEADLINE_S = 6.0
"""Of a refit: shorter than many a pause, so that barriers go on without whoever is stopped."""
REQUEST_S = 60.0
STEPS = {"safety": 60, "liveness": 20}
"""More in a storm than it lets through."""


def config(seed: int, steps: int = 12) -> RunConfig:
    """A small run; which policies it uses depends on the seed."""
    return RunConfig(
        steps=steps,
        engine=EngineConfig(count=3),
        launch=LaunchConfig(collectors=2),
        checkpoint=CheckpointConfig(every=1 + seed % 3),
        buffer=BufferConfig(
            groups=4, max_staleness=seed % 3, sampler=("fifo", "in_order", "ready_first")[seed // 3 % 3]
        ),
        rollout=RolloutConfig(samples=4, open_groups=8),
        refit=RefitConfig(drain=DRAINS[seed // 2 % 3], deadline_s=DEADLINE_S, drain_deadline_s=3.0),
        gateway=GatewayConfig(request_deadline_s=REQUEST_S),
    )


def faults(seed: int, mode: str) -> Faults:
    """Some of every kind, more of some; a few schedules lose the last second of the store under live actors."""
    random = Random(f"{mode}/{seed}")
    rewinds = 1 if seed % 10 == 9 else 0
    return Faults(
        kills=random.randint(0, 15),
        pauses=random.randint(0, 4),
        pause_s=(0.2, 12.0),
        outage_s=(0.05, 4.0),
        ghosts=random.randint(0, 4),
        traps=random.randint(0, 20),
        deaf=random.randint(0, 4),
        redeliveries=random.randint(0, 8),
        outages=random.randint(0, 2),
        leaps=random.randint(0, 2),
        leap_s=(0.1, 1.0) if mode == "liveness" else (0.1, 30.0),
        skew_s=random.choice((0.0, 0.1, 1.0)),
        blackouts=0 if rewinds else random.choice((0, 0, 1, 2)),
        rewinds=rewinds,
        wipes=0 if rewinds else random.choice((0, 0, 1)),
        lost_s=1.0 if rewinds else random.choice((0.0, 0.5, 1.0)),
        tears=random.choice((0, 0, 1)),
        window_s=CALM_S if mode == "liveness" else STORM_S,
    )


class Outcome(msgspec.Struct, frozen=True):
    """Of one schedule. `problem` is None when it kept what its mode asks for; `halted` runs said why they ended."""

    seed: int
    mode: str
    problem: str | None
    halted: bool
    trajectories: int
    steps: int


def play(seed: int, mode: str) -> tuple[Result, str | None]:
    """Run one schedule; answers what it broke, None for nothing. Raises `Broken`."""
    limit_s = LIMIT_S if mode == "liveness" else STORM_S
    planned = faults(seed, mode)
    result = simulate(config(seed, STEPS[mode]), seed, planned, limit_s=limit_s)
    if result.halted is not None:
        lossy = planned.rewinds and planned.lost_s
        return result, None if lossy else f"halted without a loss: {result.halted}"
    if not result.safe:
        return result, f"broken: {[f.rule + ': ' + f.message for f in result.findings[:3]]}, trained {result.trained}"
    if mode == "liveness" and not result.finished:
        if planned.wipes and _said_fatal(result):
            return result, None
        return result, f"not finished after {result.seconds:.0f} s, at step {result.summary.steps}"
    return result, None


def _said_fatal(result: Result) -> bool:
    """An archive that ends more checkpoints ago than are kept: the run says so and ends."""
    return any(isinstance(e.body, ActorFailed) and e.body.fatal for e in result.log())


def outcome(job: tuple[int, str]) -> Outcome:
    seed, mode = job
    try:
        result, problem = play(seed, mode)
    except Broken as broken:
        return Outcome(seed, mode, f"Broken: {broken}", False, 0, 0)
    halted = result.halted is not None
    return Outcome(seed, mode, problem, halted, result.summary.trajectories, result.summary.steps)


def replay(seed: int, mode: str) -> str:
    """The command that runs this schedule again."""
    return f"python -m tests.chaos.schedules --seed {seed} --mode {mode}"


def run(jobs: list[tuple[int, str]], workers: int) -> Iterator[Outcome]:
    if workers == 1:
        yield from map(outcome, jobs)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(outcome, jobs)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Seeded schedules of faults on virtual time.")
    parser.add_argument("--seeds", type=int, default=100, help="how many, in each mode")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--mode", choices=MODES, help="only this one")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--out", type=Path, help="with --seed and --mode: directory for the log, in the archive's format"
    )
    given: Any = parser.parse_args(words)
    seeds = range(given.first, given.first + given.seeds) if given.seed is None else [given.seed]
    modes = MODES if given.mode is None else (given.mode,)
    if given.out is not None and given.seed is not None and given.mode is not None:
        result, _ = play(given.seed, given.mode)
        archive.write(result.world, config(given.seed, STEPS[given.mode]), given.out)
    failed = halted = total = trajectories = 0
    for done in run([(seed, mode) for mode in modes for seed in seeds], given.jobs):
        total, halted, trajectories = total + 1, halted + done.halted, trajectories + done.trajectories
        if done.problem is not None:
            failed += 1
            print(f"seed {done.seed}, {done.mode}: {done.problem}\n  again: {replay(done.seed, done.mode)}", flush=True)
    print(f"schedules={total} failed={failed} halted={halted} trajectories={trajectories}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
