"""Prices of the bus against the bare server, and against a loop of one pickled message at a time.

`python -m tests.bench.bus [trajectories] [events] [latency]`, all three by default. Every row is a ratio of two
things measured in turns in one run, so that a slow moment of the machine hits both; medians over the rounds. What the
machine was doing besides is printed first and last.
Everything goes over the server's Unix socket.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis

from config.schema import BrokerConfig
from contracts.envelope import Envelope, encode
from contracts.events import PayloadRef, Provenance, TrajectoryFinished
from contracts.trajectory import Sampling, Sequence, TokenSpan, Trajectory
from contracts.trajectory import decode as decode_trajectory
from contracts.trajectory import encode as encode_trajectory
from pipeline.broker import choose
from pipeline.bus import Bus, Commit, Lease
from pipeline.runtime.loop import BATCH

GROUP = "readers"
ROUNDS, N = 3, 640
BLOCK = 16
"""Trajectories that one side emits before it is the other's turn."""
RECORD = bytes(200)
TOKENS, PROMPT = 2400, 400
Work = Callable[[], Awaitable[Any]]


class Actor:
    """One actor with its sequence number."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.boot, self.seq, self.count = bus, 0, 0, 0

    async def start(self) -> Actor:
        self.boot, self.seq = await self.bus.boot()
        await self.bus.ensure_group("work", GROUP)
        return self

    async def commit(self, steps: int, **fields: Any) -> None:
        journal = [RECORD] * steps
        await self.bus.commit(
            Commit(boot=self.boot, seq_from=self.seq, seq_to=self.seq + steps, journal=journal, **fields)
        )
        self.seq += steps

    async def emit(self, event: bytes, batch: int) -> None:
        for _ in range(N // batch):
            await self.commit(batch, adds=[("work", event)] * batch)

    async def consume(self, batch: int) -> int:
        """Take all there is and ack it, as a core that only counts does."""
        taken = 0
        while entries := await self.bus.read_work({"work": batch}, GROUP, block_ms=None):
            await self.commit(len(entries), acks=[Lease(e.stream, GROUP, e.entry) for e in entries])
            taken += len(entries)
        return taken


async def seconds(work: Work) -> float:
    before = time.perf_counter()
    await work()
    return time.perf_counter() - before


async def cost(work: Work) -> tuple[float, float]:
    """Seconds that it took, and seconds that this process computed."""
    cpu = time.process_time()
    return await seconds(work), time.process_time() - cpu


def report(name: str, ratios: list[float], rate: float) -> None:
    print(f"{name:<58} {statistics.median(ratios):6.2f} x   ({rate:,.0f} messages/s)", flush=True)


# --- events against XADD ---------------------------------------------------------------------------------------------


async def events(url: str, raw: aioredis.Redis, socket: str, size: int) -> None:
    """Emitting and consuming events of `size` bytes."""
    event = random.Random(0).randbytes(size)
    actor = await Actor(await Bus.connect(url, f"bench{size}", actor="writer")).start()
    program = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")

    async def plain() -> None:
        for _ in range(N):
            await raw.execute_command("XADD", "plain", "*", "e", event)

    async def one_by_one() -> None:
        last: Any = ">"
        while rows := await raw.execute_command("XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "STREAMS", "plain", last):
            await raw.execute_command("XACK", "plain", "g", rows[0][1][0][0])

    ratios: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    xadd = read = 0.0
    await raw.execute_command("DEL", "plain")
    await raw.execute_command("XGROUP", "CREATE", "plain", "g", "0", "MKSTREAM")
    for _ in range(ROUNDS):
        xadd, read = await seconds(plain), await seconds(one_by_one)
        await raw.execute_command("XTRIM", "plain", "MAXLEN", 0)
        rows = {}
        for batch in (1, 10, BATCH):
            emitting = await seconds(lambda batch=batch: actor.emit(event, batch))
            rows[f"emit {size:,} B, {batch} a commit, to plain XADD"] = (xadd, emitting)
            consuming = await seconds(lambda batch=batch: actor.consume(batch))
            rows[f"read and ack {size:,} B, {batch} a commit, to XREADGROUP + XACK"] = (read, consuming)
            await actor.bus.trim("work", f"{2**52}-0")
        if program:
            bare = await asyncio.to_thread(benchmark, program, socket, size)
            rows[f"redis-benchmark XADD {size:,} B, 1 client, to plain XADD"] = (xadd, N / bare)
        for name, (base, mine) in rows.items():
            ratios.setdefault(name, []).append(base / mine)
            rates[name] = N / mine
    print(f"plain XADD of {size:,} B: {N / xadd:,.0f}/s, XREADGROUP + XACK one by one: {N / read:,.0f}/s")
    for name, values in ratios.items():
        report(name, values, rates[name])
    if program is None:
        print("redis-benchmark: not on PATH")
    await actor.bus.close()


def benchmark(program: str, socket: str, size: int) -> float:
    """Requests per second of the server's own benchmark with one client."""
    words = [program, "-s", socket, "-c", "1", "-n", str(N), "-q", "--csv", "XADD", "bare", "*", "e", "x" * size]
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return float(output.strip().splitlines()[-1].split(",")[1].strip('"'))


