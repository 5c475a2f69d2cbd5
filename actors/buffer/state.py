"""What the buffer remembers, and the arithmetic on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from actors.buffer.marks import Marks
from actors.waits import Wait
from config.schema import BufferConfig
from contracts import limits
from contracts.core import Emit, Release, Step
from contracts.events import (
    ActorFailed,
    GroupRef,
    PayloadRef,
    Provenance,
    SampleFailed,
    SampleRef,
    TaskIssued,
    TrajectoriesEvent,
    TrajectoryFinished,
    TrajectoryRejected,
)
from contracts.sampler import Candidate


class Sample(msgspec.Struct, frozen=True):
    """An admitted trajectory. `oldest`: step of its oldest sampled token, None without any."""

    sample: int
    reward: float
    valid: bool
    payload: PayloadRef
    oldest: int | None


class Issued(msgspec.Struct, frozen=True):
    """A task of which no result has come, and its entry in the stream. Its payload is empty unless it may be issued
    again."""

    task: TaskIssued
    entry: str


class Group(msgspec.Struct, frozen=True):
    """What is known of one prompt group of `size` samples; `failed` lists the samples that will not come.

    `versions`: all that sampled in it. `oldest`: step of the oldest token of its valid samples, None without any.
    `entry`: of its task, empty while unknown. `issue`: the task, if its missing samples may be issued again; that was
    done `replaced` times. `attempts`: the highest seen. `late_at`: when a wait beyond the deadline was announced.
    """

    task: str
    size: int
    deadline_at: float
    samples: tuple[Sample, ...] = ()
    failed: tuple[int, ...] = ()
    versions: frozenset[int] = frozenset()
    oldest: int | None = None
    entry: str = ""
    issue: TaskIssued | None = None
    replaced: int = 0
    attempts: int = 0
    late_at: float | None = None

    def missing(self) -> tuple[int, ...]:
        """The samples without a trajectory."""
        there = {sample.sample for sample in self.samples}
        return tuple([sample for sample in range(self.size) if sample not in there])

    def has(self, sample: int) -> bool:
        for held in self.samples:
            if held.sample == sample:
                return True
        return sample in self.failed

    def settled(self) -> bool:
        return len(self.samples) + len(self.failed) >= self.size

    def flat(self) -> bool:
        return len({sample.reward for sample in self.samples if sample.valid}) < 2


class Round(msgspec.Struct, frozen=True):
    """A held-out evaluation in progress. `version`, `step`: of the oldest policy that sampled for it."""

    deadline_at: float
    seen: frozenset[tuple[int, int]] = frozenset()
    rewards: tuple[float, ...] = ()
    version: int | None = None
    step: int = 0


class State(msgspec.Struct, frozen=True):
    """Where a train index is: `issued` without a result; `open`, by deadline; `ready`, by time of completion; `closed`,
    that is batched or dropped. `lost`: entries of tasks that are gone, not seen yet."""

    base: int | None = None
    trained: int = 0
    committed: int | None = None
    next_batch: int = 1
    credit: int = 0
    dropped: int = 0
    versions: dict[int, int] = {}
    """Version -> step, of the window."""
    sources: frozenset[Provenance] = frozenset()
    barred: dict[str, tuple[int, int]] = {}
    """Engine -> (boot, epoch) of its quarantine."""
    abandoned: frozenset[int] = frozenset()
    issued: dict[int, Issued] = {}
    lost: frozenset[str] = frozenset()
    open: dict[int, Group] = {}
    ready: dict[int, Group] = {}
    closed: Marks = Marks()
    rounds: dict[int, Round] = {}
    finished_rounds: Marks = Marks()
    wait: Wait | None = None
    """For the groups of a batch, while the trainer has none in hand."""
    kept: int = 0
    """Bytes of the payloads of tasks that may be issued again."""
    crowded: bool = False
    """Some were not kept, for want of room, and that was told."""
    stopping: bool = False
    broken: bool = False
    """The sampler broke its contract: nothing is picked any more."""

    def target(self) -> int:
        """The step that the next batch is trained from."""
        return (self.base or 0) + self.next_batch - 1

    def outstanding(self) -> int:
        """Batches emitted and not trained, or to be trained again."""
        return self.target() - self.trained


def keep(state: State, task: TaskIssued, entry: str, config: BufferConfig) -> Step[State]:
    """Remember a task that was issued; its payload too, if it may be issued again and there is room for it."""
    again = config.group_policy == "replace"
    before = state.issued.get(task.index)  # a requeued one comes twice
    others = state.kept if before is None else state.kept - len(before.task.payload)
    fits = others + len(task.payload) <= limits.TASKS
    told: tuple[Any, ...] = ()
    if again and not fits and not state.crowded:
        message = (
            f"buffer.group_policy=replace: the tasks of unfinished groups have more than {limits.TASKS:,} bytes "
            "together; what is above is not kept, so missing samples of those groups are not issued again: lower "
            f"buffer.groups={config.groups}, or shorten the tasks' payloads"
        )
        told = (Emit(ActorFailed(actor="buffer", error="TasksTooLarge", message=message, fatal=False)),)
    if not (again and fits):
        task = replace(task, payload=b"")
    issued = {**state.issued, task.index: Issued(task, entry)}
    kept, crowded = others + len(task.payload), state.crowded or bool(told)
    return replace(state, issued=issued, kept=kept, crowded=crowded), told


def kept_by(group: Group) -> int:
    """Bytes that are free when the group needs its task no more."""
    return 0 if group.issue is None else len(group.issue.payload)


def lag_of(oldest: int | None, step: int) -> int:
    """Staleness when trained from `step`; `oldest` is the step of the oldest token."""
    return 0 if oldest is None else step - oldest


def refusal(state: State, event: TrajectoryFinished) -> str | None:
    """Why the sources of a trajectory bar it from the buffer, None if they don't."""
    if state.sources.issuperset(event.sources):
        return None
    for source in event.sources:
        if source.version in state.abandoned:
            return "abandoned"
        if source.version < min(state.versions, default=0):
            return "stale"
    foreign = next(source for source in event.sources if source not in state.sources)
    boot, epoch = state.barred.get(foreign.engine, (None, None))
    if boot == foreign.boot:
        return f"{foreign.engine} boot {boot} is quarantined since epoch {epoch}"
    return f"no commit covers version {foreign.version} on {foreign.engine} boot {foreign.boot}"


