"""Opens memory that the trainer shares, from a description: names and numbers, nothing that could be code."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch

from actors.engine.torch_server.groups import Incoming, split
from actors.engine.torch_server.weights import DTYPES, BadWeights
from contracts.handles import DIRECTORY, NAME, CudaMemory, HostMemory, Shared


def parse(parts: Sequence[str]) -> Shared:
    """The place that a caller names, for the one rank of this engine. Raises `BadWeights`."""
    if len(parts) != 1:
        raise BadWeights(f"serialized_named_tensors has {len(parts)} entries for the one rank of this engine")
    try:
        place = msgspec.json.decode(parts[0], type=Shared)
    except msgspec.DecodeError as error:
        raise BadWeights(f"this engine takes a description of shared memory as JSON, no pickle: {error}") from error
    for spec in place.tensors:
        if spec.dtype not in DTYPES or min(spec.shape, default=0) < 0:
            raise BadWeights(f"{spec.name} has dtype {spec.dtype!r} and shape {spec.shape}")
    return place


@contextmanager
def opened(place: Shared, device: torch.device) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors at `place`, within the block only. Raises `BadWeights` when there is no such memory."""
    incoming = [Incoming(spec.name, DTYPES[spec.dtype], tuple(spec.shape)) for spec in place.tensors]
    size = sum(item.size for item in incoming)
    if isinstance(place.memory, CudaMemory):
        yield split(_cuda(place.memory, size), incoming)
        # the copies that read it are done before its owner is told so
        torch.cuda.synchronize(device)
        return
    with _mapped(place.memory, size) as flat:
        yield split(flat, incoming)


@contextmanager
def _mapped(memory: HostMemory, size: int) -> Iterator[torch.Tensor]:
    if NAME.fullmatch(memory.name) is None:
        raise BadWeights(f"{memory.name!r} is no name of shared memory")
    try:
        descriptor = os.open(DIRECTORY / memory.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise BadWeights(f"can't open shared memory {memory.name}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise BadWeights(f"shared memory {memory.name} is not a file of this user")
        if found.st_size < max(size, 1):
            raise BadWeights(f"shared memory {memory.name} has {found.st_size} bytes, the tensors {size}")
        mapping = mmap.mmap(descriptor, max(size, 1), access=mmap.ACCESS_COPY)  # torch takes writable memory only
    finally:
        os.close(descriptor)
    # not closed by hand: that fails while a tensor still refers to it, and it ends with the last one
    yield torch.frombuffer(mapping, dtype=torch.uint8, count=size) if size else torch.empty(0, dtype=torch.uint8)


def _cuda(memory: CudaMemory, size: int) -> torch.Tensor:
    devices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if memory.device not in devices:
        raise BadWeights(f"GPU {memory.device} is not visible to this engine: it sees {', '.join(devices) or 'none'}")
    if memory.size < size:
        raise BadWeights(f"the shared allocation has {memory.size} bytes, the tensors {size}")
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            devices[memory.device],
            memory.handle,
            memory.size,
            memory.offset,
            memory.ref_counter,
            memory.ref_counter_offset,
            memory.event,
            memory.event_sync,
        )
    except RuntimeError as error:
        raise BadWeights(f"CUDA does not open the shared allocation: {error}") from error
    flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{devices[memory.device]}")
    return flat.set_(storage, 0, (size,), (1,))  # pyright: ignore[reportCallIssue, reportArgumentType]
