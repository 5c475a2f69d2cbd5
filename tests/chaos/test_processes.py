"""The schedules that `make chaos` plays on real runs."""

from __future__ import annotations

from typing import get_args

from tests.chaos.processes import BLACKOUTS, ONE_OF_EACH, Kind, plan


def test_the_short_schedule_holds_every_kind_of_fault_and_one_blackout_at_its_end() -> None:
    kinds = [fault.kind for fault in ONE_OF_EACH]
    assert {*kinds, *BLACKOUTS} == set(get_args(Kind))
    assert [kind for kind in kinds if kind in BLACKOUTS] == kinds[-1:]


def test_a_seed_names_its_schedule() -> None:
    assert plan(3) == plan(3) != plan(4)
    for seed in range(20):
        *storm, last = plan(seed)
        assert last.kind in ("everything", "wipe")
        assert len(storm) in (10, 11)
