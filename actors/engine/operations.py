"""What a barrier asks of a server: drain it, free its memory, load it, let it go on.

One operation at a time, in the order in which the core asked for them; giving one up cancels it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec.structs import replace

from actors.engine import colocated, manifest, probe
from actors.engine.client import CallError
from actors.engine.direct import Direct
from actors.engine.lease import LeaseKeeper
from actors.engine.loading import CALL_S, FLUSH_S, Loading, Unfit
from actors.engine.manifest import Manifest
from actors.engine.memory import KV, WEIGHTS, Memory
from actors.engine.proxy import Proxy
from actors.engine.server import Server
from actors.engine.state import (
    Abandon,
    Drain,
    Drained,
    DrainFailed,
    Loaded,
    LoadFailed,
    Receive,
    Release,
    Released,
    Resume,
    Resumed,
    ServerDead,
)
from config import nccl
from config.schema import RunConfig, is_direct
from contracts import plan
from contracts.core import Context, PayloadGone
from contracts.events import Bucket
from contracts.weights import digest

Result = TypeVar("Result")
END_S = 1.0
"""How long the end of a process may take to show, behind the failure of a call to it."""


class Operations:
    """On one server, which the requests of `proxy` run on.

    `held` is the manifest of the model that it was started with, None where somebody else started it.
    """

    def __init__(
        self,
        config: RunConfig,
        context: Context,
        server: Server,
        held: Manifest | None,
        proxy: Proxy,
        lease: LeaseKeeper,
    ) -> None:
        self._config, self._context = config, context
        self._server, self._client = server, server.client
        self._manifest = held
        self._proxy, self._lease = proxy, lease
        self._direct = Direct(server.client) if is_direct(config) else None
        self._memory = Memory(config.engine.release)
        self._plan: tuple[str, tuple[Bucket, ...]] | None = None
        self._label: str | None = None
        self._paused = False
        self._running: dict[asyncio.Task[Any], int] = {}
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[Operations, Any], Awaitable[Result]], command: Any) -> Result | None:
        """Perform one operation when those before it are over; None when it was given up."""
        task = asyncio.create_task(self._in_turn(work, command))
        self._running[task] = command.epoch
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            del self._running[task]
        return None if task.cancelled() else task.result()

    async def _in_turn(self, work: Callable[[Operations, Any], Awaitable[Result]], command: Any) -> Result:
        async with self._turn:
            return await work(self, command)

    def _left(self, deadline_at: float) -> float:
        return max(0.0, deadline_at - self._context.clock.now())

    # --- what the server holds ---------------------------------------------------------------------------------------

    async def settle(self, timeout: float) -> None:
        """For a server that has just started: give back what it holds, as the trainer may be in a step."""
        await self._memory.give_back(self._client, timeout)

    async def stranger(self, timeout: float) -> str | None:
        """Whether the server holds other weights than were loaded last: somebody restarted it behind our back."""
        loaded = self._label
        found = await self._client.weight_version(timeout)
        if loaded is None or found in (None, loaded) or loaded != self._label:
            return None
        return f"the server holds weights {found!r}, but {loaded!r} were loaded: it is another one"

    async def _replaced(self) -> str | None:
        """`stranger`, asked only where weights were loaded."""
        return None if self._label is None else await self.stranger(CALL_S)

    async def _pause(self) -> None:
        self._paused = True
        await self._client.pause(CALL_S)

    async def _thaw(self) -> None:
        """What an earlier epoch left paused holds nothing that anybody waits for."""
        if self._paused:
            await self._client.abort_all(CALL_S)
            await self._client.resume(CALL_S)
            self._paused = False

    async def _lost(self, otherwise: str) -> ServerDead:
        """A call failed for good: because the server has ended, or else for a reason of its own."""
        return ServerDead(await self._server.outcome(END_S) or otherwise)

    async def _kill(self, reason: str) -> ServerDead:
        """End the server now; its memory is free when this returns."""
        await self._server.kill(reason)
        return ServerDead(reason)

    # --- drain -------------------------------------------------------------------------------------------------------

    async def drain(self, command: Drain) -> Drained | DrainFailed | ServerDead:
        """What is not in the server is out (proxy), and what is in it is over (its answers, or a flush)."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._left(command.deadline_at)):
                if command.hold:
                    await self._pause()
                    stranger = await self._replaced()
                else:
                    stranger = await self._empty(command)
                if stranger is not None:
                    return ServerDead(stranger)
                await self._memory.take(self._client, WEIGHTS, self._left(command.deadline_at))
        except TimeoutError:
            reason = f"{self._proxy.running} requests known to run, and no flush at the deadline"
            return await self._unless_uncertain(DrainFailed(command.epoch, "Deadline", reason))
        except CallError as error:
            return await self._unless_uncertain(DrainFailed(command.epoch, type(error).__name__, str(error)))
        seconds, held = time.monotonic() - started, self._proxy.running if command.hold else 0
        self._context.log.info("drained", epoch=command.epoch, held=held, seconds=round(seconds, 3))
        return Drained(command.epoch, seconds, held)

    async def release(self, command: Release) -> Released | ServerDead:
        """Whatever goes wrong, the memory is free in the end: a server that doesn't give it back is killed."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._left(command.deadline_at)):
                if (stranger := await self._empty(command)) is not None:
                    return await self._kill(stranger)
                idle = time.monotonic()
                await self._memory.give_back(self._client, self._left(command.deadline_at))
        except TimeoutError:
            reason = f"{self._proxy.running} requests known to run" if not self._memory.uncertain else "no answer"
            return await self._kill(f"it did not give memory back in time ({reason}, refit.drain_deadline_s)")
        except CallError as error:
            return await self._kill(f"it did not give memory back: {error}")
        seconds, release_s = time.monotonic() - started, time.monotonic() - idle
        self._context.log.info("released", epoch=command.epoch, tags=self._memory.tags, seconds=round(seconds, 3))
        return Released(command.epoch, self._memory.tags, seconds, release_s)

    async def _unless_uncertain(self, failed: DrainFailed) -> DrainFailed | ServerDead:
        """Nobody knows what memory a server holds that did not answer when asked to take some."""
        if not self._memory.uncertain:
            return failed
        return await self._kill(f"it did not take its memory again: {failed.reason}")

    async def _empty(self, command: Drain | Release) -> str | None:
        """Bounded by the drain's deadline; whether the server is another one than was loaded."""
        await self._thaw()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._proxy.idle(), self._left(command.abort_at))
        async with asyncio.timeout(self._left(command.deadline_at)):
            await self._proxy.abort_running()
        checked = isinstance(command, Drain) and self._direct is not None and self._direct.checks
        if checked and not self._proxy.doubt:
            return None
        while True:
            flush = self._client.flush(min(FLUSH_S, self._left(command.deadline_at)))
            async with asyncio.timeout(self._left(command.deadline_at)):
                flushed, stranger = await asyncio.gather(flush, self._replaced())
            if flushed or stranger is not None:
                self._proxy.doubt = self._proxy.doubt and not flushed
                return stranger
            if not self._left(command.abort_at):
                await self._client.abort_all(CALL_S)

    # --- load --------------------------------------------------------------------------------------------------------

    async def receive(self, command: Receive) -> Loaded | LoadFailed:
        """Take the weights that the trainer sends; after a failure nobody knows what the server holds."""
        try:
            async with asyncio.timeout(self._left(command.deadline_at)):
                buckets = await self._fetched(command.plan)
        except TimeoutError:
            return LoadFailed(command.epoch, "plan", "Deadline", "the store did not give it within the refit")
        except (PayloadGone, ValueError) as error:
            return LoadFailed(command.epoch, "plan", type(error).__name__, str(error))
        wrong = None if self._manifest is None else manifest.problem(self._manifest, buckets)
        if wrong is not None:
            return LoadFailed(command.epoch, "manifest", "ManifestMismatch", wrong)
        self._label = None
        pause = self._pause if self._config.engine.kind == "external" else None
        loading = Loading(self._config, self._context, self._client, self._direct, pause, command, buckets)
        unlike = nccl.differing(nccl.of_server(self._config, os.environ), command.nccl)
        if unlike:
            self._context.log.warning("NCCL settings differ", epoch=command.epoch, settings=unlike)
        loaded = await self._bounded(loading, command)
        if isinstance(loaded, Loaded):
            self._label = str(command.version)
            self._log_loaded(command, loaded)
            return loaded
        return replace(loaded, reason=f"{loaded.reason}; {unlike}") if unlike else loaded

    async def _bounded(self, loading: Loading, command: Receive) -> Loaded | LoadFailed:
        """By the refit's deadline."""
        try:
            async with asyncio.timeout(self._left(command.deadline_at)):
                return await self._load(loading, command)
        except TimeoutError:
            return LoadFailed(command.epoch, loading.phase, "Deadline", "the deadline of the refit passed")
        except Unfit as error:
            return LoadFailed(command.epoch, loading.phase, error.error, str(error))
        except (CallError, colocated.TransferBroke) as error:
            return LoadFailed(command.epoch, loading.phase, type(error).__name__, str(error))

    async def _fetched(self, key: str) -> tuple[Bucket, ...]:
        """The buckets of a plan; the last one is remembered, as most transfers have the same."""
        if self._plan is None or self._plan[0] != key:
            (data,) = await self._context.payloads([key])
            self._plan = (key, plan.decode(data))
        return self._plan[1]

    async def _load(self, loading: Loading, command: Receive) -> Loaded:
        started = time.monotonic()
        held = await loading.run()
        fingerprint = await loading.fingerprint(held)
        if self._memory.tags:
            with loading.within("retake"):
                await self._memory.take(self._client, KV, self._left(command.deadline_at))
        logprobs: tuple[float, ...] = ()
        if self._config.refit.verify == "probe":
            with loading.within("verify"):
                logprobs = await self._continuation(command)
        fallback = "" if self._direct is None else self._direct.fallback
        ours = self._direct is not None and not fallback
        return Loaded(
            epoch=command.epoch,
            digest="" if held is None else digest(held),
            seconds=time.monotonic() - started,
            probe=logprobs,
            phases=loading.phases,
            receiver="" if self._config.engine.kind != "sglang" else "direct" if ours else "sglang",
            fallback=fallback,
            fingerprint=fingerprint,
        )

    def _log_loaded(self, command: Receive, loaded: Loaded) -> None:
        log = self._context.log
        if loaded.fallback:
            log.warning("weights go through SGLang's loader", epoch=command.epoch, reason=loaded.fallback)
        spent = {phase.name: round(phase.seconds, 4) for phase in loaded.phases}
        log.info("loaded", epoch=command.epoch, version=command.version, seconds=round(loaded.seconds, 3), **spent)

    async def _continuation(self, command: Receive) -> tuple[float, ...]:
        await self._client.resume(CALL_S)
        self._paused = False
        rid = f"probe-{command.epoch:08d}-{self._context.boot:08d}"
        return await probe.logprobs(self._client, rid, self._left(command.deadline_at))

    # --- the end -----------------------------------------------------------------------------------------------------

    async def resume(self, command: Resume) -> Resumed | ServerDead:
        """Its epoch is committed: the lease begins, then what is held goes on."""
        await self._lease.resumed()
        try:
            if self._paused:
                await self._client.resume(CALL_S)
        except CallError as error:
            return await self._lost(f"the server does not go on after the commit of epoch {command.epoch}: {error}")
        self._paused = False
        return Resumed(command.epoch)

    async def abandon(self, command: Abandon) -> ServerDead | None:
        """Cancels at once what is performed for that epoch or an older one, and waits its turn for the rest."""
        for task, epoch in self._running.items():
            if epoch <= command.epoch:
                task.cancel()
        async with self._turn:
            if self._memory.uncertain:
                return await self._kill(f"nobody knows what memory it holds after epoch {command.epoch} was given up")
            try:
                await self._client.abort_all(CALL_S)
                if command.group is not None:
                    await self._leave(command.group)
                await self._client.flush(0.0)
            except CallError as error:
                return await self._lost(f"the server hangs after epoch {command.epoch} was given up: {error}")
        return None

    async def _leave(self, group: str) -> None:
        """Any answer will do: it shows that no collective holds the server."""
        try:
            await self._client.leave_group(group, CALL_S)
        except CallError as error:
            if error.status is None:
                raise
