"""Decides what is trained on: admits trajectories, completes groups, picks batches, grants credit.

Invariants: every train task that was issued ends in exactly one batch, or is dropped with a reason, or is still owed;
no trajectory is in two batches; no batch holds a trainable token older than `buffer.max_staleness` steps, counted at
the step which the batch is trained from; nothing is admitted whose tokens come from a source that no commit covers.

Batch `b` is always trained from step `base + b - 1`, also when the trainer fell back to a checkpoint: the batches
behind the checkpoint are trained again, in order, from their entries. So the staleness at a pick is exact, and the
batches outstanding are those between the trainer's step and the next batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from actors import waits
from actors.buffer import evals
from actors.buffer.batches import Batches
from actors.buffer.state import (
    Group,
    Issued,
    State,
    keep,
    kept_by,
    refusal,
    reject,
    with_sample,
)
from actors.states import without
from config.schema import RunConfig
from contracts.core import Ack, Booted, Delivered, Emit, Ref, Release, Step, Tick
from contracts.events import (
    DataLost,
    EngineQuarantined,
    GroupDropped,
    Member,
    PolicyReady,
    Provenance,
    RefitCommitted,
    RunStarted,
    RunStopping,
    SampleFailed,
    StepFinished,
    TaskIssued,
    TrajectoriesEvent,
    TrajectoryFinished,
    WaitEnded,
    WaitStarted,
)

INTAKE = 256
"""Trajectories taken at a time."""
HISTORY = 8
"""Steps beyond the staleness window for which versions are remembered, so that what comes late is told from what is
foreign."""

# --- core ------------------------------------------------------------------------------------------------------------


class BufferCore:
    """`config`: buffer, steps, sync, and the shape of an evaluation."""

    state_type = State
    local_type = None
    work = ("trajectories",)
    watch = ("tasks", "refit", "policy", "control")

    def __init__(self, config: RunConfig) -> None:
        self.config = config.buffer
        self.steps = config.steps
        self.staleness = config.staleness
        self.batches = Batches(config)
        self.overlong = config.rollout.overlong
        self.max_new_tokens = config.rollout.max_new_tokens
        size = config.eval.groups * config.eval.samples
        self.shape = evals.Shape(config.eval.groups, size, config.buffer.group_deadline_s)
        self._handlers: Mapping[type, Callable[[State, Any, float], Step[State]]] = {
            DataLost: self._lost,
            StepFinished: self._trained,
            PolicyReady: self._restore,
            RefitCommitted: self._commit,
            EngineQuarantined: self._bar,
            RunStopping: self._stop,
            RunStarted: self._go_on,
        }

    def initial(self) -> State:
        return State()

    def step(self, state: State, input: Any, now: float) -> Step[State]:
        kind = type(input)
        if kind is Delivered:
            return self._deliver(state, input, now)
        if kind is Tick:
            return self._expire(state, now)
        return self._go_on(state, input, now) if kind is Booted else (state, ())

    def wake(self, state: State) -> float | None:
        times = [next(iter(held.values())).deadline_at for held in (state.open, state.rounds) if held]
        due = waits.due(state.wait)
        return min(times if due is None else [*times, due], default=None)

    def intake(self, state: State) -> Mapping[str, int]:
        return {} if state.stopping else {"trajectories": INTAKE}

    def done(self, state: State) -> bool:
        return state.stopping

    def _deliver(self, state: State, input: Delivered, now: float) -> Step[State]:
        event: Any = input.envelope.body
        kind = type(event)
        if kind is TrajectoryFinished or kind is SampleFailed:
            return self._result(state, event, input.ref, now)
        if kind is TaskIssued:
            return self._issued(state, event, input.ref.entry, now)
        handle = self._handlers.get(kind)
        return (state, ()) if handle is None else handle(state, event, now)

    def _result(self, state: State, event: TrajectoriesEvent, ref: Ref, now: float) -> Step[State]:
        if event.split == "eval":
            state, commands = evals.admit(state, event, now, self.shape)
        else:
            state, commands = self._admit(state, event, now)
        return state, (*commands, Ack(ref))

    def _go_on(self, state: State, _: Booted | RunStarted, now: float) -> Step[State]:
        if not (state.stopping or state.broken):
            return state, ()
        return self._advance(replace(state, stopping=False, broken=False), now)

    def _stop(self, state: State, _: RunStopping, __: float) -> Step[State]:
        return replace(state, stopping=True), ()

    def _lost(self, state: State, event: DataLost, now: float) -> Step[State]:
        if event.stream == "tasks":
            return self._tasks_lost(state, event, now)
        return self._results_lost(state, now) if event.stream == "trajectories" else (state, ())

    # --- policy and refit ---

    def _trained(self, state: State, event: StepFinished, now: float) -> Step[State]:
        versions = state.versions | {event.version: event.step}
        return self._advance(replace(state, trained=event.step, versions=versions), now)

    def _bar(self, state: State, event: EngineQuarantined, _: float) -> Step[State]:
        lasting = frozenset(s for s in state.sources if (s.engine, s.boot) != (event.engine, event.boot))
        return replace(state, sources=lasting, barred=state.barred | {event.engine: (event.boot, event.epoch)}), ()

    def _restore(self, state: State, event: PolicyReady, now: float) -> Step[State]:
        """The trainer is at `event.step`: what was sampled from versions it has abandoned is not trained on."""
        gone = frozenset(event.abandoned)
        state = replace(
            state,
            base=event.step if state.base is None else state.base,
            trained=event.step,
            versions=state.versions | {event.version: event.step},
            abandoned=state.abandoned | gone,
            sources=frozenset(s for s in state.sources if s.version not in gone),
        )
        commands: list[Any] = []
        for index, group in (*state.open.items(), *state.ready.items()):
            if group.versions & gone:
                state, dropped = self._drop(state, index, group, "abandoned", now)
                commands += dropped
        state, advanced = self._advance(state, now)
        return state, (*commands, *advanced)

    def _commit(self, state: State, event: RefitCommitted, now: float) -> Step[State]:
        """`event.engines` serve `event.version` from now on; forget what left the window long ago."""
        floor = min(state.trained, event.step) - self.staleness - HISTORY
        versions = {v: s for v, s in state.versions.items() if s >= floor} | {event.version: event.step}
        fresh = {Provenance(event.version, engine.actor, engine.boot) for engine in event.engines}
        state = replace(
            state,
            committed=event.step,
            versions=versions,
            sources=frozenset(s for s in state.sources if s.version in versions) | fresh,
            barred={e: b for e, b in state.barred.items() if Member(e, b[0]) not in event.engines},
            abandoned=frozenset(v for v in state.abandoned if v >= min(versions)),
        )
        return self._advance(state, now)

    # --- tasks ---

    def _issued(self, state: State, task: TaskIssued, entry: str, now: float) -> Step[State]:
        """A task, or samples of it once more, can be taken by a collector from now on."""
        if task.split != "train":
            return state, ()
        index, told = task.index, ()
        if task.only:
            group = state.open.get(index)
            state = state if group is None else replace(state, open={**state.open, index: replace(group, entry=entry)})
        elif index not in state.closed and index not in state.open and index not in state.ready:
            state, told = keep(state, task, entry, self.config)
        if entry not in state.lost:
            return state, told
        state, lost = self._lose(replace(state, lost=state.lost - {entry}), index, now)
        return state, (*told, *lost)

    def _tasks_lost(self, state: State, event: DataLost, now: float) -> Step[State]:
        """Nobody will roll these tasks out: what they owe will not come."""
        held = {task.entry: index for tasks in (state.issued, state.open) for index, task in tasks.items()}
        commands: list[Any] = []
        for entry in event.entries:
            if entry in held:
                state, lost = self._lose(state, held[entry], now)
                commands += lost
            else:
                state = replace(state, lost=state.lost | {entry})
        return state, commands

    def _lose(self, state: State, index: int, now: float) -> Step[State]:
        state = self._begin(state, index, now)
        group = state.open.get(index)
        if group is None:
            return state, ()
        state, completed = self._complete(state, index, group, now, "lost")
        state, advanced = self._advance(state, now)
        return state, (*completed, *advanced)

    def _results_lost(self, state: State, now: float) -> Step[State]:
        """A result of an unknown group is gone: from now on each has a deadline, also if nothing of it has come."""
        for index in state.issued:
            state = self._begin(state, index, now)
        return state, ()

    def _begin(self, state: State, index: int, now: float) -> State:
        """The deadline of an issued group begins, unless it has begun before."""
        held = state.issued.get(index)
        if held is None:
            return state
        group = self._group(held, now)
        return replace(state, issued=without(state.issued, index), open={**state.open, index: group})

    def _group(self, held: Issued, now: float) -> Group:
        task = held.task
        issue = task if task.payload else None
        return Group(task.task, task.samples, now + self.config.group_deadline_s, issue=issue, entry=held.entry)

    # --- arrivals ---

    def _admit(self, state: State, event: TrajectoriesEvent, now: float) -> Step[State]:
        index = event.index
        group = state.open.get(index)
        if group is not None:
            if group.has(event.sample):
                return state, reject(event, "duplicate: the sample has a result")
        elif index in state.ready or index in state.closed:
            return state, reject(event, "the group is closed")
        elif index in state.issued:
            group = self._group(state.issued[index], now)
            state = replace(state, issued=without(state.issued, index))
        else:
            group = Group(event.task, event.samples, now + self.config.group_deadline_s)
        group, commands = self._taken(state, group, event)
        if not group.settled():
            return replace(state, open={**state.open, index: group}), commands
        state, completed = self._complete(state, index, group, now)
        state, advanced = self._advance(state, now)
        return state, (*commands, *completed, *advanced)

    def _taken(self, state: State, group: Group, event: TrajectoriesEvent) -> tuple[Group, tuple[Any, ...]]:
        """The group with one more result."""
        if type(event) is TrajectoryFinished:
            reason = refusal(state, event) or self._cut_off(event)
            if reason is None:
                return with_sample(group, event, state.versions), ()
        else:
            reason = ""
        failed = (*group.failed, event.sample)
        return replace(group, failed=failed, attempts=max(group.attempts, event.attempt)), reject(event, reason)

    def _cut_off(self, event: TrajectoryFinished) -> str | None:
        if self.overlong == "drop" and event.stop_reason == "length":
            return f"overlong: cut off at rollout.max_new_tokens={self.max_new_tokens}"
        return None

    def _complete(self, state: State, index: int, group: Group, now: float, why: str = "incomplete") -> Step[State]:
        """No more samples are waited for: the group is ready, dropped, or its missing samples are issued again."""
        missing = len(group.samples) < group.size
        if missing and self.config.group_policy == "drop":
            return self._drop(state, index, group, why, now)
        if missing and group.issue is not None and group.replaced < self.config.replacements:
            return self._replace(state, index, group, group.issue, now)
        if sum([sample.valid for sample in group.samples]) < 2:
            reason = "lost" if why == "lost" and not group.samples else "too_few_valid"
            return self._drop(state, index, group, reason, now)
        if self.config.skip_flat_groups and group.flat():
            return self._drop(state, index, group, "flat", now)
        ended = () if group.late_at is None else _no_longer_late(index, group, now)
        if group.issue is not None or ended:
            state = replace(state, kept=state.kept - kept_by(group))
            group = replace(group, issue=None, late_at=None)
        return replace(state, open=without(state.open, index), ready={**state.ready, index: group}), ended

    def _replace(self, state: State, index: int, group: Group, task: TaskIssued, now: float) -> Step[State]:
        """Issue the missing samples once more, with attempts that draw other random numbers."""
        only, first = group.missing(), group.attempts + 1
        deadline = now + self.config.group_deadline_s
        group = replace(group, failed=(), entry="", replaced=group.replaced + 1, deadline_at=deadline)
        state = replace(state, open={**without(state.open, index), index: group})
        again = replace(task, only=only, first_attempt=first)
        return state, (Emit(again, correlation=task.task),)

    def _expire(self, state: State, now: float) -> Step[State]:
        """Complete the groups and evaluations whose deadline has passed."""
        commands: list[Any] = []
        for index, group in state.open.items():
            if group.deadline_at <= now:
                late = self._wait_on if self.config.group_policy == "wait" else self._complete
                state, done = late(state, index, group, now)
                commands += done
        state, finished = evals.expire(state, now)
        state, advanced = self._advance(state, now)
        state, announced = self._announce(state, now)
        return state, (*commands, *finished, *advanced, *announced)

    def _wait_on(self, state: State, index: int, group: Group, now: float) -> Step[State]:
        """Missing samples are waited for beyond the deadline; say so once."""
        late_at = now if group.late_at is None else group.late_at
        waited = replace(group, deadline_at=now + self.config.group_deadline_s, late_at=late_at)
        state = replace(state, open={**without(state.open, index), index: waited})
        if group.late_at is not None:
            return state, ()
        cause = (
            f"task {group.task} lacks samples {list(group.missing())} after "
            f"buffer.group_deadline_s={self.config.group_deadline_s:g}, and buffer.group_policy=wait"
        )
        return state, (Emit(WaitStarted(actor="buffer", on=f"group {index}", cause=cause)),)

    def _announce(self, state: State, now: float) -> Step[State]:
        due = waits.due(state.wait)
        if state.wait is None or due is None or now < due:
            return state, ()
        cause = (
            f"{len(state.ready)} of {self.config.groups} groups complete, {len(state.open)} begun, "
            f"{len(state.issued)} without a result"
        )
        wait, commands = waits.announce(state.wait, cause, "buffer")
        return replace(state, wait=wait), commands

    # --- batches and credit ---

    def _advance(self, state: State, now: float) -> Step[State]:
        """Emit every batch that can be emitted, evict what has become too stale, grant the credit that results."""
        commands: list[Any] = []
        while True:
            state, evicted = self._evict(state, now)
            commands += evicted
            state, chosen, failed = self.batches.choose(state)
            commands += failed
            if not chosen:
                break
            state, emitted = self.batches.emit(state, chosen)
            commands += emitted
        state, granted = self.batches.grant(state)
        wait, ended = waits.follow(state.wait, self._lack(state), "buffer", now)
        if wait is not state.wait:
            state = replace(state, wait=wait)
        return state, (*commands, *granted, *ended)

    def _lack(self, state: State) -> str | None:
        """What is waited for: groups, while the trainer has no batch in hand."""
        begun = state.base is not None and state.committed is not None
        return "collector" if begun and state.outstanding() == 0 and state.target() < self.steps else None

    def _evict(self, state: State, now: float) -> Step[State]:
        eldest = state.target() - self.staleness
        commands: list[Any] = []
        for index, group in state.ready.items():
            if group.oldest is not None and group.oldest < eldest:
                state, dropped = self._drop(state, index, group, "stale", now)
                commands += dropped
        return state, commands

    def _drop(self, state: State, index: int, group: Group, reason: str, now: float) -> Step[State]:
        """Close an open or ready group without training on it."""
        state = replace(
            state,
            open=without(state.open, index),
            ready=without(state.ready, index),
            closed=state.closed.add(index),
            dropped=state.dropped + 1,
            kept=state.kept - kept_by(group),
        )
        event = GroupDropped(task=group.task, index=index, reason=reason, samples=len(group.samples))
        keys = tuple(sample.payload.key for sample in group.samples)
        return state, (Emit(event, correlation=group.task), Release(keys), *_no_longer_late(index, group, now))


def _no_longer_late(index: int, group: Group, now: float) -> tuple[Any, ...]:
    """The end of a wait for its samples that was announced."""
    if group.late_at is None:
        return ()
    return (Emit(WaitEnded(actor="buffer", on=f"group {index}", seconds=now - group.late_at)),)
