"""Two ranks of the torch backend over gloo: what one process computes, however it is spread."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from actors.trainer import backend, hf_files, spread
from actors.trainer.backend import BackendError, Job, World
from actors.trainer.packing import Sample
from actors.trainer.torch_policy import TorchPolicy
from config.schema import LossConfig, TrainerConfig
from tests.unit.trainer.live import Live

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


@pytest.fixture
def one_of_two(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], TorchPolicy]]:
    """A rank whose other one is made up: what is gathered of it is nothing to go by."""
    opened: list[TorchPolicy] = []

    def join(world: World, device: torch.device) -> Any:
        dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
        return init_device_mesh(device.type, (world.size,))

    def make(rank: int) -> TorchPolicy:
        config = TrainerConfig(device="cpu", ranks=2, loss=LossConfig(kl_coef=0.1))
        opened.append(TorchPolicy(model_dir, config, world=World(rank=rank, size=2)))
        return opened[-1]

    monkeypatch.setattr(spread, "join", join)
    yield make
    for policy in opened:
        policy.close()


def test_a_rank_moves_nothing_but_its_parts_to_the_device(
    one_of_two: Callable[[int], TorchPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[list[torch.nn.Parameter]] = []
    real = torch.nn.Module.to

    def to(self: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        if any(isinstance(word, torch.device) for word in (*arguments, *named.values())):
            moved.append(list(self.parameters()))
        return real(self, *arguments, **named)

    monkeypatch.setattr(torch.nn.Module, "to", to)
    policy = one_of_two(1)
    assert len(moved) == 2, "the policy and its reference"
    assert all(isinstance(parameter, DTensor) for parameters in moved for parameter in parameters)
    whole = sum(parameter.numel() for parameter in policy._parameters)
    own = sum(parameter.to_local().numel() for parameter in policy._parameters if isinstance(parameter, DTensor))
    assert own == pytest.approx(whole / 2, rel=0.01)


def test_only_the_first_rank_keeps_what_all_gather_for_a_checkpoint(
    one_of_two: Callable[[int], TorchPolicy], tmp_path: Path
) -> None:
    """Weights alone: the made up rank takes no step."""
    peaks, path = {}, tmp_path / "v0000000001-step00000001"
    for rank in (0, 1):
        policy = one_of_two(rank)
        size = sum(4 * parameter.numel() for parameter in policy._parameters)
        with Live() as live:
            written = policy.save(path, {})
        peaks[rank] = live.peak / size
        assert (written > 0) == (rank == 0)
        policy.close()
    assert peaks[0] > 1
    assert peaks[1] < 0.5


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_not_kept_is_gone_before_the_next_is_gathered(keep: bool) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            assert keep or all(each() is None for each in alive)
            tensor = torch.full((2,), float(number))
            alive.append(weakref.ref(tensor))
            yield str(number), tensor
            del tensor

    kept = hf_files.on_host(gathered(), keep=keep)
    assert {name: tensor.tolist() for name, tensor in kept.items()} == (
        {str(number): [float(number)] * 2 for number in range(3)} if keep else {}
    )
    assert len(alive) == 3


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
