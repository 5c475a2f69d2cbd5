"""What each sampler loses to staleness and what it costs, on virtual time with stragglers.

Prints a Markdown table: groups dropped as stale in percent of those issued, and virtual seconds for 20 steps, for slow
and quick generation beside the trainer. Run as `python -m tests.bench.buffer_samplers [SEEDS]`.
"""

from __future__ import annotations

import sys

from config.schema import BufferConfig, EngineConfig, LaunchConfig, RefitConfig, RolloutConfig, RunConfig
from pipeline.simulate.run import simulate
from pipeline.simulate.world import Pace

SAMPLERS = ("in_order", "windowed", "fifo", "ready_first")
PACES = {
    "steps take longer": Pace(generate=(0.05, 2.0), train=(1.0, 1.5)),
    "rollouts take longer": Pace(generate=(0.05, 5.0), train=(0.2, 0.4)),
}


def main() -> None:
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
    print("| sampler | staleness bound |" + "".join(f" {name}: stale, seconds |" for name in PACES))
    print("| --- | --- |" + " --- |" * len(PACES))
    for sampler in SAMPLERS:
        for staleness in (1, 3):
            cells = [_cell(sampler, staleness, pace, seeds) for pace in PACES.values()]
            print(f"| `{sampler}` | {staleness} |" + "".join(f" {cell} |" for cell in cells), flush=True)


def _cell(sampler: str, staleness: int, pace: Pace, seeds: range) -> str:
    config = RunConfig(
        steps=20,
        engine=EngineConfig(count=4),
        launch=LaunchConfig(collectors=4),
        buffer=BufferConfig(groups=8, max_staleness=staleness, sampler=sampler),
        rollout=RolloutConfig(samples=4, open_groups=16),
        refit=RefitConfig(drain="interrupt"),
    )
    results = [simulate(config, seed, pace=pace) for seed in seeds]
    assert all(result.ok for result in results)
    lost = sum(result.summary.dropped for result in results) / sum(result.summary.tasks for result in results)
    seconds = sum(result.seconds for result in results) / len(results)
    return f"{lost:.0%}, {seconds:.0f} s"


if __name__ == "__main__":
    main()
