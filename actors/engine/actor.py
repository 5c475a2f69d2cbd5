"""The sidecar: starts a server that is nobody else's to call, watches it, and performs what the engine's core decides.

What a barrier asks of the server is in `actors.engine.operations`.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from actors.engine import manifest, server
from actors.engine.client import CallError, HttpEngineClient
from actors.engine.core import EngineCore
from actors.engine.lease import LeaseKeeper
from actors.engine.loading import CALL_S
from actors.engine.operations import Operations
from actors.engine.proxy import Proxy
from actors.engine.server import Server, ServerError
from actors.engine.state import (
    BARRIER,
    Abandon,
    Drain,
    EngineState,
    Exit,
    Receive,
    Release,
    Resume,
    ServerDead,
    ServerHeard,
    ServerReady,
    ServerSilent,
    StartServer,
    Watch,
)
from config import nccl
from config.schema import RunConfig
from contracts.core import Context, Fatal

MEMORY_S = 60.0
"""How long a server that has just started may take to give memory back."""
PROBE_S, PROBE_DEADLINE_S, PROBE_MISSES = 2.0, 5.0, 3
"""Pause between two probes of the server, how long one may take, and how many in a row may fail."""
SLOW_S = 2.0
"""How long a probe may take before it is said that the server does not answer."""
UNPROBED = tuple(mode for mode in BARRIER if mode not in ("draining", "drained"))
"""Modes in which a server may be too busy with weights to answer."""


class ServerGone(Exception):
    """The server is dead: this process ends, and its successor starts a new one."""


class EngineShell:
    """`contracts.core.Shell` of one engine."""

    def __init__(self, config: RunConfig, actor: str) -> None:
        self.core = EngineCore(actor, config.engine, config.refit)
        self._config = config
        gateway = config.gateway
        self._lease = LeaseKeeper(self.core)
        self._proxy = Proxy(
            self._lease.admitted, self._status, gateway.request_deadline_s, gateway.max_body_mib * 2**20
        )
        self._manifest: manifest.Manifest | None = None
        self._server: Server | None = None
        self._healthy = False

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
                return await self._operations.run(Operations.drain, command)
            case Release():
                return await self._operations.run(Operations.release, command)
            case Receive():
                return await self._operations.run(Operations.receive, command)
            case Resume():
                return await self._operations.run(Operations.resume, command)
            case Abandon():
                return await self._operations.abandon(command)
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
            self._take(await self._launch(self._config.launch.start_deadline_s))
            ranks = await self._client.ranks(CALL_S)
            await self._operations.settle(MEMORY_S)
        except (ServerError, CallError) as error:
            return ServerDead(str(error))
        self._proxy.connect(self._client)
        self._healthy = True
        settings = nccl.of_server(self._config, os.environ)
        return ServerReady(self._url, ranks, time.monotonic() - started, settings)

    async def _launch(self, deadline_s: float) -> Server:
        config, context = self._config, self._context
        name, boot = context.actor, context.boot
        if config.engine.kind == "external":
            return await server.attach(external_url(config, self.core.index), deadline_s)
        model_dir = await asyncio.to_thread(_model_dir, config)
        self._manifest = await asyncio.to_thread(manifest.read, model_dir)
        if config.engine.kind == "torch":
            port_file = Path(context.run_dir) / f"{name}-{boot}.port"
            launch = server.torch_launch(config, model_dir, port_file, self.core.index)
        else:
            launch = server.sglang_launch(config, model_dir, f"{context.run}-{name}-{boot}", self.core.index)
        return await server.start(launch, Path(context.run_dir) / "logs" / f"{name}.server.log", deadline_s)

    def _take(self, server: Server) -> None:
        """This is the server of this boot."""
        self._server = server
        self._operations = Operations(self._config, self._context, server, self._manifest, self._proxy, self._lease)

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
            return ServerDead(self._server.killed or next(iter(done)).result())
        finally:
            for watch in watches:
                watch.cancel()

    async def _probe(self) -> str:
        """Until the server fails to answer again and again, or turns out to be another one.

        Within a barrier it is said that a server does not answer; what it owes there has deadlines of its own.
        """
        misses = 0
        while True:
            await asyncio.sleep(PROBE_S)
            asked: EngineState = self._context.state()
            if asked.mode in UNPROBED:
                misses = 0
                continue
            within = asked.mode in BARRIER
            slow = asyncio.get_running_loop().call_later(SLOW_S, self._silent, asked.epoch, f"none in {SLOW_S:g} s")
            try:
                stranger = await self._operations.stranger(PROBE_DEADLINE_S)
                if stranger is not None and not within:
                    return stranger
                misses, self._healthy = 0, True
                if self._context.state().silent is not None:
                    self._context.deliver(ServerHeard())
            except CallError as error:
                if not self._silent(asked.epoch, str(error)):
                    continue
                misses, self._healthy = 0 if within else misses + 1, False
                self._context.log.warning("probe failed", misses=misses, epoch=asked.epoch, error=str(error))
                if misses == PROBE_MISSES:
                    return f"the server did not answer {misses} probes in a row: {error}"
            finally:
                slow.cancel()

    def _silent(self, epoch: int, reason: str) -> bool:
        """Say that a probe sent in `epoch` has no answer; False if it says nothing, as a transfer began behind it."""
        state: EngineState = self._context.state()
        if state.mode in UNPROBED or state.epoch != epoch:
            return False
        if state.silent is None:
            self._context.deliver(ServerSilent(reason))
        return True

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


def external_url(config: RunConfig, index: int) -> str:
    """The URL of engine `index`. Raises `Fatal` when `engine.urls` has none for it."""
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
