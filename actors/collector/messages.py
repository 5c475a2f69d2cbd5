"""What the collector's core asks of its shell, and what comes back."""

from __future__ import annotations

import msgspec

from contracts.core import Ref
from contracts.events import FailureKind, Provenance, TaskIssued


class Try(msgspec.Struct, frozen=True):
    """One attempt, counted from 1, at one sample."""

    sample: int
    attempt: int


class Rollout(msgspec.Struct, frozen=True):
    """Roll out and score samples of one task; each answers with `SampleDone`, `SampleProblem` or `GatewayGone`."""

    ref: Ref
    task: TaskIssued
    tries: tuple[Try, ...]
    url: str


class Cancel(msgspec.Struct, frozen=True):
    """Stop what runs for this entry and throw away its results."""

    ref: Ref


class CancelAll(msgspec.Struct, frozen=True):
    """Stop all rollouts; answers `Cancelled`."""


class Discard(msgspec.Struct, frozen=True):
    """The bytes behind `handle` are not needed."""

    handle: str


class Restart(msgspec.Struct, frozen=True):
    """End the process: only a fresh one gets rid of what is stuck in it."""

    reason: str


class SampleDone(msgspec.Struct, frozen=True, tag="sample_done"):
    """A sample is rolled out, scored and checked; its encoded trajectory of `size` bytes is held under `handle`."""

    ref: Ref
    sample: int
    attempt: int
    reward: float
    components: dict[str, float]
    mask_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    sources: tuple[Provenance, ...]
    stop_reason: str
    handle: str
    size: int
    seconds: float


class SampleProblem(msgspec.Struct, frozen=True, tag="sample_problem"):
    """An attempt ended without a trajectory."""

    ref: Ref
    sample: int
    attempt: int
    failure: FailureKind
    reason: str


class GatewayGone(msgspec.Struct, frozen=True, tag="gateway_gone"):
    """Nobody answers at `url`, so the attempts at these samples were never made or were cut off."""

    ref: Ref
    tries: tuple[Try, ...]
    url: str
    reason: str


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """No rollout runs any more."""


class ThreadsStuck(msgspec.Struct, frozen=True, tag="threads_stuck"):
    """So many calls of the environment never returned."""

    count: int
    reason: str


Local = SampleDone | SampleProblem | GatewayGone | Cancelled | ThreadsStuck
