"""Tasks, trajectories and batches: events of the work streams, each for one reader."""

from __future__ import annotations

import msgspec

from contracts._events.base import FailureKind, PayloadRef, Record, Split

# --- tasks -----------------------------------------------------------------------------------------------------------


class TaskIssued(Record, frozen=True, kw_only=True, tag="task.issued"):
    """Source -> one collector: roll out one prompt group of `samples` samples.

    Emitted when credit allows. `index` is dense and never reused; `task` is the producer's stable id. `payload` is the
    producer's JSON. The collector acks the entry in the script that emits the last sample's result. Held-out tasks are
    issued without credit, at indexes below 0: evaluation `r` has `eval.groups` of them, from `-1 - r * eval.groups`
    downwards. `data_epoch`: the pass over the producer's tasks that it belongs to, from 0.

    With `only`, the buffer issues a task again for those of its samples that have no result, under
    `buffer.group_policy=replace`; their attempts count from `first_attempt`.
    """

    task: str
    index: int
    samples: int
    payload: bytes
    producer: str
    seed: int
    split: Split = "train"
    data_epoch: int = 0
    only: tuple[int, ...] = ()
    first_attempt: int = 1


TasksEvent = TaskIssued


# --- trajectories ----------------------------------------------------------------------------------------------------


class Provenance(msgspec.Struct, frozen=True, gc=False):
    """One source of sampled tokens in a trajectory: which version, on which boot of which engine, under which epoch."""

    version: int
    engine: str
    boot: int


class TrajectoryFinished(Record, frozen=True, kw_only=True, tag="trajectory.finished"):
    """Collector -> buffer: one sample of a group is rolled out and scored.

    `payload` holds the encoded `contracts.trajectory.Trajectory`. `valid` is False when the sample must enter neither
    baseline nor loss, `mask_reason` says why. `sources` lists the provenance of every sampled token, oldest first.
    The id of a trajectory is (task, sample): the first result wins.
    """

    task: str
    index: int
    sample: int
    attempt: int
    samples: int
    reward: float
    components: dict[str, float]
    valid: bool
    payload: PayloadRef
    prompt_tokens: int
    completion_tokens: int
    sources: tuple[Provenance, ...]
    seconds: float
    split: Split = "train"
    mask_reason: str | None = None
    stop_reason: str = "stop"


class SampleFailed(Record, frozen=True, kw_only=True, tag="sample.failed"):
    """Collector -> buffer: a sample failed for good, the budget of its `failure` spent. Its group goes on without."""

    task: str
    index: int
    sample: int
    attempt: int
    samples: int
    failure: FailureKind
    reason: str
    split: Split = "train"


TrajectoriesEvent = TrajectoryFinished | SampleFailed


# --- batches ---------------------------------------------------------------------------------------------------------


class SampleRef(msgspec.Struct, frozen=True, gc=False):
    """One trajectory of a batch. `lag`: optimizer steps between the trained version and its oldest trainable token."""

    sample: int
    reward: float
    valid: bool
    payload: PayloadRef
    lag: int


class GroupRef(msgspec.Struct, frozen=True, gc=False):
    """The samples of one task that are trained together; the baseline is taken over the valid ones."""

    task: str
    index: int
    samples: tuple[SampleRef, ...]


class BatchReady(Record, frozen=True, kw_only=True, tag="batch.ready"):
    """Buffer -> trainer: the groups of one optimizer step.

    `batch` counts from 1 and is never reused. The trainer acks the entry once two durable checkpoints cover the step.
    One that is still pending after a crash is trained again, in order, unless the checkpoint that is loaded covers it.
    """

    batch: int
    groups: tuple[GroupRef, ...]


BatchesEvent = BatchReady
