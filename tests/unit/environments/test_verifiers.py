"""The `verifiers` producer, in an environment that has a `verifiers` of a few lines and nothing of ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from actors.environments.isolated import ChildError, isolate
from actors.environments.loading import ProducerError
from contracts.producer import DataError, Endpoint, Place, Task

LOADERS = """
from types import SimpleNamespace as N
import contextlib
class Data:
    def __init__(self, n): self.n = n
    def model_dump(self, **_): return {"n": self.n}
    @classmethod
    def model_validate(cls, raw): return cls(int(raw["n"]))
class Task:
    def __init__(self, data, config=None): self.data, self.key, self.config = data, f"{data.n:04d}" * 4, config
    @classmethod
    def data_type(cls): return Data
class Taskset:
    def __init__(self, count): self.count, self.bounded, self.config = count, count < 100, N(task="settings")
    @classmethod
    def task_type(cls): return Task
    def skip(self, k): return (Task(Data(n)) for n in range(k, self.count))
    def take(self, k): return [Task(Data(n)) for n in range(min(k, self.count))]
class Env:
    def __init__(self, raw):
        self.taskset = Taskset(raw["taskset"].get("count", 8))
        self.config = N(taskset=N(id=raw["taskset"]["id"]))
        self._agent_specs = dict.fromkeys(raw.get("agents", ["agent"]))
        self.up = False
    @contextlib.asynccontextmanager
    async def serving(self):
        self.up = True
        yield
    async def run_episode(self, task, context):
        assert self.up and task.config == "settings"
        if task.data.n == 6:
            return N(ok=False, errors=[N(type="EnvError", message="broken")], traces=[])
        value = None if task.data.n == 7 else N(value=0.5)
        trace = N(rewards={"right": value}, metrics={"turns": 2, "none": None}, reward=0.5, errors=[])
        trace.stop_condition = f"{context.client['base_url']} {context.sampling} {task.data.n}"
        return N(ok=True, errors=[], traces=[trace])
def resolve_env_config(raw): return raw
def load_environment(raw): return Env(raw)
"""
PLACE = Place(actor="c", collectors=1, run_dir="/nowhere", gateway_url=None)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that finds this `verifiers`, msgspec, and nothing else that is not the standard library's."""
    package = tmp_path / "verifiers" / "v1" / "utils"
    package.mkdir(parents=True)
    for directory in (package.parent.parent, package.parent, package):
        (directory / "__init__.py").touch()
    (package / "loaders.py").write_text(LOADERS)
    clients = "from types import SimpleNamespace as N\ndef EvalClientConfig(**k): return k\ndef ModelContext(**k): "
    (package.parent / "clients.py").write_text(clients + "return N(**k)\n")
    (package.parent / "types.py").write_text("def SamplingConfig(**k): return k\n")
    return _program(tmp_path)


def _program(directory: Path) -> str:
    import msgspec

    (directory / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={directory} exec {sys.executable} -S "$@"\n')
    program.chmod(0o755)
    return str(program)


class Agent:
    """A session that only has an address."""

    async def endpoint(self) -> Endpoint:
        return Endpoint(
            base_url="http://g/v1", session="s", temperature=0.7, max_new_tokens=9, deadline_s=1.0, sample=0, attempt=1
        )


async def some(producer: Any, count: int, cursor: str | None = None, seed: int = 0, split: str = "train") -> list[Task]:
    tasks = producer.tasks(cursor, seed, split)
    return [await anext(tasks) for _ in range(count)]


async def test_a_finite_taskset_comes_once_a_pass_and_goes_on_from_any_cursor(python: str):
    producer = isolate("verifiers", {"taskset": "numbers"}, python)
    tasks = await some(producer, 16)
    numbers = [task.payload["data"]["n"] for task in tasks]
    assert sorted(numbers[:8]) == sorted(numbers[8:]) == list(range(8))
    assert numbers[:8] != numbers[8:]
    assert len({task.id for task in tasks}) == 16
    assert await some(producer, 4, tasks[9].cursor) == tasks[10:14]
    assert await some(producer, 16, seed=1) != tasks
    producer._link.end()


async def test_an_infinite_taskset_is_taken_in_its_order_and_some_of_it_is_held_out(python: str):
    args = {"taskset": "numbers", "env": {"taskset": {"count": 10_000}}, "held_out_every": 4}
    producer = isolate("verifiers", args, python)
    train = [task.payload["data"]["n"] for task in await some(producer, 30)]
    held = [task.payload["data"]["n"] for task in await some(producer, 10, split="eval")]
    assert train == sorted(train)
    assert not set(train) & set(held)
    assert set(range(min(train[-1], held[-1]))) <= set(train) | set(held)
    producer._link.end()


async def test_an_episode_plays_over_the_endpoint_and_what_fails_is_no_reward(python: str):
    producer = isolate("verifiers", {"taskset": "numbers"}, python)
    await producer.start(PLACE)
    agent: Any = Agent()
    tasks = {task.payload["data"]["n"]: task for task in await some(producer, 8)}
    outcome = await producer.rollout(tasks[3], agent)
    assert (outcome.reward, outcome.components) == (0.5, {"right": 0.5, "turns": 2.0})
    assert outcome.info["stop"] == "http://g/v1 {'temperature': 0.7, 'max_tokens': 9} 3"
    with pytest.raises(ChildError, match="EnvError: broken"):
        await producer.rollout(tasks[6], agent)
    with pytest.raises(ChildError, match="right was not computed"):
        await producer.rollout(tasks[7], agent)
    with pytest.raises(DataError, match="is none of Task"):
        await producer.rollout(Task(id="x", payload={}, cursor="1"), agent)
    producer._link.end()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"taskset": "numbers", "held_out_every": 1}, "held_out_every=1"),
        ({"taskset": "numbers", "env": {"agents": ["a", "b"]}}, "has the agents a, b; one is trained"),
    ],
)
def test_settings_that_can_not_work_are_refused(python: str, args: Any, says: str):
    with pytest.raises(ProducerError, match=says):
        isolate("verifiers", args, python)


def test_without_the_package_the_error_says_how_to_get_it(tmp_path: Path):
    with pytest.raises(ProducerError, match=r"install verifiers==0\.4.* as producer\.python"):
        isolate("verifiers", {"taskset": "x"}, _program(tmp_path))
