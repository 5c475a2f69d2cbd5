"""The schedules of faults for real runs. The runs themselves: `make chaos SEEDS=20`."""

from __future__ import annotations

from tests.chaos.processes import BLACKOUTS, plan


def test_a_seed_names_its_schedule() -> None:
    assert plan(3) == plan(3) != plan(4)
    for seed in range(20):
        *storm, last = plan(seed)
        assert last.kind in BLACKOUTS
        assert len(storm) in (10, 11)
