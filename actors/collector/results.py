"""What a rollout came to: its task's own form, a checked outcome, an encoded trajectory."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from actors.collector.core import Rollout, Try
from actors.collector.session import Transcript
from contracts import trajectory
from contracts.producer import DataError, Outcome, Task
from contracts.trajectory import Trajectory


def origin(command: Rollout, each: Try) -> str:
    return f"{command.task.index}.{each.sample}.{each.attempt}"


def seed(text: str) -> int:
    """31 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


def task_of(command: Rollout) -> Task:
    return Task(id=command.task.task, payload=json.loads(command.task.payload), cursor="")


def outcome_of(value: Any) -> Outcome:
    """What a score or rollout answered, as an `Outcome`. Raises `DataError` unless its reward is a finite number."""
    outcome = value if isinstance(value, Outcome) else None
    if outcome is None and isinstance(value, int | float):
        outcome = Outcome(reward=float(value))
    if outcome is None or not math.isfinite(outcome.reward):
        raise DataError(f"answered {value!r}; a finite number or an Outcome with a finite reward is expected")
    return outcome


def encode(command: Rollout, each: Try, transcript: Transcript, outcome: Outcome, mask: str | None) -> bytes:
    """The encoded trajectory. Raises `TrajectoryError`."""
    task = command.task
    sequences = transcript.sequences()
    for number, sequence in enumerate(sequences):
        trajectory.check(sequence, f"task {task.task} sample {each.sample} sequence {number}")
    return trajectory.encode(
        Trajectory(
            task=task.task,
            index=task.index,
            sample=each.sample,
            attempt=each.attempt,
            reward=outcome.reward,
            components=dict(outcome.components),
            mask_reason=mask,
            sequences=sequences,
            info=dict(outcome.info),
        )
    )
