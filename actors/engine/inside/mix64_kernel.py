"""The kernel of `mix64`, apart because importing it needs Triton."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def mix(
    table,
    sums,
    chunk: tl.constexpr,
    block: tl.constexpr,
    k1: tl.constexpr,
    k2: tl.constexpr,
    k3: tl.constexpr,
):
    """One program a row of `table` (int64 [n, 4]): address, words, place of the first word, and which sum to add to."""
    row = table + tl.program_id(0).to(tl.int64) * 4
    words = tl.load(row + 1)
    source = tl.load(row).to(tl.pointer_type(tl.int64))
    start = tl.load(row + 2)
    lane = tl.arange(0, block).to(tl.int64)
    total = tl.zeros((block,), tl.int64)
    for begin in range(0, chunk, block):
        place = lane + begin
        inside = place < words
        mixed = tl.load(source + place, mask=inside, other=0) + (place + start) * k1
        mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
        mixed = mixed * k2
        mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
        mixed = mixed * k3
        mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
        total += tl.where(inside, mixed, 0)
    tl.atomic_add(sums + tl.load(row + 3), tl.sum(total, axis=0))
