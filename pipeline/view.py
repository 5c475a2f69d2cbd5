"""The state of a run, folded from its events: what progress, driver and report look at.

Pure: `View` reads no clock; times are seconds since the Unix epoch, taken from the envelopes, and `now` is handed in.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from actors.recorder.metrics import Refit, Row, Steps, refit
from contracts import events
from contracts.envelope import Envelope
from contracts.events import Event

RATE_S = 15.0
"""Window of the generation rate."""
TASKS = frozenset(
    (
        events.TaskIssued,
        events.TrajectoryFinished,
        events.SampleFailed,
        events.TrajectoryRejected,
        events.GroupDropped,
        events.BufferDepth,
        events.EvalFinished,
    )
)
"""Events that `View._tasks` looks at; likewise the others."""
POLICY = frozenset((events.PolicyReady, events.CheckpointSaved, events.TrainingFinished))
REFIT = frozenset(
    (
        events.RefitRequested,
        events.RefitCommitted,
        events.RefitFailed,
        events.EngineQuarantined,
        events.EngineDead,
        events.ActorLeft,
        events.ActorBooted,
    )
)
CONTROL = frozenset(
    (
        events.WaitStarted,
        events.WaitEnded,
        events.ActorFailed,
        events.DataExhausted,
        events.RunStarted,
        events.RunStopping,
        events.RunFinished,
    )
)


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
        self._generated: deque[tuple[float, int]] = deque()
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
        self.totals: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self.refitting: tuple[int, int, float] | None = None
        self.serving: dict[str, int] = {}
        self.depth: events.BufferDepth | None = None
        self.checkpoint: events.CheckpointSaved | None = None
        self.issued = 0
        self.exhausted = False
        self.started_at: float | None = None
        self.first_commit_at: float | None = None
        self.last_at: float | None = None
        self.training_finished = False
        self.stopping: str | None = None
        self.finished: str | None = None

    def apply(self, envelope: Envelope[Event]) -> Row | None:
        """Consume one event; answers the row of a step that it finished."""
        wall = envelope.wall_ns / 1e9
        self.started_at = wall if self.started_at is None else self.started_at
        self.last_at = wall
        self.totals["events"] += 1
        row = self._steps.apply(envelope)
        if row is not None:
            self._groups[row.version] = 0 if row.contents is None else row.contents.groups
            self.rows.append(row)
        body = envelope.body
        kind = type(body)
        if kind in TASKS:
            self._tasks(body, wall)
        elif kind in POLICY:
            self._policy(body, wall)
        elif kind in REFIT:
            self._refit(body, wall)
        elif kind in CONTROL:
            self._control(body, wall)
        if isinstance(body, events.ActorFailed) and envelope.boot == 0:
            self.deaths.setdefault(body.actor, []).append(wall)
        return row

    def apply_all(self, log: Iterable[Envelope[Event]]) -> View:
        for envelope in log:
            self.apply(envelope)
        return self

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
        tokens = sum(count for at, count in self._generated if at > now - RATE_S)
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

    def _trained_groups(self) -> int:
        return self._settled + sum(self._groups.values())

    def begin(self) -> None:
        """A session of the run begins: what described the processes of an earlier one is void."""
        self.stopping, self.finished, self.training_finished = None, None, False
        self.first_commit_at, self.refitting = None, None
        self.boots, self.deaths, self.serving, self.waits, self.gone = {}, {}, {}, {}, set()
        self.failures.clear()

    # --- folds ---

    def _tasks(self, event: Event, wall: float) -> None:
        match event:
            case events.TaskIssued(split="train", only=()):
                self.issued += 1
            case events.TrajectoryFinished():
                self.totals["trajectories"] += 1
                self.totals["generated_tokens"] += event.completion_tokens
                self._generated.append((wall, event.completion_tokens))
                while self._generated[0][0] < wall - RATE_S:
                    self._generated.popleft()
            case events.SampleFailed():
                self.totals[f"failed:{event.failure}"] += 1
            case events.TrajectoryRejected():
                self.totals[f"rejected:{event.reason}"] += 1
            case events.GroupDropped():
                self.drops[event.reason] += 1
            case events.BufferDepth():
                self.depth = event
            case events.EvalFinished():
                self.evaluations.append(Evaluation(event.step, event.version, event.mean_reward, wall))

    def _policy(self, event: Event, wall: float) -> None:
        match event:
            case events.PolicyReady(abandoned=gone) if gone:
                kept = [row for row in self.rows if row.version not in gone]
                self.rows.clear()
                self.rows.extend(kept)
                self._groups = {version: n for version, n in self._groups.items() if version not in gone}
            case events.CheckpointSaved():
                self.checkpoint = event
                for version in [version for version in self._groups if version <= event.version]:
                    self._settled += self._groups.pop(version)
            case events.TrainingFinished():
                self.training_finished = True

    def _refit(self, event: events.Event, wall: float) -> None:
        match event:
            case events.RefitRequested():
                self.refitting = (event.epoch, event.version, wall)
            case events.RefitCommitted():
                self.refitting = None
                self.first_commit_at = wall if self.first_commit_at is None else self.first_commit_at
                self.refits.append(refit(event, wall))
                self.totals["refits"] += 1
                self.serving = {member.actor: event.version for member in event.engines}
            case events.RefitFailed():
                self.refitting = None
                self.mishaps.append(Mishap(event.epoch, None, f"{event.phase}: {event.reason}", wall))
                self.totals["failed_refits"] += 1
            case events.EngineQuarantined():
                self.mishaps.append(Mishap(event.epoch, event.engine, event.reason, wall))
                self.totals["quarantines"] += 1
                self.serving.pop(event.engine, None)
            case events.EngineDead():
                self.serving.pop(event.engine, None)
            case events.ActorLeft():
                self.gone.add(event.actor)
            case events.ActorBooted():
                self.gone.discard(event.actor)
                self.boots.setdefault(event.actor, []).append(wall)
                self.hosts[event.actor] = (event.pid, event.host)
                self.serving.pop(event.actor, None)
                self.waits = {key: wait for key, wait in self.waits.items() if wait.actor != event.actor}

    def _control(self, event: Event, wall: float) -> None:
        match event:
            case events.WaitStarted():
                wait = Wait(event.actor, event.on, event.cause, wall, event.deadline_at)
                self.waits[event.actor, event.on] = wait
            case events.WaitEnded():
                self.waits.pop((event.actor, event.on), None)
            case events.ActorFailed():
                self.failures.append(Failure(event.actor, event.error, event.message, event.fatal, wall))
            case events.DataExhausted():
                self.exhausted = True
            case events.RunStarted():
                self.begin()
            case events.RunStopping():
                self.stopping = event.reason
            case events.RunFinished():
                self.finished = event.reason
