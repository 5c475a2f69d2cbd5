"""trainer.offload: what waits between steps is really away, and everything is as in a policy that stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch

from actors.trainer.packing import Sample
from actors.trainer.ranks import RankedPolicy
from tests.lanes.megatron.bench import Bench, furthest, same

Mode = Literal["none", "optimizer", "all"]
CASES: dict[str, tuple[str, tuple[Mode, ...]]] = {
    "llama": ("float32", ("none", "all")),
    "qwen3-moe": ("bfloat16", ("optimizer", "none", "all")),
}
"""Tied embeddings and an optimizer of views of the parameters; two optimizers of float32 copies."""


class Course(NamedTuple):
    """What a policy said and was, step by step."""

    metrics: list[Any]
    weights: list[dict[str, torch.Tensor]]
    logprobs: list[np.ndarray]
    moments: dict[str, torch.Tensor]


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that they have now."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def state(policy: RankedPolicy) -> dict[str, torch.Tensor]:
    """Rank 0's moments and what it optimizes."""
    found = {}
    whole = policy._part._built.optimizer
    for number, part in enumerate(getattr(whole, "chained_optimizers", [whole])):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                values = {"param": parameter, **part.optimizer.state[parameter]}
                found |= {f"{number} {len(found)} {name}": value for name, value in values.items()}
    return found


def all_buffers(policy: RankedPolicy) -> list[Any]:
    """Megatron's, of parameters and gradients."""
    chunks = policy._part._built.chunks
    return [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]


def check_what_is_away(policy: RankedPolicy, mode: Mode, dtype: str) -> None:
    part, buffers = policy._part, all_buffers(policy)
    apart = [tensor for name, tensor in state(policy).items() if "exp" in name or dtype == "bfloat16"]
    aside = [tensor for tensor in apart if tensor.ndim]
    assert aside
    assert (held(aside) == 0) == (mode != "none")
    assert (held(buffer.grad_data for buffer in buffers) == 0) == (mode != "none")
    weights = [*part._parameters(), *part._reference, *(buffer.param_data for buffer in buffers)]
    assert (held(weights) == 0) == (mode == "all")


def check_views(policy: RankedPolicy) -> None:
    """Parameters and their gradients are still views of megatron's buffers, once they are back."""
    part = policy._part
    with part._offloading.everything_here():
        values = {buffer.param_data.untyped_storage()._cdata for buffer in all_buffers(policy)}
        gradients = {buffer.grad_data.untyped_storage()._cdata for buffer in all_buffers(policy)}
        for parameter in part._parameters():
            assert parameter.untyped_storage()._cdata in values
            assert parameter.main_grad.untyped_storage()._cdata in gradients
            assert part._config.offload == "none" or not parameter.main_grad.any()


def course(
    policy: RankedPolicy, mode: Mode, dtype: str, batch: list[Sample], saved: Path, other: Path | None
) -> Course:
    """Three steps, the last from the checkpoint `other`, where there is one."""
    metrics, weights, logprobs = [], [], []

    def check() -> None:
        check_what_is_away(policy, mode, dtype)

    check()
    for step in range(3):
        if step == 2:
            policy.save(saved, {"step": 2})
            check()
            if other is not None:
                policy.load(other)
                check()
        metrics.append(policy.train_step(batch))
        check()
        weights.append(dict(policy.export()))
        check()
        logprobs += policy.logprobs(batch)
    check()
    check_views(policy)
    offloading = policy._part._offloading
    with offloading.weights_here():
        moments = {name: offloading.on_host(tensor) for name, tensor in state(policy).items()}
    check()
    return Course(metrics, weights, logprobs, moments)


@pytest.mark.parametrize("family", CASES)
def test_steps_exports_and_checkpoints_are_those_of_a_policy_that_stays(
    family: str, bench: Callable[[str], Bench], tmp_path: Path
) -> None:
    (dtype, modes), stand = CASES[family], bench(family)
    courses: list[Course] = []
    saved: list[Path] = []
    for number, mode in enumerate(modes):
        path = tmp_path / f"v{number:010d}-step00000002"
        with stand.megatron(dtype=dtype, offload=mode) as policy:
            courses.append(course(policy, mode, dtype, stand.samples, path, saved[-1] if saved else None))
            kept = [tensor for buffer in all_buffers(policy) for tensor in (buffer.param_data, buffer.grad_data)]
            kept += [*policy._part._reference, *(tensor for tensor in state(policy).values() if tensor.ndim)]
        assert held(kept) == 0, "modules of megatron's outlive a closed policy, with no memory"
        saved.append(path)
    assert not same(courses[0].weights[1], courses[0].weights[2])
    for one, other in pairwise(courses):
        assert one.metrics == other.metrics
        assert all(starmap(same, zip(one.weights, other.weights, strict=True)))
        assert furthest(one.logprobs, other.logprobs) == 0.0
        assert same(one.moments, other.moments)
    for one, other in pairwise(saved):
        for name in ("model.safetensors", "__0_0.distcp"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
