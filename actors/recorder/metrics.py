"""One row for each training step, folded from the events. Pure.

Rows are flat: the same names are columns of metrics.jsonl and tags in TensorBoard (`actors.recorder.files`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from actors.registry import kind_of
from contracts import events
from contracts.envelope import Envelope
from contracts.events import Event

KEEP = 256
"""Batches remembered behind the one just trained: a restored trainer trains those since its checkpoint again."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch says about its step. `reward` is the mean over valid samples, None without any."""

    groups: int
    valid: int
    invalid: int
    reward: float | None
    reward_std: float | None
    lags: dict[int, int]


class Refit(msgspec.Struct, frozen=True, kw_only=True):
    """A committed refit. Times in seconds; `wall` since the Unix epoch."""

    epoch: int
    version: int
    step: int
    wall: float
    pause_s: float
    drain_s: float
    transfer_s: float
    bytes: int
    engines: tuple[str, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One training step. Counts named `*_total` run over the whole log; the others belong to this step."""

    step: int
    version: int
    parent_version: int
    batch: int
    wall: float
    seconds: float
    waited_s: float
    since_last_s: float | None
    trained_tokens: int
    generated_tokens: int
    contents: Batch | None
    ready_groups: int | None
    open_groups: int | None
    flat_groups: int | None
    refit: Refit | None
    refits_total: int
    failed_refits_total: int
    quarantines_total: int
    failed_samples_total: int
    dropped_groups_total: int
    restarts_total: int
    eval_reward: float | None
    waits: dict[str, float]
    policy: dict[str, float]
    components: dict[str, float] = {}
    """Mean of each named reward component over the train samples finished since the row before."""
    noncontiguous_total: int = 0
    """Samples that left the tokens of their episode, kept in part or failed."""

    @property
    def reward(self) -> float | None:
        """Mean reward of the valid samples trained in this step."""
        return None if self.contents is None else self.contents.reward

    def flat(self) -> dict[str, float | int | None]:
        """Column -> value."""
        row: dict[str, float | int | None] = {
            "step": self.step,
            "version": self.version,
            "parent_version": self.parent_version,
            "batch": self.batch,
            "wall": self.wall,
            "reward/train": self.reward,
            "reward/eval": self.eval_reward,
            "time/step_s": self.seconds,
            "time/waited_s": self.waited_s,
            "time/since_last_s": self.since_last_s,
            "tokens/trained": self.trained_tokens,
            "tokens/generated": self.generated_tokens,
            "buffer/ready_groups": self.ready_groups,
            "buffer/open_groups": self.open_groups,
            "buffer/flat_groups": self.flat_groups,
            "total/refits": self.refits_total,
            "total/failed_refits": self.failed_refits_total,
            "total/quarantines": self.quarantines_total,
            "total/failed_samples": self.failed_samples_total,
            "total/dropped_groups": self.dropped_groups_total,
            "total/restarts": self.restarts_total,
            "total/noncontiguous": self.noncontiguous_total,
        }
        if self.since_last_s:
            row["tokens/trained_per_s"] = self.trained_tokens / self.since_last_s
            row["tokens/generated_per_s"] = self.generated_tokens / self.since_last_s
        row |= _contents(self.contents) | _refit(self.refit)
        row |= {f"wait_s/{who}": seconds for who, seconds in self.waits.items()}
        row |= {f"component/{name}": value for name, value in self.components.items()}
        row |= {f"policy/{name}": value for name, value in self.policy.items()}
        return row


def _contents(batch: Batch | None) -> dict[str, float | int | None]:
    if batch is None:
        return {}
    samples = sum(batch.lags.values())
    return {
        "reward/std": batch.reward_std,
        "samples/valid": batch.valid,
        "samples/invalid": batch.invalid,
        "staleness/mean": sum(lag * n for lag, n in batch.lags.items()) / samples if samples else None,
        "staleness/max": max(batch.lags, default=None),
        **{f"staleness/lag_{lag}": n for lag, n in sorted(batch.lags.items())},
    }


def _refit(refit: Refit | None) -> dict[str, float | int | None]:
    if refit is None:
        return {}
    return {
        "refit/epoch": refit.epoch,
        "refit/version": refit.version,
        "refit/pause_s": refit.pause_s,
        "refit/drain_s": refit.drain_s,
        "refit/transfer_s": refit.transfer_s,
        "refit/bytes": refit.bytes,
        "refit/engines": len(refit.engines),
    }


class Memory(msgspec.Struct, frozen=True):
    """What `Steps` remembers, to be kept in a file."""

    batches: dict[int, Batch]
    depth: events.BufferDepth | None
    refit: Refit | None
    eval: float | None
    generated: int
    waits: dict[str, float]
    totals: dict[str, int]
    last_wall: float | None


class Steps:
    """Folds the log; `apply` answers a row when a step is finished."""

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}
        self._depth: events.BufferDepth | None = None
        self._refit: Refit | None = None
        self._eval: float | None = None
        self._generated = 0
        self._finished = 0
        self._components: dict[str, float] = {}
        self._waits: dict[str, float] = {}
        self._totals: Counter[str] = Counter()
        self._last_wall: float | None = None
        self.handlers: Mapping[type, Callable[[Any, float], Row | None]] = {
            events.TrajectoryFinished: self._finished_sample,
            events.SampleFailed: self._failed_sample,
            events.GroupDropped: self._dropped,
            events.BatchReady: self._batch,
            events.BufferDepth: self._depth_known,
            events.EvalFinished: self._evaluated,
            events.RefitCommitted: self._committed,
            events.RefitFailed: self._refit_failed,
            events.EngineQuarantined: self._quarantined,
            events.ActorBooted: self._booted,
            events.WaitEnded: self._waited,
            events.StepFinished: self._row,
        }
        """Kind -> what to call with an event of it and its time."""

    def memory(self) -> Memory:
        """Everything that the next rows depend on."""
        return Memory(
            dict(self._batches),
            self._depth,
            self._refit,
            self._eval,
            self._generated,
            dict(self._waits),
            dict(self._totals),
            self._last_wall,
        )

    def recall(self, memory: Memory) -> None:
        """Go on from there."""
        self._batches, self._depth, self._refit = dict(memory.batches), memory.depth, memory.refit
        self._eval, self._generated, self._waits = memory.eval, memory.generated, dict(memory.waits)
        self._totals, self._last_wall = Counter(memory.totals), memory.last_wall

    def apply(self, envelope: Envelope[Event]) -> Row | None:
        """Consume one event, in log order."""
        handler = self.handlers.get(type(envelope.body))
        return None if handler is None else handler(envelope.body, envelope.wall_ns / 1e9)

    def _finished_sample(self, event: events.TrajectoryFinished, wall: float) -> None:
        self.finished((event,))

    def finished(self, samples: Sequence[events.TrajectoryFinished]) -> None:
        """Consume samples. Those between one step and the next may come together: only a row tells of them."""
        self._generated += sum([sample.completion_tokens for sample in samples])
        self._finished += [sample.split for sample in samples].count("train")
        sums = self._components
        for sample in samples:
            components = sample.components
            if not components:
                continue
            if "noncontiguous" in components:
                self._totals["noncontiguous"] += 1
            for name, value in components.items() if sample.split == "train" else ():
                sums[name] = sums.get(name, 0.0) + value

    def _failed_sample(self, event: events.SampleFailed, wall: float) -> None:
        self._totals["failed_samples"] += 1
        self._totals["noncontiguous"] += event.failure == "noncontiguous"

    def _batch(self, event: events.BatchReady, wall: float) -> None:
        self._batches[event.batch] = contents(event)

    def _depth_known(self, event: events.BufferDepth, wall: float) -> None:
        self._depth = event

    def _evaluated(self, event: events.EvalFinished, wall: float) -> None:
        self._eval = event.mean_reward

    def _committed(self, event: events.RefitCommitted, wall: float) -> None:
        self._totals["refits"] += 1
        self._refit = refit(event, wall)

    def _booted(self, event: events.ActorBooted, wall: float) -> None:
        self._totals["restarts"] += event.boot > 1

    def _waited(self, event: events.WaitEnded, wall: float) -> None:
        who = waiting(event.actor, event.on)
        self._waits[who] = self._waits.get(who, 0.0) + event.seconds

    def _dropped(self, event: events.GroupDropped, wall: float) -> None:
        self._totals["dropped_groups"] += 1

    def _refit_failed(self, event: events.RefitFailed, wall: float) -> None:
        self._totals["failed_refits"] += 1

    def _quarantined(self, event: events.EngineQuarantined, wall: float) -> None:
        self._totals["quarantines"] += 1

    def _row(self, step: events.StepFinished, wall: float) -> Row:
        depth = self._depth
        row = Row(
            step=step.step,
            version=step.version,
            parent_version=step.parent_version,
            batch=step.batch,
            wall=wall,
            seconds=step.seconds,
            waited_s=step.waited_s,
            since_last_s=None if self._last_wall is None else wall - self._last_wall,
            trained_tokens=step.tokens,
            generated_tokens=self._generated,
            contents=self._batches.get(step.batch),
            ready_groups=depth.ready if depth else None,
            open_groups=depth.open if depth else None,
            flat_groups=depth.flat_groups if depth else None,
            refit=self._refit,
            refits_total=self._totals["refits"],
            failed_refits_total=self._totals["failed_refits"],
            quarantines_total=self._totals["quarantines"],
            failed_samples_total=self._totals["failed_samples"],
            dropped_groups_total=self._totals["dropped_groups"],
            restarts_total=self._totals["restarts"],
            eval_reward=self._eval,
            waits=dict(self._waits),
            policy=dict(step.metrics),
            components={name: total / self._finished for name, total in self._components.items()},
            noncontiguous_total=self._totals["noncontiguous"],
        )
        for number in [number for number in self._batches if number <= step.batch - KEEP]:
            del self._batches[number]
        self._refit, self._eval, self._generated, self._last_wall = None, None, 0, wall
        self._finished = 0
        self._components.clear()
        self._waits.clear()
        return row


@lru_cache(1024)
def waiting(actor: str, on: str) -> str:
    """Who waits for whom, by kinds: `refit` on `engine-0,engine-1,trainer` is `refit/engine+trainer`."""
    kinds = sorted({kind_of(name.strip()) for name in on.split(",")})
    return f"{kind_of(actor)}/{'+'.join(kinds)}"


def contents(batch: events.BatchReady) -> Batch:
    """Rewards and staleness of a batch."""
    samples = [sample for group in batch.groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.valid]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    std = None if mean is None else math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return Batch(
        groups=len(batch.groups),
        valid=len(rewards),
        invalid=len(samples) - len(rewards),
        reward=mean,
        reward_std=std,
        lags=dict(Counter(sample.lag for sample in samples if sample.valid)),
    )


def refit(event: events.RefitCommitted, wall: float) -> Refit:
    """A committed refit at `wall` seconds since the Unix epoch."""
    return Refit(
        epoch=event.epoch,
        version=event.version,
        step=event.step,
        wall=wall,
        pause_s=event.pause_s,
        drain_s=event.drain_s,
        transfer_s=event.transfer_s,
        bytes=event.bytes,
        engines=tuple(member.actor for member in event.engines),
    )
