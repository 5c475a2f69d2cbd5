"""What waits in host memory between two steps is really away, and comes back bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from actors.trainer.offload import Shelf, own
from actors.trainer.packing import Sample
from actors.trainer.torch_policy import TorchPolicy
from config.schema import LossConfig, TrainerConfig

Make = Callable[..., list[Sample]]
Offload = Literal["none", "optimizer", "all"]
CPU = torch.device("cpu")


def policy(model_dir: Path, offload: Offload) -> TorchPolicy:
    config = TrainerConfig(
        device="cpu", lr=0.01, microbatch_tokens=64, minibatches=2, offload=offload, loss=LossConfig(kl_coef=0.1)
    )
    return TorchPolicy(model_dir, config, seed=1, total_steps=10)


def moments(trained: TorchPolicy) -> list[torch.Tensor]:
    return [entry[name] for entry in trained._optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def held(tensors: list[torch.Tensor]) -> int:
    """Bytes that they have now."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_steps_exports_and_checkpoints_are_those_of_a_policy_that_stays(
    model_dir: Path, make_samples: Make, tmp_path: Path, offload: Offload
):
    plain, moved = policy(model_dir, "none"), policy(model_dir, offload)
    weights = [*moved._parameters, *moved._references]
    for seed in (1, 2, 3):
        samples = make_samples(9, seed=seed)
        assert plain.train_step(samples) == moved.train_step(samples)
        assert held(moments(moved)) == 0
        assert (held(weights) == 0) == (offload == "all")
        expected = dict(plain.export())
        for name, tensor in moved.export():
            assert torch.equal(tensor, expected.pop(name)), name
        assert not expected
        for a, b in zip(plain.logprobs(samples), moved.logprobs(samples), strict=True):
            assert (a == b).all()
        assert held(moments(moved)) == 0
    one, other = tmp_path / "v0000000003-step00000003", tmp_path / "v0000000004-step00000003"
    plain.save(one, {"step": 3})
    moved.save(other, {"step": 3})
    assert held(moments(moved)) == 0
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    resumed = policy(model_dir, offload)
    resumed.load(one)
    assert held(moments(resumed)) == 0
    resumed_other = policy(model_dir, "none")
    resumed_other.load(other)
    samples = make_samples(9, seed=4)
    metrics = [each.train_step(samples) for each in (plain, moved, resumed, resumed_other)]
    assert all(each == metrics[0] for each in metrics)
    for each in (moved, resumed, resumed_other):
        for name, tensor in each.export():
            assert torch.equal(tensor, dict(plain.export())[name]), name


def test_views_follow_their_storage_and_one_tensor_can_be_read_while_it_is_away():
    whole = torch.arange(12.0)
    view, values = whole[3:6], torch.arange(12.0)
    shelf = Shelf(CPU)
    shelf.put([whole, view])
    assert (shelf.bytes, whole.untyped_storage().nbytes()) == (48, 0)
    with shelf.here(view) as there:
        assert there.tolist() == [3.0, 4.0, 5.0]
    assert whole.untyped_storage().nbytes() == 0
    shelf.put([whole])
    shelf.bring()
    assert torch.equal(whole, values)
    assert view.tolist() == [3.0, 4.0, 5.0]
    assert shelf.bytes == 0
    with shelf.here(view) as there:
        assert there.tolist() == [3.0, 4.0, 5.0]
    assert whole.untyped_storage().nbytes() == 48, "it was not away"


def test_what_changed_meanwhile_is_what_comes_back():
    tensor, shelf = torch.zeros(4), Shelf(CPU)
    for value in (1.0, 2.0):
        tensor.fill_(value)
        shelf.put([tensor])
        shelf.bring()
        assert tensor.tolist() == [value] * 4


def test_parameters_of_a_file_get_memory_of_their_own(tmp_path: Path):
    path = tmp_path / "w"
    path.write_bytes(bytes(16))
    parameter: Any = torch.nn.Parameter(torch.from_file(str(path), size=4))
    assert not parameter.untyped_storage().resizable()
    own([parameter])
    shelf = Shelf(CPU)
    shelf.put([parameter])
    assert parameter.untyped_storage().nbytes() == 0
