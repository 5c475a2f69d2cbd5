"""What takes too long is ended, once; what ends in time is left alone."""

from __future__ import annotations

import asyncio

import pytest

from actors.gateway import overdue
from actors.gateway.overdue import Overdue

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overdue, "EVERY_S", 0.005)


async def test_what_is_late_is_ended_once_and_what_has_time_is_not():
    limits, late = Overdue(), asyncio.Event()
    ended: list[str] = []

    def end() -> None:
        ended.append("late")
        late.set()

    with limits.after(WAIT_S, lambda: ended.append("early")), limits.after(0.0, end):
        async with asyncio.timeout(WAIT_S):
            await late.wait()
            await asyncio.sleep(0.05)
    assert ended == ["late"]


async def test_what_ended_in_time_is_never_ended_and_leaves_no_timer():
    limits = Overdue()
    ended: list[str] = []
    with limits.after(0.0, lambda: ended.append("x")):
        pass
    async with asyncio.timeout(WAIT_S):
        while limits._timer is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert ended == []


async def test_a_limit_after_a_pause_is_looked_for_again():
    limits = Overdue()
    for _ in range(2):
        late = asyncio.Event()
        with limits.after(0.0, late.set):
            async with asyncio.timeout(WAIT_S):
                await late.wait()
        async with asyncio.timeout(WAIT_S):
            while limits._timer is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
