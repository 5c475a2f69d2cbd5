"""A run that names GPUs which are not there ends before anything is started."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config import loading
from pipeline import machine, preflight
from pipeline.errors import Exit, PipelineError


def load(*words: str) -> Any:
    return loading.load("quickstart", ["engine.device=cuda", *words])


@pytest.mark.parametrize(
    ("there", "words", "problem"),
    [
        (0, (), r"engine.device=cuda: needs GPU 0, but there is no GPU here"),
        (1, ("engine.gpus=[0,1]",), r"engine.gpus=\[0, 1\]: needs GPU 1, but the GPUs here are 0 to 0"),
        (2, ("trainer.device=cuda:2",), r"trainer.device=cuda:2 with trainer.ranks=1: needs GPU 2, but .* are 0 to 1"),
    ],
)
def test_a_missing_gpu_is_named_with_its_setting(
    monkeypatch: pytest.MonkeyPatch, there: int, words: tuple[str, ...], problem: str
):
    monkeypatch.setattr(machine, "gpus", lambda: there)
    with pytest.raises(PipelineError, match=problem) as raised:
        preflight.check(load(*words))
    assert raised.value.code is Exit.MISSING


def test_gpus_that_are_there_are_accepted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "gpus", lambda: 2)
    preflight.check(load("engine.gpus=[0,1]", "trainer.device=cuda:1"))


def driver(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    """Stands where NVIDIA's library would be loaded from."""

    def counted(place: Any) -> int:
        place._obj.value = count
        return 0

    def library(name: str) -> Any:
        if count is None:
            raise OSError(name)
        return SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlShutdown=lambda: 0, nvmlDeviceGetCount_v2=counted)

    monkeypatch.setattr(ctypes, "CDLL", library)


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 4), ("2,3", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,1,2,3,4,5", 4)]
)
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int):
    driver(monkeypatch, 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpus() == expected


def test_without_the_drivers_library_device_files_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    driver(monkeypatch, None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    assert machine.gpus() == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert machine.gpus() == 2
