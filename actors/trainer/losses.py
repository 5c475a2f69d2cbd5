"""The GRPO objective over a flat list of trainable tokens. Pure functions of tensors.

Three log-probabilities of each token take part: `behaviour` (by the engine that sampled it), `proximal` (by the
trainer, before the first update of the step) and `current`. The clipped ratio keeps `current` near `proximal`; the
truncated importance weight proximal / behaviour makes up for staleness and for the engine's different arithmetic.
This is the decoupled objective of "Batch size-invariance for policy optimization" (arXiv 2110.00641) with the token
weights of GRPO (arXiv 2402.03300) and the truncation of IMPALA (arXiv 1802.01561).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Normalisation = Literal["token", "sequence"]

LOG_RATIO_BOUND = 20.0
"""Log ratios are held to [-20, 20] before they are exponentiated, so that no finite pair of inputs overflows."""


@dataclass(frozen=True)
class PolicyTerms:
    """One entry a token [n]. `loss` carries the gradient, the others are detached.

    `ratio` current / proximal, `clipped` bool: the clip took the gradient away, `weight` the truncated importance
    weight, `capped` bool: the truncation held it down.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    weight: Tensor
    capped: Tensor


def policy_terms(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> PolicyTerms:
    """Clipped surrogate of each token, times its truncated importance weight. All inputs float32 [n].

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) * w, with r = exp(current - proximal) and the constant
    w = min(exp(proximal - behaviour), importance_cap). Unequal bounds are DAPO's "clip higher" (arXiv 2503.14476).
    """
    ratio = _bounded_exp(current - proximal)
    raw = ratio * advantage
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    importance = _bounded_exp(proximal - behaviour).detach()
    weight = importance.clamp(max=importance_cap)
    return PolicyTerms(
        loss=-torch.minimum(raw, clipped) * weight,
        ratio=ratio.detach(),
        clipped=(clipped < raw).detach(),
        weight=weight,
        capped=importance > importance_cap,
    )


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate of KL(q, p) for each token drawn from q, given log p - log q: exp(x) - 1 - x, never negative.

    Source: the third estimator of J. Schulman, "Approximating KL divergence" (2020).
    """
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(bounded) - bounded


def mismatch(proximal: Tensor, behaviour: Tensor) -> Tensor:
    """exp|proximal - behaviour| of each token: 1 where engine and trainer agree."""
    return _bounded_exp((proximal - behaviour).abs())


def token_weights(
    rows: Tensor, trainable: Tensor, normalisation: Normalisation, *, tokens: float, sequences: float
) -> Tensor:
    """Factor of each token's loss, so that the sum over all microbatches and ranks is the mean that is meant.

    `rows` int64 [n]: sequence of each token, `trainable` int64 [rows]: trainable tokens of each sequence. `tokens` and
    `sequences` count what the whole update trains on, over microbatches and ranks.

    - `token`: 1 / tokens, every token alike (DAPO, arXiv 2503.14476).
    - `sequence`: 1 / (sequences * tokens of the sequence), every sequence alike (GRPO, arXiv 2402.03300).
    """
    if normalisation == "token":
        return torch.full(rows.shape, 1.0 / tokens, device=rows.device)
    return 1.0 / (sequences * trainable[rows].to(torch.float32))


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
