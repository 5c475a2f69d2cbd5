"""From trajectories to microbatches: what goes through the model at once. Plain numpy.

Rows are padded on the right. Under causal attention no token sees what lies right of it, so padding needs no mask and
can't reach a log-probability. How samples are split into microbatches changes no result, only memory and speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class PackingError(ValueError):
    """A sample can't be trained on: says which one, which field and why."""


@dataclass(frozen=True)
class Sample:
    """One token sequence to train on.

    `ids` int32 [length]; `loss_mask` uint8 [length], 1 where the token was sampled and is trained on; `behaviour`
    float32 [length], the engine's log-probabilities, 0 where not sampled. `advantage` holds for all its tokens. `lag`
    counts optimizer steps since the oldest version that sampled it. `temperature` is the one it was sampled at.
    """

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    behaviour: NDArray[np.float32]
    advantage: float
    lag: int = 0
    group: int = 0
    temperature: float = 1.0


@dataclass(frozen=True)
class Microbatch:
    """`ids` int64 [rows, width] goes through the model at once; the rest is one entry a trainable token [n].

    A token is predicted by the logits at `columns[at]` of row `row` and stands one to the right of it. `columns` int64
    are the positions whose logits any row needs. `samples` are the indices of the rows in the list that was packed,
    `trainable` int64 [rows] their trainable tokens.
    """

    ids: NDArray[np.int64]
    columns: NDArray[np.int64]
    row: NDArray[np.int64]
    at: NDArray[np.int64]
    target: NDArray[np.int64]
    behaviour: NDArray[np.float32]
    advantage: NDArray[np.float32]
    temperature: NDArray[np.float32]
    lag: NDArray[np.int64]
    samples: NDArray[np.int64]
    trainable: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """int64 [rows]: tokens of each row; what is right of them is padding."""
    slots: int
    """Places that go through the model, padding included."""

    @property
    def tokens(self) -> int:
        """Tokens in `ids` without the padding."""
        return int(self.lengths.sum())

    @property
    def position(self) -> NDArray[np.int64]:
        """int64 [n]: where each token stands in its sequence."""
        return self.columns[self.at] + 1


def pack(samples: Sequence[Sample], max_tokens: int, *, ragged: bool = False) -> list[Microbatch]:
    """Microbatches of at most `max_tokens` tokens, padding included, longest sequences first.

    `ragged` is for a model that takes the sequences one behind the other: it counts no padding, and each microbatch is
    filled with what still fits. Samples without a trainable token are left out. Raises `PackingError`.
    """
    for number, sample in enumerate(samples):
        _check(sample, number, max_tokens)
    lengths = np.array([len(sample.ids) for sample in samples], dtype=np.int64)
    wanted = [int(index) for index in np.argsort(-lengths, kind="stable") if samples[index].loss_mask.any()]
    bins = _first_fit(lengths, wanted, max_tokens) if ragged else _rectangles(lengths, wanted, max_tokens)
    return [_assemble(samples, np.array(chosen, dtype=np.int64), ragged) for chosen in bins]


def _rectangles(lengths: NDArray[np.int64], wanted: list[int], max_tokens: int) -> list[list[int]]:
    """Runs of `wanted`, longest first, that as rows of equal width hold at most `max_tokens` tokens."""
    bins, start = [], 0
    while start < len(wanted):
        rows = max_tokens // int(lengths[wanted[start]])
        bins.append(wanted[start : start + rows])
        start += rows
    return bins


def _first_fit(lengths: NDArray[np.int64], wanted: list[int], max_tokens: int) -> list[list[int]]:
    """Each of `wanted`, longest first, in the first bin where it fits ("first fit decreasing")."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in wanted:
        length = int(lengths[index])
        place = next((number for number, left in enumerate(room) if left >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[place].append(index)
        room[place] -= length
    return bins


def split(count: int, parts: int, seed: Sequence[int]) -> list[NDArray[np.int64]]:
    """Indices 0..count-1 shuffled by `seed` and cut into `parts` nearly equal parts; with too few, some are empty."""
    return np.array_split(np.random.default_rng(seed).permutation(count), parts)


def _check(sample: Sample, number: int, max_tokens: int) -> None:
    length = len(sample.ids)
    for name in ("loss_mask", "behaviour"):
        if len(getattr(sample, name)) != length:
            raise PackingError(f"sample {number}: {name} has {len(getattr(sample, name))} entries, ids {length}")
    if length > max_tokens:
        raise PackingError(f"sample {number}: {length} tokens exceed trainer.microbatch_tokens={max_tokens}; raise it")
    if length and sample.loss_mask[0]:
        raise PackingError(f"sample {number}: loss_mask is 1 at 0, but nothing predicts a first token")
    if not np.isfinite(sample.advantage):
        raise PackingError(f"sample {number}: advantage {sample.advantage} is not finite")
    if not np.isfinite(sample.behaviour).all():
        raise PackingError(f"sample {number}: behaviour has a value that is not finite")
    if not sample.temperature > 0:
        raise PackingError(f"sample {number}: temperature {sample.temperature} is not positive")


def _assemble(samples: Sequence[Sample], chosen: NDArray[np.int64], ragged: bool) -> Microbatch:
    rows = [samples[index] for index in chosen]
    shape = (len(rows), max(len(row.ids) for row in rows))
    ids = np.zeros(shape, dtype=np.int64)
    mask = np.zeros(shape, dtype=bool)
    behaviour = np.zeros(shape, dtype=np.float32)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = row.ids
        mask[number, : len(row.ids)] = row.loss_mask.astype(bool)
        behaviour[number, : len(row.ids)] = row.behaviour
    lengths = np.array([len(row.ids) for row in rows], dtype=np.int64)
    row, position = np.nonzero(mask)
    columns, at = np.unique(position - 1, return_inverse=True)
    return Microbatch(
        ids=ids,
        columns=columns,
        row=row,
        at=at,
        target=ids[row, position],
        behaviour=behaviour[row, position],
        advantage=np.array([sample.advantage for sample in rows], dtype=np.float32)[row],
        temperature=np.array([sample.temperature for sample in rows], dtype=np.float32)[row],
        lag=np.array([sample.lag for sample in rows], dtype=np.int64)[row],
        samples=chosen,
        trainable=mask.sum(1),
        lengths=lengths,
        slots=int(lengths.sum()) if ragged else ids.size,
    )