def reject(event: TrajectoriesEvent, reason: str) -> tuple[Any, ...]:
    """Refuse a trajectory and delete its payload. A failed sample has neither."""
    if isinstance(event, SampleFailed):
        return ()
    rejected = TrajectoryRejected(task=event.task, index=event.index, sample=event.sample, reason=reason)
    return Emit(rejected, correlation=event.task), Release((event.payload.key,))


def with_sample(group: Group, event: TrajectoryFinished, versions: Mapping[int, int]) -> Group:
    used, oldest, worst = group.versions, None, group.oldest
    for source in event.sources:
        version = source.version
        step = versions[version]
        if oldest is None or step < oldest:
            oldest = step
        if version not in used:
            used = used | {version}
    if event.valid and oldest is not None and (worst is None or oldest < worst):
        worst = oldest
    samples = (*group.samples, Sample(event.sample, event.reward, event.valid, event.payload, oldest))
    attempts = event.attempt if event.attempt > group.attempts else group.attempts
    return replace(group, samples=samples, versions=used, oldest=worst, attempts=attempts)


def with_reward(held: Round, event: TrajectoryFinished, versions: Mapping[int, int]) -> Round:
    if not event.valid:
        return held
    held = replace(held, rewards=(*held.rewards, event.reward))
    oldest = min((source.version for source in event.sources), default=None)
    if oldest is None or (held.version is not None and held.version <= oldest):
        return held
    return replace(held, version=oldest, step=versions[oldest])


def candidate(index: int, group: Group, step: int) -> Candidate:
    """A complete group as samplers see it."""
    rewards = [sample.reward for sample in group.samples if sample.valid]
    mean = sum(rewards) / len(rewards)
    lag = lag_of(group.oldest, step)
    return Candidate(index=index, lag=lag, reward=mean, valid=len(rewards), flat=len(set(rewards)) < 2)


def group_ref(index: int, group: Group, step: int) -> GroupRef:
    samples = tuple(
        [
            SampleRef(each.sample, each.reward, each.valid, each.payload, lag_of(each.oldest, step))
            for each in group.samples
        ]
    )
    return GroupRef(task=group.task, index=index, samples=samples)
