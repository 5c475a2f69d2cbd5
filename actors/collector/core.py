"""Decides which samples are rolled out, which are tried again, and when a task is done.

Invariants: every sample of a task that stays ours gets exactly one result, a trajectory or a failure with its kind; the
task's entry is acked in the step that gives its last sample a result; a sample is in one place only: with the shell, or
waiting to be tried; results for tasks that are no longer ours are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from actors.states import without
from config.schema import RolloutConfig
from contracts import limits
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
CRASHES = 5
"""Crashes of the collector during one task after which the task is taken for their cause."""

# --- state -----------------------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True):
    """A task in hand. `attempts`: unsettled sample -> its current attempt; `waiting`: sample -> when it is tried.

    `failures`: unsettled sample -> the kinds of its failures so far. `crashes`: of the collector while it had the task.
    """

    ref: Ref
    task: TaskIssued
    attempts: dict[int, int]
    waiting: dict[int, float]
    failures: dict[int, tuple[FailureKind, ...]] = {}
    crashes: int = 0


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
        self._inputs: Mapping[type, Callable[[State, Any, float], Step[State]]] = {
            SampleDone: self._sample_done,
            Delivered: self._deliver,
            SampleProblem: self._sample_problem,
            GatewayGone: self._gateway_gone,
            Tick: lambda state, _, now: self._launch(state, now),
            Booted: lambda state, _, now: self._boot(state, now, crashed=not state.stopping),
            LeaseLost: self._lease_lost,
            Cancelled: lambda state, _, __: (replace(state, cancelled=True) if state.stopping else state, ()),
            ThreadsStuck: lambda state, input, _: (state, (_restart(input),)),
        }

    def initial(self) -> State:
        return State()

    def step(self, state: State, input: Any, now: float) -> Step[State]:
        handle = self._inputs.get(type(input))
        return (state, ()) if handle is None else handle(state, input, now)

    def wake(self, state: State) -> float | None:
        return min(state.due.values(), default=None) if _able(state) else None

    def intake(self, state: State) -> Mapping[str, int]:
        if not _able(state):
            return {}
        # In an outage one task at a time finds out whether it is over.
        room = (self.config.open_groups if state.outage is None else 1) - len(state.open)
        if self.config.open_groups * limits.TASK > limits.TASKS:
            held = sum([len(each.task.payload) for each in state.open.values()])
            room = min(room, (limits.TASKS - held) // limits.TASK)
        return {"tasks": max(0, room)}

    def holds(self, state: State, ref: Ref) -> bool:
        """Whether the task is in hand: how often the collector may crash with it is counted here (`CRASHES`)."""
        return ref.entry in state.open

    def done(self, state: State) -> bool:
        return state.stopping and state.cancelled

    # --- life ---

    def _deliver(self, state: State, input: Delivered, now: float) -> Step[State]:
        event: Any = input.envelope.body
        kind = type(event)
        if kind is TaskIssued:
            return self._task(state, input.ref, event, now)
        if kind is GatewayReady:
            return self._gateway_ready(state, event.url, now)
        if kind is RunStopping:
            return replace(state, stopping=True), (CancelAll(),)
        again = kind is RunStarted and state.stopping
        return self._boot(state, now, crashed=False) if again else (state, ())

    def _task(self, state: State, ref: Ref, task: TaskIssued, now: float) -> Step[State]:
        if ref.entry in state.open:
            return state, ()
        samples = task.only or range(task.samples)
        attempts = dict.fromkeys(samples, task.first_attempt)
        return self._launch(_put(state, Open(ref, task, attempts, dict.fromkeys(samples, now))), now)

    def _boot(self, state: State, now: float, *, crashed: bool) -> Step[State]:
        """Nothing runs: roll out again whatever has no result. A stop that was ordered is no crash."""
        state, ended = self._end_outage(replace(state, stopping=False, cancelled=False), now)
        commands: list[Any] = [*ended]
        for task in state.open.values():
            task = replace(task, crashes=task.crashes + crashed, waiting=dict.fromkeys(task.attempts, now))
            if task.crashes < CRASHES:
                state = _put(state, task)
                continue
            reason = f"the collector crashed {task.crashes} times during this task"
            for sample in task.attempts:
                state, failed = self._fail(state, task.ref, sample, "infra", reason)
                commands += failed
        state, launched = self._launch(state, now)
        return state, (*commands, *launched)

    def _lease_lost(self, state: State, input: LeaseLost, _: float) -> Step[State]:
        lost = [ref for ref in input.refs if ref.entry in state.open]
        for ref in lost:
            state = _remove(state, ref.entry)
        return state, [Cancel(ref) for ref in lost]

    def _launch(self, state: State, now: float) -> Step[State]:
        """Hand the samples that are due to the shell, those of one task together."""
        if not _able(state):
            return state, ()
        entries = [entry for entry, at in state.due.items() if at <= now]
        if not entries:
            return state, ()
        commands: list[Any] = []
        held, due = state.open.copy(), state.due.copy()
        for entry in entries:
            task = held[entry]
            samples = [sample for sample, at in task.waiting.items() if at <= now]
            tries = tuple([Try(sample, task.attempts[sample]) for sample in samples])
            commands.append(Rollout(ref=task.ref, task=task.task, tries=tries, url=state.url or ""))
            waiting = {sample: at for sample, at in task.waiting.items() if at > now}
            held[entry] = replace(task, waiting=waiting)
            del due[entry]
            if waiting:
                due[entry] = min(waiting.values())
        return replace(state, open=held, due=due), commands

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
        tries = [each for each in input.tries if _held(state, input.ref, each)]
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
        held = _held(state, input.ref, input)
        if held is None:
            return state, (Discard(input.handle),)
        ended: Sequence[Any] = ()
        if state.outage is not None:
            state, ended = self._end_outage(state, now)
        task = held.task
        key = f"traj:{task.index}:{input.sample}:{self.actor}:{state.serial}"
        event = TrajectoryFinished(
            task=task.task,
            index=task.index,
            sample=input.sample,
            attempt=input.attempt,
            samples=task.samples,
            reward=input.reward,
            components=input.components,
            valid=True,
            payload=PayloadRef(key=key, size=input.size),
            prompt_tokens=input.prompt_tokens,
            completion_tokens=input.completion_tokens,
            sources=input.sources,
            seconds=input.seconds,
            split=task.split,
            stop_reason=input.stop_reason,
        )  # With a 16th keyword the interpreter would make the call through a dict, at four times the cost.
        if input.mask_reason is not None:
            event = replace(event, valid=False, mask_reason=input.mask_reason)
        emit = Emit(event, payload=input.handle, lease=input.ref, correlation=task.task)
        state, acks = _settle(state, held, input.sample, state.serial + 1)
        return state, (*ended, emit, *acks)

    def _sample_problem(self, state: State, input: SampleProblem, now: float) -> Step[State]:
        task = _held(state, input.ref, input)
        if task is None:
            return state, ()
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
        state, acks = _settle(state, held, sample, state.serial)
        return state, (Emit(event, lease=ref, correlation=held.task.task), *acks)


# --- functions -------------------------------------------------------------------------------------------------------


def _able(state: State) -> bool:
    """Whether rollouts can be started."""
    return state.url is not None and not state.stopping


def _held(state: State, ref: Ref, tried: Try | SampleDone | SampleProblem) -> Open | None:
    """The task, if `tried` is the attempt that the shell was asked for last, of a sample without a result."""
    task = state.open.get(ref.entry)
    if task is None or task.attempts.get(tried.sample) != tried.attempt or tried.sample in task.waiting:
        return None
    return task


def _wait(state: State, ref: Ref, until: Mapping[int, float]) -> State:
    """Try samples of an open task at the given times."""
    task = state.open[ref.entry]
    return _put(state, replace(task, waiting={**task.waiting, **until}))


def _restart(input: ThreadsStuck) -> Restart:
    return Restart(f"{input.count} threads are stuck: {input.reason}")


def _settle(state: State, task: Open, sample: int, serial: int) -> Step[State]:
    """The sample has its result; with the last one the task is done. `serial`: payload keys made so far."""
    attempts = without(task.attempts, sample)
    if not attempts:
        return _remove(state, task.ref.entry, serial), (Ack(task.ref),)
    waiting, failures = without(task.waiting, sample), without(task.failures, sample)
    return _put(state, replace(task, attempts=attempts, waiting=waiting, failures=failures), serial), ()


def _put(state: State, task: Open, serial: int | None = None) -> State:
    entry, due = task.ref.entry, state.due
    if task.waiting or entry in due:
        due = due.copy()
        due.pop(entry, None)
    if task.waiting:
        due[entry] = min(task.waiting.values())
    return replace(state, open={**state.open, entry: task}, due=due, serial=state.serial if serial is None else serial)


def _remove(state: State, entry: str, serial: int | None = None) -> State:
    rest, due = without(state.open, entry), without(state.due, entry)
    return replace(state, open=rest, due=due, serial=state.serial if serial is None else serial)
