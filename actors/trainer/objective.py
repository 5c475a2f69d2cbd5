"""The loss of a microbatch, the same for every backend: they differ in how they compute log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.trainer import losses
from actors.trainer.metrics import StepMetrics
from actors.trainer.packing import Microbatch
from config.schema import LossConfig


def share_of_loss(
    config: LossConfig,
    micro: Microbatch,
    *,
    current: Tensor,
    entropy: Tensor,
    proximal: Tensor | None,
    reference: Tensor | None,
    tokens: float,
    sequences: float,
    metrics: StepMetrics,
) -> Tensor:
    """This microbatch's share of its update's loss: a scalar whose sum over microbatches and ranks is the loss.

    `current`, `entropy`, `proximal` and `reference` are float32 [n], one entry a trainable token; the gradient flows
    through the first two. Without `proximal` the policy that starts the step is the current one. `reference` is there
    if and only if `kl_coef` is positive. `tokens` and `sequences` count what the whole update trains on. What was
    measured is added to `metrics`.
    """
    device = current.device
    proximal = current.detach() if proximal is None else proximal
    behaviour = on(device, micro.behaviour)
    terms = losses.policy_terms(
        current,
        proximal,
        behaviour,
        on(device, micro.advantage),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        importance_cap=config.importance_cap,
    )
    loss = terms.loss
    divergence = None
    if reference is not None:
        divergence = losses.k3(reference - current)
        loss = loss + config.kl_coef * divergence
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    weights = losses.token_weights(
        on(device, micro.row), on(device, micro.trainable), config.normalisation, tokens=tokens, sequences=sequences
    )
    total = (loss * weights).sum()
    metrics.tokens(micro, on(device, micro.lag), terms, proximal, behaviour, entropy.detach(), divergence)
    metrics.loss(total.detach())
    return total


def on(device: torch.device, array: NDArray[Any]) -> Tensor:
    """The array as a tensor on `device`."""
    return torch.from_numpy(array).to(device, non_blocking=True)
