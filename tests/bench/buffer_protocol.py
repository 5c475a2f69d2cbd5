"""CPU of the whole control plane per trajectory: all cores, envelopes, journals and commits, on virtual time.

Runs the protocol with `IN_FLIGHT` rollouts in flight on 32 engines and 64 collectors, without models, HTTP or Redis.
Prints milliseconds of CPU per trajectory: of each actor's turns (reading, stepping, committing), of all, and with the
simulation itself. Run as `python -m tests.bench.buffer_protocol [STEPS]`.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Any

from config.schema import BufferConfig, EngineConfig, LaunchConfig, RolloutConfig, RunConfig
from contracts.envelope import decode
from contracts.events import TrajectoryFinished
from pipeline.simulate.process import SimActor
from pipeline.simulate.run import simulate

GROUPS, SAMPLES, STALENESS = 32, 8, 1
IN_FLIGHT = GROUPS * (1 + STALENESS) * SAMPLES
BOUND_MS = 5.0


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    spent: dict[str, int] = defaultdict(int)
    turn = SimActor._turn

    def timed(actor: Any) -> None:
        started = time.thread_time_ns()
        try:
            turn(actor)
        finally:
            spent[actor.name.partition("-")[0]] += time.thread_time_ns() - started

    SimActor._turn = timed  # type: ignore[method-assign]
    config = RunConfig(
        steps=steps,
        engine=EngineConfig(count=32),
        launch=LaunchConfig(collectors=64),
        buffer=BufferConfig(groups=GROUPS, max_staleness=STALENESS),
        rollout=RolloutConfig(samples=SAMPLES),
    )
    started = time.thread_time_ns()
    result = simulate(config, 0)
    total = time.thread_time_ns() - started
    assert result.ok
    bodies = [decode(entry.stream, entry.data).body for entry in result.world.store.log]
    count = sum(isinstance(body, TrajectoryFinished) for body in bodies)
    print(f"{count} trajectories, {IN_FLIGHT} in flight, {len(bodies) / count:.1f} events a trajectory")
    for name, nanoseconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"{name:<10} {nanoseconds / count / 1e6:>8.3f} ms")
    plane = sum(spent.values()) / count / 1e6
    print(f"{'all actors':<10} {plane:>8.3f} ms, {'within' if plane <= BOUND_MS else 'over'} {BOUND_MS:g} ms")
    print(f"{'in all':<10} {total / count / 1e6:>8.3f} ms with the simulation and the checker")


if __name__ == "__main__":
    main()
