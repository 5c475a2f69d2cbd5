from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.advantages import group_advantages


def advantages(rewards: list[float], valid: list[bool] | None = None, groups: list[int] | None = None, **options):
    valid = [True] * len(rewards) if valid is None else valid
    groups = [0] * len(rewards) if groups is None else groups
    return group_advantages(torch.tensor(rewards), torch.tensor(valid), torch.tensor(groups), **options)


def test_group_advantage_is_the_deviation_from_the_mean_over_the_standard_deviation() -> None:
    result = advantages([0.0, 1.0, 1.0, 2.0], std=True)
    scale = math.sqrt(2 / 3)
    assert result.values.tolist() == pytest.approx([-1 / scale, 0.0, 0.0, 1 / scale], rel=1e-4)


def test_without_std_only_the_mean_is_taken_away() -> None:
    assert advantages([0.0, 1.0, 1.0, 4.0], std=False).values.tolist() == pytest.approx([-1.5, -0.5, -0.5, 2.5])


def test_leave_one_out_baseline_is_the_mean_of_the_others_and_never_divided() -> None:
    rewards = [0.0, 1.0, 5.0]
    result = advantages(rewards, baseline="leave_one_out", std=True)
    assert result.values.tolist() == pytest.approx([0.0 - 3.0, 1.0 - 2.5, 5.0 - 0.5])


def test_groups_do_not_touch_each_other() -> None:
    result = advantages([0.0, 10.0, 1.0, 30.0], groups=[7, -3, 7, -3], std=False)
    assert result.values.tolist() == pytest.approx([-0.5, -10.0, 0.5, 10.0])


def test_invalid_samples_enter_no_baseline_and_are_not_kept() -> None:
    result = advantages([0.0, 1.0, 100.0], valid=[True, True, False], std=False)
    assert result.values.tolist() == pytest.approx([-0.5, 0.5, 0.0])
    assert result.kept.tolist() == [True, True, False]
    assert not result.flat.any()


def test_an_invalid_sample_may_have_no_reward_at_all() -> None:
    assert advantages([0.0, 1.0, math.nan], valid=[True, True, False]).values.isfinite().all()


def test_groups_of_fewer_than_two_valid_samples_are_dropped() -> None:
    result = advantages([1.0, 0.0, 0.0, 1.0], valid=[True, False, True, True], groups=[0, 0, 1, 1])
    assert result.kept.tolist() == [False, False, True, True]
    assert result.values[0] == 0.0


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_flat_groups_are_flagged_and_teach_exactly_nothing(baseline) -> None:
    result = advantages([0.1, 0.1, 0.1, 0.0, 1.0], groups=[0, 0, 0, 1, 1], baseline=baseline)
    assert result.flat.tolist() == [True, True, True, False, False]
    assert result.values[:3].tolist() == [0.0, 0.0, 0.0]


def test_a_valid_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 1 is not finite"):
        advantages([0.0, math.inf])


@given(
    st.lists(st.tuples(st.floats(-10, 10, width=32), st.booleans(), st.integers(0, 3)), min_size=1, max_size=24),
    st.sampled_from(["group", "leave_one_out"]),
    st.booleans(),
)
def test_kept_advantages_of_each_group_sum_to_zero(samples, baseline, std) -> None:
    rewards, valid, groups = zip(*samples, strict=True)
    result = advantages(list(rewards), list(valid), list(groups), baseline=baseline, std=std)
    for group in set(groups):
        mine = torch.tensor(groups) == group
        assert abs(float(result.values[mine].double().sum())) < 1e-3
    assert not result.values[~result.kept].any()
