"""Sends weights over NCCL, from the GPU that holds them.

The communicator lives beside the trainer's own groups and shares nothing with them. A bucket is flattened and broadcast
on a stream of its own, so that a training step goes on meanwhile. A transfer that fails is aborted, not waited for: its
kernels may hang, and torch's watchdog, which would end the process, is kept out of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from actors.refit.transports.collective import CollectiveSender, broadcast_options
from actors.refit.transports.staging import Staging
from actors.refit.transports.tensors import flat_bytes

POLL_S = 0.0002
"""Pause between two looks whether a broadcast is done."""
WARM = 8
"""Bytes that a fresh group broadcasts first."""


class NcclSender(CollectiveSender):
    """`CollectiveSender` over NCCL, from the GPU `device`, by the environment's settings (`config.nccl`).

    Raises `RuntimeError` where torch has no NCCL.
    """

    def __init__(
        self,
        host: str,
        bucket_bytes: int | None,
        device: torch.device,
        apart: bool = False,
        staging: Staging = Staging(),  # noqa: B008 - frozen
    ) -> None:
        if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
            raise RuntimeError("refit.transport=nccl needs a GPU and a torch with NCCL: use gloo, or ipc on one host")
        super().__init__(host, bucket_bytes, lambda _: NcclWire(device), apart, staging)


class NcclWire:
    """`collective.Wire` from one GPU."""

    device = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def connect(self, store: Any, world_size: int, timeout: timedelta) -> NcclCommunicator:
        """Blocks for nobody: ranks meet at the first broadcast."""
        from torch._C._distributed_c10d import ProcessGroup, ProcessGroupNCCL

        kind: Any = ProcessGroupNCCL  # torch's type stubs leave out most of it
        options = kind.Options()
        options._timeout = timeout
        with torch.cuda.device(self._device):
            backend = kind(store, 0, world_size, options)
        # the outer object, registered nowhere, is what has calls to make one launch of many collectives
        group = ProcessGroup(store, 0, world_size)
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, backend)
        return NcclCommunicator(group, backend, self._device, self._stream)

    def absent(self, store: Any, offset: int) -> bool:
        """NCCL's ranks leave no word at the store: the coordinator names who has said nothing."""
        return False

    def flatten(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """On the GPU, behind whatever made the tensors; one that is there is not copied."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            flats = [flat_bytes(tensor.to(self._device, non_blocking=True)) for tensor in tensors]
            return flats[0] if len(flats) == 1 else torch.cat(flats)


class NcclCommunicator:
    """Rank 0 of a group; all of its work is on `stream`."""

    def __init__(self, group: Any, backend: Any, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._group = group
        self._backend = backend
        self._device = device
        self._stream = stream

    def warm(self, timeout: timedelta) -> None:
        """See `Communicator.warm`: ranks connect at their first collective. Every receiver takes `WARM` bytes so."""
        self.broadcast([torch.zeros(WARM, dtype=torch.uint8, device=self._device)], timeout)()

    def broadcast(self, flats: Sequence[torch.Tensor], timeout: timedelta) -> Callable[[], None]:
        """See `Communicator.broadcast`; one launch. torch's own wait only orders streams: the end is looked for."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            options: Any = broadcast_options(timeout)
            options.asyncOp = True
            if len(flats) == 1:
                work = self._backend.broadcast([flats[0]], options)
            else:
                self._group._start_coalescing(self._device)
                for flat in flats:
                    self._backend.broadcast([flat], options)
                work = self._group._end_coalescing(self._device)
        give_up_at = time.monotonic() + timeout.total_seconds()

        def wait() -> None:
            while not work.is_completed():
                if time.monotonic() > give_up_at:
                    raise RuntimeError(f"{sum(flat.numel() for flat in flats)} bytes were not taken in time")
                time.sleep(POLL_S)
            work.wait()

        return wait

    def abort(self) -> None:
        """See `Communicator.abort`."""
        self._backend.abort()


def environment() -> dict[str, str]:
    """NCCL's settings in this process, for the log."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "TORCH_NCCL_"))}
