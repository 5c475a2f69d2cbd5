"""The contract of a producer as checks: what every producer must do, tried on a real one.

Each check is a coroutine that raises `Broken` with what was expected and what came. `pipeline.testing` makes tests of
them, `pipeline producers` runs them on an installed producer.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

from contracts.producer import CONTRACT_VERSION, Completion, DataError, Endpoint, MultiTurn, Outcome, SingleTurn, Task

TASKS = 6
"""Tasks that are looked at."""
TASK_MIB = 8
ANSWERS = ("", "42", "The answer is 42.", "<think>\n", '<tool_call>{"name": 1}</tool_call>', "\ud7ff\U0001f600" * 50)
"""What a policy in training says, sooner or later."""


class Broken(AssertionError):
    """The producer breaks its contract."""


class ScriptedSession:
    """A `contracts.producer.Session` whose policy says `answers` in turn, and then the last one for ever."""

    def __init__(self, *answers: str, turns: int = 100) -> None:
        self._answers = list(answers) or [""]
        self._left = turns
        self.asked: list[Any] = []

    async def generate(self, prompt: str) -> Completion:
        if not isinstance(prompt, str):
            raise Broken(f"session.generate got {type(prompt).__name__}, a string is due")
        return self._answer(prompt)

    async def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Completion:
        _check_messages(messages)
        return self._answer(messages)

    async def endpoint(self) -> Endpoint:
        raise DataError("a scripted session has no endpoint")

    def _answer(self, asked: Any) -> Completion:
        self.asked.append(asked)
        self._left -= 1
        if self._left < 0:
            raise Broken(f"the rollout took more than {len(self.asked) - 1} turns and shows no end")
        text = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        message = {"role": "assistant", "content": text}
        return Completion(text=text, tokens=len(text.split()) + 1, stop_reason="stop", message=message)


async def states_its_contract(producer: Any) -> None:
    """It was written for this version of the contract, and is of one kind."""
    if getattr(producer, "contract", None) != CONTRACT_VERSION:
        raise Broken(f"contract is {getattr(producer, 'contract', None)!r}, {CONTRACT_VERSION} is due")
    if not isinstance(producer, SingleTurn | MultiTurn):
        raise Broken("it needs `tasks` and either `prompt` and `score` or `rollout`")


async def yields_tasks(producer: Any) -> None:
    """Tasks have ids of their own, JSON payloads of bounded size, and cursors."""
    tasks = await _take(producer, None, 0)
    if not tasks:
        raise Broken("tasks(None, 0, 'train') yielded nothing")
    seen = set()
    for task in tasks:
        if not isinstance(task, Task):
            raise Broken(f"tasks() yielded {type(task).__name__}, contracts.producer.Task is due")
        if not task.id or task.id in seen:
            raise Broken(f"task id {task.id!r} is empty or was used before")
        seen.add(task.id)
        if not isinstance(task.cursor, str) or not task.cursor:
            raise Broken(f"task {task.id}: cursor {task.cursor!r}, a string that is not empty is due")
        try:
            data = json.dumps(task.payload, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise Broken(f"task {task.id}: payload is not JSON: {error}") from error
        if json.loads(data) != task.payload:
            what = "payload changes on its way through JSON (tuples, or keys that are no strings?)"
            raise Broken(f"task {task.id}: {what}")
        if len(data) > TASK_MIB * 2**20:
            raise Broken(f"task {task.id}: payload of {len(data)} bytes exceeds {TASK_MIB} MiB")


async def repeats_itself(producer: Any) -> None:
    """The same seed gives the same tasks."""
    first, second = await _take(producer, None, 3), await _take(producer, None, 3)
    if first != second:
        raise Broken(f"two readings with seed 3 differ: {_ids(first)} and {_ids(second)}")


async def resumes(producer: Any) -> None:
    """From the cursor of any task, the tasks behind it follow."""
    whole = await _take(producer, None, 1)
    for at in range(len(whole) - 1):
        rest = await _take(producer, whole[at].cursor, 1, len(whole) - at - 1)
        if rest != whole[at + 1 :]:
            raise Broken(
                f"behind the cursor {whole[at].cursor!r} of task {whole[at].id} came {_ids(rest)}, "
                f"{_ids(whole[at + 1 :])} was due"
            )


async def keeps_evaluation_apart(producer: Any) -> None:
    """Held-out tasks, if there are any, have ids of their own."""
    try:
        held = await _take(producer, None, 0, split="eval")
    except ValueError:
        return
    both = set(_ids(held)) & set(_ids(await _take(producer, None, 0)))
    if both:
        raise Broken(f"tasks of both splits: {', '.join(sorted(both))}")


async def scores_anything(producer: Any) -> None:
    """Any answer gets a finite reward, the same each time; `DataError` is for tasks alone."""
    for task in (await _take(producer, None, 0))[:2]:
        for answer in ANSWERS:
            rewards = [await _reward(producer, task, answer) for _ in range(2)]
            if rewards[0] != rewards[1]:
                raise Broken(f"task {task.id}: {answer!r} scored {rewards[0]} and then {rewards[1]}")


async def _reward(producer: Any, task: Task, answer: str) -> float | None:
    try:
        if isinstance(producer, MultiTurn):
            value = await producer.rollout(task, ScriptedSession(answer))
        else:
            prompt = await asyncio.to_thread(producer.prompt, task)
            if not isinstance(prompt, str):
                _check_messages(prompt)
            value = await asyncio.to_thread(producer.score, task, answer)
    except DataError:
        return None
    except Broken:
        raise
    except Exception as error:
        raise Broken(f"task {task.id}: the answer {answer!r} made it raise {type(error).__name__}: {error}") from error
    return _finite(task, value)


def _finite(task: Task, value: Any) -> float:
    outcome = Outcome(reward=float(value)) if isinstance(value, int | float) else value
    if not isinstance(outcome, Outcome):
        raise Broken(f"task {task.id}: answered {value!r}, a number or an Outcome is due")
    numbers = {"reward": outcome.reward, **outcome.components}
    for name, number in numbers.items():
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise Broken(f"task {task.id}: {name} is {number!r}, a finite number is due")
    return float(outcome.reward)


def _check_messages(messages: Any) -> None:
    fits = isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
    if not fits or not messages:
        raise Broken(f"{messages!r}"[:200] + " is no conversation: a list of messages with role and content is due")


async def _take(producer: Any, cursor: str | None, seed: int, count: int = TASKS, split: str = "train") -> list[Any]:
    found = []
    async for task in producer.tasks(cursor, seed, split):
        found.append(task)
        if len(found) == count:
            break
    return found


def _ids(tasks: list[Any]) -> list[str]:
    return [task.id for task in tasks]


CHECKS: tuple[Callable[[Any], Awaitable[None]], ...] = (
    states_its_contract,
    yields_tasks,
    repeats_itself,
    resumes,
    keeps_evaluation_apart,
    scores_anything,
)
"""In the order in which they make sense."""
