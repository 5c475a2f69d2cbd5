"""What is sent must be the whole model and nothing else."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest

from actors.engine import manifest
from contracts.events import Bucket, TensorSpec

MODEL = {"model.embed_tokens.weight": (8, 4), "w": (4, 4)}


def buckets(*specs: TensorSpec) -> tuple[Bucket, ...]:
    return tuple(Bucket((spec,), 4) for spec in specs)


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, shape)


EMBED, W = spec("model.embed_tokens.weight", 8, 4), spec("w", 4, 4)


def write(file: Path, entries: dict[str, tuple[int, ...]]) -> None:
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in entries.items()}
    data = msgspec.json.encode({"__metadata__": {"format": "pt"}, **header})
    file.write_bytes(struct.pack("<Q", len(data)) + data)


def test_names_and_shapes_come_from_every_file_of_the_checkpoint(tmp_path: Path) -> None:
    assert manifest.read(tmp_path) is None
    for number, (name, shape) in enumerate(MODEL.items()):
        write(tmp_path / f"model-{number}.safetensors", {name: shape})
    assert manifest.read(tmp_path) == MODEL


def test_it_agrees_with_the_library_that_writes_such_files(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({name: torch.zeros(shape) for name, shape in MODEL.items()}, tmp_path / "model.safetensors")
    assert manifest.read(tmp_path) == MODEL


@pytest.mark.parametrize("data", [b"", b"12345", struct.pack("<Q", 2**40), struct.pack("<Q", 3) + b"{a}"])
def test_another_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file"):
        manifest.read(tmp_path)


def test_the_whole_model_is_no_problem() -> None:
    assert manifest.problem(MODEL, buckets(EMBED, W)) is None


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((EMBED, W, spec("x", 1)), "1 parameters are sent that the model has not, first 'x'"),
        ((EMBED,), "1 parameters of the model are not sent, first 'w'"),
        ((EMBED, spec("w", 4, 5)), "'w' is sent with shape [4, 5], the model has [4, 4]"),
        ((EMBED, spec("w", 4, 4, dtype="int8")), "'w' is sent as int8"),
        ((EMBED, W, W), "'w' is sent twice"),
    ],
)
def test_what_is_wrong_is_named(specs: tuple[TensorSpec, ...], message: str) -> None:
    assert message in (manifest.problem(MODEL, buckets(*specs)) or "")


def test_a_tied_head_may_be_left_out_on_either_side() -> None:
    head = {"lm_head.weight": (8, 4)}
    assert manifest.problem(MODEL | head, buckets(EMBED, W)) is None
    assert manifest.problem(MODEL, buckets(EMBED, W, spec("lm_head.weight", 8, 4))) is None
    assert manifest.problem({"w": (4, 4)}, buckets(W, spec("lm_head.weight", 8, 4))) is not None


def test_names_that_are_held_are_compared_with_those_sent() -> None:
    assert manifest.strangers(list(MODEL), buckets(EMBED, W)) is None
    assert "'x'" in (manifest.strangers(["x", *MODEL], buckets(EMBED, W)) or "")
