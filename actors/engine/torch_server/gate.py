"""Admission: generations enter unless paused or behind an update; an update waits for those inside.

All on the asyncio loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from actors.engine.torch_server.protocol import Ticket


class GateBusy(TimeoutError):
    """Requests ran on past the deadline of an update that waits for them."""


class Gate:
    """`paused` holds new requests until `open`; an update (`exclusive`) holds them while it waits and works."""

    def __init__(self) -> None:
        self.paused = False
        self.held: deque[tuple[Ticket, asyncio.Future[bool]]] = deque()
        self._inside = self._updates = 0
        self._clear = asyncio.Event()
        self._clear.set()

    async def enter(self, ticket: Ticket) -> bool:
        """Wait for the turn of `ticket`; False when it was abandoned at the gate. True must be paired with `leave`."""
        if not self.paused and not self._updates:
            self._count(1)
            return True
        entry = (ticket, asyncio.get_running_loop().create_future())
        self.held.append(entry)
        try:
            return await entry[1]
        except asyncio.CancelledError:
            if entry in self.held:
                self.held.remove(entry)
            elif entry[1].done() and not entry[1].cancelled() and entry[1].result():
                self._count(-1)
            raise

    def leave(self) -> None:
        self._count(-1)

    def abandon(self) -> None:
        """Let held tickets go whose generations have all ended."""
        for entry in [e for e in self.held if e[0].remaining == 0]:
            self.held.remove(entry)
            entry[1].set_result(False)

    def close(self) -> None:
        self.paused = True
        self._clear.set()

    def open(self) -> None:
        self.paused = False
        self._count(0)
        self._admit()

    @asynccontextmanager
    async def exclusive(self, timeout: float) -> AsyncIterator[None]:
        """Hold new requests and wait until those inside are done, or paused. Raises `GateBusy`."""
        self._updates += 1
        try:
            try:
                await asyncio.wait_for(self._clear.wait(), timeout)
            except TimeoutError:
                raise GateBusy(f"{self._inside} requests still ran after {timeout} s: pause or abort first") from None
            yield
        finally:
            self._updates -= 1
            self._admit()

    def _count(self, change: int) -> None:
        self._inside += change
        if self._inside == 0 or self.paused:
            self._clear.set()
        else:
            self._clear.clear()

    def _admit(self) -> None:
        while self.held and not self.paused and not self._updates:
            _, turn = self.held.popleft()
            if not turn.done():
                self._count(1)
                turn.set_result(True)
