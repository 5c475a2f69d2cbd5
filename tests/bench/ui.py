"""`python -m tests.bench.ui [EVENTS] [RUN]`: what `pipeline ui` takes for a log of 1,000,000 events.

Prints how long the log takes to open (through `Source`, as the server does it), memory, and how long each answer of the
server takes then. CPU seconds are those of this process alone, but for those of the process that helps to open the log,
which are told beside.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from pipeline.rundir import RunDir, config_of
from pipeline.ui._index import Query
from pipeline.ui._samples import Wanted
from pipeline.ui._source import Source
from tests.bench import longlog


def memory() -> int:
    """Most memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


async def opened(run: RunDir) -> Source:
    source = Source(run, config_of(run), time.time)
    before, cpu, wall = memory(), time.process_time(), time.perf_counter()
    following = asyncio.create_task(source.follow())
    while source.state == "loading":
        await source.change(source.version, 60.0)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    following.cancel()
    await asyncio.wait({following}, timeout=60.0)
    count = len(source.data.index)
    print(f"opened {count:,} events: {cpu:.1f} s CPU, {wall:.1f} s wall, {cpu / count * 1e6:.1f} us an event")
    helper = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"beside it: {helper.ru_utime + helper.ru_stime:.1f} s CPU, {helper.ru_maxrss // 1024} MiB at most")
    print(f"memory: {before} MiB before, {memory()} MiB at most")
    return source


async def timed(name: str, work: Callable[[], Any | Awaitable[Any]]) -> None:
    cpu, wall = time.process_time(), time.perf_counter()
    found = work()
    if asyncio.iscoroutine(found):
        found = await found
    size = len(msgspec.json.encode(found))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"{name:<34} {cpu * 1e3:8.0f} ms CPU {wall * 1e3:8.0f} ms wall {size / 1024:8.0f} KiB")


async def main(events: int, folder: Path) -> None:
    run = RunDir.open(folder if (folder / "run.json").exists() else longlog.write(folder, events))
    source = await opened(run)
    data, length = source.data, source.data.timeline.length
    await timed("diagnosis", source.why)
    await timed("overview", lambda: data.overview(source.now(), source.evidence))
    await timed("plots", data.charts)
    await timed("timeline, whole", lambda: data.window(None, None, 2800))
    await timed("timeline, a hundredth", lambda: data.window(length / 2, length * 0.51, 2800))
    await timed("timeline, a ten thousandth", lambda: data.window(length / 2, length * 0.5001, 2800))
    await timed("events, first page", lambda: data.search(Query(), 0, 200, newest=False))
    await timed("events, a page of a kind", lambda: data.search(Query(kinds=("refit.*",)), 1000, 200, newest=False))
    await timed("events, a text in many", lambda: data.search(Query(text="engine-3"), 0, 200, newest=False))
    await timed("events, a text in none", lambda: data.search(Query(text="is not there"), 0, 200, newest=False))
    await timed("one event with causes", lambda: data.event(len(data.index) // 2))
    await timed("samples by reward", lambda: data.samples.page(Wanted(order="highest"), 0, 60))


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as held:
        asyncio.run(main(number, Path(sys.argv[2]) if len(sys.argv) > 2 else Path(held) / "run"))
