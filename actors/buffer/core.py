"""Decides what is trained on: admits trajectories, completes groups, picks batches, grants credit.

Invariants: every train index that was delivered ends in exactly one batch, or is dropped with a reason, or is still in
hand; no trajectory is in two batches; no batch holds a trainable token older than `buffer.max_staleness` steps, counted
at the step that the batch is trained from; nothing is admitted whose tokens come from a source that no commit covers.

Batch `b` is always trained from step `base + b - 1`, also when the trainer fell back to a checkpoint: the batches
behind the checkpoint are trained again, in order, from their entries. So the staleness at a pick is exact, and the
batches outstanding are those between the trainer's step and the next batch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from actors import waits
from actors.buffer import samplers
from actors.buffer.samplers import SamplerError
from actors.buffer.state import (
    Group,
    Round,
    State,
    candidate,
    group_ref,
    refusal,
    reject,
    with_reward,
    with_sample,
    without,
)
from config.schema import RunConfig
from contracts.core import Ack, Booted, Delivered, Emit, Release, Step, Tick
from contracts.events import (
    ActorFailed,
    BatchReady,
    BufferDepth,
    CreditGranted,
    EngineQuarantined,
    EvalFinished,
    GroupDropped,
    PolicyReady,
    Provenance,
    RefitCommitted,
    RunStarted,
    RunStopping,
    SampleFailed,
    StepFinished,
    TrajectoriesEvent,
    TrajectoryFinished,
)
from contracts.sampler import Pool

INTAKE = 256
"""Trajectories taken at a time."""
AHEAD = 1
"""Batches that may wait at the trainer beyond the one in training."""
HISTORY = 8
"""Steps beyond the staleness window for which versions are remembered, so that what comes late is told from what is
foreign."""

# --- core ------------------------------------------------------------------------------------------------------------


class BufferCore:
    """`config`: buffer, steps, sync, and the shape of an evaluation."""

    state_type = State
    local_type = None
    work = ("trajectories",)
    watch = ("refit", "policy", "control")

    def __init__(self, config: RunConfig) -> None:
        self.config = config.buffer
        self.steps = config.steps
        self.staleness = config.staleness
        self.sampler = samplers.load(config.buffer.sampler)
        self.window = config.window
        self.eval_groups = config.eval.groups
        self.eval_size = config.eval.groups * config.eval.samples

    def initial(self) -> State:
        return State()

    def step(self, state: State, input: Any, now: float) -> Step[State]:
        match input:
            case Delivered():
                return self._deliver(state, input, now)
            case Tick():
                return self._expire(state, now)
            case Booted() if state.stopping or state.broken:
                return self._advance(replace(state, stopping=False, broken=False), now)
        return state, ()

    def wake(self, state: State) -> float | None:
        times = [next(iter(held.values())).deadline_at for held in (state.open, state.rounds) if held]
        due = waits.due(state.wait)
        return min(times if due is None else [*times, due], default=None)

    def intake(self, state: State) -> Mapping[str, int]:
        return {} if state.stopping else {"trajectories": INTAKE}

    def done(self, state: State) -> bool:
        return state.stopping

    def _deliver(self, state: State, input: Delivered, now: float) -> Step[State]:
        match input.envelope.body:
            case TrajectoryFinished() | SampleFailed() as event:
                handle = self._evaluate if event.split == "eval" else self._admit
                state, commands = handle(state, event, now)
                return state, (*commands, Ack(input.ref))
            case StepFinished() as event:
                versions = state.versions | {event.version: event.step}
                return self._advance(replace(state, trained=event.step, versions=versions), now)
            case PolicyReady() as event:
                return self._restore(state, event, now)
            case RefitCommitted() as event:
                return self._commit(state, event, now)
            case EngineQuarantined() as event:
                barred = frozenset(s for s in state.sources if (s.engine, s.boot) == (event.engine, event.boot))
                return (replace(state, sources=state.sources - barred), ()) if barred else (state, ())
            case RunStopping():
                return replace(state, stopping=True), ()
            case RunStarted() if state.stopping or state.broken:
                return self._advance(replace(state, stopping=False, broken=False), now)
        return state, ()

    # --- policy and refit ---

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
        for index in [i for held in (state.open, state.ready) for i, g in held.items() if g.versions & gone]:
            state, dropped = self._drop(state, index, "abandoned")
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
            abandoned=frozenset(v for v in state.abandoned if v >= min(versions)),
        )
        return self._advance(state, now)

    # --- arrivals ---

    def _admit(self, state: State, event: TrajectoriesEvent, now: float) -> Step[State]:
        index = event.index
        if index in state.closed or index in state.ready:
            return state, reject(event, "the group is closed")
        group = state.open.get(index)
        if group is None:
            group = Group(event.task, event.samples, now + self.config.group_deadline_s)
        elif group.has(event.sample):
            return state, reject(event, "duplicate: the sample has a result")
        commands: tuple[Any, ...] = ()
        reason = refusal(state, event)
        if isinstance(event, TrajectoryFinished) and reason is None:
            group = with_sample(group, event, state.versions)
        else:
            group = replace(group, failed=(*group.failed, event.sample))
            commands = reject(event, reason or "")
        state = replace(state, open={**state.open, index: group})
        if not group.settled():
            return state, commands
        state, completed = self._complete(state, index, group)
        state, advanced = self._advance(state, now)
        return state, (*commands, *completed, *advanced)

    def _complete(self, state: State, index: int, group: Group) -> Step[State]:
        """No more samples are waited for: the group is ready, or dropped."""
        if len(group.samples) < group.size and self.config.group_policy == "drop":
            return self._drop(state, index, "incomplete")
        if len(group.valid()) < 2:
            return self._drop(state, index, "too_few_valid")
        if self.config.skip_flat_groups and group.flat():
            return self._drop(state, index, "flat")
        return replace(state, open=without(state.open, index), ready={**state.ready, index: group}), ()

    def _expire(self, state: State, now: float) -> Step[State]:
        """Complete the groups and evaluations whose deadline has passed."""
        commands: list[Any] = []
        for index, group in state.open.items():
            if group.deadline_at <= now:
                state, completed = self._complete(state, index, group)
                commands += completed
        for number, held in state.rounds.items():
            if held.deadline_at <= now:
                state, finished = self._finish(state, number, held)
                commands += finished
        state, advanced = self._advance(state, now)
        state, announced = self._announce(state, now)
        return state, (*commands, *advanced, *announced)

    def _announce(self, state: State, now: float) -> Step[State]:
        due = waits.due(state.wait)
        if state.wait is None or due is None or now < due:
            return state, ()
        cause = f"{len(state.ready)} of {self.config.groups} groups complete, {len(state.open)} begun"
        wait, commands = waits.announce(state.wait, cause, "buffer")
        return replace(state, wait=wait), commands

    # --- held-out evaluation ---

    def _evaluate(self, state: State, event: TrajectoriesEvent, now: float) -> Step[State]:
        number = (-1 - event.index) // self.eval_groups
        if number in state.finished_rounds:
            return state, reject(event, "the evaluation is closed")
        held = state.rounds.get(number) or Round(now + self.config.group_deadline_s)
        key = (event.index, event.sample)
        if key in held.seen:
            return state, reject(event, "duplicate: the sample has a result")
        held = replace(held, seen=held.seen | {key})
        reason = refusal(state, event)
        if isinstance(event, TrajectoryFinished) and reason is None:
            commands: tuple[Any, ...] = (Release((event.payload.key,)),)
            held = with_reward(held, event, state.versions)
        else:
            commands = reject(event, reason or "")
        state = replace(state, rounds={**state.rounds, number: held})
        if len(held.seen) < self.eval_size:
            return state, commands
        state, finished = self._finish(state, number, held)
        return state, (*commands, *finished)

    def _finish(self, state: State, number: int, held: Round) -> Step[State]:
        state = replace(state, rounds=without(state.rounds, number), finished_rounds=state.finished_rounds.add(number))
        if held.version is None:
            message = f"held-out evaluation {number} ended with {len(held.seen)} results and no reward among them"
            failed = ActorFailed(actor="buffer", error="NoHeldOutReward", message=message, fatal=False)
            return state, (Emit(failed),)
        mean = sum(held.rewards) / len(held.rewards)
        event = EvalFinished(version=held.version, step=held.step, mean_reward=mean, samples=len(held.rewards))
        return state, (Emit(event),)

    # --- batches and credit ---

    def _advance(self, state: State, now: float) -> Step[State]:
        """Emit every batch that can be emitted, evict what has become too stale, grant the credit that results."""
        commands: list[Any] = []
        while True:
            state, evicted = self._evict(state)
            commands += evicted
            state, chosen, failed = self._choose(state)
            commands += failed
            if not chosen:
                break
            state, emitted = self._emit(state, chosen)
            commands += emitted
        state, granted = self._grant(state)
        wait, ended = waits.follow(state.wait, self._lack(state), "buffer", now)
        return replace(state, wait=wait), (*commands, *granted, *ended)

    def _lack(self, state: State) -> str | None:
        """What is waited for: groups, while the trainer has no batch in hand."""
        begun = state.base is not None and state.committed is not None
        return "collector" if begun and state.outstanding() == 0 and state.target() < self.steps else None

    def _evict(self, state: State) -> Step[State]:
        step = state.target()
        commands: list[Any] = []
        for index in [index for index, group in state.ready.items() if group.lag(step) > self.staleness]:
            state, dropped = self._drop(state, index, "stale")
            commands += dropped
        return state, commands

    def _choose(self, state: State) -> tuple[State, tuple[int, ...], tuple[Any, ...]]:
        """The groups of the next batch; none while the trainer has enough in hand or too few are complete."""
        step = state.target()
        if state.base is None or state.stopping or state.broken or state.outstanding() > AHEAD or step >= self.steps:
            return state, (), ()
        if len(state.ready) < self.config.groups:
            return state, (), ()
        pool = Pool(
            candidates=tuple(candidate(index, group, step) for index, group in state.ready.items()),
            holes=samplers.holes(state.closed.floor, state.closed.above, tuple(state.ready)),
            count=self.config.groups,
            step=step,
            max_staleness=self.staleness,
            window=self.window,
        )
        try:
            chosen = samplers.choose(self.config.sampler, self.sampler, pool)
        except SamplerError as error:
            failed = ActorFailed(actor="buffer", error="SamplerError", message=str(error), fatal=True)
            return replace(state, broken=True), (), (Emit(failed),)
        return state, chosen if len(chosen) == self.config.groups else (), ()

    def _emit(self, state: State, chosen: tuple[int, ...]) -> Step[State]:
        step = state.target()
        groups = tuple(group_ref(index, state.ready[index], step) for index in chosen)
        flat = sum(state.ready[index].flat() for index in chosen)
        lags: dict[int, int] = {}
        for sample in (sample for group in groups for sample in group.samples if sample.valid):
            lags[sample.lag] = lags.get(sample.lag, 0) + 1
        closed = state.closed
        for index in chosen:
            closed = closed.add(index)
        batch = BatchReady(batch=state.next_batch, groups=groups)
        state = replace(state, ready=without(state.ready, *chosen), closed=closed, next_batch=state.next_batch + 1)
        depth = BufferDepth(
            batch=batch.batch, ready=len(state.ready), open=len(state.open), lags=lags, flat_groups=flat
        )
        return state, (Emit(batch), Emit(depth))

    def _drop(self, state: State, index: int, reason: str) -> Step[State]:
        """Close an open or ready group without training on it."""
        group = state.open.get(index) or state.ready[index]
        state = replace(
            state,
            open=without(state.open, index),
            ready=without(state.ready, index),
            closed=state.closed.add(index),
            dropped=state.dropped + 1,
        )
        event = GroupDropped(task=group.task, index=index, reason=reason, samples=len(group.samples))
        keys = tuple(sample.payload.key for sample in group.samples)
        return state, (Emit(event, correlation=group.task), Release(keys))

    def _grant(self, state: State) -> Step[State]:
        """Let the source issue what can still be trained within the staleness window, and replace what was dropped.

        A task issued now is sampled from the committed version at the oldest, so it must belong to one of the next
        `1 + max_staleness` batches after that version. Up to `window` - 1 younger ones may be trained before it, so
        that many fewer are issued.
        """
        if state.base is None or state.committed is None:
            return state, ()
        ahead = self.config.groups * (state.committed + 1 + self.staleness - state.base) - (self.window - 1)
        total = min(ahead, self.config.groups * (self.steps - state.base)) + state.dropped
        if total <= state.credit:
            return state, ()
        return replace(state, credit=total), (Emit(CreditGranted(total=total)),)
