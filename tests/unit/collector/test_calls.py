"""Blocking calls in threads: results, errors, deadlines, and threads that never come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from actors.collector.calls import Calls, CallTimeout

LONG_S = 30.0


@pytest.fixture
def calls() -> Iterator[Calls]:
    pool = Calls("test", threads=2)
    yield pool
    pool.close()


async def until(condition: object) -> None:
    """Wait until a condition on other threads holds."""
    assert callable(condition)
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110  it becomes true on another thread
            await asyncio.sleep(0.001)


async def test_results_and_errors_come_back(calls: Calls) -> None:
    def fail() -> None:
        raise KeyError("x")

    def leave() -> None:
        raise SystemExit(3)

    assert await calls.run(lambda: 7, LONG_S) == 7
    with pytest.raises(KeyError, match="x"):
        await calls.run(fail, LONG_S)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await calls.run(leave, LONG_S)
    assert calls.stuck == 0


async def test_no_more_calls_run_at_a_time_than_there_are_threads(calls: Calls) -> None:
    running: list[int] = []
    most: list[int] = []
    gate = threading.Event()

    def work() -> None:
        running.append(1)
        most.append(len(running))
        gate.wait(LONG_S)
        running.pop()

    tasks = [asyncio.ensure_future(calls.run(work, LONG_S)) for _ in range(6)]
    await until(lambda: len(running) == 2)
    gate.set()
    await asyncio.gather(*tasks)
    assert max(most) <= 2
    assert len(most) == 6


async def test_a_call_that_never_returns_is_given_up_and_its_thread_replaced(calls: Calls) -> None:
    gate = threading.Event()
    for _ in range(3):
        with pytest.raises(CallTimeout, match=r"no answer within 0\.02 s"):
            await calls.run(lambda: gate.wait(LONG_S), 0.02)
    assert calls.stuck == 3
    assert await calls.run(lambda: "alive", LONG_S) == "alive"
    gate.set()
    await until(lambda: calls.stuck == 0)


async def test_the_deadline_counts_from_the_start_of_the_call_not_from_its_place_in_the_queue() -> None:
    pool = Calls("test", threads=1)
    gate = threading.Event()
    first = asyncio.ensure_future(pool.run(lambda: gate.wait(LONG_S), LONG_S))
    second = asyncio.ensure_future(pool.run(lambda: "done", 0.02))
    await asyncio.wait({second}, timeout=0.1)
    assert not second.done()
    gate.set()
    assert await second == "done"
    await first
    pool.close()


async def test_a_cancelled_call_that_runs_counts_as_stuck_until_it_returns(calls: Calls) -> None:
    started, gate = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        gate.wait(LONG_S)

    task = asyncio.ensure_future(calls.run(work, LONG_S))
    await until(started.is_set)
    task.cancel()
    await asyncio.wait({task})
    assert calls.stuck == 1
    gate.set()
    await until(lambda: calls.stuck == 0)
    assert await calls.run(lambda: 1, LONG_S) == 1


async def test_a_cancelled_call_in_the_queue_never_runs() -> None:
    pool = Calls("test", threads=1)
    gate = threading.Event()
    ran: list[int] = []
    first = asyncio.ensure_future(pool.run(lambda: gate.wait(LONG_S), LONG_S))
    queued = asyncio.ensure_future(pool.run(lambda: ran.append(1), LONG_S))
    await asyncio.sleep(0)
    queued.cancel()
    await asyncio.wait({queued})
    gate.set()
    await first
    await pool.run(lambda: ran.append(2), LONG_S)
    assert ran == [2]
    assert pool.stuck == 0
    pool.close()


async def test_a_queued_call_runs_although_every_thread_that_it_waited_for_got_stuck(calls: Calls) -> None:
    release = threading.Event()
    hanging = [asyncio.ensure_future(calls.run(lambda: release.wait(LONG_S), 0.05)) for _ in range(2)]
    queued = asyncio.ensure_future(calls.run(lambda: 7, LONG_S))
    assert await asyncio.wait_for(queued, LONG_S / 2) == 7
    for call in hanging:
        with pytest.raises(CallTimeout):
            await call
    assert calls.stuck == 2
    release.set()
