"""The finished samples of a run as columns, to be listed by group, reward or length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from contracts import events as ev
from pipeline.ui._columns import Columns

PAGE = 200
"""Most samples of one answer."""

Order = Literal["newest", "lowest", "highest", "longest"]


class Wanted(msgspec.Struct, frozen=True):
    """Which samples; what is None wants all. `version`: that the sample has tokens of."""

    index: int | None = None
    version: int | None = None
    split: Literal["train", "eval"] | None = None
    order: Order = "newest"


ROW, INDEX, TOKENS, REWARD, OLDEST, NEWEST, TRAIN = range(7)


class Samples:
    """Feed every `trajectory.finished` to `extend`."""

    def __init__(self) -> None:
        self._columns = Columns("IqIdqqB")

    def extend(self, rows: Sequence[int], samples: Sequence[ev.TrajectoryFinished]) -> None:
        """The samples that the events of `rows` tell of."""
        self._columns.extend(
            (
                rows,
                [sample.index for sample in samples],
                [sample.completion_tokens for sample in samples],
                [sample.reward for sample in samples],
                [sample.sources[0].version if sample.sources else -1 for sample in samples],
                [sample.sources[-1].version if sample.sources else -1 for sample in samples],
                [sample.split == "train" for sample in samples],
            )
        )

    def drain(self) -> list[bytes]:
        """Let go of what was taken since the last time, see `Columns.drain`."""
        return self._columns.drain()

    def merge(self, part: list[bytes]) -> None:
        """Take what another one was drained of."""
        self._columns.merge(part)

    def page(self, wanted: Wanted, offset: int, limit: int) -> tuple[int, list[int]]:
        """How many samples are wanted, and the rows of a page of them."""
        column = self._columns.column
        mask = np.ones(len(self._columns), bool)
        if wanted.index is not None:
            mask &= np.array(column(INDEX)) == wanted.index
        if wanted.version is not None:
            mask &= (np.array(column(OLDEST)) <= wanted.version) & (np.array(column(NEWEST)) >= wanted.version)
        if wanted.split is not None:
            mask &= np.array(column(TRAIN)) == (wanted.split == "train")
        found = np.nonzero(mask)[0][::-1]
        keys: dict[Order, int] = {"lowest": REWARD, "highest": REWARD, "longest": TOKENS}
        if wanted.order in keys:
            key = np.array(column(keys[wanted.order]), float)[found]
            found = found[np.argsort(key if wanted.order == "lowest" else -key, kind="stable")]
        page = found[max(0, offset) : max(0, offset) + min(limit, PAGE)]
        rows = column(ROW)
        return len(found), [rows[int(n)] for n in page]


def line(row: int, event: ev.TrajectoryFinished, at: float, actor: str) -> dict[str, Any]:
    """One sample in a list."""
    return {
        "row": row,
        "at": at,
        "actor": actor,
        "task": event.task,
        "index": event.index,
        "sample": event.sample,
        "attempt": event.attempt,
        "reward": event.reward,
        "valid": event.valid,
        "mask_reason": event.mask_reason,
        "prompt_tokens": event.prompt_tokens,
        "tokens": event.completion_tokens,
        "versions": sorted({source.version for source in event.sources}),
        "stop_reason": event.stop_reason,
        "split": event.split,
        "seconds": event.seconds,
    }
