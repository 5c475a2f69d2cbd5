"""The kit passes the shipped producers and catches every breach of the contract it names."""

from __future__ import annotations

from typing import Any

import pytest

from actors.environments import kit
from actors.environments.kit import Broken, ScriptedSession
from actors.environments.reasoning_gym import ReasoningGym
from contracts.producer import DataError, Outcome, Task
from pipeline.testing import ProducerContract


class TestReasoningGym(ProducerContract):
    def make(self) -> ReasoningGym:
        return ReasoningGym("count_bits", size=10)


class Sound:
    """Keeps the contract."""

    contract = 1

    async def tasks(self, cursor: str | None, seed: int, split: str) -> Any:
        for n in range(int(cursor or 0), 20):
            yield Task(id=f"{split}{n}", payload={"n": n}, cursor=str(n + 1))

    async def rollout(self, task: Task, session: Any) -> Any:
        answer = await session.generate("a")
        await session.chat([{"role": "user", "content": answer.text}])
        return Outcome(reward=0.5)


class TestSound(ProducerContract):
    async def make(self) -> Sound:
        return Sound()


class Endless(Sound):
    async def rollout(self, task: Task, session: Any) -> Any:
        while True:
            await session.generate("again")


class Raises(Sound):
    async def rollout(self, task: Task, session: Any) -> Any:
        raise KeyError("x")


class Fickle(Sound):
    count = 0.0

    async def rollout(self, task: Task, session: Any) -> Any:
        self.count += 1
        return self.count


class Infinite(Sound):
    async def rollout(self, task: Task, session: Any) -> Any:
        return Outcome(reward=0.0, components={"a": float("inf")})


class NoOutcome(Sound):
    async def rollout(self, task: Task, session: Any) -> Any:
        return "good"


class NoText(Sound):
    async def rollout(self, task: Task, session: Any) -> Any:
        await session.generate(5)


class NoMessages(Sound):
    async def rollout(self, task: Task, session: Any) -> Any:
        await session.chat([])


class Mixed(Sound):
    async def tasks(self, cursor: str | None, seed: int, split: str) -> Any:
        yield Task(id="same", payload={}, cursor="1")


class NoTask(Sound):
    async def tasks(self, cursor: str | None, seed: int, split: str) -> Any:
        yield "task"


class NoCursor(Sound):
    async def tasks(self, cursor: str | None, seed: int, split: str) -> Any:
        yield Task(id="a", payload={}, cursor="")


class Huge(Sound):
    async def tasks(self, cursor: str | None, seed: int, split: str) -> Any:
        yield Task(id="a", payload={"x": "x" * (kit.TASK_MIB * 2**20)}, cursor="1")


class NoJson(Sound):
    async def tasks(self, cursor: str | None, seed: int, split: str) -> Any:
        yield Task(id="a", payload={"x": object()}, cursor="1")


class Nothing(Sound):
    async def tasks(self, cursor: str | None, seed: int, split: str) -> Any:
        for task in ():
            yield task


class Foreign(Sound):
    contract = 2


class Half:
    contract = 1


@pytest.mark.parametrize(
    ("check", "producer", "says"),
    [
        (kit.states_its_contract, Foreign, "contract is 2"),
        (kit.states_its_contract, Half, "needs `tasks`"),
        (kit.yields_tasks, Nothing, "yielded nothing"),
        (kit.yields_tasks, NoTask, "yielded str"),
        (kit.yields_tasks, NoCursor, "cursor ''"),
        (kit.yields_tasks, NoJson, "not JSON"),
        (kit.yields_tasks, Huge, "exceeds 8 MiB"),
        (kit.keeps_evaluation_apart, Mixed, "both splits: same"),
        (kit.scores_anything, Endless, "more than 100 turns"),
        (kit.scores_anything, Raises, "made it raise KeyError"),
        (kit.scores_anything, Fickle, "scored 1.0 and then 2.0"),
        (kit.scores_anything, Infinite, "a is inf"),
        (kit.scores_anything, NoOutcome, "answered 'good'"),
        (kit.scores_anything, NoText, "got int"),
        (kit.scores_anything, NoMessages, "is no conversation"),
    ],
)
async def test_a_breach_is_caught_and_named(check: Any, producer: Any, says: str):
    with pytest.raises(Broken, match=says):
        await check(producer())


async def test_a_task_that_can_not_be_used_is_no_breach():
    class Unusable(Sound):
        async def rollout(self, task: Task, session: Any) -> Any:
            raise DataError("no")

    await kit.scores_anything(Unusable())


async def test_a_producer_that_has_no_evaluation_may_say_so():
    class TrainOnly(Sound):
        async def tasks(self, cursor: str | None, seed: int, split: str) -> Any:
            if split == "eval":
                raise ValueError("no eval_data")
            yield Task(id="a", payload={}, cursor="1")

    await kit.keeps_evaluation_apart(TrainOnly())


async def test_a_scripted_policy_says_its_lines_and_then_the_last_for_ever():
    session = ScriptedSession("a", "b")
    assert [(await session.generate("x")).text for _ in range(3)] == ["a", "b", "b"]
    assert session.asked == ["x", "x", "x"]
    with pytest.raises(DataError):
        await session.endpoint()
