"""A producer in a process of its own behaves as one that is here, and its process may die."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from actors.environments.isolated import ChildError, isolate, loaded
from actors.environments.loading import ProducerError
from config.schema import ProducerConfig
from contracts.producer import Completion, DataError, Endpoint, MultiTurn, Outcome, Place, SingleTurn, Started, Task

CODE = """
import os, sys
import contracts.producer as c
assert "msgspec" in sys.modules and "actors" not in sys.modules

class Single:
    contract = 1
    def __init__(self, limit=3, wrong=False):
        if wrong: raise ValueError("wrong=True")
        self.limit = limit
    async def tasks(self, cursor, seed, split):
        print("the producer prints")
        for n in range(int(cursor or 0), self.limit):
            yield c.Task(id=f"{split}-{seed}-{n}", payload={"n": n}, cursor=str(n + 1))
    def prompt(self, task):
        return f"Q{task.payload['n']}"
    def score(self, task, completion):
        if completion == "die": os._exit(3)
        if completion == "bad": raise c.DataError("unusable")
        if completion == "raise": raise KeyError("x")
        if completion == "text": return "text"
        return c.Outcome(reward=float(completion), components={"a": 1.0}, info={"pid": str(os.getpid())})

class Multi:
    contract = 1
    async def tasks(self, cursor, seed, split):
        yield c.Task(id="t", payload={}, cursor="1")
    async def start(self, place):
        self.place = place
    async def close(self):
        pass
    async def rollout(self, task, session):
        if task.payload.get("agent"):
            return c.Outcome(reward=1.0, info={"url": (await session.endpoint()).base_url, "actor": self.place.actor})
        first = await session.generate("a")
        second = await session.chat([{"role": "user", "content": first.text}], tools=[])
        return float(second.tokens)

class Old(Single):
    contract = 0

class Neither:
    contract = 1
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that has a distribution of producers which this one has not."""
    (tmp_path / "plugin_module.py").write_text(CODE)
    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    names = "\n".join(f"{name.lower()} = plugin_module:{name}" for name in ("Single", "Multi", "Old", "Neither"))
    (info / "entry_points.txt").write_text(f"[sluice.producers]\n{names}\n")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


TASK = Task(id="t", payload={"n": 2}, cursor="3")


async def scored(producer: Any, text: str) -> Any:
    return await asyncio.to_thread(producer.score, TASK, text)


async def test_a_single_turn_producer_works_over_the_process_boundary(python: str):
    producer = await asyncio.to_thread(isolate, "single", {"limit": 4}, python)
    assert isinstance(producer, SingleTurn)
    assert not isinstance(producer, MultiTurn | Started)
    tasks = [task async for task in producer.tasks("1", 7, "eval")]
    assert [task.id for task in tasks] == ["eval-7-1", "eval-7-2", "eval-7-3"]
    assert await asyncio.to_thread(producer.prompt, TASK) == "Q2"
    outcome = await scored(producer, "0.5")
    assert (outcome.reward, outcome.components) == (0.5, {"a": 1.0})
    assert int(outcome.info["pid"]) != os.getpid()
    assert await scored(producer, "text") == "text"
    with pytest.raises(DataError, match="unusable"):
        await scored(producer, "bad")
    with pytest.raises(ChildError, match="KeyError: 'x'"):
        await scored(producer, "raise")
    producer._link.end()


async def test_a_process_that_dies_fails_what_was_asked_and_is_replaced(python: str):
    producer = await asyncio.to_thread(isolate, "single", {}, python)
    before = int((await scored(producer, "1")).info["pid"])
    with pytest.raises(ChildError, match="ended with status 3"):
        await scored(producer, "die")
    after = int((await scored(producer, "1")).info["pid"])
    assert before != after
    producer._link.end()


class Speaks:
    def __init__(self) -> None:
        self.said: list[Any] = []

    async def generate(self, prompt: str) -> Completion:
        self.said.append(prompt)
        return Completion(text="b", tokens=1, stop_reason="stop")

    async def chat(self, messages: Any, tools: Any = None) -> Completion:
        self.said.append(messages)
        if messages[0]["content"] == "fail":
            raise DataError("too long")
        return Completion(text="c", tokens=5, stop_reason="stop", message={"role": "assistant"})

    async def endpoint(self) -> Endpoint:
        return Endpoint(
            base_url="u", session="s", temperature=1.0, max_new_tokens=1, deadline_s=1.0, sample=0, attempt=1
        )


async def test_a_rollout_takes_its_turns_here(python: str):
    producer = await asyncio.to_thread(isolate, "multi", {}, python)
    assert isinstance(producer, MultiTurn)
    assert isinstance(producer, Started)
    await producer.start(Place(actor="collector-0", collectors=1, run_dir="/r", gateway_url=None))
    session = Speaks()
    assert await producer.rollout(TASK, session) == 5.0
    assert session.said == ["a", [{"role": "user", "content": "b"}]]
    agent = Task(id="t", payload={"agent": True}, cursor="1")
    assert await producer.rollout(agent, session) == Outcome(reward=1.0, info={"url": "u", "actor": "collector-0"})
    await producer.close()


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("nobody", {}, "there are 0 producers 'nobody'.*it has .*multi, neither,.* old"),
        ("single", {"wrong": True}, "ValueError: wrong=True"),
        ("single", {"colour": 1}, "unexpected keyword argument 'colour'"),
        ("old", {}, "states contract=0"),
        ("neither", {}, "needs `tasks` and either"),
    ],
)
async def test_a_producer_that_can_not_be_had_there_is_refused_with_its_reason(
    python: str, name: str, args: Any, says: str
):
    with pytest.raises(ProducerError, match=says):
        await asyncio.to_thread(isolate, name, args, python)


async def test_a_recipe_chooses_between_here_and_an_interpreter_of_its_own(python: str):
    here = await loaded(ProducerConfig(name="x", args={"a": 1}), lambda name, args: (name, args))
    assert here == ("x", {"a": 1})
    there = await loaded(ProducerConfig(name="single", args={"limit": 1}, python=python), lambda name, args: None)
    assert [task.id async for task in there.tasks(None, 0, "train")] == ["train-0-0"]
    there._link.end()


async def test_an_interpreter_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(ProducerError, match="nowhere"):
        await asyncio.to_thread(isolate, "single", {}, str(tmp_path / "nowhere"))


def test_the_code_above_is_valid():
    compile(textwrap.dedent(CODE), "plugin", "exec")
