"""The ranks of the torch backend: each holds a part of every parameter and of the optimizer (FSDP2, `fully_shard`).

A layer's parameters are gathered just before it computes. What leaves the ranks (exports, checkpoints) is whole again,
so that it can be read by any number of them.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from actors.trainer.backend import BackendError, World


def device_of(name: str, rank: int) -> torch.device:
    """Where a rank computes: `cuda:N` is rank 0's, the others follow. `auto`: the first GPU, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    index = (device.index or 0) + rank
    if torch.cuda.is_available() and index >= torch.cuda.device_count():
        raise BackendError(
            f"trainer.device={name}: rank {rank} needs GPU {index}, here are {torch.cuda.device_count()}; "
            "lower trainer.ranks, or name a GPU with enough behind it"
        )
    return torch.device("cuda", index) if rank or device.index is not None else device


def join(world: World, device: torch.device) -> DeviceMesh | None:
    """Meet the other ranks; None for a rank that is alone."""
    if world.size == 1:
        return None
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=FileStore(world.meeting, world.size),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.timeout_s),
    )
    return init_device_mesh(device.type, (world.size,))


def leave(mesh: DeviceMesh | None) -> None:
    """The end of `join`."""
    if mesh is not None:
        dist.destroy_process_group()


def shard(model: Any, mesh: DeviceMesh | None) -> Any:
    """Cut the parameters of `model` over the ranks, in place: layer by layer, each moved to the device for that."""
    if mesh is not None:
        for layer in layers(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def layers(model: Any) -> list[torch.nn.Module]:
    """The decoder's layers; none for a model of another build."""
    return list(getattr(getattr(model, "model", model), "layers", []))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded. Collective, if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(value: Tensor, own: Tensor) -> Tensor:
    """This rank's share of a whole `value`, as `own` is sharded; each rank has all of it, nothing is sent."""
    if not isinstance(own, DTensor):
        return value
    value = value.to(own.to_local().device)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
