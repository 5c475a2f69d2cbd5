"""One process, one actor: from a name and a store URL to a running loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import structlog

from actors import registry
from actors.startup import uncollected
from config.schema import RunConfig
from contracts.core import Fatal, Overdue
from contracts.envelope import STREAM_OF, Envelope, encode
from contracts.events import ActorFailed, ActorLeft
from pipeline import logs
from pipeline.bus import Bus, Fenced
from pipeline.runtime.clock import WallClock
from pipeline.runtime.loop import Runtime

RECORDER = "recorder"
"""Leaves last and silently: nothing follows run.finished."""


def run_actor(name: str, url: str, run: str, run_dir: Path) -> str:
    """Run actor `name` of run `run` until the run stops; answers why it left: `done` or `fenced`.

    Raises `contracts.core.Fatal` when a restart would not help (the driver has been told by an event then), and
    whatever else ended it; a restarted process goes on from the store.
    """
    logs.configure(run_dir, name)
    return asyncio.run(_run(name, url, run, run_dir))


async def _run(name: str, url: str, run: str, run_dir: Path) -> str:
    log = structlog.get_logger().bind(run=run, actor=name)
    bus = await Bus.connect(url, run, actor=name)
    try:
        config = msgspec.json.decode(await bus.get_config(), type=RunConfig)
        with uncollected():
            shell = registry.build(config, name)
        runtime = Runtime(shell, bus, run, name, config, str(run_dir), WallClock(), log)
        await runtime.run()
        boot = runtime.machine.identity.boot
        if name != RECORDER:
            await _post(bus, run, name, boot, ActorLeft(actor=name, boot=boot))
        log.info("actor left", boot=boot, seq=runtime.machine.seq)
        return "done"
    except Fenced as fenced:
        log.warning("actor fenced", reason=str(fenced))
        return "fenced"
    except Exception as error:
        fatal = isinstance(error, Fatal)
        log.error("actor failed", error=type(error).__name__, message=str(error), fatal=fatal, exc_info=not fatal)
        with contextlib.suppress(Exception):
            await _report(bus, run, name, error, fatal)
        if isinstance(error, Overdue):  # the end of the loop would wait for its threads, which may hang too
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        raise
    finally:
        await bus.close()


async def _report(bus: Bus, run: str, name: str, error: Exception, fatal: bool) -> None:
    body = ActorFailed(actor=name, error=type(error).__name__, message=str(error)[:2000], fatal=fatal)
    await _post(bus, run, name, 0, body)


async def _post(bus: Bus, run: str, name: str, boot: int, body: ActorFailed | ActorLeft) -> None:
    """Append an event that no step of the core asked for: the process's last words."""
    wall = int(WallClock().now() * 1e9)
    stream = STREAM_OF[type(body)]
    envelope = Envelope(
        id=f"{name}:last.{os.getpid()}.{wall}",
        run=run,
        stream=stream,
        actor=name,
        boot=boot,
        epoch=0,
        wall_ns=wall,
        mono_ns=0,
        body=body,
    )
    await bus.post(stream, encode(envelope))
