"""Log-probabilities and entropies from logits that are split over ranks by vocabulary, padding left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

IMPOSSIBLE = -1e30
"""Logit of a padding entry: finite, so that 0 * log 0 is 0."""


def token_statistics(
    logits: Tensor, targets: Tensor, temperature: Tensor, *, vocabulary: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution at `temperature`: float32 [n], differentiable.

    `logits` [n, part] are this rank's part of the vocabulary, `targets` int64 [n], `temperature` float [n]. Entries
    from `vocabulary` on are padding. All ranks of `group` must call it together; each gets the whole result, and the
    gradient of its own part.
    """
    start = group.rank() * logits.shape[1]
    scaled = logits.float() / temperature[:, None]
    if start + logits.shape[1] > vocabulary:
        padding = torch.arange(start, start + logits.shape[1], device=logits.device) >= vocabulary
        scaled = scaled.masked_fill(padding, IMPOSSIBLE)
    return _Statistics.apply(scaled, targets - start, group)


class _Statistics(torch.autograd.Function):
    """(logits [n, part], targets relative to this part [n]) -> (log-probabilities [n], entropies [n])."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        greatest = logits.max(dim=1).values
        all_reduce(greatest, ReduceOp.MAX, group)
        shifted = logits - greatest[:, None]
        total = shifted.exp().sum(1)
        all_reduce(total, ReduceOp.SUM, group)
        distribution = shifted - total.log()[:, None]
        probability = distribution.exp()
        here = (targets >= 0) & (targets < logits.shape[1])
        local = targets.clamp(0, logits.shape[1] - 1)
        both = torch.stack(
            [
                distribution.gather(1, local[:, None])[:, 0] * here,
                -(probability * distribution).sum(1),
            ]
        )
        all_reduce(both, ReduceOp.SUM, group)
        chosen, entropy = both.unbind()
        ctx.save_for_backward(distribution, local, here, entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """d log p_t / d x_j = [j = t] - p_j, and d H / d x_j = -p_j (log p_j + H)."""
        by_chosen, by_entropy = gradients
        distribution, local, here, entropy = ctx.saved_tensors
        probability = distribution.exp()
        result = -probability * (by_chosen[:, None] + by_entropy[:, None] * (distribution + entropy[:, None]))
        result.scatter_add_(1, local[:, None], (by_chosen * here)[:, None])
        return result, None, None
