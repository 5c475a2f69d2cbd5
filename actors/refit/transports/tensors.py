"""Tensors as the wire sees them: name, dtype, shape, and contiguous bytes."""

from __future__ import annotations

import torch
import xxhash

from contracts.events import TensorSpec


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
