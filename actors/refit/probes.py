"""Probing engines and gateways: one loop a member, which says when answers cease and when they come again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import aiohttp

from actors.refit.state import Heard, Missed, Watch
from config.schema import FleetConfig


class Prober:
    """`deliver` takes `Missed` and `Heard`. Create and close it on one event loop.

    Any answer of /health is a sign of life: what else it says, the member's own events say too.
    """

    def __init__(self, fleet: FleetConfig, deliver: Callable[[Missed | Heard], None]) -> None:
        self._fleet = fleet
        self._deliver = deliver
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    def watch(self, command: Watch) -> None:
        """See `Watch`."""
        old = self._tasks.pop(command.name, None)
        if old is not None:
            old.cancel()
        if command.url is not None:
            self._tasks[command.name] = asyncio.create_task(self._probe(command.name, command.boot, command.url))

    async def close(self) -> None:
        """Probe no more."""
        for task in self._tasks.values():
            task.cancel()
        if self._session is not None:
            await self._session.close()

    async def _probe(self, name: str, boot: int, url: str) -> None:
        misses = 0
        while True:
            await asyncio.sleep(self._fleet.probe_s)
            reason = await self._ask(f"{url}/health")
            if reason is None:
                if misses:
                    self._deliver(Heard(name, boot))
                misses = 0
                continue
            misses += 1
            if misses <= self._fleet.misses:
                self._deliver(Missed(name, boot, misses, reason))

    async def _ask(self, url: str) -> str | None:
        """Why no answer came, None if one did."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with asyncio.timeout(self._fleet.probe_deadline_s), self._session.get(url) as response:
                with contextlib.suppress(aiohttp.ClientError):
                    await response.content.read(1024)
                return None
        except TimeoutError:
            return f"no answer in {self._fleet.probe_deadline_s:g} s (fleet.probe_deadline_s)"
        except (aiohttp.ClientError, OSError) as error:
            return f"{type(error).__name__}: {error}"
