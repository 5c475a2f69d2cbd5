"""Runs one boot of the engine actor without a store: events and registers come from the test, in order."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from actors.engine.actor import EngineShell
from actors.engine.state import EngineState
from config.schema import RunConfig
from contracts import plan
from contracts.core import Booted, Emit
from contracts.events import Bucket, PayloadRef, RefitCommitted, RefitRequested
from pipeline.bus import PayloadMissing
from tests.unit.engine.world import BUCKETS, PLAN, delivered

T = TypeVar("T")
DEADLINE_S = 60.0


class Clock:
    def now(self) -> float:
        return time.time()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


class Log:
    """structlog's calls over the standard library."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda text, **fields: getattr(logging.getLogger("engine"), level)("%s %s", text, fields)


class Driver:
    """The runtime of a shell, and its `contracts.core.Context`.

    `events` is what the actor emitted, `failure` what its process ends with. With `store_up` cleared, registers are
    not answered and nothing is committed: inputs wait, as they do in an outage of the store.
    """

    def __init__(self, config: RunConfig, run_dir: Path, actor: str = "engine-0", boot: int = 1) -> None:
        self.run = "test"
        self.actor = actor
        self.boot = boot
        self.clock = Clock()
        self.log = Log()
        self.config = config
        self.store = None
        self.run_dir = str(run_dir)
        self.shell = EngineShell(config, actor)
        self.registers: dict[str, int] = {}
        self.kept: dict[str, bytes] = {PLAN.key: plan.encode(BUCKETS)}
        self.fetched: list[str] = []
        self.store_up = asyncio.Event()
        self.store_up.set()
        self.events: list[Any] = []
        self.commands: list[Any] = []
        self.failure: BaseException | None = None
        self._state: EngineState = self.shell.core.initial()
        self._changed = asyncio.Condition()
        self._inputs: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Driver:
        await self.shell.start(self)  # type: ignore[arg-type]
        self._spawn(self._turns())
        self.deliver(Booted(self.boot))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.shell.close()

    # --- contracts.core.Context --------------------------------------------------------------------------------------

    def deliver(self, input: Any) -> None:
        self._loop.call_soon_threadsafe(self._inputs.put_nowait, input)

    def state(self) -> EngineState:
        return self._state

    async def register(self, name: str) -> int:
        await self.store_up.wait()
        return self.registers.get(name, 0)

    async def payloads(self, keys: Sequence[str]) -> list[bytes]:
        await self.store_up.wait()
        self.fetched += keys
        for key in keys:
            if key not in self.kept:
                raise PayloadMissing(key)
        return [self.kept[key] for key in keys]

    # --- for tests ---------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.shell._url

    def keep(self, buckets: Sequence[Bucket]) -> PayloadRef:
        """Keep a plan in the store."""
        data = plan.encode(buckets)
        ref = PayloadRef(f"plan:{hashlib.sha256(data).hexdigest()}", len(data))
        self.kept[ref.key] = data
        return ref

    def publish(self, event: Any) -> None:
        """Append an event of the coordinator or the trainer, raising registers as the coordinator does."""
        if isinstance(event, RefitRequested):
            self.registers["epoch"] = event.epoch
        if isinstance(event, RefitCommitted):
            self.registers["committed"] = event.epoch
        self.deliver(delivered(event))

    async def until(self, holds: Callable[[], T | None], what: str, timeout: float = DEADLINE_S) -> T:
        """Wait until `holds()` is something; it is asked after every step."""
        try:
            async with asyncio.timeout(timeout), self._changed:
                while (found := holds()) in (None, False):
                    if self.failure is not None:
                        raise AssertionError(f"the actor ended before {what}") from self.failure
                    await self._changed.wait()
                return found  # type: ignore[return-value]
        except TimeoutError:
            raise AssertionError(f"no {what}; mode {self._state.mode}, events {self.events}") from None

    async def event(self, kind: type[T], **fields: Any) -> T:
        """Wait for an event of `kind` with these fields."""
        return await self.until(lambda: next(iter(self.find(kind, **fields)), None), f"{kind.__name__} {fields}")

    def find(self, kind: type[T], **fields: Any) -> list[T]:
        return [e for e in self.events if isinstance(e, kind) and all(getattr(e, k) == v for k, v in fields.items())]

    async def mode(self, mode: str) -> None:
        await self.until(lambda: self._state.mode == mode, f"mode {mode}")

    async def ended(self) -> BaseException:
        """Wait until the process would end."""
        async with asyncio.timeout(DEADLINE_S), self._changed:
            while self.failure is None:
                await self._changed.wait()
        return self.failure

    async def _turns(self) -> None:
        while True:
            input = await self._inputs.get()
            await self.store_up.wait()
            self._state, commands = self.shell.core.step(self._state, input, self.clock.now())
            for command in commands:
                self.commands.append(command)
                if isinstance(command, Emit):
                    self.events.append(command.event)
                else:
                    self._spawn(self._perform(command))
            await self._notify()

    async def _perform(self, command: Any) -> None:
        try:
            result = await self.shell.perform(command)
        except Exception as error:
            self.failure = self.failure or error
            await self._notify()
            return
        if result is not None:
            self._inputs.put_nowait(result)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
