"""The buffer with all other cores around it, on virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from config.schema import BufferConfig, EngineConfig, LaunchConfig, RefitConfig, RolloutConfig, RunConfig
from contracts.events import GroupDropped
from pipeline.simulate.run import Result, simulate
from pipeline.simulate.world import Pace

WIDE = Pace(generate=(0.05, 2.0), train=(0.2, 0.4))
"""Some rollouts take many steps' time; with interrupted drains they go on over refits."""


def config(steps: int = 10, sync: bool = False, **buffer: Any) -> RunConfig:
    return RunConfig(
        steps=steps,
        sync=sync,
        engine=EngineConfig(count=2),
        launch=LaunchConfig(collectors=2),
        buffer=BufferConfig(groups=4, **buffer),
        rollout=RolloutConfig(samples=2, open_groups=8),
        refit=RefitConfig(drain="interrupt"),
    )


def drops(result: Result) -> Counter[str]:
    return Counter(event.body.reason for event in result.log() if isinstance(event.body, GroupDropped))


@pytest.mark.parametrize("buffer", [{}, {"sampler": "windowed"}, {"sampler": "windowed", "window": 9}])
def test_stragglers_are_trained_by_default_and_in_a_window(buffer: dict[str, Any]):
    result = simulate(config(max_staleness=2, **buffer), 1, pace=WIDE)
    assert result.ok
    assert drops(result) == {}
    assert result.summary.tasks == 40


def test_first_come_first_trained_loses_stragglers():
    result = simulate(config(max_staleness=2, sampler="fifo"), 1, pace=WIDE)
    assert result.ok
    assert set(drops(result)) == {"stale"}
