"""Key and value cache: one row a running sequence, rows 0..n-1 always dense, and retained prefixes of finished ones.

Dense rows let attention read a view of the cache (no gather); a finished row is filled from the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from actors.engine.torch_server.config import ModelConfig

BLOCK = 32  # tokens: prefixes are shared in whole blocks, shorter ones are cheaper to compute than to look up
ROUND = 64  # tokens: the cache grows along its length in steps of at least this


class KVCache:
    """Per layer one tensor (2, rows, kv_heads, length, head_dim); index 0 holds keys, 1 values.

    Unwritten places are zero, so that masked positions never bring a NaN into a sum.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, limit: int) -> None:
        """`limit`: the most tokens (rows x length) the cache may hold."""
        self.config, self.dtype, self.device, self.limit = config, dtype, device, limit
        self.rows = self.length = 0
        self.layers: list[torch.Tensor] = []
        self._allocate(0, 0, 0)

    def reserve(self, rows: int, length: int, used: int) -> None:
        """Make room for `rows` rows of `length` tokens, keeping the first `used` rows.

        Raises ValueError beyond the limit (admission keeps the product under it).
        """
        if rows <= self.rows and length <= self.length:
            return
        if rows * length > self.limit:
            raise ValueError(f"{rows} rows of {length} tokens exceed max_total_tokens={self.limit}")
        fits = _grown(rows, self.rows), -(-_grown(length, self.length) // ROUND) * ROUND
        if fits[0] * fits[1] > self.limit:
            fits = rows, min(-(-length // ROUND) * ROUND, self.limit // rows)
        self._allocate(*fits, used)

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Flat places (N*kv_heads,) of the tokens at (row, position), both (N,) int64, for `write`."""
        heads = torch.arange(self.config.kv_heads, device=self.device)
        return ((rows[:, None] * self.config.kv_heads + heads) * self.length + positions[:, None]).view(-1)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values (N, kv_heads, head_dim) at `slots`."""
        both = self.layers[layer].view(2, -1, self.config.head_dim)
        both[0].index_copy_(0, slots, keys.reshape(-1, self.config.head_dim))
        both[1].index_copy_(0, slots, values.reshape(-1, self.config.head_dim))

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the source rows over the target rows (disjoint)."""
        if not sources:
            return
        src = torch.tensor(sources, device=self.device)
        dst = torch.tensor(targets, device=self.device)
        for cache in self.layers:
            cache[:, dst, :, :length] = cache[:, src, :, :length]

    def wipe(self, row: int) -> None:
        """Zero a row whose contents are not finite: a NaN under a mask still spoils a sum."""
        for cache in self.layers:
            cache[:, row] = 0

    def release(self) -> None:
        """Give the memory back; nothing cached survives."""
        self._allocate(0, 0, 0)

    @property
    def bytes(self) -> int:
        """What it holds now."""
        return sum(cache.nbytes for cache in self.layers)

    def read_row(self, row: int, length: int) -> torch.Tensor:
        """A copy (layers, 2, kv_heads, length, head_dim) of a row's first tokens."""
        return torch.stack([cache[:, row, :, :length] for cache in self.layers])

    def write_row(self, row: int, stored: torch.Tensor, length: int) -> None:
        """Put the first `length` tokens of what `read_row` gave into a row."""
        for cache, part in zip(self.layers, stored, strict=True):
            cache[:, row, :, :length] = part[:, :, :length]

    def _allocate(self, rows: int, length: int, used: int) -> None:
        c = self.config
        shape = (2, rows, c.kv_heads, length, c.head_dim)
        fresh = []
        for i in range(c.layers):
            cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
            if used:
                kept = min(length, self.length)
                cache[:, :used, :, :kept] = self.layers[i][:, :used, :, :kept]
                self.layers[i] = cache  # the old layer's memory goes before the next is taken
            fresh.append(cache)
        self.layers, self.rows, self.length = fresh, rows, length


def _grown(need: int, have: int) -> int:
    """At least `need`; half as much again when it grows, so that copies stay rare."""
    return have if need <= have else max(need, have * 3 // 2)


class PrefixStore:
    """Keys and values of finished sequences, found by the longest shared prefix of whole blocks; least recent out."""

    def __init__(self, limit: int) -> None:
        """`limit`: the most tokens kept; 0 keeps nothing."""
        self.limit = limit
        self.tokens = 0
        self._entries: OrderedDict[int, tuple[list[int], torch.Tensor, list[int]]] = OrderedDict()
        self._index: dict[int, int] = {}
        self._next = 0

    def clear(self) -> None:
        self._entries.clear()
        self._index.clear()
        self.tokens = 0

    def wants(self, tokens: Sequence[int]) -> int:
        """How many of the tokens are worth storing: whole blocks, 0 if they are all stored already."""
        length = len(tokens) // BLOCK * BLOCK
        if length == 0 or length > self.limit:
            return 0
        return 0 if self.find(tokens[:length])[0] == length else length

    def put(self, tokens: Sequence[int], stored: torch.Tensor) -> None:
        """Keep `stored` (as `KVCache.read_row` gives) for `tokens`, a whole number of blocks."""
        kept = list(tokens)
        keys = list(_keys(kept))
        while self.tokens + len(kept) > self.limit:
            self._evict()
        self._entries[self._next] = (kept, stored, keys)
        for key in keys:
            self._index[key] = self._next
        self.tokens += len(kept)
        self._next += 1

    def find(self, tokens: Sequence[int]) -> tuple[int, torch.Tensor | None]:
        """Length of the longest stored prefix of `tokens` and its keys and values; (0, None) without one."""
        if not self._entries or len(tokens) < BLOCK:
            return 0, None
        for count, key in reversed(list(enumerate(_keys(tokens), 1))):
            number = self._index.get(key)
            length = count * BLOCK
            # equal hashes are not equal prefixes
            if number is not None and self._entries[number][0][:length] == list(tokens[:length]):
                self._entries.move_to_end(number)
                return length, self._entries[number][1]
        return 0, None

    def _evict(self) -> None:
        number, (tokens, _, keys) = self._entries.popitem(last=False)
        self.tokens -= len(tokens)
        for key in keys:
            if self._index.get(key) == number:
                del self._index[key]


def _keys(tokens: Sequence[int]) -> Iterator[int]:
    """One chained hash for each whole block: it stands for all tokens up to the block's end."""
    key = 0
    for start, end in pairwise(range(0, len(tokens) + 1, BLOCK)):
        key = hash((key, tuple(tokens[start:end])))
        yield key
