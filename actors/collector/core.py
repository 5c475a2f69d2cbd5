"""Decides which samples are rolled out, which are tried again, and when a task is done.

Invariants: every sample of a task that stays ours gets exactly one result, a trajectory or a failure with its kind; the
task's entry is acked in the step that gives its last sample a result; a sample is in one place only: with the shell, or
waiting to be tried; results for tasks that are no longer ours are thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from actors.collector.messages import (
    Cancel,
    CancelAll,
    Cancelled,
    Discard,
    GatewayGone,
    Local,
    Restart,
    Rollout,
    SampleDone,
    SampleProblem,
    ThreadsStuck,
    Try,
)
from config.schema import RolloutConfig
from contracts.core import Ack, Booted, Delivered, Emit, LeaseLost, Ref, Step, Tick
from contracts.events import (
    FailureKind,
    GatewayReady,
    PayloadRef,
    RunStarted,
    RunStopping,
    SampleFailed,
    TaskIssued,
    TrajectoryFinished,
    WaitEnded,
    WaitStarted,
)

BACKOFF_MAX_S = 30.0
"""Longest pause before a sample is tried again."""
BOOTS = 5
"""Restarts of the collector during one task after which the task is taken for their cause."""

# --- state -----------------------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True):
    """A task in hand. `attempts`: unsettled sample -> its current attempt; `waiting`: sample -> when it is tried.

    `failures`: unsettled sample -> the kinds of its failures so far.
    """

    ref: Ref
    task: TaskIssued
    attempts: dict[int, int]
    waiting: dict[int, float]
    failures: dict[int, tuple[FailureKind, ...]] = {}
    boots: int = 0


class Outage(msgspec.Struct, frozen=True):
    """Since when nobody answers at the gateway's address. Until `deadline_at` that uses up no attempts."""

    since: float
    deadline_at: float


class State(msgspec.Struct, frozen=True):
    """`open`: entry id -> task; `due`: entry id -> earliest time in its `waiting`, of tasks that have one."""

    open: dict[str, Open] = {}
    due: dict[str, float] = {}
    url: str | None = None
    outage: Outage | None = None
    serial: int = 0
    """Payload keys made so far."""
    stopping: bool = False
    cancelled: bool = False


# --- core ------------------------------------------------------------------------------------------------------------


