"""Tensors as the wire sees them: name, dtype, shape, and contiguous bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from actors.engine.inside import mix64
from actors.refit.transports.plan import plan
from actors.refit.transports.staging import LARGE, LEAST, ON_CPU, Choice, Staging, choose, is_short, mib
from contracts.events import Bucket, TensorSpec
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


class Planner:
    """Plans transfers for one sender. A model of tens of thousands of tensors takes a while, and seldom changes."""

    def __init__(self) -> None:
        self._seen: Any = None
        self._buckets: tuple[Bucket, ...] = ()

    def plan(self, tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> tuple[Bucket, ...]:
        """`plan.plan` of these tensors, the one before as long as names, dtypes, shapes and size are the same."""
        held = tensors.values()
        seen = bucket_bytes, list(tensors), [tensor.dtype for tensor in held], [tensor.shape for tensor in held]
        if seen != self._seen:
            specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
            self._seen, self._buckets = seen, plan(specs, bucket_bytes)
        return self._buckets


class Sizer:
    """Chooses the size of buckets, once for a sender: receivers prepare for the buckets that they know."""

    def __init__(self, setting: int | None, staging: Staging) -> None:
        self._setting, self._staging = setting, staging
        self._chosen: Choice | None = None
        self._used = 0
        """Bytes of the last choice."""
        self._most, self._why = LARGE, ""

    def choose(self, tensors: Mapping[str, torch.Tensor], held: int = 0) -> Choice:
        """By the GPU's free memory, of which `held` bytes are the sender's already. Raises `NoRoom`."""
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        if self._chosen is not None:
            return Choice(self._chosen.size)
        if device is None:
            chosen = Choice(min(self._most, ON_CPU) if self._setting is None else self._setting)
        else:
            free, _ = torch.cuda.mem_get_info(device)
            cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
            chosen = choose(self._setting, free + cached + held, sizes, self._staging, self._most)
        why, self._why = self._why, ""
        self._chosen = Choice(chosen.size, "; ".join(note for note in (why, chosen.note) if note))
        self._used = chosen.size
        return self._chosen

    def forget(self, reason: str = "") -> None:
        """The transfer failed: what is free now decides anew.

        Where `reason` tells of too little memory, an automatic bucket is from now on at most half of what it was. One
        failure may be told several times, by whoever noticed it, in any order: only some of them know the reason.
        """
        self._chosen = None
        if self._setting is not None or not is_short(reason) or self._used <= LEAST:
            return
        self._most = max(LEAST, self._used // 2)
        self._why = f"buckets of at most {mib(self._most)}: with {mib(self._used)} somebody ran out of memory"
