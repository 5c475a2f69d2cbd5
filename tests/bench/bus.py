"""Prices of the bus, as ratios to a plain XADD measured in the same run: `python tests/bench/bus.py`.

Rows alternate between the kinds of write, so that a slow moment of the machine hits all of them; medians of the ratios.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from config.schema import BrokerConfig
from pipeline.broker import choose
from pipeline.bus import Bus, Commit, Lease

GROUP = "readers"
ROUNDS, N = 7, 1000
EVENT = bytes(range(256)) * 4
RECORD = EVENT[:200]


class Writer:
    """One actor with its sequence number."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.boot, self.seq = bus, 0, 0

    async def start(self) -> None:
        self.boot, self.seq = await self.bus.boot()
        await self.bus.ensure_group("work", GROUP)

    async def plain(self) -> None:
        for _ in range(N):
            await self.bus.post("out", EVENT)

    async def commits(self, batch: int) -> None:
        for _ in range(N // batch):
            commit = Commit(
                boot=self.boot,
                seq_from=self.seq,
                seq_to=self.seq + batch,
                journal=[RECORD] * batch,
                adds=[("out", EVENT)] * batch,
            )
            await self.bus.commit(commit)
            self.seq += batch

    async def steps(self, batch: int) -> None:
        """A whole turn of an actor: take work, then commit its output, ack, cursor and journal."""
        for _ in range(N // batch):
            entries = await self.bus.read_work({"work": batch}, GROUP, block_ms=None)
            leases = [Lease(e.stream, GROUP, e.entry) for e in entries]
            commit = Commit(
                boot=self.boot,
                seq_from=self.seq,
                seq_to=self.seq + batch,
                journal=[RECORD] * batch,
                adds=[("out", EVENT)] * batch,
                leases=leases,
                acks=leases,
            )
            await self.bus.commit(commit)
            self.seq += batch

    async def fill(self) -> None:
        await asyncio.gather(*(self.bus.post("work", EVENT) for _ in range(N)))


async def seconds(work: Callable[[], Awaitable[None]]) -> float:
    before = time.perf_counter()
    await work()
    return time.perf_counter() - before


async def wake_ms(url: str) -> list[float]:
    """From an event's XADD to the return of an idle `read_inputs`, alternating broadcast and work."""
    reader, poster = [await Bus.connect(url, "wake", actor=name) for name in ("reader", "poster")]
    await reader.ensure_group("work", GROUP)
    cursors, samples = {"news": "0-0"}, []
    for number in range(200):
        waiting = asyncio.create_task(reader.read_inputs({"work": 1}, cursors, GROUP, block_ms=5000))
        await asyncio.sleep(0.005)
        before = time.perf_counter()
        await poster.post("news" if number % 2 else "work", EVENT)
        found = await waiting
        samples.append((time.perf_counter() - before) * 1000)
        cursors |= {e.stream: e.entry for e in found.events}
    await reader.close()
    await poster.close()
    return samples


async def main(url: str) -> None:
    writer = Writer(await Bus.connect(url, "bench", actor="writer"))
    await writer.start()
    kinds: dict[str, Callable[[], Awaitable[None]]] = {
        "commit of 1": lambda: writer.commits(1),
        "commit of 10": lambda: writer.commits(10),
        "commit of 50": lambda: writer.commits(50),
        "read + commit of 1": lambda: writer.steps(1),
        "read + commit of 50": lambda: writer.steps(50),
    }
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    rates: list[float] = []
    for _ in range(ROUNDS):
        plain = await seconds(writer.plain)
        rates.append(N / plain)
        for kind, work in kinds.items():
            if kind.startswith("read"):
                await writer.fill()
            ratios[kind].append(plain / await seconds(work))
    await writer.bus.close()
    print(f"plain XADD of {len(EVENT)} B: {statistics.median(rates):,.0f} events/s")
    for kind, values in ratios.items():
        print(f"{kind:20s} {statistics.median(values):6.2f} x plain XADD, in events/s")
    samples = sorted(await wake_ms(url))
    print(f"wake-up after an event: median {statistics.median(samples):.2f} ms, p99 {samples[-2]:.2f} ms")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, choose({}, Path(folder), BrokerConfig()) as broker:
        print(broker.describe())
        asyncio.run(main(broker.url))