class CollectorCore:
    """One of several collectors; `config` says how many tasks and attempts."""

    state_type = State
    local_type = Local
    work = ("tasks",)
    watch = ("fleet", "control")

    def __init__(self, config: RolloutConfig, actor: str) -> None:
        self.config = config
        self.actor = actor

    def initial(self) -> State:
        return State()

    def step(self, state: State, input: Any, now: float) -> Step[State]:
        match input:
            case SampleDone():
                return self._sample_done(state, input, now)
            case SampleProblem():
                return self._sample_problem(state, input, now)
            case GatewayGone():
                return self._gateway_gone(state, input, now)
            case Delivered():
                return self._deliver(state, input, now)
            case Tick():
                return self._launch(state, now)
            case Booted():
                return self._boot(state, now)
            case LeaseLost():
                return self._lease_lost(state, input)
            case Cancelled() if state.stopping:
                return replace(state, cancelled=True), ()
            case ThreadsStuck():
                return state, (Restart(f"{input.count} threads are stuck: {input.reason}"),)
        return state, ()

    def wake(self, state: State) -> float | None:
        return min(state.due.values(), default=None) if _able(state) else None

    def intake(self, state: State) -> Mapping[str, int]:
        if not _able(state):
            return {}
        # In an outage one task at a time finds out whether it is over.
        room = self.config.open_groups if state.outage is None else 1
        return {"tasks": max(0, room - len(state.open))}

    def done(self, state: State) -> bool:
        return state.stopping and state.cancelled

    # --- life ---

    def _deliver(self, state: State, input: Delivered, now: float) -> Step[State]:
        match input.envelope.body:
            case TaskIssued() as task if input.ref.entry not in state.open:
                samples = task.only or range(task.samples)
                fresh = Open(
                    ref=input.ref,
                    task=task,
                    attempts=dict.fromkeys(samples, task.first_attempt),
                    waiting=dict.fromkeys(samples, now),
                )
                return self._launch(_put(state, fresh), now)
            case GatewayReady() as ready:
                return self._gateway_ready(state, ready.url, now)
            case RunStopping():
                return replace(state, stopping=True), (CancelAll(),)
            case RunStarted() if state.stopping:
                return self._boot(state, now)
        return state, ()

    def _boot(self, state: State, now: float) -> Step[State]:
        """Nothing runs: roll out again whatever has no result."""
        state, ended = self._end_outage(replace(state, stopping=False, cancelled=False), now)
        commands: list[Any] = [*ended]
        for task in state.open.values():
            task = replace(task, boots=task.boots + 1, waiting=dict.fromkeys(task.attempts, now))
            if task.boots < BOOTS:
                state = _put(state, task)
                continue
            reason = f"the collector restarted {task.boots} times during this task"
            for sample in task.attempts:
                state, failed = self._fail(state, task.ref, sample, "infra", reason)
                commands += failed
        state, launched = self._launch(state, now)
        return state, (*commands, *launched)

    def _lease_lost(self, state: State, input: LeaseLost) -> Step[State]:
        lost = [ref for ref in input.refs if ref.entry in state.open]
        for ref in lost:
            state = _remove(state, ref.entry)
        return state, [Cancel(ref) for ref in lost]

    def _launch(self, state: State, now: float) -> Step[State]:
        """Hand the samples that are due to the shell, those of one task together."""
        if not _able(state):
            return state, ()
        commands: list[Any] = []
        for entry in [entry for entry, at in state.due.items() if at <= now]:
            task = state.open[entry]
            samples = [sample for sample, at in task.waiting.items() if at <= now]
            tries = tuple(Try(sample, task.attempts[sample]) for sample in samples)
            commands.append(Rollout(ref=task.ref, task=task.task, tries=tries, url=state.url or ""))
            state = _put(state, replace(task, waiting=_without(task.waiting, samples)))
        return state, commands

    # --- gateway ---

    def _gateway_ready(self, state: State, url: str, now: float) -> Step[State]:
        """A gateway listens: what waited for it goes out at once."""
        for task in state.open.values() if state.outage is not None else ():
            state = _put(state, replace(task, waiting=dict.fromkeys(task.waiting, now)))
        state, ended = self._end_outage(replace(state, url=url), now)
        state, launched = self._launch(state, now)
        return state, (*ended, *launched)

    def _gateway_gone(self, state: State, input: GatewayGone, now: float) -> Step[State]:
        """The first sign begins an outage; until its deadline samples wait without using up attempts.

        A sign from an address that has been replaced since says nothing about the new one: try there at once.
        """
        tries = [each for each in input.tries if _current(state, input.ref, each)]
        if not tries:
            return state, ()
        if input.url != state.url:
            return self._launch(_wait(state, input.ref, {each.sample: now for each in tries}), now)
        commands: tuple[Any, ...] = ()
        if state.outage is None:
            state = replace(state, outage=Outage(since=now, deadline_at=now + self.config.deadline_s))
            cause = f"nobody answers at {input.url}: {input.reason}"
            wait = WaitStarted(actor=self.actor, on="gateway", cause=cause, deadline_at=now + self.config.deadline_s)
            commands = (Emit(wait),)
        assert state.outage is not None
        if now < state.outage.deadline_at:
            at = now + self.config.retry_backoff_s
            return _wait(state, input.ref, {each.sample: at for each in tries}), commands
        for each in tries:
            problem = SampleProblem(input.ref, each.sample, each.attempt, "infra", input.reason)
            state, failed = self._sample_problem(state, problem, now)
            commands = (*commands, *failed)
        return state, commands

    def _end_outage(self, state: State, now: float) -> Step[State]:
        if state.outage is None:
            return state, ()
        ended = WaitEnded(actor=self.actor, on="gateway", seconds=now - state.outage.since)
        return replace(state, outage=None), (Emit(ended),)

    # --- results ---

    def _sample_done(self, state: State, input: SampleDone, now: float) -> Step[State]:
        if not _current(state, input.ref, input):
            return state, (Discard(input.handle),)
        state, ended = self._end_outage(state, now)
        task = state.open[input.ref.entry].task
        key = f"traj:{task.index}:{input.sample}:{self.actor}:{state.serial}"
        event = TrajectoryFinished(
            task=task.task,
            index=task.index,
            sample=input.sample,
            attempt=input.attempt,
            samples=task.samples,
            reward=input.reward,
            components=input.components,
            valid=input.mask_reason is None,
            payload=PayloadRef(key=key, size=input.size),
            prompt_tokens=input.prompt_tokens,
            completion_tokens=input.completion_tokens,
            sources=input.sources,
            seconds=input.seconds,
            split=task.split,
            mask_reason=input.mask_reason,
            stop_reason=input.stop_reason,
        )
        emit = Emit(event, payload=input.handle, lease=input.ref, correlation=task.task)
        state, acks = _settle(replace(state, serial=state.serial + 1), input.ref, input.sample)
        return state, (*ended, emit, *acks)

    def _sample_problem(self, state: State, input: SampleProblem, now: float) -> Step[State]:
        if not _current(state, input.ref, input):
            return state, ()
        task = state.open[input.ref.entry]
        failures = (*task.failures.get(input.sample, ()), input.failure)
        spent, budget = failures.count(input.failure), getattr(self.config.attempts, input.failure)
        if spent >= budget:
            # What one attempt was allowed needs no arithmetic.
            text = f" (failure {spent} of rollout.attempts.{input.failure}={budget})" if budget > 1 else ""
            return self._fail(state, input.ref, input.sample, input.failure, input.reason + text)
        pause = min(BACKOFF_MAX_S, self.config.retry_backoff_s * 2 ** (len(failures) - 1))
        task = replace(
            task,
            attempts={**task.attempts, input.sample: input.attempt + 1},
            failures={**task.failures, input.sample: failures},
        )
        return _wait(_put(state, task), input.ref, {input.sample: now + pause}), ()

    def _fail(self, state: State, ref: Ref, sample: int, failure: FailureKind, reason: str) -> Step[State]:
        held = state.open[ref.entry]
        event = SampleFailed(
            task=held.task.task,
            index=held.task.index,
            sample=sample,
            attempt=held.attempts[sample],
            samples=held.task.samples,
            failure=failure,
            reason=reason,
            split=held.task.split,
        )
        state, acks = _settle(state, ref, sample)
        return state, (Emit(event, lease=ref, correlation=held.task.task), *acks)


