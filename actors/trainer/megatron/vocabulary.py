"""Log-probabilities and entropies from logits that are split over ranks by vocabulary, padding left out.

As in `actors.trainer.statistics`: a stretch of tokens is float32 at a time, and computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from actors.trainer.statistics import stretches

IMPOSSIBLE = -1e30
"""Logit of a padding entry: finite, so that 0 * log 0 is 0."""


def token_statistics(
    logits: Tensor, targets: Tensor, temperature: Tensor, *, vocabulary: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution at `temperature`: float32 [n], differentiable.

    `logits` [n, part] are this rank's part of the vocabulary, `targets` int64 [n], `temperature` float32 [n]. Entries
    from `vocabulary` on are padding. All ranks of `group` must call it together; each gets the whole result, and the
    gradient of its own part.
    """
    start = group.rank() * logits.shape[1]
    return _Statistics.apply(logits, targets - start, temperature, vocabulary - start, group)


class _Statistics(torch.autograd.Function):
    """`targets` and `real`, the number of entries that are no padding, are relative to this part of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, real: int, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        greatest = temperature.new_empty(len(logits))
        for rows in stretches(logits):
            greatest[rows] = _scaled(logits[rows], temperature[rows], real).max(1).values
        all_reduce(greatest, ReduceOp.MAX, group)
        here = (targets >= 0) & (targets < logits.shape[1])
        local = targets.clamp(0, logits.shape[1] - 1)
        sums = temperature.new_empty(3, len(logits))
        for rows in stretches(logits):
            shifted = _scaled(logits[rows], temperature[rows], real).sub_(greatest[rows, None])
            sums[2, rows] = shifted.gather(1, local[rows, None])[:, 0] * here[rows]
            weights = shifted.exp()
            sums[0, rows] = weights.sum(1)
            sums[1, rows] = shifted.mul_(weights).sum(1)
        all_reduce(sums, ReduceOp.SUM, group)
        total, weighted, chosen = sums
        norm = total.log()
        entropy = norm - weighted / total
        ctx.save_for_backward(logits, local, here, temperature, greatest, norm, entropy)
        ctx.set_materialize_grads(False)
        ctx.real = real
        return chosen - norm, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        """d log p_t / d x_j = [j = t] - p_j and d H / d x_j = -p_j (log p_j + H), both over the temperature."""
        by_chosen, by_entropy = gradients
        logits, local, here, temperature, greatest, norm, entropy = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in stretches(logits):
            found = _scaled(logits[rows], temperature[rows], ctx.real).sub_(greatest[rows, None]).sub_(norm[rows, None])
            probability = found.exp()
            if by_entropy is None:
                found.zero_()
            else:
                found.add_(entropy[rows, None]).mul_(-by_entropy[rows, None]).mul_(probability)
            if by_chosen is not None:
                found -= probability.mul_(by_chosen[rows, None])
                found.scatter_add_(1, local[rows, None], (by_chosen * here)[rows, None])
            result[rows] = found.div_(temperature[rows, None])
        return result, None, None, None, None


def _scaled(logits: Tensor, temperature: Tensor, real: int) -> Tensor:
    """A copy in float32, at `temperature`, without padding."""
    values = torch.div(logits, temperature[:, None])
    if real < values.shape[1]:
        values[:, max(real, 0) :] = IMPOSSIBLE
    return values
