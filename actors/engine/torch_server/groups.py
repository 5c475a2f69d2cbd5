"""Weight-update groups: side process groups in which the trainer is rank 0 and broadcasts parameters.

The rendezvous is the one SGLang makes (TCP store at the trainer, keys prefixed with the group's name), so that one
sender serves both. The process's default group is never touched.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,  # pyright: ignore[reportPrivateUsage]
    _world,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.rendezvous import rendezvous

BACKENDS = ("gloo", "nccl")
POLL = 0.05  # seconds


class GroupError(RuntimeError):
    """Joining, receiving or leaving failed: names the group and the cause."""


class GroupLost(GroupError):
    """A receive through NCCL failed: its kernel still waits on the GPU, so only a new process is sure to work."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """One parameter to receive: its name, dtype and shape as the sender declares them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Groups:
    """The groups this engine is in, by name. Not thread-safe: all calls from one thread, which they may block."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        """`timeout` (seconds) bounds the rendezvous and each broadcast."""
        self.device, self.timeout = device, timedelta(seconds=timeout)
        self._groups: dict[str, tuple[Any, torch.device]] = {}

    def names(self) -> list[str]:
        return sorted(self._groups)

    def join(self, name: str, address: str, port: int, rank: int, world: int, backend: str) -> None:
        """Meet the other ranks; blocks until all are there. Raises `GroupError`."""
        if name in self._groups:
            raise GroupError(f"group {name!r} exists already: destroy it first")
        if backend not in BACKENDS or (backend == "nccl" and self.device.type != "cuda"):
            raise GroupError(f"backend is {backend!r}, an engine on {self.device.type} can use gloo (nccl on cuda)")
        if not 0 < rank < world:
            raise GroupError(f"rank is {rank} of {world}: rank_offset must be in [1, world_size)")
        try:
            self._await_listener(address, port)
            store, _, _ = next(rendezvous(f"tcp://{address}:{port}", rank, world, timeout=self.timeout))
            store.set_timeout(self.timeout)
            group, _ = _new_process_group_helper(
                world,
                rank,
                [],
                Backend(backend),
                PrefixStore(name, store),
                group_name=cast("Any", name),  # a NewType of str in some versions of torch
                timeout=self.timeout,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise GroupError(f"joining group {name!r} at {address}:{port}: {error}") from error
        _world.pg_group_ranks[group] = {i: i for i in range(world)}
        self._groups[name] = group, self.device if backend == "nccl" else torch.device("cpu")

    def _await_listener(self, address: str, port: int) -> None:
        """Wait for rank 0's store; torch's own client retries to about twice its timeout. Raises OSError."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                socket.create_connection((address, port), max(deadline - time.monotonic(), 0.001)).close()
                return
            except OSError as error:
                if time.monotonic() + POLL > deadline:
                    raise TimeoutError(f"nothing listened within {self.timeout.total_seconds()} s ({error})") from error
            time.sleep(POLL)

    def receive(self, name: str, incoming: Sequence[Incoming], bucket: bool) -> list[tuple[str, torch.Tensor]]:
        """The named tensors rank 0 broadcasts: one by one, or as one bucket of bytes in the order given.

        Raises `GroupError` when the group is unknown, there is no memory for what is announced, or the sender left,
        dawdled or disagrees on sizes; on a GPU `GroupLost` for the latter three.
        """
        group, device = self._member(name)
        sizes = [(item.shape, item.dtype) for item in incoming]
        if bucket:
            sizes = [((sum(item.size for item in incoming),), torch.uint8)]
        try:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]
        except (RuntimeError, MemoryError) as error:  # no collective has begun here
            size = sum(item.size for item in incoming)
            raise GroupError(f"no memory for {size} bytes of group {name!r} (refit.bucket_mib): {error}") from error
        try:
            self._broadcast(group, tensors)
        except (RuntimeError, ValueError, TimeoutError) as error:
            kind = GroupLost if device.type == "cuda" else GroupError
            raise kind(f"receiving through group {name!r}: {error}") from error
        if bucket:
            return split(tensors[0], incoming)
        return [(item.name, tensor) for item, tensor in zip(incoming, tensors, strict=True)]

    def leave(self, name: str) -> None:
        """Destroy the group. Raises `GroupError` when it is unknown."""
        group, _ = self._member(name)
        del self._groups[name]
        try:
            dist.destroy_process_group(group)
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"leaving group {name!r}: {error}") from error

    def _member(self, name: str) -> tuple[Any, torch.device]:
        if name not in self._groups:
            raise GroupError(f"group {name!r} is not initialised")
        return self._groups[name]

    def _broadcast(self, group: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Receive into `tensors`; they are complete on return. Raises RuntimeError or TimeoutError."""
        pending = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]
        deadline = time.monotonic() + self.timeout.total_seconds()
        for tensor, work in zip(tensors, pending, strict=True):
            assert work is not None  # this rank is a member
            # waiting for NCCL only orders later kernels behind it
            while tensor.is_cuda and not work.is_completed():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nothing arrived within {self.timeout.total_seconds()} s")
                time.sleep(POLL / 50)
            work.wait()


def split(flat: torch.Tensor, incoming: Sequence[Incoming]) -> list[tuple[str, torch.Tensor]]:
    """The tensors that lie one behind the other in `flat` (uint8), as views wherever alignment allows."""
    found, start = [], 0
    for item in incoming:
        part = flat[start : start + item.size]
        if start % item.dtype.itemsize:
            part = part.clone()  # a view of another dtype needs its alignment
        found.append((item.name, part.view(item.dtype).view(item.shape)))
        start += item.size
    return found
