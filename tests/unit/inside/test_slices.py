"""Where tensors go is what the model's own loader does with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.engine.inside.slices import Layout, Mismatch, Spec, derive, offsets, target_of
from tests.unit.inside.model import SPECS, Model, weights


def placed(layout: Layout, tensors: dict[str, torch.Tensor]) -> None:
    for name, pieces in layout.slices.items():
        for piece in pieces:
            piece.tensor.copy_(tensors[name].as_strided(piece.tensor.shape, piece.stride, piece.offset))


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_what_is_put_into_the_slices_is_what_the_loader_would_have_loaded(rank: int, size: int) -> None:
    model, loaded = Model(rank, size), Model(rank, size)
    layout = derive(model, SPECS, model.load_weights)
    assert layout.problem is None
    placed(layout, weights(1))
    loaded.load_weights(weights(1).items())
    for (name, found), want in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(found, want), name


def test_deriving_changes_nothing_but_padding() -> None:
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    derive(model, SPECS, model.load_weights)
    before["embed"][13:] = 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())


def test_whole_contiguous_slices_are_received_into_and_cut_ones_are_not() -> None:
    model, shard = Model(), Model(0, 2)
    straight = derive(model, SPECS, model.load_weights).slices
    cut = derive(shard, SPECS, shard.load_weights).slices
    assert all(target_of(spec, straight[spec.name]) is not None for spec in SPECS)
    assert [spec.name for spec in SPECS if target_of(spec, cut[spec.name]) is not None] == ["embed", "norm"]
    assert target_of(SPECS[1], straight["q"]).data_ptr() == model.qkv.data_ptr()  # type: ignore[union-attr]


def transposed(model: Any, name: str, tensor: torch.Tensor) -> bool:
    if name == "down":
        model.down.data.view(32, 8).copy_(tensor.t())
    return name == "down"


def quantised(model: Any, name: str, tensor: torch.Tensor) -> bool:
    if name == "norm":
        model.norm.data.copy_((tensor * 16).round())
    return name == "norm"


def derived(model: Any, name: str, tensor: torch.Tensor) -> bool:
    if name == "norm":
        model.norm.data.copy_(model.embed.sum(0))
    return name == "norm"


def read(model: Any, name: str, tensor: torch.Tensor) -> bool:
    return name == "norm" and bool(tensor.max() > 0)


def twice(model: Any, name: str, tensor: torch.Tensor) -> bool:
    if name == "k":
        model.qkv.data.narrow(0, 0, 4).copy_(tensor)
        model.qkv.data.narrow(0, 0, 4).copy_(tensor)
    return name == "k"


def partly(model: Any, name: str, tensor: torch.Tensor) -> bool:
    return name == "q"


@pytest.mark.parametrize(
    ("quirk", "problem"),
    [
        (quantised, r"computes .*mul.* of 'norm'"),
        (derived, r"computes .*sum.* of 'embed'"),
        (read, r"'norm'"),
        (twice, r"'qkv' is written twice"),
        (partly, r"64 of 128 elements of 'qkv'"),
    ],
)
def test_what_is_no_slice_is_named(quirk: Any, problem: str) -> None:
    model = Model(quirk=quirk)
    layout = derive(model, SPECS, model.load_weights)
    with pytest.raises(AssertionError, match=problem):
        assert not layout.problem, layout.problem


def test_a_transposed_parameter_is_a_slice_that_has_to_be_staged() -> None:
    model = Model(quirk=transposed)
    layout = derive(model, SPECS, model.load_weights)
    assert layout.problem is None
    placed(layout, weights(1))
    assert torch.equal(model.down.view(32, 8), weights(1)["down"].t())
    assert target_of(SPECS[4], layout.slices["down"]) is None


def test_another_dtype_is_no_slice() -> None:
    model = Model()
    specs = [spec._replace(dtype=torch.bfloat16) if spec.name == "norm" else spec for spec in SPECS]
    assert "'norm' as torch.bfloat16" in str(derive(model, specs, model.load_weights).problem)


def test_another_shape_is_what_the_loader_says_of_it() -> None:
    model = Model()
    specs = [spec._replace(shape=(9,)) if spec.name == "norm" else spec for spec in SPECS]
    assert "norm has another shape" in str(derive(model, specs, model.load_weights).problem)


def test_missing_and_unknown_names_are_refused() -> None:
    model = Model()
    with pytest.raises(Mismatch, match="'norm' is not among"):
        derive(model, SPECS[:-1], model.load_weights)
    with pytest.raises(Mismatch, match="first 'extra'"):
        derive(model, [*SPECS, Spec("extra", torch.float32, (2,))], model.load_weights)
    tied = [*SPECS, Spec("lm_head.weight", torch.float32, (13, 8))]
    assert derive(model, tied, model.load_weights).problem is None


def test_shared_tensors_begin_at_aligned_places() -> None:
    assert offsets([1, 256, 0, 300]) == ([0, 256, 512, 512], 1024)
