"""The state of a run, folded from its events: what progress, driver and report look at.

Pure: `View` reads no clock; times are seconds since the Unix epoch, taken from the envelopes, and `now` is handed in.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from actors.recorder.metrics import Refit, Row, Steps, refit
from contracts import events
from contracts.envelope import Envelope
from contracts.events import Event
from pipeline.restoring import Restores

RATE_S = 15.0
"""Window of the generation rate."""


class Wait(msgspec.Struct, frozen=True):
    """`actor` can't go on until `on` acts."""

    actor: str
    on: str
    cause: str
    since: float
    deadline_at: float | None


class Mishap(msgspec.Struct, frozen=True):
    """A failed epoch (`engine` None) or the quarantine of one engine."""

    epoch: int
    engine: str | None
    reason: str
    wall: float


class Evaluation(msgspec.Struct, frozen=True):
    """Held-out reward of one version."""

    step: int
    version: int
    reward: float
    wall: float


class Failure(msgspec.Struct, frozen=True):
    """Something an actor wants a person to see."""

    actor: str
    error: str
    message: str
    fatal: bool
    wall: float


class View:
    """Feed every event in log order to `apply`; the attributes then describe the run.

    `rows` holds a row a step of the lineage that led to the newest weights: steps abandoned by a restore are taken out.
    With `keep`, only that many of the newest rows, refits and mishaps are held.
    """

    def __init__(self, keep: int | None = None) -> None:
        self._steps = Steps()
        self.generated: deque[tuple[float, int]] = deque()
        """(time, tokens) of the samples of the last `RATE_S`."""
        self._groups: dict[int, int] = {}
        self._settled = 0
        self.rows: deque[Row] = deque(maxlen=keep)
        self.evaluations: deque[Evaluation] = deque(maxlen=keep)
        self.refits: deque[Refit] = deque(maxlen=keep)
        self.mishaps: deque[Mishap] = deque(maxlen=keep)
        self.failures: deque[Failure] = deque(maxlen=100)
        self.boots: dict[str, list[float]] = {}
        self.deaths: dict[str, list[float]] = {}
        self.gone: set[str] = set()
        self.hosts: dict[str, tuple[int, str]] = {}
        self.waits: dict[tuple[str, str], Wait] = {}
        self.events = 0
        self.totals: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self.refitting: tuple[int, int, float] | None = None
        self.serving: dict[str, int] = {}
        self.depth: events.BufferDepth | None = None
        self.checkpoint: events.CheckpointSaved | None = None
        self.restores = Restores()
        self.issued = 0
        self.batched = 0
        """Groups that are in a batch, trained or not."""
        self.exhausted = False
        self.started_at: float | None = None
        self.first_commit_at: float | None = None
        self.last_at: float | None = None
        self.training_finished = False
        self.stopping: str | None = None
        self.finished: str | None = None
        handlers: dict[type, Callable[[Any, float], None]] = {
            events.TaskIssued: self._task,
            events.SampleFailed: self._sample_failed,
            events.TrajectoryRejected: self._rejected,
            events.GroupDropped: self._dropped,
            events.BatchReady: self._batched,
            events.BufferDepth: self._depth_known,
            events.EvalFinished: self._evaluated,
            events.PolicyReady: self._policy,
            events.CheckpointSaved: self._checkpoint,
            events.TrainingFinished: self._trained,
            events.RefitRequested: self._refit,
            events.RefitCommitted: self._committed,
            events.RefitFailed: self._refit_failed,
            events.EngineQuarantined: self._quarantined,
            events.EngineDead: self._engine_dead,
            events.ActorLeft: self._left,
            events.ActorBooted: self._booted,
            events.WaitStarted: self._wait,
            events.WaitEnded: self._wait_ended,
            events.ActorFailed: self._failed,
            events.DataExhausted: self._exhausted,
            events.RunStarted: self._run_started,
            events.RunStopping: self._run_stopping,
            events.RunFinished: self._run_finished,
        }
        first = self._steps.handlers
        self._table = {kind: (first.get(kind), handlers.get(kind)) for kind in {**first, **handlers}}
        """Kind -> what is called with an event of it, in turn; samples are taken together, see `_sampled`."""

    def apply(self, envelope: Envelope[Event]) -> Row | None:
        """Consume one event; answers the row of a step that it finished."""
        rows = self.extend((envelope,))
        return rows[0] if rows else None

    def apply_all(self, log: Iterable[Envelope[Event]]) -> View:
        self.extend(list(log))
        return self

    def extend(self, log: Sequence[Envelope[Event]]) -> list[Row]:
        """Consume the next events; answers the rows of the steps that they finished."""
        if not log:
            return []
        if self.started_at is None:
            self.started_at = log[0].wall_ns / 1e9
        handlers_of, rows, sampled = self._table.get, [], []
        for envelope in log:
            body: Any = envelope.body
            kind = type(body)
            if kind is events.TrajectoryFinished:
                sampled.append(envelope)
                continue
            handlers = handlers_of(kind)
            if handlers is None:
                continue
            if kind is events.StepFinished:
                self._sampled(sampled)
                sampled = []
            first, second = handlers
            wall = envelope.wall_ns / 1e9
            row = first(body, wall) if first is not None else None
            if row is not None:
                self._groups[row.version] = 0 if row.contents is None else row.contents.groups
                self.rows.append(row)
                rows.append(row)
            if second is not None:
                second(body, wall)
                if envelope.boot == 0 and kind is events.ActorFailed:
                    self.deaths.setdefault(body.actor, []).append(wall)
        self._sampled(sampled)
        self.last_at = log[-1].wall_ns / 1e9
        self.events += len(log)
        return rows

    # --- what follows from the attributes ---

    @property
    def step(self) -> int:
        """Optimizer steps of the newest weights."""
        return self.rows[-1].step if self.rows else 0

    def rewards(self) -> list[float]:
        """Mean training reward of each step held, oldest first; steps without a valid sample are left out."""
        return [row.reward for row in self.rows if row.reward is not None]

    def mean_reward(self, window: int) -> float | None:
        """Mean over the last `window` steps, None before there are as many."""
        last = self.rewards()[-window:]
        return sum(last) / window if len(last) == window else None

    def generated_per_s(self, now: float) -> float:
        """Generated tokens a second over the last `RATE_S`."""
        tokens = sum(count for at, count in self.generated if at > now - RATE_S)
        age = RATE_S if self.started_at is None else min(RATE_S, max(now - self.started_at, 1.0))
        return tokens / age

    def longest_waits(self, now: float, least_s: float = 1.0) -> list[Wait]:
        """Open waits older than `least_s`, oldest first."""
        return sorted((w for w in self.waits.values() if now - w.since >= least_s), key=lambda w: w.since)

    def recent_deaths(self, actor: str, now: float, window_s: float) -> int:
        """How often a process of the actor ended by itself, within the last `window_s`: as its later boots show it, or
        its own last words, whichever are more."""
        boots = sum(at > now - window_s for at in self.boots.get(actor, [])[1:])
        return max(boots, sum(at > now - window_s for at in self.deaths.get(actor, [])))

    def starved(self, groups: int) -> bool:
        """The source has no more tasks, and those still open can't fill a batch of `groups`."""
        return self.exhausted and self.issued - self._trained_groups() - sum(self.drops.values()) < groups

    @property
    def open_groups(self) -> int:
        """Groups that are issued, and neither in a batch nor dropped."""
        return self.issued - self.batched - sum(self.drops.values())

    @property
    def queued_groups(self) -> int:
        """Groups in batches that the trainer has yet to train, or to train again."""
        return max(0, self.batched - self._trained_groups())  # a run without its checkpoints trains others again

    def _trained_groups(self) -> int:
        return self._settled + sum(self._groups.values())

    def begin(self) -> None:
        """A session of the run begins: what described the processes of an earlier one is void."""
        self.stopping, self.finished, self.training_finished = None, None, False
        self.first_commit_at, self.refitting = None, None
        self.boots, self.deaths, self.serving, self.waits, self.gone = {}, {}, {}, {}, set()
        self.failures.clear()

    # --- folds: tasks ---

    def _task(self, event: events.TaskIssued, wall: float) -> None:
        if event.split == "train" and not event.only:
            self.issued += 1

    def _sampled(self, log: Sequence[Envelope[Any]]) -> None:
        """Samples between one step and the next: nothing else looks at what they change."""
        if not log:
            return
        samples = [envelope.body for envelope in log]
        self._steps.finished(samples)
        tokens = [sample.completion_tokens for sample in samples]
        self.totals["trajectories"] += len(tokens)
        self.totals["generated_tokens"] += sum(tokens)
        generated = self.generated
        for envelope, count in zip(log, tokens, strict=True):
            wall = envelope.wall_ns / 1e9
            generated.append((wall, count))
            while generated[0][0] < wall - RATE_S:
                generated.popleft()

    def _sample_failed(self, event: events.SampleFailed, wall: float) -> None:
        self.totals[f"failed:{event.failure}"] += 1

    def _rejected(self, event: events.TrajectoryRejected, wall: float) -> None:
        self.totals[f"rejected:{event.reason}"] += 1

    def _dropped(self, event: events.GroupDropped, wall: float) -> None:
        self.drops[event.reason] += 1

    def _batched(self, event: events.BatchReady, wall: float) -> None:
        self.batched += len(event.groups)

    def _depth_known(self, event: events.BufferDepth, wall: float) -> None:
        self.depth = event

    def _evaluated(self, event: events.EvalFinished, wall: float) -> None:
        self.evaluations.append(Evaluation(event.step, event.version, event.mean_reward, wall))

    # --- folds: policy ---

    def _policy(self, event: events.PolicyReady, wall: float) -> None:
        if event.abandoned:
            kept = [row for row in self.rows if row.version not in event.abandoned]
            self.rows.clear()
            self.rows.extend(kept)
            self._groups = {version: n for version, n in self._groups.items() if version not in event.abandoned}

    def _checkpoint(self, event: events.CheckpointSaved, wall: float) -> None:
        self.checkpoint = event
        self.restores.apply(event)
        for version in [version for version in self._groups if version <= event.version]:
            self._settled += self._groups.pop(version)

    def _trained(self, event: events.TrainingFinished, wall: float) -> None:
        self.training_finished = True

    # --- folds: refits and the fleet ---

    def _refit(self, event: events.RefitRequested, wall: float) -> None:
        self.refitting = (event.epoch, event.version, wall)

    def _committed(self, event: events.RefitCommitted, wall: float) -> None:
        self.refitting = None
        self.first_commit_at = wall if self.first_commit_at is None else self.first_commit_at
        self.refits.append(refit(event, wall))
        self.totals["refits"] += 1
        self.serving = {member.actor: event.version for member in event.engines}

    def _refit_failed(self, event: events.RefitFailed, wall: float) -> None:
        self.refitting = None
        self.mishaps.append(Mishap(event.epoch, None, f"{event.phase}: {event.reason}", wall))
        self.totals["failed_refits"] += 1

    def _quarantined(self, event: events.EngineQuarantined, wall: float) -> None:
        self.mishaps.append(Mishap(event.epoch, event.engine, event.reason, wall))
        self.totals["quarantines"] += 1
        self.serving.pop(event.engine, None)

    def _engine_dead(self, event: events.EngineDead, wall: float) -> None:
        self.serving.pop(event.engine, None)

    def _left(self, event: events.ActorLeft, wall: float) -> None:
        self.gone.add(event.actor)

    def _booted(self, event: events.ActorBooted, wall: float) -> None:
        self.gone.discard(event.actor)
        self.boots.setdefault(event.actor, []).append(wall)
        self.hosts[event.actor] = (event.pid, event.host)
        self.serving.pop(event.actor, None)
        self.waits = {key: wait for key, wait in self.waits.items() if wait.actor != event.actor}

    # --- folds: waits and control ---

    def _wait(self, event: events.WaitStarted, wall: float) -> None:
        self.waits[event.actor, event.on] = Wait(event.actor, event.on, event.cause, wall, event.deadline_at)

    def _wait_ended(self, event: events.WaitEnded, wall: float) -> None:
        self.waits.pop((event.actor, event.on), None)

    def _failed(self, event: events.ActorFailed, wall: float) -> None:
        self.failures.append(Failure(event.actor, event.error, event.message, event.fatal, wall))
        self.restores.apply(event)

    def _exhausted(self, event: events.DataExhausted, wall: float) -> None:
        self.exhausted = True

    def _run_started(self, event: events.RunStarted, wall: float) -> None:
        self.begin()

    def _run_stopping(self, event: events.RunStopping, wall: float) -> None:
        self.stopping = event.reason

    def _run_finished(self, event: events.RunFinished, wall: float) -> None:
        self.finished = event.reason
