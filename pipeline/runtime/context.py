"""What a shell sees of the runtime: `contracts.core.Context` and `contracts.core.Store`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actors import registry
from contracts.core import Entry

if TYPE_CHECKING:
    from pipeline.runtime.loop import Runtime


class BusStore:
    """Read access to the whole log."""

    def __init__(self, runtime: Runtime, actors: Sequence[str]) -> None:
        self._runtime = runtime
        self._actors = actors

    async def read_after(self, cursors: Mapping[str, str], count: int, block_ms: int) -> list[Entry]:
        found = await self._runtime.bus.follow(cursors, count=count, block_ms=block_ms)
        await self._runtime.report(found.gaps)
        return found.entries

    async def trim(self, stream: str, floor: str) -> int:
        """An actor that the run no longer has, after a resume with fewer of them, holds nothing back."""
        return (await self._runtime.bus.trim(stream, floor, self._actors)).removed

    async def discard(self, upto: str) -> int:
        return await self._runtime.bus.discard(upto)


class ActorContext:
    """`contracts.core.Context` of one boot."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.run = runtime.run_id
        self.actor = runtime.actor
        self.boot = runtime.machine.identity.boot
        self.clock = runtime.clock
        self.log = runtime.log
        self.config = runtime.config
        self._store = BusStore(runtime, registry.names(runtime.config))
        self.run_dir = runtime.run_dir

    @property
    def store(self) -> BusStore:
        return self._store

    def deliver(self, input: Any) -> None:
        """Hand a local input to the core; callable from any thread."""
        self._runtime.push_threadsafe(input)

    def state(self) -> Any:
        """The core's last committed state."""
        return self._runtime.machine.state

    async def payloads(self, keys: Sequence[str]) -> list[bytes]:
        """Fetch payloads. Raises `pipeline.bus.PayloadMissing` naming the first that is gone."""
        return await self._runtime.bus.payloads(keys)

    async def register(self, name: str) -> int:
        """A register of the store, 0 if never raised."""
        return await self._runtime.bus.register(name)
