"""The lease of one boot: two registers of the store, read again and again, and the end of what runs without them."""

from __future__ import annotations

import asyncio
import contextlib

from actors.engine.core import LOOK_S, EngineCore
from actors.engine.proxy import Grant, Proxy, Refused
from actors.engine.state import SERVED, EngineState, Lease, LeaseLapsed, LeaseRenewed
from contracts.core import Context


class LeaseKeeper:
    """Admits a request while the newest reading confirms its epoch, and aborts what runs when none has for too long."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._lease = Lease(0, 0, 0.0)
        self._held_at = 0.0
        self._lapse_told = False

    def start(self, context: Context) -> None:
        """Before anything else is called."""
        self._context = context

    def admit(self, epoch: int) -> Grant:
        """What a request for `epoch` gets. Raises `Refused` when this engine doesn't serve it."""
        state: EngineState = self._context.state()
        now = self._now()
        if not self._core.admits(state, epoch, self._lease, now):
            raise Refused(self._core.refusal(state, epoch, self._lease, now))
        assert state.version is not None
        return Grant(state.version, state.boot)

    async def admitted(self, epoch: int) -> Grant:
        """As `admit`, of which the commit of `epoch` may be on its way to here."""
        came_at = self._now()
        while True:
            if not self._core.about_to_serve(self._context.state(), epoch, self._now() - came_at):
                return self.admit(epoch)
            await asyncio.sleep(LOOK_S)

    def age_s(self) -> float:
        """Since the newest reading."""
        return self._now() - self._lease.seen_at

    async def resumed(self) -> None:
        """The engine serves from now on: the time within which a reading must confirm it begins."""
        self._held_at, self._lapse_told = self._now(), False
        await self.renew()

    async def poll(self) -> str:
        """For ever."""
        while True:
            await self.renew()
            await asyncio.sleep(self._core.lease_s / 4)

    async def renew(self) -> None:
        """Take a reading, unless the store is slow to answer."""
        seen_at = self._now()
        try:
            async with asyncio.timeout(self._core.lease_s / 4):
                committed = await self._context.register("committed")
                newest = await self._context.register("epoch")
        except TimeoutError:
            return
        self._lease = Lease(committed, newest, seen_at)
        state: EngineState = self._context.state()
        if not self._lease.confirms(state.epoch):
            return
        self._held_at, self._lapse_told = seen_at, False
        if state.mode == "lapsed":
            self._context.deliver(LeaseRenewed(state.epoch))

    async def guard(self, proxy: Proxy) -> str:
        """For ever: when no reading has confirmed the served epoch for too long, end what runs under it."""
        period = self._core.lease_s / 4
        while True:
            state: EngineState = self._context.state()
            left = self._held_at + self._core.lease_s - self._now()
            if state.mode in SERVED and left <= 0:
                if not self._lapse_told:
                    self._lapse_told = True
                    self._context.log.warning("lease lapsed", epoch=state.epoch, running=proxy.running)
                    self._context.deliver(LeaseLapsed(state.epoch))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(proxy.abort_running(), period)
            await asyncio.sleep(min(left, period) if left > 0 else period)

    def _now(self) -> float:
        return self._context.clock.monotonic_ns() / 1e9
