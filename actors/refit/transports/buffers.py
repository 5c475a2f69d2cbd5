"""Memory that a process of the same host can open: a bucket is filled here and read there.

`HostBuffer` is a file in the host's shared memory, `CudaBuffer` an allocation that CUDA hands over by a handle. Both
describe themselves in two forms: as a `contracts.handles.Shared`, which our own engine reads, and as the pickle that
SGLang's `/update_weights_from_tensor` takes. Pickles are only ever written here, never read.
"""

from __future__ import annotations

import base64
import io
import pickle
import time
import types
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

import msgspec
import torch
from torch._utils import _rebuild_tensor_v2
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from actors.leftovers import BUCKET, Claim
from actors.refit.transports.plan import size_of
from actors.refit.transports.tensors import flat_bytes
from contracts.events import TensorSpec
from contracts.handles import DIRECTORY, CudaMemory, HostMemory, Shared

Form = Literal["shared", "pickle", "direct"]
"""`shared` for our own engine, `pickle` for SGLang, `direct` for our own receiver in SGLang's processes."""
POLL_S = 0.0005
"""Pause between two looks whether a GPU is done."""


class Buffer(Protocol):
    """Memory of a fixed size in bytes."""

    size: int

    def fill(self, tensors: Iterable[torch.Tensor], deadline: float, starts: Iterable[int] | None = None) -> None:
        """Copy the bytes of `tensors` in, one behind the other, or to `starts`.

        `deadline`: `time.monotonic()`, `TimeoutError` then.
        """
        ...

    def part(self, tensors: Sequence[TensorSpec], form: Form) -> str:
        """What one rank of a server needs to read the buffer; to be used once."""
        ...

    def close(self) -> None:
        """Give the memory back; readers keep what they have open."""
        ...


class HostBuffer:
    """A `Buffer` in host memory, readable by processes of the same user alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._name = f"{BUCKET}{uuid.uuid4().hex}"
        self._claim = Claim.file(DIRECTORY / self._name, max(size, 1))
        try:
            path = str(self._claim.path)
            self._memory = torch.from_file(path, shared=True, size=max(size, 1), dtype=torch.uint8)
        except BaseException:
            self._claim.drop()
            raise

    def fill(self, tensors: Iterable[torch.Tensor], deadline: float, starts: Iterable[int] | None = None) -> None:
        """See `Buffer.fill`."""
        _lay_out(self._memory, tensors, deadline, starts)

    def part(self, tensors: Sequence[TensorSpec], form: Form) -> str:
        """See `Buffer.part`."""
        if form != "pickle":
            return _described(HostMemory(self._name), tensors, form)
        storage = _Call(torch.ByteStorage.from_file, str(self._claim.path), False, self.size)
        flat = _Call(_rebuild_tensor_v2, storage, 0, (self.size,), (1,), False, OrderedDict())
        return _pickled(flat, tensors)

    def close(self) -> None:
        """See `Buffer.close`."""
        self._claim.drop()


class CudaBuffer:
    """A `Buffer` on a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._memory = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)

    def fill(self, tensors: Iterable[torch.Tensor], deadline: float, starts: Iterable[int] | None = None) -> None:
        """See `Buffer.fill`. Copies run on a stream of their own, behind what made the tensors."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._memory.device))
            _lay_out(self._memory, tensors, deadline, starts)
            done = self._stream.record_event()
        while not done.query():
            if time.monotonic() > deadline:
                raise TimeoutError("the GPU did not copy a bucket in time")
            time.sleep(POLL_S)

    def part(self, tensors: Sequence[TensorSpec], form: Form) -> str:
        """See `Buffer.part`. Each call counts one reader, as torch's reference counts want it."""
        _, handle, size, offset, counter, counter_offset, event, sync = self._memory.untyped_storage()._share_cuda_()
        device = str(torch.cuda.get_device_properties(self._memory.device).uuid)
        if form != "pickle":
            memory = CudaMemory(device, handle, size, offset, counter, counter_offset, event, sync)
            return _described(memory, tensors, form)
        place = (device, handle, size, offset, False, counter, counter_offset, event, sync)
        shape = (torch.Tensor, (self.size,), (1,), 0, torch.storage.TypedStorage, torch.uint8)
        return _pickled(_Call(rebuild_cuda_tensor, *shape, *place), tensors)

    def close(self) -> None:
        """See `Buffer.close`."""
        torch.cuda.ipc_collect()


def buffer(size: int, device: torch.device) -> Buffer:
    """A buffer of `size` bytes where tensors of `device` are."""
    return CudaBuffer(size, device) if device.type == "cuda" else HostBuffer(size)


class _Call:
    """Pickles as the call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def _lay_out(
    memory: torch.Tensor, tensors: Iterable[torch.Tensor], deadline: float, starts: Iterable[int] | None
) -> None:
    places, start = None if starts is None else iter(starts), 0
    for tensor in tensors:
        if time.monotonic() > deadline:
            raise TimeoutError("a bucket was not filled in time")
        flat = flat_bytes(tensor)
        start = start if places is None else next(places)
        memory[start : start + flat.numel()].copy_(flat, non_blocking=True)
        start += flat.numel()


def _described(memory: HostMemory | CudaMemory, tensors: Sequence[TensorSpec], form: Form) -> str:
    """As JSON; our receiver in SGLang's processes knows the tensors already."""
    return msgspec.json.encode(memory if form == "direct" else Shared(memory, tuple(tensors))).decode()


def _pickled(flat: _Call, tensors: Sequence[TensorSpec]) -> str:
    """SGLang's `flattened_bucket`: it reads attributes of each entry of `metadata`, whatever its type."""
    metadata, start = [], 0
    for spec in tensors:
        end = start + size_of(spec)
        metadata.append(
            types.SimpleNamespace(
                name=spec.name,
                shape=torch.Size(spec.shape),
                dtype=getattr(torch, spec.dtype),
                start_idx=start,
                end_idx=end,
                numel=end - start,
            )
        )
        start = end
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=4).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(stream.getvalue()).decode()
