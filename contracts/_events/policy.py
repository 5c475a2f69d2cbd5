"""Versions of the weights, and the steps and checkpoints that they come from."""

from __future__ import annotations

from contracts._events.base import Record


class PolicyReady(Record, frozen=True, kw_only=True, tag="policy.ready"):
    """Trainer -> all: weights of `version` are in memory, at start or after a restore.

    After a restore, versions above `parent_version` in the old lineage are abandoned: `abandoned` lists them.
    The coordinator refits the engines to `version` before anything is generated.
    """

    version: int
    step: int
    parent_version: int | None
    trainer_boot: int
    abandoned: tuple[int, ...] = ()


class StepFinished(Record, frozen=True, kw_only=True, tag="step.finished"):
    """Trainer -> all: one optimizer step done. `version` is new, never reused, and derived from `parent_version`.

    `metrics` are scalars by name; `seconds` is the step alone, `waited_s` the time the trainer had no batch.
    """

    version: int
    parent_version: int
    step: int
    trainer_boot: int
    batch: int
    metrics: dict[str, float]
    seconds: float
    waited_s: float
    tokens: int
    tasks: tuple[int, ...]


class CheckpointSaved(Record, frozen=True, kw_only=True, tag="checkpoint.saved"):
    """Trainer -> all: a durable checkpoint of `version` at `path` covers every batch up to and including `batch`.

    The batches that the checkpoint before it covered are acked in the same script, and their payloads released: should
    this one turn out to be damaged, the trainer falls back on that one.
    """

    version: int
    step: int
    batch: int
    path: str
    bytes: int
    seconds: float


class TrainingFinished(Record, frozen=True, kw_only=True, tag="training.finished"):
    """Trainer -> driver: the configured number of steps is trained and covered by a checkpoint."""

    version: int
    step: int


class MemoryWanted(Record, frozen=True, kw_only=True, tag="memory.wanted"):
    """Trainer -> coordinator: it has the batch of `step`, and trains once the engines gave their memory back.

    With engine.release alone. `release.finished` for this step and boot is the answer.
    """

    step: int
    trainer_boot: int


PolicyEvent = PolicyReady | StepFinished | CheckpointSaved | TrainingFinished | MemoryWanted
