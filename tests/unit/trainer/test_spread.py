"""Two ranks of the torch backend over gloo: what one process computes, however it is spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer import backend, spread
from actors.trainer.backend import BackendError, Job
from actors.trainer.packing import Sample
from config.schema import LossConfig, TrainerConfig

Make = Callable[..., list[Sample]]


@contextmanager
def opened(model_dir: Path, ranks: int, **settings: Any) -> Iterator[Any]:
    trainer = TrainerConfig(
        device="cpu",
        ranks=ranks,
        step_deadline_s=100.0,
        lr=0.01,
        microbatch_tokens=24,
        threads=1,
        loss=LossConfig(kl_coef=0.1),
        **settings,
    )
    policy = backend.open_policy(Job(model_dir=str(model_dir), trainer=trainer, seed=1, total_steps=10))
    try:
        yield policy
    finally:
        policy.close()


def test_two_ranks_train_export_save_and_resume_as_one_does(
    model_dir: Path, make_samples: Make, tmp_path: Path
) -> None:
    # one more sample than ranks share evenly, so that one of them has a microbatch less
    first, second = make_samples(11, seed=7), make_samples(1, seed=8)
    settings = {"minibatches": 2, "packed": True, "activation_checkpointing": True, "offload": "all"}
    saved, mine = tmp_path / "v0000000002-step00000002", tmp_path / "v0000000001-step00000001"
    with opened(model_dir, 1, minibatches=2) as alone, opened(model_dir, 2, **settings) as both:
        for samples in (first, second):
            theirs, metrics = alone.train_step(samples), both.train_step(samples)
            for name in theirs.keys() - {"padding_fraction"}:
                assert metrics[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
        expected = dict(alone.export())
        for name, tensor in dict(both.export()).items():
            torch.testing.assert_close(tensor, expected.pop(name), atol=2e-4, rtol=1e-3)
        assert not expected
        for a, b in zip(both.logprobs(first), alone.logprobs(first), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-3)
        both.save(saved, {"step": 2})
        both.train_step(first)
        uninterrupted = dict(both.export())
        assert both.load(saved) == {"step": 2}
        both.train_step(first)
        assert all(torch.equal(tensor, uninterrupted[name]) for name, tensor in both.export())
        # either reads what the other wrote
        alone.load(saved)
        alone.train_step(first)
        for name, tensor in alone.export():
            torch.testing.assert_close(tensor, uninterrupted[name], atol=2e-4, rtol=1e-3)
        alone.save(mine, {"step": 3})
        both.load(mine)
        assert both.step == 3
        assert all(
            torch.equal(tensor, weight) for (_, tensor), (_, weight) in zip(both.export(), alone.export(), strict=True)
        )


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [("cpu", 1, "cpu"), ("cuda", 0, "cuda"), ("cuda", 1, "cuda:1"), ("cuda:2", 1, "cuda:3")],
)
def test_ranks_are_on_gpus_that_follow_each_other(
    monkeypatch: pytest.MonkeyPatch, name: str, rank: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert str(spread.device_of(name, rank)) == expected


def test_a_rank_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BackendError, match=r"trainer.device=cuda:1: rank 1 needs GPU 2, here are 2"):
        spread.device_of("cuda:1", 1)
