"""Tensors as the wire sees them: name, dtype, shape, and contiguous bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

from actors.engine.inside import mix64
from contracts.events import TensorSpec
from contracts.weights import Checksum


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Name, dtype (`float32`, ...) and shape of a tensor."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous bytes of a tensor where it is, as a uint8 vector; shares memory where it can."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`flat_bytes` in host memory."""
    return flat_bytes(tensor.cpu())


def checksum(tensor: torch.Tensor) -> str:
    """Hexadecimal xxh3_128 of the tensor's contiguous bytes; `contracts.weights.digest` combines these."""
    return xxhash.xxh3_128(as_bytes(tensor).numpy().data).hexdigest()


def checksum_for(tensors: Mapping[str, torch.Tensor], direct: bool) -> Checksum:
    """The checksum that is quick where these tensors are, or that our own receiver knows (`direct`)."""
    return "mix64" if direct or any(tensor.is_cuda for tensor in tensors.values()) else "xxh3_128"


def checksums(tensors: Mapping[str, torch.Tensor], kind: Checksum) -> dict[str, str]:
    """Hexadecimal checksum of the contiguous bytes of each tensor, by name."""
    if kind == "mix64":
        return dict(zip(tensors, mix64.checksums(list(tensors.values())), strict=True))
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def bucket_bytes(setting: int | None, tensors: Mapping[str, torch.Tensor]) -> int:
    """`setting`, or what suits the memory: 256 MiB on a CPU, on a GPU an eighth of what is free, 64 to 512 MiB.

    SGLang stages a bucket twice: 512 MiB keep that at 1 GiB.
    """
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if setting is not None or device is None:
        return 256 * 2**20 if setting is None else setting
    free, _ = torch.cuda.mem_get_info(device)
    return min(512 * 2**20, max(64 * 2**20, free // 8))
