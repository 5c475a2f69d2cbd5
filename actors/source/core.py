"""Decides which tasks are issued and when the producer is asked for more.

Invariants: train indexes are dense from 0 and each is issued once, over restarts too; none is issued at or above the
granted credit; the tasks of a run are those of the producer in its order, in `producer.epochs` passes. Held-out
evaluations issue the same tasks each time, at indexes below 0: round `r` uses `eval.groups` of them, from
`-1 - r * eval.groups` downwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from actors import waits
from actors.waits import Wait
from config.schema import RunConfig
from contracts import limits
from contracts.core import Booted, Delivered, Emit, Step, Tick
from contracts.events import (
    ActorFailed,
    CreditGranted,
    DataExhausted,
    RefitCommitted,
    RunStarted,
    RunStopping,
    Split,
    TaskIssued,
)

PREFETCH = 16
"""Tasks held ready beyond the credit; more are fetched when half of them are gone."""
CHUNK = 64
"""Tasks asked for at a time at most."""

# --- commands and their results --------------------------------------------------------------------------------------


class FetchTasks(msgspec.Struct, frozen=True):
    """Ask the producer for up to `n` tasks behind `cursor`, in pass `epoch` over them; see `weight` for large ones."""

    n: int
    cursor: str | None
    split: Split
    epoch: int = 0


class FetchedTask(msgspec.Struct, frozen=True):
    """A task of the producer, of pass `epoch` over its tasks. `payload` is JSON; all of it within `limits.TASK`."""

    id: str
    payload: bytes
    cursor: str
    epoch: int = 0


def weight(task: FetchedTask) -> int:
    """Bytes that it takes in the log. A fetch ends once its tasks weigh `limits.FETCH`."""
    return len(task.payload) + len(task.id.encode()) + len(task.cursor.encode())


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """At least one task, in the producer's order."""

    split: Split
    tasks: tuple[FetchedTask, ...]


class Exhausted(msgspec.Struct, frozen=True, tag="exhausted"):
    """The producer has no task behind the cursor."""

    split: Split


class ProducerFailed(msgspec.Struct, frozen=True, tag="producer_failed"):
    """The producer raised, answered something that is not a task, or nothing in time."""

    split: Split
    cursor: str | None
    error: str
    message: str


Local = Fetched | Exhausted | ProducerFailed

# --- state -----------------------------------------------------------------------------------------------------------


class Eval(msgspec.Struct, frozen=True):
    """Held-out evaluation. `tasks`: those fetched so far; `due`: rounds asked for; `issued`: rounds issued."""

    tasks: tuple[FetchedTask, ...] = ()
    complete: bool = False
    fetching: bool = False
    period: int | None = None
    due: int = 0
    issued: int = 0


class State(msgspec.Struct, frozen=True):
    """`ready`: fetched and not yet issued. `cursor` resumes behind the last task of pass `epoch` that was fetched."""

    next: int = 0
    credit: int = 0
    cursor: str | None = None
    epoch: int = 0
    ready: tuple[FetchedTask, ...] = ()
    fetching: bool = False
    exhausted: bool = False
    announced_end: bool = False
    failed: bool = False
    stopping: bool = False
    wait: Wait | None = None
    """For the credit of the `buffer`, or tasks of the `producer`."""
    eval: Eval = Eval()


# --- core ------------------------------------------------------------------------------------------------------------


