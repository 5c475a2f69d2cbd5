"""Memory of tensors put aside in host memory, so that others on the device have room, and brought back bit for bit.

A tensor stays the object that it is: its storage is emptied and filled again in place, so whoever refers to it, or to a
view of it (optimizers, FSDP2, megatron's buffers), goes on as before. Nothing may read or write it meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Shelf:
    """Where tensors of one `device` wait. Host memory is pinned for a GPU, and kept from one time to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hosts: dict[int, Tensor] = {}
        self._away: dict[int, torch.UntypedStorage] = {}

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Put aside what is not yet; of a sharded tensor, this rank's part."""
        fresh = {
            storage._cdata: storage
            for storage in map(_storage, tensors)
            if storage.nbytes() and storage._cdata not in self._away
        }
        for key, storage in fresh.items():
            host = self._hosts.get(key)
            if host is None or host.numel() != storage.nbytes():
                pinned = self._device.type == "cuda"
                host = self._hosts[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            host.copy_(_flat(storage), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for storage in fresh.values():
            storage.resize_(0)
        self._away |= fresh
        self._hosts = {key: host for key, host in self._hosts.items() if key in self._away}
        if fresh and self._device.type == "cuda":
            torch.cuda.empty_cache()  # other processes can use no memory that is merely cached

    def bring(self) -> None:
        """All of it is where it was, for what runs on this thread's stream next."""
        for key, storage in self._away.items():
            self._fill(key, storage)
        self._away = {}

    @contextlib.contextmanager
    def here(self, tensor: Tensor) -> Iterator[Tensor]:
        """One tensor is there to be read within the block, wherever it was before."""
        storage = _storage(tensor)
        away = storage._cdata in self._away
        if away:
            self._fill(storage._cdata, storage)
        try:
            yield tensor
        finally:
            if away:
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                storage.resize_(0)

    @property
    def bytes(self) -> int:
        """What is away."""
        return sum(self._hosts[key].numel() for key in self._away)

    def _fill(self, key: int, storage: torch.UntypedStorage) -> None:
        host = self._hosts[key]
        storage.resize_(host.numel())
        _flat(storage).copy_(host, non_blocking=True)


def own(tensors: Iterable[Tensor]) -> None:
    """Give tensors memory that can be emptied, where they have, say, that of a file."""
    for tensor in map(_local, tensors):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return _local(tensor).untyped_storage()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _flat(storage: torch.UntypedStorage) -> Tensor:
    """All of its bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportCallIssue, reportArgumentType]
