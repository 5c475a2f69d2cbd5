"""Advantages of the samples of a batch, relative to the other samples of their group. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it."""


@dataclass(frozen=True)
class Advantages:
    """One entry a sample, in the order given.

    `values` float32 [n], 0 where not `kept`. `kept` bool [n]: valid and in a group of at least 2 valid samples. `flat`
    bool [n]: in a group whose valid samples all have one reward, so that it teaches nothing.
    """

    values: Tensor
    kept: Tensor
    flat: Tensor


def group_advantages(
    rewards: Tensor,
    valid: Tensor,
    groups: Tensor,
    *,
    baseline: Literal["group", "leave_one_out"] = "group",
    std: bool = True,
) -> Advantages:
    """Advantage of each sample over its group.

    `rewards` float [n], `valid` bool [n], `groups` int64 [n] with any labels. Invalid samples enter no baseline.

    - `group`: r_i - mean(r), divided by the group's sample standard deviation (n - 1 below the root) with `std`: GRPO,
      eq. 3 of "DeepSeekMath" (arXiv 2402.03300); without `std` as in "Dr. GRPO" (arXiv 2503.20783).
    - `leave_one_out`: r_i minus the mean of the group's other samples: RLOO, "Back to Basics" (arXiv 2402.14740).
      Never divided by a deviation.

    Raises `ValueError` for a valid sample whose reward is not finite.
    """
    rewards = rewards.to(torch.float64)
    broken = valid & ~torch.isfinite(rewards)
    if bool(broken.any()):
        at = int(broken.nonzero()[0])
        raise ValueError(
            f"reward {float(rewards[at])} of valid sample {at} is not finite; mark it invalid or fix its environment"
        )
    labels, group = torch.unique(groups, return_inverse=True)
    rewards = torch.where(valid, rewards, 0.0)
    weight = valid.to(torch.float64)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(len(labels)).index_add(0, group, values)[group]

    count = total(weight)
    kept = valid & (count >= 2)
    deviation = rewards - total(rewards) / count.clamp(min=1)
    flat = (
        _extreme(rewards, valid, group, len(labels), "amax") == _extreme(rewards, valid, group, len(labels), "amin")
    ) & (count >= 1)
    if baseline == "leave_one_out":
        values = deviation * count / (count - 1).clamp(min=1)
    elif std:
        variance = total(deviation.square() * weight) / (count - 1).clamp(min=1)
        values = deviation / (variance.sqrt() + EPSILON)
    else:
        values = deviation
    values = torch.where(kept & ~flat, values, 0.0).to(torch.float32)
    return Advantages(values, kept, flat)


def _extreme(rewards: Tensor, valid: Tensor, group: Tensor, groups: int, reduce: str) -> Tensor:
    outside = float("-inf") if reduce == "amax" else float("inf")
    start = rewards.new_full((groups,), outside)
    return start.scatter_reduce(0, group, torch.where(valid, rewards, outside), reduce)[group]