# --- trajectories against one pickled message at a time --------------------------------------------------------------


class Numbers:
    """One rollout of 2,400 tokens, as plain numbers."""

    def __init__(self) -> None:
        source = random.Random(1)
        self.ids = [source.randrange(100_000) for _ in range(TOKENS)]
        self.logprobs = [-source.expovariate(2.0) for _ in range(TOKENS - PROMPT)]
        self.text = "".join(source.choice("abcdefghijklmnopqrstuvwxyz    ") for _ in range(4 * TOKENS))


def pickled(numbers: Numbers) -> bytes:
    """A training sample as such a loop sends it: a dictionary of lists, one number an object, and the text."""
    sample = {
        "text": numbers.text,
        "n_predicted": TOKENS - PROMPT,
        "reward": 1.0,
        "logprobs": numbers.logprobs,
        "ref_logprobs": [],
        "input_ids": numbers.ids,
        "labels": [-100] * PROMPT + numbers.ids[PROMPT:],
        "group_id": "group-0",
        "metadata": {"model_version": 3, "rollout_index": 0, "step_index": 0},
    }
    return pickle.dumps(sample)


def trajectory(numbers: Numbers) -> bytes:
    """The same sample as a trajectory, its numbers packed as the collector packs them."""
    logprobs = [0.0] * PROMPT + numbers.logprobs
    sequence = Sequence(
        length=TOKENS,
        ids=struct.pack(f"<{TOKENS}i", *numbers.ids),
        loss_mask=bytes(PROMPT) + b"\1" * (TOKENS - PROMPT),
        logprobs=struct.pack(f"<{TOKENS}f", *logprobs),
        spans=(TokenSpan(0, PROMPT, "environment"), TokenSpan(PROMPT, TOKENS, "sampled", 3, "engine-0", 1)),
        sampling=Sampling(1.0, 2048, 7),
        stop_reason="stop",
    )
    return encode_trajectory(
        Trajectory(
            task="task-0",
            index=0,
            sample=0,
            attempt=1,
            reward=1.0,
            components={"accuracy": 1.0},
            mask_reason=None,
            sequences=(sequence,),
        )
    )


def finished(number: int, size: int) -> bytes:
    """The event of one trajectory."""
    event = TrajectoryFinished(
        task="task-0",
        index=number // 8,
        sample=number % 8,
        attempt=1,
        samples=8,
        reward=1.0,
        components={"accuracy": 1.0},
        valid=True,
        payload=PayloadRef(f"traj:{number}", size),
        prompt_tokens=PROMPT,
        completion_tokens=TOKENS - PROMPT,
        sources=(Provenance(3, "engine-0", 1),),
        seconds=1.0,
    )
    return encode(envelope(f"collector-0:{number}.0", event, "trajectories"))


def envelope(id: str, event: Any, stream: str) -> Envelope[Any]:
    return Envelope(
        id=id, run="bench", stream=stream, actor="collector-0", boot=1, epoch=3, wall_ns=1, mono_ns=1, body=event
    )


