"""A run whose needs of GPU memory can't be met, or that lacks what gives memory back, ends before it starts."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config import loading
from config.memory import GIB, Model
from pipeline import machine, preflight
from pipeline.errors import Exit, PipelineError

SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


def checkpoint(path: Path, parameters: int, **shape: Any) -> Path:
    """A directory whose safetensors file announces tensors and holds none."""
    path.mkdir()
    half = parameters // 2
    head = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [half, 1], "data_offsets": [0, 0]},
        "b": {"dtype": "BF16", "shape": [half], "data_offsets": [0, 0]},
    }
    data = json.dumps(head).encode()
    (path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    (path / "config.json").write_text(json.dumps(SHAPE | shape))
    return path


def test_the_size_of_a_model_is_read_from_the_heads_of_its_files(tmp_path: Path):
    assert preflight.checkpoint_size(checkpoint(tmp_path / "a", 1000)) == Model(1000, 2 * 2 * 2 * 16)
    assert preflight.checkpoint_size(checkpoint(tmp_path / "b", 10, head_dim=8)) == Model(10, 2 * 2 * 2 * 8)
    assert preflight.checkpoint_size(tmp_path / "none") is None
    (tmp_path / "a" / "model.safetensors").write_bytes(b"\xff" * 9)
    assert preflight.checkpoint_size(tmp_path / "a") is None


def test_a_model_that_is_too_large_for_a_gpu_is_refused_with_numbers_and_fixes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(machine, "gpus", lambda: 1)
    words = ["trainer.device=cuda:0", "engine.device=cuda:0", "sync=true", "model.params={}"]
    config = loading.load("quickstart", [*words, f"model.source={checkpoint(tmp_path / 'm', 10**9)}"])
    monkeypatch.setattr(machine, "free_memory", lambda numbers: {number: 100 * GIB for number in numbers})
    preflight.check(config)
    monkeypatch.setattr(machine, "free_memory", lambda numbers: {number: 20 * GIB for number in numbers})
    with pytest.raises(
        PipelineError, match=r"GPU 0 has 20.0 GiB free, but a step needs .*; set engine.release"
    ) as raised:
        preflight.check(config)
    assert raised.value.code is Exit.USAGE


def test_sglang_without_its_memory_saver_is_refused(monkeypatch: pytest.MonkeyPatch):
    words = ["trainer.device=cuda:0", "engine.device=cuda:0", "engine.kind=sglang", "sync=true", "engine.release=kv"]
    config = loading.load("quickstart", [*words, f"engine.python={sys.executable}"])
    monkeypatch.setattr(preflight, "_engines", lambda config: None)  # nor is SGLang itself here
    with pytest.raises(PipelineError, match=r"engine.release=kv needs torch_memory_saver .*pip install") as raised:
        preflight.check(config)
    assert raised.value.code is Exit.MISSING


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, {0: 100, 1: 101}), ("1", {0: 101}), ("GPU-x,0", {1: 100}), ("7,0", {1: 100})]
)
def test_free_memory_is_that_of_the_gpus_which_a_process_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: dict[int, int]
):
    def handle(number: int, place: Any) -> int:
        place._obj.value = number + 1
        return 0 if number < 2 else 6

    def memory(handle: Any, place: Any) -> int:
        place._obj.free = 99 + handle.value
        return 0

    calls = {"nvmlInit_v2": lambda: 0, "nvmlShutdown": lambda: 0}
    library = SimpleNamespace(**calls, nvmlDeviceGetHandleByIndex_v2=handle, nvmlDeviceGetMemoryInfo=memory)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.free_memory([0, 1]) == expected


def test_without_a_driver_nothing_is_known_of_memory(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert machine.free_memory([0]) == {}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(nvmlInit_v2=lambda: 9))
    assert machine.free_memory([0]) == {}
