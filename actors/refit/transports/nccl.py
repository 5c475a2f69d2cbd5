"""Sends weights over NCCL, from the GPU that holds them.

The communicator lives beside the trainer's own groups and shares nothing with them. A bucket is flattened and broadcast
on a stream of its own, so that a training step goes on meanwhile. A transfer that fails is aborted, not waited for: its
kernels may hang, and torch's watchdog, which would end the process, is kept out of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch

from actors.refit.transports.collective import CollectiveSender, broadcast_options
from actors.refit.transports.tensors import flat_bytes

POLL_S = 0.0002
"""Pause between two looks whether a broadcast is done."""
SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""What SGLang sets for itself, and what keeps torch from ending a process whose collective failed."""


class NcclSender(CollectiveSender):
    """`CollectiveSender` over NCCL, from the GPU `device`. Raises `RuntimeError` where torch has no NCCL."""

    def __init__(self, host: str, bucket_bytes: int, device: torch.device) -> None:
        if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
            raise RuntimeError("refit.transport=nccl needs a GPU and a torch with NCCL: use gloo, or ipc on one host")
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        super().__init__(host, bucket_bytes, lambda _: NcclWire(device))


class NcclWire:
    """`collective.Wire` from one GPU."""

    device = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def connect(self, store: Any, world_size: int, timeout: timedelta) -> NcclCommunicator:
        """Blocks for nobody: ranks meet at the first broadcast."""
        from torch._C._distributed_c10d import ProcessGroupNCCL

        kind: Any = ProcessGroupNCCL  # torch's type stubs leave out most of it
        options = kind.Options()
        options._timeout = timeout
        with torch.cuda.device(self._device):
            return NcclCommunicator(kind(store, 0, world_size, options), self._device, self._stream)

    def absent(self, store: Any, offset: int) -> bool:
        """NCCL's ranks leave no word at the store."""
        return False

    def flatten(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """On the GPU, behind whatever made the tensors."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            return torch.cat([flat_bytes(tensor.to(self._device, non_blocking=True)) for tensor in tensors])


class NcclCommunicator:
    """Rank 0 of a group; all of its work is on `stream`."""

    def __init__(self, group: Any, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._group = group
        self._device = device
        self._stream = stream

    def broadcast(self, flat: torch.Tensor, timeout: timedelta) -> Callable[[], None]:
        """See `Communicator.broadcast`. torch's own wait only orders streams: the end is looked for."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            options: Any = broadcast_options(timeout)
            options.asyncOp = True
            work = self._group.broadcast([flat], options)
        give_up_at = time.monotonic() + timeout.total_seconds()

        def wait() -> None:
            while not work.is_completed():
                if time.monotonic() > give_up_at:
                    raise RuntimeError(f"a bucket of {flat.numel()} bytes was not taken in time")
                time.sleep(POLL_S)
            work.wait()

        return wait

    def abort(self) -> None:
        """See `Communicator.abort`."""
        self._group.abort()


def environment() -> dict[str, str]:
    """NCCL's settings in this process, for the log."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "TORCH_NCCL_"))}