async def trajectories(url: str, raw: aioredis.Redis) -> None:
    """A group of 8 a commit, as a collector commits, and batches of them read as a trainer reads them."""
    numbers = Numbers()
    actor = await Actor(await Bus.connect(url, "bench", actor="collector")).start()
    emitting, computing, rates, reading, bare, count, read = [], [], [], [], [], 240, 0.0
    size = len(trajectory(numbers))

    async def emit_pickled(first: int) -> None:
        for _ in range(BLOCK):
            await raw.execute_command("XADD", "pickled", "*", "index", 0, "data", pickled(numbers))

    async def read_pickled() -> None:
        last: Any = "0-0"
        while rows := await raw.execute_command("XREAD", "COUNT", 1, "STREAMS", "pickled", last):
            last, fields = rows[0][1][0]
            pickle.loads(fields[3])

    async def emit_ours(first: int) -> None:
        for start in range(first, first + BLOCK, 8):
            group = range(start, start + 8)
            blobs = [(f"traj:{number}", trajectory(numbers)) for number in group]
            adds = [("work", finished(number, len(data))) for number, (_, data) in zip(group, blobs, strict=True)]
            await actor.commit(8, payloads=blobs, adds=adds)

    async def read_ours() -> None:
        taken = 0
        while entries := await actor.bus.read_work({"work": 256}, GROUP, block_ms=None):
            await actor.commit(1, acks=[Lease(e.stream, GROUP, e.entry) for e in entries])
            taken += len(entries)
        assert taken == count

    async def fetch_ours() -> None:
        for data in await actor.bus.payloads([f"traj:{number}" for number in range(count)]):
            decode_trajectory(data)

    for _ in range(3 * ROUNDS):
        await raw.execute_command("DEL", "pickled")
        for first in range(0, count, BLOCK):
            theirs = await cost(lambda first=first: emit_pickled(first))
            ours = await cost(lambda first=first: emit_ours(first))
            emitting.append(theirs[0] / ours[0])
            computing.append(theirs[1] / ours[1])
            rates.append(BLOCK / ours[0])
        read = await seconds(read_pickled)
        mine = await seconds(read_ours)
        reading.append(read / mine)
        bare.append(read / (mine + await seconds(fetch_ours)))
        await actor.bus.trim("work", f"{2**52}-0")
    held: Any = await raw.execute_command("STRLEN", actor.bus.keys.payload("traj:1"))
    sent, theirs_sent = held + len(finished(1, size)) + len(RECORD), len(pickled(numbers))
    print(f"a trajectory of {TOKENS:,} tokens: {held:,} B compressed, {size:,} B before, {sent:,} B with its event and")
    print(f"journal record; {theirs_sent:,} B pickled")
    print(f"{'bytes of a trajectory, to pickled':<58} {sent / theirs_sent:6.2f} x")
    report("emit a trajectory, to one pickled message an XADD", emitting, statistics.median(rates))
    low, _, high = statistics.quantiles(emitting, n=4)
    print(f"  {len(emitting)} ratios of blocks of {BLOCK} in turns: quartiles {low:.2f} and {high:.2f}; ", end="")
    print(f"CPU time of this process, likewise: {statistics.median(computing):.2f} x")
    report("read and ack a trajectory's event, to XREAD of one", reading, count * reading[-1] / read)
    report("the same, and fetch, decode and check every token", bare, count * bare[-1] / read)
    await actor.bus.close()


async def main(url: str, parts: list[str]) -> None:
    socket = url.removeprefix("unix://")
    raw = aioredis.Redis(unix_socket_path=socket, protocol=2)
    raw.response_callbacks.clear()
    if "trajectories" in parts:
        await trajectories(url, raw)
    for size in (1_000, 20_000) if "events" in parts else ():
        await events(url, raw, socket, size)
    if "latency" in parts:
        from tests.bench.latency import latency

        await latency(url, raw)
    await raw.aclose()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, choose({}, Path(folder), BrokerConfig()) as broker:
        print(f"{broker.describe()}; load {os.getloadavg()[0]:.1f}")
        asyncio.run(main(broker.url, sys.argv[1:] or ["trajectories", "events", "latency"]))
        print(f"load {os.getloadavg()[0]:.1f}")
