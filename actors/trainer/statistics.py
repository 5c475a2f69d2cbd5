"""Log-probabilities and entropies of tokens from their logits, in memory for little more than the logits.

A whole distribution in float32 has twice the bytes of bfloat16 logits, and autograd would keep several of them. Here a
stretch of tokens is computed at a time, and again in the backward pass, of which only the logits are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

STRETCH = 2**26
"""Logits of a stretch; in float32 they have 256 MiB."""


def token_statistics(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy in nats of its distribution: float32 [n], differentiable once.

    `logits` float [n, vocabulary], `targets` int64 [n]. `temperature` float [n] is what the tokens were sampled at.
    """
    return _Statistics.apply(logits, targets, temperature)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(chosen)
        for part in stretches(logits):
            distribution = _distribution(logits[part], temperature[part])
            chosen[part] = distribution.gather(1, targets[part, None])[:, 0]
            entropy[part] = -(distribution.exp() * distribution).sum(1)
        ctx.save_for_backward(logits, targets, temperature, entropy)
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        """d log p_t / d x_j = [j = t] - p_j and d H / d x_j = -p_j (log p_j + H), both over the temperature."""
        by_chosen, by_entropy = gradients
        logits, targets, temperature, entropy = ctx.saved_tensors
        result = torch.empty_like(logits)
        for part in stretches(logits):
            distribution = _distribution(logits[part], temperature[part])
            probability = distribution.exp()
            found = torch.zeros_like(distribution)
            if by_chosen is not None:
                found -= probability * by_chosen[part, None]
                found.scatter_add_(1, targets[part, None], by_chosen[part, None])
            if by_entropy is not None:
                found -= probability * (distribution + entropy[part, None]) * by_entropy[part, None]
            result[part] = found / temperature[part, None]
        return result, None, None


def _distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    return torch.log_softmax(logits.float() / temperature[:, None], dim=-1)


def stretches(logits: Tensor) -> Iterator[slice]:
    """Rows of `logits` that are float32 at a time."""
    count = max(1, STRETCH // logits.shape[1])
    return (slice(start, start + count) for start in range(0, len(logits), count))
