"""Which tensors share a broadcast."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from contracts.events import Bucket, TensorSpec

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by transfer dtype."""


def size_of(spec: TensorSpec) -> int:
    """Bytes of a tensor. Raises `ValueError` for a dtype that can't be transferred."""
    if spec.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {spec.name!r} has dtype {spec.dtype!r}; transferable are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[spec.dtype] * prod(spec.shape)


def plan(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Fill buckets in order, up to `bucket_bytes` each; a tensor above that has a bucket of its own.

    A tensor starts at a multiple of its element size within its bucket, because receivers view the bytes in place;
    where it would not, a new bucket begins. Raises `ValueError` for a dtype that can't be transferred.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, not {bucket_bytes}; check refit.bucket_mib")
    buckets: list[Bucket] = []
    held: list[TensorSpec] = []
    filled = 0
    for spec in specs:
        size = size_of(spec)
        if held and (filled + size > bucket_bytes or filled % ITEM_BYTES[spec.dtype]):
            buckets.append(Bucket(tuple(held), filled))
            held, filled = [], 0
        held.append(spec)
        filled += size
    if held:
        buckets.append(Bucket(tuple(held), filled))
    return tuple(buckets)
