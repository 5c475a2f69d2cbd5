"""A checksum that is quick where the tensors are: each 8-byte word is mixed with its position, and the mixes are added.

The sum is modulo 2**64 and does not depend on the order of adding, so a GPU computes it in one pass over the memory,
and shards of a tensor add up to the whole. It finds corruption, not malice. Words are little-endian; a tensor whose
bytes are no multiple of 8 is read as if zeros followed. On a GPU with Triton one kernel reads all tensors; elsewhere
torch's own operations compute the same number.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

WORD = 8
K1, K2, K3 = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""Odd multipliers, as signed 64-bit numbers."""
CHUNK, BLOCK = 8192, 1024
"""Words that one program of the kernel reads, and at a time."""
HOST_WORDS = 2**15
"""Words that are mixed at a time without the kernel: they stay in a core's cache."""


class Piece(NamedTuple):
    """A part of a tensor: `tensor` (memory as it lies) holds the elements that the whole has at `offset`, `stride`.

    `offset` and `stride` are in elements of the whole, which is contiguous; `stride` has an entry a dimension.
    """

    tensor: torch.Tensor
    offset: int
    stride: tuple[int, ...]


def whole(tensor: torch.Tensor) -> Piece:
    """All of a tensor, whatever its layout here."""
    return Piece(tensor.detach(), 0, contiguous_stride(tensor.shape))


def hexadecimal(value: int) -> str:
    return f"{value % 2**64:016x}"


def checksums(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Of each tensor, 16 hexadecimal digits; equal bytes have equal checksums on any device. Waits for the device."""
    return [hexadecimal(value) for value in Mixer([whole(tensor) for tensor in tensors]).run().values()]


class Mixer:
    """Computes the sums of the same memory again and again. `unreadable`: pieces that don't begin or end at a word.

    `room`: where a GPU leaves them, int64 [pieces] there; its own if None.
    """

    def __init__(self, pieces: Sequence[Piece], room: torch.Tensor | None = None) -> None:
        self._pieces = list(pieces)
        self.count = len(self._pieces)
        self.unreadable: set[int] = set()
        self._slow: list[tuple[int, np.ndarray]] = []
        rows: list[np.ndarray] = []
        self._device = torch.device("cpu")
        fast = _kernel() is not None
        for index, piece in enumerate(self._pieces):
            starts, length, _ = _runs(piece, in_place=False)
            entire = piece.tensor.numel() == 0 or (len(starts) == 1 and starts[0] == 0)
            if not entire and (length % WORD or (starts % WORD).any()):
                self.unreadable.add(index)
                continue
            table = _table(index, piece) if fast and _on_kernel(piece.tensor) else None
            if table is None:
                self._slow.append((index, starts // WORD))
            else:
                self._device = piece.tensor.device
                rows.append(table)
        self._table = None
        if rows:
            self._table = torch.from_numpy(np.concatenate(rows)).to(self._device)
            self._sums = torch.zeros(self.count, dtype=torch.int64, device=self._device) if room is None else room

    def launch(self) -> None:
        """Begin on the current stream of the device, for a `run(launched=True)` later."""
        if self._table is None:
            return
        # Triton launches on the current device, whatever the pointers are of
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            self._sums.zero_()
            _kernel()[(len(self._table),)](self._table, self._sums, CHUNK, BLOCK, K1, K2, K3)

    def run(self, launched: bool = False, read: Sequence[int] | None = None) -> dict[int, int]:
        """Sum of each readable piece, by its place. Waits for the device; `read` is what `room` held after that."""
        if not launched:
            self.launch()
        found = {}
        for index, starts in self._slow:
            found[index] = _slowly(self._pieces[index].tensor, starts)
        if self._table is not None:
            sums = self._sums.tolist() if read is None else read
            slow = {index for index, _ in self._slow}
            found |= {i: sums[i] for i in range(len(sums)) if i not in slow and i not in self.unreadable}
        return {index: found[index] % 2**64 for index in sorted(found)}


def contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(tuple(shape)):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _runs(piece: Piece, in_place: bool) -> tuple[np.ndarray, int, int]:
    """Where in the whole each longest contiguous run of the piece begins, how long all are (bytes), dims outside a run.

    With `in_place` a run is contiguous in the piece's own memory too.
    """
    tensor, item = piece.tensor, piece.tensor.element_size()
    length, dims = 1, tensor.dim()
    while dims and (
        tensor.shape[dims - 1] == 1
        or (piece.stride[dims - 1] == length and not (in_place and tensor.stride(dims - 1) != length))
    ):
        length *= tensor.shape[dims - 1]
        dims -= 1
    return _starts(tensor.shape[:dims], piece.stride[:dims], piece.offset) * item, length * item, dims


def _starts(shape: Sequence[int], stride: Sequence[int], offset: int) -> np.ndarray:
    found = np.array([offset], dtype=np.int64)
    for size, step in zip(shape, stride, strict=True):
        found = (found[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
    return found


def _table(index: int, piece: Piece) -> np.ndarray | None:
    """The kernel's work: address, words, first word's place in the whole, place of the sum; None if words don't fit."""
    starts, length, outer = _runs(piece, in_place=True)
    tensor = piece.tensor
    places = _starts(tensor.shape[:outer], tensor.stride()[:outer], 0) * tensor.element_size() + tensor.data_ptr()
    if length % WORD or (places % WORD).any() or (starts % WORD).any():
        return None
    words = length // WORD
    begins = np.arange(0, words, CHUNK, dtype=np.int64)
    rows = np.empty((len(starts), len(begins), 4), dtype=np.int64)
    rows[:, :, 0] = places[:, None] + begins * WORD
    rows[:, :, 1] = np.minimum(words - begins, CHUNK)
    rows[:, :, 2] = starts[:, None] // WORD + begins
    rows[:, :, 3] = index
    return rows.reshape(-1, 4)


def _slowly(tensor: torch.Tensor, starts: np.ndarray) -> int:
    """By torch's operations, on any device. `starts`: in words."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % WORD or flat.data_ptr() % WORD:
        padded = torch.zeros(-(-flat.numel() // WORD) * WORD, dtype=torch.uint8, device=flat.device)
        padded[: flat.numel()] = flat
        flat = padded
    words = flat.view(torch.int64).view(len(starts), -1)
    total = 0
    wide = max(1, HOST_WORDS // max(words.shape[1], 1))
    for row in range(0, words.shape[0], wide):
        first = torch.from_numpy(starts[row : row + wide]).to(words.device)[:, None]
        for begin in range(0, words.shape[1], HOST_WORDS):
            part = words[row : row + wide, begin : begin + HOST_WORDS]
            places = torch.arange(begin, begin + part.shape[1], device=words.device) + first
            total += int(_mixed(part, places).sum())
    return total


def _mixed(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """int64 [n], int64 [n] -> int64 [n]; arithmetic wraps, shifts are logical."""
    mixed = places.mul_(K1).add_(words)
    mixed ^= (mixed >> 32) & (2**32 - 1)
    mixed *= K2
    mixed ^= (mixed >> 29) & (2**35 - 1)
    mixed *= K3
    mixed ^= (mixed >> 32) & (2**32 - 1)
    return mixed


def has_kernel() -> bool:
    """Whether a GPU of this process would use Triton's kernel."""
    return _kernel() is not None


def _on_kernel(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or interpreted()


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, slowly, which tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _kernel() -> Any:
    """The kernel; None where there is no Triton, or nothing to run it on."""
    if not (torch.cuda.is_available() or interpreted()):
        return None
    try:
        from .mix64_kernel import mix
    except ImportError:
        return None
    return mix