class SourceCore:
    """`config`: producer, rollout.samples, seed, eval."""

    state_type = State
    local_type = Local
    work = ()
    watch = ("ledger", "refit", "control")

    def __init__(self, config: RunConfig, actor: str) -> None:
        self.actor = actor
        self.producer = config.producer.name
        self.task_deadline_s = config.producer.task_deadline_s
        self.epochs = config.producer.epochs
        self.seed = config.seed
        self.samples = config.rollout.samples
        self.eval = config.eval

    def initial(self) -> State:
        return State()

    def step(self, state: State, input: Any, now: float) -> Step[State]:
        match input:
            case Delivered():
                return self._deliver(state, input.envelope.body, now)
            case Booted():
                idle = replace(state.eval, fetching=False)
                return self._go_on(replace(state, fetching=False, stopping=False, eval=idle), now)
            case Tick():
                return self._announce(state, now)
            case Fetched(split="train"):
                cursor = input.tasks[-1].cursor
                state = replace(state, ready=(*state.ready, *input.tasks), cursor=cursor, fetching=False)
                return self._go_on(state, now)
            case Exhausted(split="train"):
                return self._train_ends(replace(state, fetching=False), now)
            case Fetched():
                tasks = (*state.eval.tasks, *input.tasks)
                held = replace(state.eval, tasks=tasks, fetching=False, complete=len(tasks) >= self.eval.groups)
                return self._hold(state, held, now)
            case Exhausted():
                return self._held_out_ends(state, now)
            case ProducerFailed():
                return self._failed(state, input)
        return state, ()

    def wake(self, state: State) -> float | None:
        return waits.due(state.wait)

    def intake(self, state: State) -> Mapping[str, int]:
        return {}

    def done(self, state: State) -> bool:
        return state.stopping

    def _deliver(self, state: State, event: Any, now: float) -> Step[State]:
        match event:
            case CreditGranted() if event.total > state.credit:
                return self._go_on(replace(state, credit=event.total), now)
            case RefitCommitted() if self.eval.every:
                return self._committed(state, event, now)
            case RunStopping():
                return replace(state, stopping=True), ()
            case RunStarted() if state.stopping:
                return self._go_on(replace(state, stopping=False), now)
        return state, ()

    # --- training tasks ---

    def _go_on(self, state: State, now: float) -> Step[State]:
        """Issue what may be issued, ask for what is missing, and note what is waited for."""
        if state.stopping or state.failed:
            return state, ()
        before = state.next
        state, issued = self._issue(state)
        state, evals = self._issue_evals(state)
        state, fetches = self._fetch(state)
        wait, ended = waits.follow(state.wait, self._lack(state), self.actor, now, moved=state.next > before)
        return replace(state, wait=wait), (*issued, *evals, *fetches, *ended)

    def _issue(self, state: State) -> Step[State]:
        count = max(0, min(len(state.ready), state.credit - state.next))
        commands: list[Any] = [
            self._task(task, state.next + offset, "train") for offset, task in enumerate(state.ready[:count])
        ]
        state = replace(state, next=state.next + count, ready=state.ready[count:])
        if state.exhausted and not state.ready and not state.announced_end:
            state = replace(state, announced_end=True)
            commands.append(Emit(DataExhausted(issued=state.next)))
        return state, commands

    def _task(self, task: FetchedTask, index: int, split: Split) -> Emit:
        event = TaskIssued(
            task=task.id,
            index=index,
            samples=self.samples if split == "train" else self.eval.samples,
            payload=task.payload,
            producer=self.producer,
            seed=self.seed,
            split=split,
            data_epoch=task.epoch,
        )
        return Emit(event, correlation=task.id)

    def _fetch(self, state: State) -> Step[State]:
        commands: list[Any] = []
        missing = max(0, state.credit - state.next) + PREFETCH - len(state.ready)
        if not state.fetching and not state.exhausted and missing >= PREFETCH // 2:
            commands.append(FetchTasks(n=min(missing, CHUNK), cursor=state.cursor, split="train", epoch=state.epoch))
            state = replace(state, fetching=True)
        held = state.eval
        if held.due > held.issued and not held.complete and not held.fetching:
            cursor = held.tasks[-1].cursor if held.tasks else None
            commands.append(FetchTasks(n=self.eval.groups - len(held.tasks), cursor=cursor, split="eval"))
            state = replace(state, eval=replace(held, fetching=True))
        return state, commands

    def _train_ends(self, state: State, now: float) -> Step[State]:
        """The pass is over: the next one begins, unless it was the last or had no task at all."""
        last = self.epochs is not None and state.epoch + 1 >= self.epochs
        if last or state.cursor is None:
            return self._go_on(replace(state, exhausted=True), now)
        return self._go_on(replace(state, epoch=state.epoch + 1, cursor=None), now)

    def _failed(self, state: State, input: ProducerFailed) -> Step[State]:
        message = (
            f"producer {self.producer!r} failed to give the next {input.split} task behind cursor {input.cursor!r}: "
            f"{input.error}: {input.message}"
        )
        return self._give_up(state, input.error, message)

    def _give_up(self, state: State, error: str, message: str) -> Step[State]:
        event = ActorFailed(actor=self.actor, error=error, message=message, fatal=True)
        return replace(state, failed=True, wait=None), (Emit(event),)

    # --- held-out tasks ---

    def _committed(self, state: State, event: RefitCommitted, now: float) -> Step[State]:
        """A round falls due when the committed step enters a new period of `eval.every` steps.

        Steps may be skipped by a refit that takes a newer version, so the multiple itself need not be committed. When
        the policy fell back to an earlier period, the rounds behind it are due once more.
        """
        period, before = event.step // self.eval.every, state.eval.period
        if period == before:
            return state, ()
        due = state.eval.due + (before is None or period > before)
        return self._go_on(replace(state, eval=replace(state.eval, period=period, due=due)), now)

    def _issue_evals(self, state: State) -> Step[State]:
        held = state.eval
        if not held.complete or held.issued == held.due:
            return state, ()
        first = held.issued * self.eval.groups
        commands = [self._task(task, -1 - first - number, "eval") for number, task in enumerate(self._round(held))]
        # A round that could not start before the next fell due would measure the same policy twice.
        return replace(state, eval=replace(held, issued=held.issued + 1, due=held.issued + 1)), commands

    def _round(self, held: Eval) -> list[FetchedTask]:
        """What one evaluation issues; as long as tasks are missing, those that it has."""
        count = self.eval.groups if held.complete else len(held.tasks)
        return [held.tasks[number % len(held.tasks)] for number in range(count)]

    def _hold(self, state: State, held: Eval, now: float) -> Step[State]:
        """All are kept, and issued at once."""
        size = sum(weight(task) for task in self._round(held))
        if size <= limits.HELD_OUT:
            return self._go_on(replace(state, eval=held), now)
        message = (
            f"producer {self.producer!r}: {len(held.tasks)} tasks of split 'eval' make evaluations of {size:,} bytes, "
            f"limit {limits.HELD_OUT:,}: lower eval.groups={self.eval.groups}, or shorten the tasks' payloads"
        )
        return self._give_up(state, "HeldOutTooLarge", message)

    def _held_out_ends(self, state: State, now: float) -> Step[State]:
        """Fewer held-out tasks than `eval.groups`: they are repeated to fill a round; none at all is an error."""
        held = replace(state.eval, fetching=False, complete=True)
        if held.tasks:
            return self._hold(state, held, now)
        message = f"producer {self.producer!r} has no task in split 'eval'; set eval.every=0"
        return self._give_up(state, "NoHeldOutTasks", message)

    # --- waits ---

    @staticmethod
    def _lack(state: State) -> str | None:
        if state.exhausted and not state.ready:
            return None
        return "buffer" if state.next >= state.credit else "producer"

    def _announce(self, state: State, now: float) -> Step[State]:
        due = waits.due(state.wait)
        if state.wait is None or due is None or now < due:
            return state, ()
        cause = {
            "buffer": f"no credit yet for task {state.next}",
            "producer": f"producer {self.producer!r} has not given the next task behind cursor {state.cursor!r}",
        }[state.wait.on]
        deadline_at = state.wait.since + self.task_deadline_s if state.wait.on == "producer" else None
        wait, commands = waits.announce(state.wait, cause, self.actor, deadline_at=deadline_at)
        return replace(state, wait=wait), commands
