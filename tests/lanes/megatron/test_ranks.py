"""Ranks over gloo: the same results however the model is spread, and an end in time when a rank is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.backend import BackendError
from actors.trainer.ranks import RankError
from tests.lanes.megatron.bench import Bench, furthest, same

COSINE = {"schedule": "cosine", "warmup_steps": 1}
SPREADS: dict[str, tuple[int, str, dict[str, Any], str, dict[str, Any]]] = {
    "tensor": (2, "qwen2", {"tensor_parallel": 2}, "optimizer", {}),
    "pipeline": (2, "llama", {"pipeline_parallel": 2}, "none", {}),
    "data": (2, "qwen3", {"overlap": True}, "all", {}),
    "four": (4, "qwen3-moe", {"tensor_parallel": 2, "expert_parallel": 2}, "all", COSINE),
}
"""Ranks, family, `trainer.megatron`, `trainer.offload`, and more of `trainer`. Four have each of them but pipelines."""


@pytest.mark.parametrize("spread", SPREADS)
def test_ranks_train_export_and_resume_as_one_process_does(
    spread: str, bench: Callable[[str], Bench], tmp_path: Path
) -> None:
    ranks, family, sizes, offload, more = SPREADS[spread]
    stand = bench(family)
    samples, saved = stand.samples, tmp_path / "v0000000001-step00000001"
    reference = stand.torch(**more)
    with stand.megatron(ranks=ranks, megatron=sizes, offload=offload, **more) as policy:
        assert furthest(policy.logprobs(samples), reference.logprobs(samples)) < 2e-5
        mine, theirs = policy.train_step(samples), reference.train_step(samples)
        for name in theirs.keys() - {"padding_fraction"}:
            assert mine[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-5), name
        assert furthest(policy.logprobs(samples), reference.logprobs(samples)) < 5e-3
        policy.save(saved, {"step": 1})
        # what is exported right after the step is what the step made, whether or not parameters are gathered late
        assert furthest(stand.torch(saved).logprobs(samples), policy.logprobs(samples)) < 2e-5
        after = policy.train_step(samples)
        assert after["lr"] == reference.train_step(samples)["lr"]
        assert furthest(policy.logprobs(samples), reference.logprobs(samples)) < 5e-3
        uninterrupted = dict(policy.export())
        assert uninterrupted["model.embed_tokens.weight"].shape == (131, 128)
        policy.load(saved)
        assert policy.train_step(samples)["lr"] == after["lr"]
        assert same(dict(policy.export()), uninterrupted)


def test_a_checkpoint_of_two_ranks_is_read_by_one(bench: Callable[[str], Bench], tmp_path: Path) -> None:
    stand = bench("qwen3")
    samples, saved = stand.samples, tmp_path / "v0000000001-step00000001"
    with stand.megatron(ranks=2, megatron={"tensor_parallel": 2}) as policy:
        policy.train_step(samples)
        policy.save(saved, {"step": 1})
        wanted, weights = policy.train_step(samples), policy.logprobs(samples)
        (pid,) = policy.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 died of SIGKILL"):
            policy.train_step(samples)
    with stand.megatron() as alone:
        alone.load(saved)
        got = alone.train_step(samples)
        for name in ("loss", "grad_norm", "kl_reference"):
            assert got[name] == pytest.approx(wanted[name], rel=1e-3), name
        assert furthest(alone.logprobs(samples), weights) < 1e-3


def test_a_spread_that_the_model_does_not_allow_is_refused_with_the_setting_to_change(bench: Callable[[str], Bench]):
    refused = [
        ({"tensor_parallel": 3}, "tensor_parallel=3 must divide the model's 2 key-value heads"),
        ({"pipeline_parallel": 3}, "pipeline_parallel=3 must divide the model's 2 layers"),
        ({"expert_parallel": 2}, "expert_parallel=2 must divide the model's 0 experts: it is dense, use 1"),
    ]
    for sizes, message in refused:
        with pytest.raises(BackendError, match=message), bench("llama").megatron(megatron=sizes):
            pass
