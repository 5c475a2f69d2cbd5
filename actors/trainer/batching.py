"""From a batch event and its trajectories to the samples that the policy is trained on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from actors.trainer.advantages import group_advantages
from actors.trainer.packing import Sample
from config.schema import LossConfig
from contracts.events import BatchReady
from contracts.trajectory import Trajectory


def samples(batch: BatchReady, trajectories: Mapping[str, Trajectory], loss: LossConfig) -> list[Sample]:
    """One `Sample` a sequence of every trajectory that bears on the loss.

    `trajectories` maps payload key -> trajectory. Advantages are taken over the valid samples of each group; a
    trajectory of several sequences gives each of them its advantage. Raises `ValueError` for a reward that isn't
    finite, `KeyError` for a trajectory that is missing.
    """
    flat = [(group, sample) for group in batch.groups for sample in group.samples]
    advantages = group_advantages(
        torch.tensor([sample.reward for _, sample in flat], dtype=torch.float64),
        torch.tensor([sample.valid for _, sample in flat], dtype=torch.bool),
        torch.tensor([group.index for group, _ in flat], dtype=torch.int64),
        baseline=loss.advantage,
        std=loss.advantage_std,
    )
    values, kept = advantages.values.tolist(), advantages.kept.tolist()
    return [
        Sample(
            ids=np.frombuffer(sequence.ids, dtype="<i4"),
            loss_mask=np.frombuffer(sequence.loss_mask, dtype=np.uint8),
            behaviour=np.frombuffer(sequence.logprobs, dtype="<f4"),
            advantage=values[place],
            lag=sample.lag,
            group=group.index,
            temperature=sequence.sampling.temperature,
        )
        for place, (group, sample) in enumerate(flat)
        if kept[place]
        for sequence in trajectories[sample.payload.key].sequences
    ]
