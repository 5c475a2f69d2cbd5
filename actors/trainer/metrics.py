"""Metrics of a training step: sums over tokens and updates, made means of the whole batch at the end."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp

from actors.trainer import losses
from actors.trainer.packing import Microbatch

RANK_WAIT = timedelta(minutes=10)
"""Longest wait for the other ranks of the trainer, who may still compute their part of a step."""


def all_reduce(tensor: Tensor, ranks: ProcessGroup | None, operation: ReduceOp.RedOpType = ReduceOp.SUM) -> None:
    """Combine `tensor` over `ranks` in place; alone, it stays as it is."""
    if ranks is not None:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(operation)
        options.timeout = RANK_WAIT
        ranks.allreduce([tensor], options).wait(RANK_WAIT)


MEANS = (
    "entropy",
    "ratio_mean",
    "clip_fraction",
    "is_weight_mean",
    "is_capped_fraction",
    "mismatch_exp",
    "mismatch_kl",
    "kl_reference",
)
"""Means over the trainable tokens of the batch (and over its epochs)."""

LAGGED = ("mismatch_exp", "mismatch_kl")
"""Also given apart for tokens of the current version (`_lag0`) and of older ones (`_lagged`), where there are any."""


class StepMetrics:
    """Collects what a step measures. All ranks must call `result` together. `reference`: the loss has a KL term."""

    def __init__(self, device: torch.device, *, reference: bool = False) -> None:
        names = [*MEANS, *(f"{name}{side}" for name in LAGGED for side in ("_lag0", "_lagged"))]
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
        self._counts = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ("all", "lag0", "lagged")}
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._padded = torch.zeros(2, dtype=torch.float64, device=device)
        self._greatest = torch.zeros((), dtype=torch.float64, device=device)
        self._norms: list[float] = []
        self._updates = 0
        self._skipped = 0
        self._reference = reference

    def tokens(
        self,
        micro: Microbatch,
        lag: Tensor,
        terms: losses.PolicyTerms,
        proximal: Tensor,
        behaviour: Tensor,
        entropy: Tensor,
        divergence: Tensor | None,
    ) -> None:
        """Add a microbatch; tensors have one entry a trainable token."""
        exp, kl = losses.mismatch(proximal, behaviour), losses.k3(proximal - behaviour)
        values = {
            "entropy": entropy,
            "ratio_mean": terms.ratio,
            "clip_fraction": terms.clipped,
            "is_weight_mean": terms.weight,
            "is_capped_fraction": terms.capped,
            "mismatch_exp": exp,
            "mismatch_kl": kl,
        }
        if divergence is not None:
            values["kl_reference"] = divergence.detach()
        fresh = lag == 0
        for name, value in (("mismatch_exp", exp), ("mismatch_kl", kl)):
            values[f"{name}_lag0"], values[f"{name}_lagged"] = value * fresh, value * ~fresh
        for name, value in values.items():
            self._sums[name] += value.sum(dtype=torch.float64)
        self._counts["all"] += lag.numel()
        self._counts["lag0"] += fresh.sum()
        self._counts["lagged"] += (~fresh).sum()
        self._greatest = torch.maximum(self._greatest, terms.weight.max().double())
        self._padded += torch.tensor([micro.slots - micro.tokens, micro.slots], device=lag.device)

    def loss(self, share: Tensor) -> None:
        """Add a microbatch's share of the loss of its update."""
        self._loss += share

    def update(self, norm: float, applied: bool) -> None:
        """An update is done: gradient norm before clipping, and whether it was applied."""
        self._updates += 1
        self._skipped += not applied
        self._norms.append(norm)

    def result(self, ranks: ProcessGroup | None) -> dict[str, float]:
        """Scalars of the whole batch. `tokens` counts trainable tokens once an epoch, `grad_norm` is a mean."""
        vector = torch.stack([*self._sums.values(), *self._counts.values(), self._loss, *self._padded])
        all_reduce(vector, ranks)
        all_reduce(self._greatest, ranks, ReduceOp.MAX)
        values = vector.tolist()
        sums = dict(zip(self._sums, values, strict=False))
        everything, fresh, lagged, loss, padding, slots = values[len(sums) :]
        result = {
            name: sums[name] / max(everything, 1.0) for name in MEANS if name != "kl_reference" or self._reference
        }
        for name in LAGGED:
            for side, count in (("_lag0", fresh), ("_lagged", lagged)):
                if count:
                    result[f"{name}{side}"] = sums[f"{name}{side}"] / count
        return {
            **result,
            "loss": loss / max(self._updates, 1),
            "is_weight_max": float(self._greatest),
            "grad_norm": sum(self._norms) / max(self._updates, 1),
            "padding_fraction": padding / max(slots, 1.0),
            "tokens": everything,
            "updates": float(self._updates),
            "skipped_updates": float(self._skipped),
        }
