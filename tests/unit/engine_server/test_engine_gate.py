"""The gate: a pause holds, an update waits for those inside, everyone gets through in order."""

from __future__ import annotations

import asyncio

import pytest

from actors.engine.torch_server.gate import Gate, GateBusy
from actors.engine.torch_server.protocol import Ticket


def ticket() -> Ticket:
    made = Ticket(asyncio.get_running_loop().create_future(), None)
    made.remaining = 1
    return made


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_closed_gate_holds_in_order_until_opened() -> None:
    gate, order = Gate(), []

    async def pass_through(number: int) -> None:
        assert await gate.enter(ticket())
        order.append(number)

    gate.close()
    tasks = [asyncio.create_task(pass_through(i)) for i in range(3)]
    await settle()
    assert order == []
    gate.open()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_an_update_waits_for_those_inside_and_holds_those_outside() -> None:
    gate = Gate()
    assert await gate.enter(ticket())
    events: list[str] = []

    async def update() -> None:
        async with gate.exclusive(5):
            events.append("update")
            await settle()

    async def later() -> None:
        await gate.enter(ticket())
        events.append("request")

    tasks = [asyncio.create_task(update()), asyncio.create_task(later())]
    await settle()
    assert events == []
    gate.leave()
    await asyncio.gather(*tasks)
    assert events == ["update", "request"]


async def test_a_pause_lets_a_waiting_update_proceed() -> None:
    gate = Gate()
    await gate.enter(ticket())

    async def update() -> None:
        async with gate.exclusive(5):
            pass

    task = asyncio.create_task(update())
    await settle()
    assert not task.done()
    gate.close()
    await task


async def test_an_update_gives_up_at_its_deadline_and_lets_requests_through() -> None:
    gate = Gate()
    await gate.enter(ticket())
    with pytest.raises(GateBusy, match="1 requests"):
        async with gate.exclusive(0.01):
            pass
    assert await gate.enter(ticket())


async def test_a_caller_that_hangs_up_at_the_gate_leaves_no_trace() -> None:
    gate = Gate()
    gate.close()
    task = asyncio.create_task(gate.enter(ticket()))
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not gate.held
    gate.open()
    async with gate.exclusive(0.01):
        pass


async def test_a_caller_that_hangs_up_as_it_is_admitted_is_counted_out() -> None:
    gate = Gate()
    gate.close()
    task = asyncio.create_task(gate.enter(ticket()))
    await settle()
    gate.open()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with gate.exclusive(0.01):
        pass


async def test_an_abandoned_ticket_is_let_go_unadmitted() -> None:
    gate = Gate()
    gate.close()
    held = ticket()
    task = asyncio.create_task(gate.enter(held))
    await settle()
    held.remaining = 0
    gate.abandon()
    assert await task is False
