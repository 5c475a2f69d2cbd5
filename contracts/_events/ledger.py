"""What becomes of groups and samples, and how many tasks may be issued."""

from __future__ import annotations

from contracts._events.base import Record


class CreditGranted(Record, frozen=True, kw_only=True, tag="credit.granted"):
    """Buffer -> source: train tasks with `index < total` may be issued. Cumulative, so a repeat is harmless."""

    total: int


class GroupDropped(Record, frozen=True, kw_only=True, tag="group.dropped"):
    """Buffer -> all: a group will never be trained, and why. Its credit returns to the source."""

    task: str
    index: int
    reason: str
    samples: int


class TrajectoryRejected(Record, frozen=True, kw_only=True, tag="trajectory.rejected"):
    """Buffer -> all: one delivered trajectory was not admitted (duplicate, uncommitted source, closed group, ...)."""

    task: str
    index: int
    sample: int
    reason: str


class BatchRejected(Record, frozen=True, kw_only=True, tag="batch.rejected"):
    """Trainer -> all: a batch was handed to it once more, under another entry, and is not trained again."""

    batch: int
    reason: str


class EvalFinished(Record, frozen=True, kw_only=True, tag="eval.finished"):
    """Buffer -> all: held-out rewards of one version."""

    version: int
    step: int
    mean_reward: float
    samples: int


class BufferDepth(Record, frozen=True, kw_only=True, tag="buffer.depth"):
    """Buffer -> all, with each batch: groups left after the pick, and its staleness histogram (lag -> samples).

    `ready` are complete, `open` are issued and not complete.
    """

    batch: int
    ready: int
    open: int
    lags: dict[int, int]
    flat_groups: int


LedgerEvent = CreditGranted | GroupDropped | TrajectoryRejected | BatchRejected | EvalFinished | BufferDepth
