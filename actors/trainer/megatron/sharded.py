"""Model and optimizer in megatron-core's own checkpoint format, which other parallel sizes can read too."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.utils import unwrap_model
from torch import Tensor

from actors.trainer.checkpoint import CheckpointError
from actors.trainer.megatron.model import Built, optimizers

LAYOUT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,  # gathered in host memory, not on the device
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def write(built: Built, step: int, directory: Path, on_host: Callable[[Tensor], Tensor]) -> None:
    """Write everything that a later step depends on into an empty directory. Collective.

    `on_host` answers a copy in host memory of a tensor of the optimizer's, which may be elsewhere than it says.
    """
    # It is written on this thread. megatron's own queue is a server process, which would outlive a killed trainer.
    filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]
    with _read_by(on_host, optimizers(built.optimizer)):
        state = {**_state(built, loading=False), "step": step}
    dist_checkpointing.save(state, str(directory), async_strategy="mcore", content_metadata=LAYOUT)


def read(built: Built, directory: Path) -> int:
    """Restore what `write` wrote; answers the step. Collective. Raises `CheckpointError`."""
    try:
        state: Any = dist_checkpointing.load({**_state(built, loading=True), "step": 0}, str(directory))
    except (CheckpointingException, RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{directory} can't be read by the megatron backend ({error}); set model.* and trainer.backend as in the "
            "run before"
        ) from error
    for chunk, name in zip(built.chunks, _names(built), strict=True):
        unwrap_model(chunk).load_state_dict(state[name])
    for part in optimizers(built.optimizer):
        _tolerate_step(part)
    built.optimizer.load_state_dict(state["optimizer"])
    for part in optimizers(built.optimizer):
        for values in part.optimizer.state.values():
            if isinstance(values.get("step"), torch.Tensor):
                # One tensor for all parameters is left here, and each of them would count its own steps on it.
                values["step"] = values["step"].clone()
    return state["step"]


def _state(built: Built, *, loading: bool) -> dict[str, Any]:
    models = {
        name: unwrap_model(chunk).sharded_state_dict(metadata=LAYOUT)
        for name, chunk in zip(_names(built), built.chunks, strict=True)
    }
    shards = next(iter(models.values())) if len(models) == 1 else models
    return {**models, "optimizer": built.optimizer.sharded_state_dict(shards, is_loading=loading, metadata=LAYOUT)}


@contextlib.contextmanager
def _read_by(on_host: Callable[[Tensor], Tensor], parts: list[Any]) -> Iterator[None]:
    """Within the block, distributed optimizers read float32 copies and moments by `on_host`."""

    def reader(part: Any) -> Callable[[Any], dict[str, Tensor]]:
        read = part._get_main_param_and_optimizer_states
        return lambda parameter: {name: on_host(tensor) for name, tensor in read(parameter).items()}

    for part in parts:
        part._get_main_param_and_optimizer_states = reader(part)
    try:
        yield
    finally:
        for part in parts:
            del part._get_main_param_and_optimizer_states


def _names(built: Built) -> list[str]:
    return ["model"] if len(built.chunks) == 1 else [f"model{number}" for number in range(len(built.chunks))]


def _tolerate_step(part: Any) -> None:
    """Let the distributed optimizer restore torch's AdamW, whose step count comes with the groups, not as a tensor."""
    restore = type(part)._set_main_param_and_optimizer_states
    part._set_main_param_and_optimizer_states = lambda parameter, tensors: restore(
        part, parameter, {"step": None, **tensors}
    )
