"""`pipeline scale`: another number of engines in a live run."""

from __future__ import annotations

import asyncio
import os
import time

import msgspec

from config import rules
from config.schema import RunConfig
from contracts.envelope import STREAM_OF, Envelope, encode
from contracts.events import FleetScaled
from pipeline.bus import Bus, BusError
from pipeline.errors import Exit, PipelineError
from pipeline.invocation import command
from pipeline.rundir import RunDir

CONNECT_S = 3.0
MOST = 1024


def parse(word: str) -> int:
    """`engines=3` -> 3. Raises `PipelineError`."""
    key, _, value = word.partition("=")
    if key != "engines":
        raise PipelineError(f"{word!r}: only engines can be scaled, as in engines=3", Exit.USAGE)
    if not value.isdecimal() or not 1 <= int(value) <= MOST:
        raise PipelineError(f"{word!r}: the number of engines must be 1 to {MOST}, as in engines=3", Exit.USAGE)
    return int(value)


def scale(run: RunDir, engines: int) -> str:
    """Tell a live run how many engines it is to have; answers what happens next. Raises `PipelineError`."""
    info = run.info()
    url = os.environ.get("REDIS_URL") or info.redis_url
    if not url:
        raise PipelineError(f"{run.path} does not say which store it uses: set REDIS_URL", Exit.BROKER)
    if info.ended is not None:
        raise PipelineError(f"{run.path} has ended ({info.ended}): only a live run can be scaled", Exit.USAGE)
    return asyncio.run(_scale(url, info.run, run, engines))


async def _scale(url: str, name: str, run: RunDir, engines: int) -> str:
    try:
        bus = await Bus.connect(url, name, actor="scale", connect_s=CONNECT_S)
    except BusError as error:
        raise PipelineError(f"the run is not live: {error}", Exit.BROKER) from error
    try:
        before = msgspec.json.decode(await bus.get_config(), type=RunConfig)
        config = resized(before, engines)
        await bus.put_config(msgspec.json.encode(config))
        await bus.post(STREAM_OF[FleetScaled], encode(_announcement(name, engines)))
    except BusError as error:
        raise PipelineError(f"the run can't be scaled: {error}", Exit.BROKER) from error
    finally:
        await bus.close()
    return outlook(before, engines, str(run.path))


def resized(config: RunConfig, engines: int) -> RunConfig:
    """The configuration with so many engines. Raises `PipelineError` for what can't be."""
    if config.engine.kind == "external" and engines > len(config.engine.urls):
        raise PipelineError(
            f"engines={engines}: engine.kind=external has {len(config.engine.urls)} servers (engine.urls), and a "
            "server's URL can't be added to a live run: stop it and resume it with more",
            Exit.USAGE,
        )
    if config.engine.kind == "external":
        urls = config.engine.urls
        probe = msgspec.structs.replace(config.engine, count=engines, urls=urls[:engines])
    else:
        probe = msgspec.structs.replace(config.engine, count=engines)
    problems = rules.across_fields(msgspec.structs.replace(config, engine=probe))
    if problems:
        raise PipelineError("\n".join(problems), Exit.USAGE)
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, count=engines))


def outlook(before: RunConfig, engines: int, run: str) -> str:
    """What a person has to know, or to do."""
    old = before.engine.count
    if engines == old:
        return f"the run has {engines} engines already"
    if engines < old:
        names = ", ".join(f"engine-{n}" for n in range(engines, old))
        return f"serving until the next commit, then leaving: {names}"
    names = [f"engine-{n}" for n in range(old, engines)]
    if before.launch.mode == "external":
        starts = "; ".join(command("actor", name, "--run", run) for name in names)
        return f"start the new engines, they join with the next refit: {starts}"
    return f"being started, to join with the next refit: {', '.join(names)}"


def _announcement(run: str, engines: int) -> Envelope[FleetScaled]:
    event = FleetScaled(engines=engines)
    now = time.time_ns()
    return Envelope(
        id=f"post:scale.{os.getpid()}.{now}",
        run=run,
        stream=STREAM_OF[FleetScaled],
        actor="scale",
        boot=0,
        epoch=0,
        wall_ns=now,
        mono_ns=time.monotonic_ns(),
        body=event,
    )