# --- functions -------------------------------------------------------------------------------------------------------


def _able(state: State) -> bool:
    """Whether rollouts can be started."""
    return state.url is not None and not state.stopping


def _current(state: State, ref: Ref, tried: Try | SampleDone | SampleProblem) -> bool:
    """Whether `tried` is the attempt that the shell was asked for last, of a sample without a result."""
    task = state.open.get(ref.entry)
    return task is not None and task.attempts.get(tried.sample) == tried.attempt and tried.sample not in task.waiting


def _wait(state: State, ref: Ref, until: Mapping[int, float]) -> State:
    """Try samples of an open task at the given times."""
    task = state.open[ref.entry]
    return _put(state, replace(task, waiting={**task.waiting, **until}))


def _settle(state: State, ref: Ref, sample: int) -> Step[State]:
    """The sample has its result; with the last one the task is done."""
    task = state.open[ref.entry]
    attempts = _without(task.attempts, (sample,))
    if not attempts:
        return _remove(state, ref.entry), (Ack(ref),)
    waiting, failures = _without(task.waiting, (sample,)), _without(task.failures, (sample,))
    return _put(state, replace(task, attempts=attempts, waiting=waiting, failures=failures)), ()


def _put(state: State, task: Open) -> State:
    entry = task.ref.entry
    due = _without(state.due, (entry,))
    if task.waiting:
        due[entry] = min(task.waiting.values())
    return replace(state, open={**state.open, entry: task}, due=due)


def _remove(state: State, entry: str) -> State:
    return replace(state, open=_without(state.open, (entry,)), due=_without(state.due, (entry,)))


def _without(held: Mapping[Any, Any], keys: Iterable[Any]) -> dict[Any, Any]:
    gone = frozenset(keys)
    return {key: value for key, value in held.items() if key not in gone}
