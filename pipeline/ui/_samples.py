"""The finished samples of a run as columns, to be listed by group, reward or length."""

from __future__ import annotations

from array import array
from typing import Any, Literal

import msgspec
import numpy as np

from contracts import events as ev

PAGE = 200
"""Most samples of one answer."""

Order = Literal["newest", "lowest", "highest", "longest"]


class Wanted(msgspec.Struct, frozen=True):
    """Which samples; what is None wants all. `version`: that the sample has tokens of."""

    index: int | None = None
    version: int | None = None
    split: Literal["train", "eval"] | None = None
    order: Order = "newest"


class Samples:
    """Feed every `trajectory.finished` to `take`."""

    def __init__(self) -> None:
        self._rows, self._indexes, self._tokens = array("I"), array("q"), array("I")
        self._rewards = array("d")
        self._oldest, self._newest, self._train = array("q"), array("q"), array("B")

    def take(self, row: int, event: ev.TrajectoryFinished) -> None:
        """The sample that the event of `row` tells of."""
        self._rows.append(row)
        self._indexes.append(event.index)
        self._tokens.append(event.completion_tokens)
        self._rewards.append(event.reward)
        sources = event.sources
        self._oldest.append(sources[0].version if sources else -1)
        self._newest.append(sources[-1].version if sources else -1)
        self._train.append(event.split == "train")

    def page(self, wanted: Wanted, offset: int, limit: int) -> tuple[int, list[int]]:
        """How many samples are wanted, and the rows of a page of them."""
        mask = np.ones(len(self._rows), bool)
        if wanted.index is not None:
            mask &= np.array(self._indexes) == wanted.index
        if wanted.version is not None:
            mask &= (np.array(self._oldest) <= wanted.version) & (np.array(self._newest) >= wanted.version)
        if wanted.split is not None:
            mask &= np.array(self._train) == (wanted.split == "train")
        found = np.nonzero(mask)[0][::-1]
        keys: dict[Order, Any] = {"lowest": self._rewards, "highest": self._rewards, "longest": self._tokens}
        if wanted.order in keys:
            key = np.array(keys[wanted.order], float)[found]
            found = found[np.argsort(key if wanted.order == "lowest" else -key, kind="stable")]
        page = found[max(0, offset) : max(0, offset) + min(limit, PAGE)]
        return len(found), [self._rows[int(n)] for n in page]


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
