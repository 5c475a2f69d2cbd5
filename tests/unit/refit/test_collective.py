"""What holds for every broadcast, whatever moves the bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

from actors.refit.transports import TransferError, collective
from actors.refit.transports.choice import sender, settings
from actors.refit.transports.collective import CollectiveSender
from actors.refit.transports.tensors import Planner, as_bytes
from config.schema import RefitConfig, RunConfig, TrainerConfig
from contracts.events import TransferStarted

STARTED = TransferStarted(epoch=1, version=1, group="g", fresh=True, members=(), world_size=1)


class Wire:
    """A wire that notes what is asked of it; `broken` is what its communicator raises at bucket 1."""

    device = "cpu"

    def __init__(self, broken: Exception | None = None) -> None:
        self.log: list[str] = []
        self.most = 0
        self.aborted = self.warmed = 0
        self.together: list[int] = []
        self._broken = broken
        self._flats: list[weakref.ref[torch.Tensor]] = []

    def connect(self, store: Any, world_size: int, timeout: timedelta) -> Wire:
        return self

    def absent(self, store: Any, offset: int) -> bool:
        return False

    def flatten(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([as_bytes(tensor) for tensor in tensors])
        self.log.append(f"flatten {flat.view(torch.float32)[0]:g}")
        self._flats.append(weakref.ref(flat))
        self.most = max(self.most, sum(ref() is not None for ref in self._flats))
        return flat

    def warm(self, timeout: timedelta) -> None:
        self.warmed += 1

    def broadcast(self, flats: Sequence[torch.Tensor], timeout: timedelta) -> Callable[[], None]:
        number = flats[0].view(torch.float32)[0]
        self.together.append(len(flats))
        self.log.append(f"begin {number:g}")

        def wait() -> None:
            if number == 1 and self._broken is not None:
                raise self._broken
            self.log.append(f"end {number:g}")

        return wait

    def abort(self) -> None:
        self.aborted += 1


def exhausted(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def weights(count: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.full((4,), float(i))) for i in range(count)]


def test_the_next_bucket_is_flattened_while_one_travels_and_no_third_one_is_held() -> None:
    wire = Wire()
    made = CollectiveSender("127.0.0.1", 16, lambda _: wire)
    made.offer(weights(4))
    assert made.send(STARTED, 30.0).bytes == 64
    made.close()
    assert wire.log == [
        *("flatten 0", "begin 0"),
        *("flatten 1", "end 0", "begin 1"),
        *("flatten 2", "end 1", "begin 2"),
        *("flatten 3", "end 2", "begin 3", "end 3"),
    ]
    assert wire.most == 2
    assert (wire.aborted, wire.warmed) == (1, 1)


def test_apart_nothing_is_flattened_in_a_transfer_and_a_bucket_is_one_launch() -> None:
    wire = Wire()
    made = CollectiveSender("127.0.0.1", 32, lambda _: wire, apart=True)
    offer = made.offer([*weights(4), ("empty", torch.empty(0))])
    assert offer.checksum == "mix64"
    wire.log.clear()
    assert made.send(STARTED, 30.0).bytes == 64
    made.close()
    assert wire.log == ["begin 0", "begin 2", "end 0", "end 2"]
    assert wire.together == [2, 2]


def test_a_broadcast_that_breaks_aborts_the_communicator_and_fails_the_transfer() -> None:
    wire = Wire(RuntimeError("peer gone\nand a trace"))
    made = CollectiveSender("127.0.0.1", 16, lambda _: wire)
    made.offer(weights(4))
    with pytest.raises(TransferError, match=r"^peer gone$") as caught:
        made.send(STARTED, 30.0)
    assert caught.value.phase == "send"
    assert wire.aborted == 1
    made.offer(weights(1))
    with pytest.raises(TransferError, match="not held any more"):
        made.send(TransferStarted(epoch=2, version=1, group="g", fresh=False, members=(), world_size=1), 30.0)


def test_a_gpu_without_memory_fails_the_transfer_and_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    made = CollectiveSender("127.0.0.1", 16, lambda _: wire)
    with monkeypatch.context() as patch:
        patch.setattr(collective, "checksums", exhausted)
        with pytest.raises(TransferError, match=r"can't offer weights .*out of memory") as caught:
            made.offer(weights(1))
        assert caught.value.phase == "offer"
    made.offer(weights(1))
    with monkeypatch.context() as patch:
        patch.setattr(wire, "flatten", exhausted)
        with pytest.raises(TransferError, match="out of memory") as caught:
            made.send(STARTED, 30.0)
        assert caught.value.phase == "send"
    assert wire.aborted == 1, "receivers wait for bytes that never come"
    made.offer(weights(1))
    assert made.send(STARTED, 30.0).bytes > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without GPUs says")
def test_nccl_without_a_gpu_names_the_way_out() -> None:
    config = RunConfig(refit=RefitConfig(transport="nccl"), trainer=TrainerConfig(device="cuda"))
    with pytest.raises(RuntimeError, match=r"refit\.transport=nccl needs a GPU.*use gloo"):
        sender(config)


def test_the_settings_of_nccl_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert settings(RunConfig(refit=RefitConfig(transport="nccl")))["NCCL_DEBUG"] == "WARN"
    assert settings(RunConfig()) == {}


def test_a_plan_is_made_anew_exactly_when_names_dtypes_shapes_or_the_size_of_buckets_change() -> None:
    def tensors(*names: str, dtype: torch.dtype = torch.float32, width: int = 2) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(3, width, dtype=dtype) for name in names}

    planner = Planner()
    first = planner.plan(tensors("a", "b"), 24)
    assert [[spec.name for spec in bucket.tensors] for bucket in first] == [["a"], ["b"]]
    assert planner.plan(tensors("a", "b"), 24) is first
    assert len(planner.plan(tensors("a", "b"), 48)) == 1
    for changed in (tensors("b", "a"), tensors("a"), tensors("a", width=1), tensors("a", dtype=torch.bfloat16)):
        (bucket, *_) = planner.plan(changed, 99)
        assert [(spec.name, spec.dtype, spec.shape) for spec in bucket.tensors] == [
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in changed.items()
        ]
