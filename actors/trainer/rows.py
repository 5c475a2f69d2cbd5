"""Which rank trains on what: samples dealt to the data-parallel ranks, microbatches as packed rows. Plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from actors.trainer.packing import Microbatch, Sample, pack


@dataclass(frozen=True)
class Row:
    """A microbatch as one row of `ids` int64 [tokens], the sequences one behind the other.

    `bounds` int32 [sequences + 1] says where they begin and end, `positions` int64 [tokens] the place in its sequence.
    `source` int64 [n]: where in the row the logits stand that predict each trainable token of `micro`. Without `micro`
    there is nothing to train on: ranks that share experts must run equally often.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    bounds: NDArray[np.int32]
    source: NDArray[np.int64]
    micro: Microbatch | None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(np.diff(self.bounds).max())


@dataclass(frozen=True)
class Deal:
    """What the ranks of one update get: `rows[rank]`, equally many each, and what all of them train on together.

    `samples[rank]` are the indices of a rank's samples in the list that was dealt: `micro.samples` counts in these.
    """

    rows: list[list[Row]]
    samples: list[list[int]]
    tokens: int
    sequences: int


def deal(samples: Sequence[Sample], ranks: int, max_tokens: int, *, multiple: int = 1) -> Deal:
    """Deal samples to `ranks` data-parallel ranks, longest first and back and forth, so that all get about as much.

    Rows hold at most `max_tokens` tokens, and a multiple of `multiple` after padding. The same samples give the same
    deal on every rank. Raises `PackingError`.
    """
    shares = shared_out(samples, ranks)
    packed = [pack([samples[index] for index in share], max_tokens, ragged=True) for share in shares]
    count = max(1, *(len(batches) for batches in packed))
    return Deal(
        rows=[
            [row(batches[place] if place < len(batches) else None, multiple) for place in range(count)]
            for batches in packed
        ],
        samples=shares,
        tokens=sum(len(micro.row) for batches in packed for micro in batches),
        sequences=sum(len(micro.samples) for batches in packed for micro in batches),
    )


def shared_out(samples: Sequence[Sample], ranks: int) -> list[list[int]]:
    """Indices of the samples of each rank: longest first and back and forth, so that all get about as much."""
    order = sorted(range(len(samples)), key=lambda index: -len(samples[index].ids))
    turns = [*range(ranks), *reversed(range(ranks))]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for number, index in enumerate(order):
        shares[turns[number % len(turns)]].append(index)
    return shares


def row(micro: Microbatch | None, multiple: int) -> Row:
    """One microbatch as a row. What must be added to reach the multiple is a sequence of its own, at the end."""
    lengths = [] if micro is None else micro.lengths.tolist()
    missing = -sum(lengths) % multiple if lengths else multiple
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    ids = [] if micro is None else [ids[:length] for ids, length in zip(micro.ids, lengths, strict=True)]
    bounds = [*starts.tolist(), *([int(starts[-1]) + missing] if missing else [])]
    return Row(
        ids=np.concatenate([*ids, np.zeros(missing, dtype=np.int64)]),
        positions=np.concatenate([np.arange(end - start) for start, end in pairwise(bounds)]),
        bounds=np.array(bounds, dtype=np.int32),
        source=np.zeros(0, dtype=np.int64) if micro is None else starts[micro.row] + micro.columns[micro.at],
        micro=micro,
    )
