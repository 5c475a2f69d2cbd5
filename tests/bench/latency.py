"""From just before an event is committed to the call of another actor's core, over the runtime's own loop.

Part of `python -m tests.bench.bus latency`. Once with both actors in one process, where each waits for what the other
computes, and once with each in a process of its own, as in a run. A plain XADD is measured in turns with the first.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import redis.asyncio as aioredis
import structlog

from config.schema import RunConfig
from contracts.core import Booted, Delivered
from contracts.envelope import encode
from contracts.events import RunStopping
from pipeline.bus import Bus
from pipeline.runtime.clock import WallClock
from pipeline.runtime.loop import Runtime
from tests.bench.bus import Actor, envelope, finished, seconds

EVENTS, WARM = 600, 100
"""Emitted, and how many of them come before those that count."""
PAUSE_S = 0.004
KINDS = {
    "broadcast": ("control", encode(envelope("x:1.0", RunStopping(reason=""), "control"))),
    "work": ("trajectories", finished(1, 20_000)),
}
TOGETHER_S = 60.0


class Listener:
    """A core that notes when it was handed each event."""

    state_type = int
    local_type = None
    work = ("trajectories",)
    watch = ("control",)

    def __init__(self) -> None:
        self.at: list[float] = []
        self.heard = asyncio.Event()

    def initial(self) -> int:
        return 0

    def step(self, state: int, input: Any, now: float) -> tuple[int, tuple[Any, ...]]:
        if isinstance(input, Delivered):
            self.at.append(time.perf_counter())
            self.heard.set()
        return state + isinstance(input, Booted), ()

    def wake(self, state: int) -> float | None:
        return None

    def intake(self, state: int) -> dict[str, int]:
        return {"trajectories": 1_000_000}

    def done(self, state: int) -> bool:
        return False


class Quiet:
    """A shell without effects."""

    def __init__(self) -> None:
        self.core: Any = Listener()

    async def start(self, context: Any) -> None:
        pass

    async def close(self) -> None:
        pass

    def payload(self, handle: str) -> bytes:
        raise KeyError(handle)

    async def perform(self, command: Any) -> None:
        pass


def told(what: str, samples: Sequence[float]) -> str:
    ordered = sorted(samples)
    p50, p99 = statistics.median(ordered) * 1000, ordered[len(ordered) * 99 // 100] * 1000
    return f"emit to handler, {what}: p50 {p50:.2f} ms, p99 {p99:.2f} ms"


async def latency(url: str, raw: aioredis.Redis) -> None:
    """Both kinds of streams, in both ways."""
    listening = await Bus.connect(url, "wake", actor="buffer")
    shell = Quiet()
    runtime = Runtime(shell, listening, "wake", "buffer", RunConfig(), "", WallClock(), structlog.get_logger())
    running = asyncio.create_task(runtime.run())
    actor = await Actor(await Bus.connect(url, "wake", actor="trainer")).start()
    for kind, (stream, data) in KINDS.items():
        samples, bare, cpu = [], [], 0.0
        for number in range(EVENTS):
            await asyncio.sleep(PAUSE_S)
            shell.core.heard.clear()
            before, computed = time.perf_counter(), time.process_time()
            await actor.commit(1, adds=[(stream, data)])
            await shell.core.heard.wait()
            if number >= WARM:
                cpu += time.process_time() - computed
                samples.append(shell.core.at[-1] - before)
                bare.append(await seconds(lambda data=data: raw.execute_command("XADD", "plain", "*", "e", data)))
        print(f"{told(f'{kind}, in one process', samples)}, CPU {cpu / len(samples) * 1e6:.0f} us; ", end="")
        print(f"plain XADD in turns with it: p50 {statistics.median(bare) * 1000:.2f} ms", flush=True)
    await actor.bus.close()
    for kind in KINDS:
        shell.core.at.clear()
        emitted = await apart(url, kind)
        async with asyncio.timeout(TOGETHER_S):
            while len(shell.core.at) < EVENTS:  # noqa: ASYNC110 - the last ones are on their way
                await asyncio.sleep(PAUSE_S)
        both = list(zip(emitted, shell.core.at, strict=True))[WARM:]
        print(told(f"{kind}, in two processes", [at - before for before, at in both]), flush=True)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await listening.close()


async def apart(url: str, kind: str) -> list[float]:
    """When another process began to emit each event; processes of one host share that clock."""
    words = (sys.executable, "-m", "tests.bench.latency", url, kind)
    child = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, env=dict(os.environ))
    async with asyncio.timeout(TOGETHER_S):
        output, _ = await child.communicate()
    return json.loads(output)


async def emit(url: str, kind: str) -> list[float]:
    """The other process."""
    actor = await Actor(await Bus.connect(url, "wake", actor="source")).start()
    stream, data = KINDS[kind]
    began: list[float] = []
    for _ in range(EVENTS):
        await asyncio.sleep(PAUSE_S)
        began.append(time.perf_counter())
        await actor.commit(1, adds=[(stream, data)])
    await actor.bus.close()
    return began


if __name__ == "__main__":
    print(json.dumps(asyncio.run(emit(*sys.argv[1:]))))
