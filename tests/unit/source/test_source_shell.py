"""The source's shell with producers that work, fail, hang and lie."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from actors.source import actor
from actors.source.actor import SourceShell, build
from actors.source.core import CHUNK, Exhausted, Fetched, FetchTasks, ProducerFailed, weight
from config.schema import ProducerConfig, RunConfig
from contracts import limits
from contracts.core import Fatal
from contracts.producer import Task
from pipeline.runtime.journal import Journal

CONTEXT: Any = SimpleNamespace()


class Producer:
    """Yields what `make(number)` gives for numbers behind the cursor, up to `size`."""

    def __init__(self, make: Callable[[int], Any], size: int = 1000) -> None:
        self.make = make
        self.size = size
        self.opened: list[tuple[str | None, int, str]] = []
        self.threads: set[int] = set()

    async def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]:
        self.opened.append((cursor, seed, split))
        self.threads.add(threading.get_ident())
        for number in range(int(cursor or 0), self.size):
            yield self.make(number)


def task(number: int, **changes: Any) -> Task:
    return Task(**{"id": f"t{number}", "payload": {"n": number}, "cursor": str(number + 1), **changes})


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    shells: list[SourceShell] = []

    async def begin(producer: Any, deadline_s: float = 30.0) -> SourceShell:
        monkeypatch.setattr(actor, "load", lambda name, args: producer)
        shell = build(RunConfig(seed=5, producer=ProducerConfig(task_deadline_s=deadline_s)), "source")
        await shell.start(CONTEXT)
        shells.append(shell)
        return shell

    yield begin
    for shell in shells:
        asyncio.run(shell.close())


async def fetch(shell: SourceShell, n: int, cursor: str | None = None, split: Any = "train") -> Any:
    return await shell.perform(FetchTasks(n=n, cursor=cursor, split=split))


async def test_tasks_come_in_order_from_one_iteration(start: Any) -> None:
    producer = Producer(task)
    shell = await start(producer)
    first = await fetch(shell, 3)
    second = await fetch(shell, 2, cursor="3")
    assert [t.id for t in (*first.tasks, *second.tasks)] == [f"t{n}" for n in range(5)]
    assert first.tasks[2].payload == b'{"n":2}'
    assert producer.opened == [(None, 5, "train")]


async def test_another_cursor_or_split_is_another_iteration(start: Any) -> None:
    producer = Producer(task)
    shell = await start(producer)
    await fetch(shell, 3)
    assert [t.id for t in (await fetch(shell, 1, cursor="7")).tasks] == ["t7"]
    assert [t.id for t in (await fetch(shell, 1, split="eval")).tasks] == ["t0"]
    assert [t.id for t in (await fetch(shell, 1, cursor="8")).tasks] == ["t8"]
    assert producer.opened == [(None, 5, "train"), ("7", 5, "train"), (None, 5, "eval")]


async def test_the_end_is_told_after_the_last_tasks(start: Any) -> None:
    shell = await start(Producer(task, size=2))
    assert len((await fetch(shell, 5)).tasks) == 2
    assert await fetch(shell, 5, cursor="2") == Exhausted("train")
    assert await fetch(shell, 5, cursor="2") == Exhausted("train")


async def test_an_error_is_told_after_the_tasks_before_it_with_its_cursor(start: Any) -> None:
    def make(number: int) -> Task:
        if number == 2:
            raise FileNotFoundError("tasks.jsonl")
        return task(number)

    shell = await start(Producer(make))
    assert len((await fetch(shell, 5)).tasks) == 2
    assert await fetch(shell, 5, cursor="2") == ProducerFailed("train", "2", "FileNotFoundError", "tasks.jsonl")


async def test_a_producer_that_blocks_its_thread_is_given_up_at_the_deadline_and_the_actor_lives(start: Any) -> None:
    gate = threading.Event()

    def make(number: int) -> Task:
        if number == 1:
            gate.wait(30)
        return task(number)

    shell = await start(Producer(make), deadline_s=0.05)
    assert len((await fetch(shell, 5)).tasks) == 1
    failed = await fetch(shell, 5, cursor="1")
    gate.set()
    assert failed == ProducerFailed("train", "1", "NoTaskInTime", "no task within producer.task_deadline_s=0.05 s")


async def test_a_producer_that_awaits_for_ever_is_given_up_at_the_deadline(start: Any) -> None:
    class Waits(Producer):
        async def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]:
            await asyncio.Event().wait()
            yield task(0)

    shell = await start(Waits(task), deadline_s=0.05)
    assert (await fetch(shell, 5)).error == "NoTaskInTime"


async def test_tasks_of_a_slow_producer_are_handed_on_before_all_are_there(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "PATIENCE_S", 0.0)
    shell = await start(Producer(task))
    assert len((await fetch(shell, 5)).tasks) == 1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"id": "x"}, "yielded dict"),
        (task(0, id=""), "id=''"),
        (task(0, cursor=3), "cursor=3"),
        (task(0, payload={"x": {1, 2}}), "payload is not JSON: .*set"),
        (task(0, payload={"x": float("nan")}), "payload is not JSON"),
    ],
)
async def test_what_is_not_a_task_is_named(start: Any, made: Any, message: str) -> None:
    shell = await start(Producer(lambda number: made))
    failed = await fetch(shell, 1)
    assert failed.error == "NotATask"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failed.message)


def long(number: int, size: int) -> Task:
    return task(number, payload={"prompt": "x" * size})


async def test_long_tasks_are_fetched_in_parts_that_fit_into_the_log(start: Any) -> None:
    producer = Producer(lambda number: long(number, 256 << 10), size=64)
    shell, cursor, sizes = await start(producer), None, []
    while isinstance(fetched := await fetch(shell, CHUNK, cursor=cursor), Fetched):
        cursor = fetched.tasks[-1].cursor
        sizes.append(len(fetched.tasks))
        record = Journal(shell.core).record(1, 0.0, fetched, ())
        assert len(record) <= limits.ENTRY
    assert (sum(sizes), max(sizes)) == (64, 4)
    assert len(producer.opened) == 1


async def test_the_largest_task_fits_behind_others_and_its_events_too(start: Any) -> None:
    largest = limits.TASK - len('{"prompt":""}') - len("t1" + "2")
    shell = await start(Producer(lambda number: long(number, largest if number else 1000)))
    fetched = await fetch(shell, CHUNK)
    assert [weight(each) for each in fetched.tasks][1:] == [limits.TASK]
    assert len(Journal(shell.core).record(1, 0.0, fetched, ())) <= limits.ENTRY


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            long(3, limits.TASK),
            r"task 't3' has 2,097,16\d bytes of payload, id and cursor, limit 2,097,152: shorten it",
        ),
        (task(3, cursor="x" * limits.TASK), r"task 't3' has 2,097,16\d bytes"),
        (task(3, id="i" * 513), r"task 'i{64}'\.\.\.: id has 513 bytes, limit 512: use a shorter one"),
    ],
)
async def test_a_task_that_is_too_large_ends_the_run_by_name(start: Any, made: Task, message: str) -> None:
    shell = await start(Producer(lambda number: made if number == 3 else task(number)))
    assert len((await fetch(shell, 5)).tasks) == 3
    failed = await fetch(shell, 5, cursor="3")
    assert failed.error == "TaskTooLarge"
    state, (emit,) = shell.core.step(shell.core.initial(), failed, 0.0)
    assert state.failed
    assert emit.event.fatal
    assert re.match(
        "producer 'reasoning_gym' failed to give the next train task behind cursor '3': TaskTooLarge: " + message,
        emit.event.message,
    )


async def test_an_unknown_producer_is_fatal_at_start() -> None:
    shell = build(RunConfig(producer=ProducerConfig(name="chess")), "source")
    with pytest.raises(Fatal, match=r"'chess' is not registered .* reasoning_gym"):
        await shell.start(CONTEXT)


async def test_the_built_in_producer_gives_its_tasks() -> None:
    shell = build(RunConfig(), "source")
    await shell.start(CONTEXT)
    fetched = await fetch(shell, 20)
    await shell.close()
    assert isinstance(fetched, Fetched)
    assert fetched.tasks[-1].id == "count_bits-0-19"


async def test_commands_and_payloads_of_others_are_errors(start: Any) -> None:
    shell = await start(Producer(task))
    with pytest.raises(TypeError, match="can't perform"):
        await shell.perform(object())
    with pytest.raises(KeyError):
        shell.payload("x")
