"""What of a rank's part of the policy waits in host memory between its steps, as `trainer.offload` says."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.trainer.megatron.model import Built, optimizers
from actors.trainer.offload import Shelf, own
from config.schema import TrainerConfig


class Offloading:
    """Puts aside, and brings back bit for bit, what is named by `config.offload`; with `none`, nothing ever moves.

    `optimizer`: its moments and float32 copies wait, and buffers of gradients are dropped: each update begins with
    zeros. `all`: parameters, with megatron's buffers that they are views of, and `references` wait too.
    """

    def __init__(self, built: Built, references: Sequence[Tensor], config: TrainerConfig, device: torch.device) -> None:
        self._built = built
        self._references = references
        self._config = config
        self._optimizer, self._weights = Shelf(device), Shelf(device)
        self._put_away()

    @contextlib.contextmanager
    def everything_here(self) -> Iterator[None]:
        """Within the block all is on the device, gradients are zeros. Collective, like `weights_here`."""
        self._weights.bring()
        self._optimizer.bring()
        for chunk in self._built.chunks:
            chunk.restore_grad_buffers()
        yield
        self._put_away()

    @contextlib.contextmanager
    def weights_here(self) -> Iterator[None]:
        """Within the block parameters and references are on the device; may be nested."""
        away = self._weights.bytes > 0
        self._weights.bring()
        yield
        if away:
            self._put_weights_away()

    def on_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory of a part of the optimizer's state, which comes to the device only by itself."""
        with self._optimizer.here(tensor):
            return tensor.detach().to("cpu", copy=True)

    def drop(self) -> None:
        """Free all of it, for good: megatron's modules outlive the policy, by hooks on nodes of autograd."""
        buffers = [
            buffer for chunk in self._built.chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        ]
        gradients = [buffer.grad_data for buffer in buffers]
        for tensor in [*self._state(), *self._parameters(), *self._references, *gradients]:
            if tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)

    def _put_away(self) -> None:
        if self._config.offload == "none":
            return
        for chunk in self._built.chunks:
            chunk.offload_grad_buffers()
        state = self._state()
        own(state)
        self._optimizer.put(state)
        if self._config.offload == "all":
            self._put_weights_away()

    def _put_weights_away(self) -> None:
        if self._config.megatron.overlap:
            # What is still to be gathered would be written into memory that is gone.
            for chunk in self._built.chunks:
                chunk.start_param_sync(force_sync=True)
        self._weights.put([*self._parameters(), *self._references])

    def _state(self) -> list[Tensor]:
        """Moments, and float32 copies of parameters. Where parameters are float32, megatron optimizes views of them."""
        of_weights = {parameter.untyped_storage()._cdata for parameter in self._parameters()}
        found: list[Tensor] = []
        for part in optimizers(self._built.optimizer):
            if part.optimizer is None:  # this rank has no parameters of its kind
                continue
            found += [tensor for group in part.optimizer.param_groups for tensor in group["params"]]
            values: list[Any] = [value for entry in part.optimizer.state.values() for value in entry.values()]
            found += [value for value in values if isinstance(value, Tensor) and value.ndim]
        return [tensor for tensor in found if tensor.untyped_storage()._cdata not in of_weights]

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self._built.chunks:
            yield from chunk.parameters()
