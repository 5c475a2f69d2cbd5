"""The sidecar: performs what the engine's core decides, on one server that is nobody else's to call.

Operations of a barrier (drain, receive, resume, abandon) run one at a time, in the order in which the core asked for
them; giving one up cancels it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from actors.engine import colocated, manifest, probe, server
from actors.engine.client import CallError, HttpEngineClient
from actors.engine.core import EngineCore
from actors.engine.direct import Direct
from actors.engine.lease import LeaseKeeper
from actors.engine.loading import CALL_S, FLUSH_S, Loading, Unfit
from actors.engine.memory import KV, WEIGHTS, Memory
from actors.engine.proxy import Proxy
from actors.engine.server import Server, ServerError
from actors.engine.state import (
    BARRIER,
    Abandon,
    Drain,
    Drained,
    DrainFailed,
    EngineState,
    Exit,
    Loaded,
    LoadFailed,
    Receive,
    Release,
    Released,
    Resume,
    Resumed,
    ServerDead,
    ServerReady,
    StartServer,
    Watch,
)
from config.schema import RunConfig, is_direct
from contracts.core import Context, Fatal
from contracts.weights import digest

MEMORY_S = 60.0
"""How long a server that has just started may take to give memory back."""
PROBE_S, PROBE_DEADLINE_S, PROBE_MISSES = 2.0, 5.0, 3
"""Pause between two probes of the server, how long one may take, and how many in a row may fail."""


class ServerGone(Exception):
    """The server is dead: this process ends, and its successor starts a new one."""


class EngineShell:
    """`contracts.core.Shell` of one engine."""

    def __init__(self, config: RunConfig, actor: str) -> None:
        self.core = EngineCore(actor, config.engine, config.refit)
        self._config = config
        gateway = config.gateway
        self._lease = LeaseKeeper(self.core)
        self._proxy = Proxy(self._lease.admit, self._status, gateway.request_deadline_s, gateway.max_body_mib * 2**20)
        self._server: Server | None = None
        self._direct: Direct | None = None
        self._memory = Memory(config.engine.release)
        self._ended: str | None = None
        self._manifest: manifest.Manifest | None = None
        self._healthy = False
        self._paused = False
        self._label: str | None = None
        self._operations: dict[asyncio.Task[Any], int] = {}
        self._turn = asyncio.Lock()

    async def start(self, context: Context) -> None:
        self._context = context
        self._lease.start(context)
        host = self._config.network.host
        try:
            self._url = await self._proxy.start(host)
        except OSError as error:
            raise Fatal(f"can't listen on network.host={host!r} ({error}): name an address of this host") from error

    async def perform(self, command: Any) -> Any | None:
        match command:
            case StartServer():
                return await self._start_server(command)
            case Watch():
                return await self._watch()
            case Drain():
                return await self._operate(command.epoch, lambda: self._drain(command))
            case Release():
                return await self._operate(command.epoch, lambda: self._release(command))
            case Receive():
                return await self._operate(command.epoch, lambda: self._receive(command))
            case Resume():
                return await self._operate(command.epoch, lambda: self._resume(command))
            case Abandon():
                return await self._abandon(command)
            case Exit():
                raise Fatal(command.reason) if command.fatal else ServerGone(command.reason)
        raise TypeError(f"the engine can't perform {command!r}")

    def payload(self, handle: str) -> bytes:
        raise KeyError(handle)

    async def close(self) -> None:
        await self._proxy.close()
        if self._server is not None:
            await self._server.close()

    # --- the server --------------------------------------------------------------------------------------------------

    async def _start_server(self, command: StartServer) -> ServerReady | ServerDead:
        await asyncio.sleep(command.delay_s)
        started = time.monotonic()
        try:
            self._server = await self._launch(self._config.launch.start_deadline_s)
            ranks = await self._server.client.ranks(CALL_S)
            await self._memory.give_back(self._client, MEMORY_S)  # the trainer may be in a step
        except (ServerError, CallError) as error:
            return ServerDead(str(error))
        if is_direct(self._config):
            self._direct = Direct(self._server.client)
        self._proxy.connect(self._server.client)
        self._healthy = True
        return ServerReady(self._url, ranks, time.monotonic() - started)

    async def _launch(self, deadline_s: float) -> Server:
        config, context = self._config, self._context
        name, boot = context.actor, context.boot
        if config.engine.kind == "external":
            return await server.attach(external_url(config, name), deadline_s)
        model_dir = await asyncio.to_thread(_model_dir, config)
        self._manifest = await asyncio.to_thread(manifest.read, model_dir)
        if config.engine.kind == "torch":
            port_file = Path(context.run_dir) / f"{name}-{boot}.port"
            launch = server.torch_launch(config, model_dir, port_file, number_of(name))
        else:
            launch = server.sglang_launch(config, model_dir, f"{context.run}-{name}-{boot}", number_of(name))
        return await server.start(launch, Path(context.run_dir) / "logs" / f"{name}.server.log", deadline_s)

    @property
    def _client(self) -> HttpEngineClient:
        assert self._server is not None
        return self._server.client

    async def _watch(self) -> ServerDead:
        """Until the server is gone."""
        assert self._server is not None
        watches = [
            asyncio.create_task(work)
            for work in (self._server.ended(), self._probe(), self._lease.poll(), self._lease.guard(self._proxy))
        ]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            self._healthy = False
            return ServerDead(self._ended or next(iter(done)).result())
        finally:
            for watch in watches:
                watch.cancel()

    async def _probe(self) -> str:
        """Until the server fails to answer again and again, or turns out to be another one; not within a barrier."""
        misses = 0
        while True:
            await asyncio.sleep(PROBE_S)
            if self._context.state().mode in BARRIER:
                misses = 0
                continue
            try:
                if (stranger := await self._stranger(PROBE_DEADLINE_S)) is not None:
                    return stranger
                misses = 0
            except CallError as error:
                misses += 1
                self._context.log.warning("probe failed", misses=misses, error=str(error))
                if misses == PROBE_MISSES:
                    return f"the server did not answer {misses} probes in a row: {error}"
            self._healthy = misses == 0

    async def _stranger(self, timeout: float) -> str | None:
        """Whether the server holds other weights than were loaded last: somebody restarted it behind our back."""
        loaded = self._label
        found = await self._client.weight_version(timeout)
        if loaded is None or found in (None, loaded) or loaded != self._label:
            return None
        return f"the server holds weights {found!r}, but {loaded!r} were loaded: it is another one"

    async def _replaced(self) -> str | None:
        """`_stranger`, asked only where weights were loaded."""
        return None if self._label is None else await self._stranger(CALL_S)

    # --- the barrier -------------------------------------------------------------------------------------------------

    async def _operate(self, epoch: int, work: Callable[[], Awaitable[Any]]) -> Any | None:
        """Perform one operation when those before it are over; None when it was given up."""
        task = asyncio.create_task(self._in_turn(work))
        self._operations[task] = epoch
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            del self._operations[task]
        return None if task.cancelled() else task.result()

    async def _in_turn(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async with self._turn:
            return await work()

    def _left(self, deadline_at: float) -> float:
        return max(0.0, deadline_at - self._context.clock.now())

    async def _drain(self, command: Drain) -> Drained | DrainFailed | ServerDead:
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

    async def _release(self, command: Release) -> Released | ServerDead:
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

    async def _kill(self, reason: str) -> ServerDead:
        """End the server now; its memory is free when this returns."""
        self._ended = reason
        assert self._server is not None
        if self._server.process is not None:
            await asyncio.to_thread(self._server.process.kill)
        return ServerDead(reason)

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

    async def _thaw(self) -> None:
        """What an earlier epoch left paused holds nothing that anybody waits for."""
        if self._paused:
            await self._client.abort_all(CALL_S)
            await self._client.resume(CALL_S)
            self._paused = False

    async def _receive(self, command: Receive) -> Loaded | LoadFailed:
        started = time.monotonic()
        wrong = None if self._manifest is None else manifest.problem(self._manifest, command.buckets)
        if wrong is not None:
            return LoadFailed(command.epoch, "manifest", "ManifestMismatch", wrong)
        logprobs: tuple[float, ...] = ()
        fingerprint = ""
        self._label = None
        pause = self._pause if self._config.engine.kind == "external" else None
        loading = Loading(self._config, self._context, self._client, self._direct, pause, command)
        try:
            async with asyncio.timeout(self._left(command.deadline_at)):
                held = await loading.run()
                fingerprint = await loading.fingerprint(held)
                if self._memory.tags:
                    with loading.within("retake"):
                        await self._memory.take(self._client, KV, self._left(command.deadline_at))
                if self._config.refit.verify == "probe":
                    with loading.within("verify"):
                        logprobs = await self._continuation(command)
        except TimeoutError:
            return LoadFailed(command.epoch, loading.phase, "Deadline", "the deadline of the refit passed")
        except Unfit as error:
            return LoadFailed(command.epoch, loading.phase, error.error, str(error))
        except (CallError, colocated.TransferBroke) as error:
            return LoadFailed(command.epoch, loading.phase, type(error).__name__, str(error))
        self._label = str(command.version)
        found = "" if held is None else digest(held)
        fallback = "" if self._direct is None else self._direct.fallback
        receiver = (
            "" if self._config.engine.kind != "sglang" else "direct" if self._direct and not fallback else "sglang"
        )
        return self._loaded(
            command,
            Loaded(
                command.epoch,
                found,
                time.monotonic() - started,
                logprobs,
                loading.phases,
                receiver,
                fallback,
                fingerprint,
            ),
        )

    def _loaded(self, command: Receive, loaded: Loaded) -> Loaded:
        log = self._context.log
        if loaded.fallback:
            log.warning("weights go through SGLang's loader", epoch=command.epoch, reason=loaded.fallback)
        spent = {phase.name: round(phase.seconds, 4) for phase in loaded.phases}
        log.info("loaded", epoch=command.epoch, version=command.version, seconds=round(loaded.seconds, 3), **spent)
        return loaded

    async def _pause(self) -> None:
        self._paused = True
        await self._client.pause(CALL_S)

    async def _continuation(self, command: Receive) -> tuple[float, ...]:
        await self._client.resume(CALL_S)
        self._paused = False
        rid = f"probe-{command.epoch:08d}-{self._context.boot:08d}"
        return await probe.logprobs(self._client, rid, self._left(command.deadline_at))

    async def _resume(self, command: Resume) -> Resumed | ServerDead:
        await self._lease.resumed()
        try:
            if self._paused:
                await self._client.resume(CALL_S)
        except CallError as error:
            return ServerDead(f"the server does not go on after the commit of epoch {command.epoch}: {error}")
        self._paused = False
        return Resumed(command.epoch)

    async def _abandon(self, command: Abandon) -> ServerDead | None:
        for task, epoch in self._operations.items():
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
                return ServerDead(f"the server hangs after epoch {command.epoch} was given up: {error}")
        return None

    async def _leave(self, group: str) -> None:
        """Any answer will do: it shows that no collective holds the server."""
        try:
            await self._client.leave_group(group, CALL_S)
        except CallError as error:
            if error.status is None:
                raise

    # --- what others see ---------------------------------------------------------------------------------------------

    def _status(self) -> dict[str, Any]:
        state: EngineState = self._context.state()
        return {
            "engine": self._context.actor,
            "boot": self._context.boot,
            "state": state.mode,
            "epoch": state.epoch,
            "version": state.version,
            "running": self._proxy.running,
            "healthy": self._healthy and self._server is not None and self._server.alive,
            "lease_age_s": self._lease.age_s(),
        }


def number_of(actor: str) -> int:
    """`engine-3` -> 3."""
    return int(actor.rpartition("-")[2])


def external_url(config: RunConfig, actor: str) -> str:
    """The URL of engine `actor`. Raises `Fatal` when `engine.urls` has none for it."""
    index = number_of(actor)
    if index >= len(config.engine.urls):
        raise Fatal(f"engine.urls names {len(config.engine.urls)} servers, engine.count is {config.engine.count}")
    return config.engine.urls[index]


def _model_dir(config: RunConfig) -> Path:
    from actors import models

    try:
        return models.resolve(config.model.source, models.cache_dir(), config.model.params)
    except models.ModelError as error:
        raise Fatal(f"model.source={config.model.source!r}: {error}") from error


def build(config: RunConfig, actor: str) -> EngineShell:
    """The shell of engine `actor`."""
    return EngineShell(config, actor)
