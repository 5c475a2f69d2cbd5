"""Requests a second through the gateway, as a share of what calling its engine directly gives, in one run.

    python -m tests.bench.gateway [--seconds 5] [--episodes 64 512] [--answer 2:0.5 2:0 0:0] [--profile DIR]

A fake engine in a process of its own answers 256 tokens with their logprobs. `--answer S:SHARE`: after S seconds, give
or take SHARE of them. 2 s is a fast engine, 128 tokens a second for every sequence. 2:0.5 is what a batch of answers
looks like, which neither begin nor end at one moment; 2:0 keeps all callers in step, so that they come in bursts as
large as their number; 0:0 leaves nothing but the cost of the way there: JSON, tokens, checks, the core's steps and
their commits, two hops instead of one. `*_cpu_ms` is what the gateway's process computes a turn, whatever else the
machine does.

Callers are in this process, one request in flight each over a connection of its own, on every way alike. The gateway
runs in a process of its own under the real runtime, with a real store. `native` is POST /generate; `chat` a whole
episode of one turn, which is three requests: open, /v1/chat/completions, finish; `chat4` an episode of four turns, each
of which repeats the conversation so far. `GROUP` callers have the first prompt in common, as the samples of a group do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog
from aiohttp import web

from actors.gateway.actor import build
from actors.startup import uncollected
from config.schema import BrokerConfig, EngineConfig, GatewayConfig, ModelConfig, RunConfig
from contracts.envelope import STREAM_OF, Envelope, decode, encode
from contracts.events import EngineReady, GatewayReady, Member, RefitCommitted
from pipeline.broker import choose
from pipeline.bus import Bus
from pipeline.runtime.clock import WallClock
from pipeline.runtime.loop import Runtime
from tests.unit.gateway.agents import write_chat_model

ANSWER, PROMPT, GROUP = 256, 64, 8
IDS = [3 + k % 50 for k in range(PROMPT)]
SAMPLING = {"temperature": 1.0, "max_new_tokens": ANSWER}
TEXT = "".join(chr(32 + k % 50) for k in range(ANSWER))
"""The text of every answer."""


def serve_engine(pipe: Connection, answer_s: float, spread: float) -> None:
    """An engine whose every answer is the same `ANSWER` tokens, encoded once, after `answer_s` (1 ± `spread`)."""
    ids = [3 + k % 50 for k in range(ANSWER)]
    meta = {
        "finish_reason": {"type": "length", "length": ANSWER},
        "output_token_logprobs": [[-0.1 - k / 1000, token, None] for k, token in enumerate(ids)],
    }
    answer = msgspec.json.encode({"output_ids": ids, "meta_info": meta})
    draws = random.Random(0)

    async def generate(request: web.Request) -> web.Response:
        msgspec.json.decode(await request.read())
        await asyncio.sleep(answer_s * draws.uniform(1 - spread, 1 + spread))
        return web.Response(body=answer, content_type="application/json", headers={"x-sluice-boot": "1"})

    async def main() -> None:
        app = web.Application(client_max_size=2**26)
        app.add_routes([web.post("/generate", generate)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(main())


def serve_gateway(pipe: Connection, engine: str, profile: str | None) -> None:
    """The gateway as it runs: shell, core, runtime and store."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        directory = Path(folder)
        broker = stack.enter_context(choose({"PATH": os.defpath}, directory, BrokerConfig()))
        profiler = cProfile.Profile(time.thread_time) if profile else None
        if profiler:
            profiler.enable()
        try:
            asyncio.run(_serve_gateway(pipe, engine, directory, broker.url))
        finally:
            if profiler:
                profiler.disable()
                profiler.dump_stats(f"{profile}/gateway-{os.getpid()}.prof")


async def _serve_gateway(pipe: Connection, engine: str, directory: Path, store: str) -> None:
    config = RunConfig(
        model=ModelConfig(source=str(write_chat_model(directory / "model"))),
        engine=EngineConfig(max_total_tokens=100_000),
        gateway=GatewayConfig(max_episodes=10_000),
    )
    bus = await Bus.connect(store, "bench", actor="gateway-0")
    log = structlog.get_logger()
    with uncollected():
        shell: Any = build(config, "gateway-0")
    runtime = Runtime(shell, bus, "bench", "gateway-0", config, str(directory), WallClock(), log)
    running = asyncio.create_task(runtime.run())
    committed = RefitCommitted(
        epoch=1, version=1, step=1, engines=(Member("engine-0", 1),), world_size=2, pause_s=0, drain_s=0,
        transfer_s=0, bytes=0,
    )  # fmt: skip
    for event in (EngineReady(engine="engine-0", boot=1, url=engine, ranks=1, seconds=0.0), committed):
        await post_event(bus, event)
    cursor = "0-0"
    while True:
        for entry in await bus.read_after({"fleet": cursor}, count=16, block_ms=1000):
            cursor, event = entry.entry, decode("fleet", entry.data).body
            if isinstance(event, GatewayReady):
                pipe.send(event.url)
        if running.done():
            running.result()
        if pipe.poll():
            running.cancel()
            await asyncio.wait((running,))
            return


async def post_event(bus: Bus, event: Any) -> None:
    stream = STREAM_OF[type(event)]
    envelope = Envelope(
        id=f"bench:{stream}", run="bench", stream=stream, actor="bench", boot=1, epoch=0, wall_ns=0, mono_ns=0,
        body=event,
    )  # fmt: skip
    await bus.post(stream, encode(envelope))


class Caller(asyncio.Protocol):
    """One connection, over which one request at a time is posted. Costs a quarter of what a client library does."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._size: int | None = None
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        host, port = transport.get_extra_info("peername")
        self._head = f" HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\ncontent-length: "

    async def post(self, path: str, body: bytes) -> None:
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(f"POST {path}{self._head}{len(body)}\r\n\r\n".encode() + body)
        data = await self._answer
        if not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{path} is answered {data[:400]!r}")

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._size is None and (end := self._data.find(b"\r\n\r\n")) >= 0:
            _, _, behind = bytes(self._data[:end]).lower().partition(b"\r\ncontent-length:")
            self._size = end + 4 + int(behind.split(b"\r\n")[0])
        if self._size is not None and len(self._data) >= self._size and self._answer is not None:
            self._answer.set_result(bytes(self._data))
            self._size, self._answer = None, None
            self._data.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._answer.set_exception(exc or ConnectionError("closed without an answer"))


Ask = Callable[[Caller, int, int], Awaitable[None]]


async def direct(caller: Caller, number: int, turn: int) -> None:
    params = {"temperature": 1.0, "max_new_tokens": ANSWER, "stop_token_ids": [1]}
    body = {"input_ids": IDS, "rid": f"r{number}-{turn}", "sampling_params": params, "return_logprob": True}
    await caller.post("/generate", msgspec.json.encode(body))


async def native(caller: Caller, number: int, turn: int) -> None:
    body = {"session": f"s{number}", "input_ids": IDS, "sampling": SAMPLING}
    await caller.post("/generate", msgspec.json.encode(body))


def chat(turns: int) -> Ask:
    """An episode is as long as that; each turn of it repeats the conversation so far."""
    said: dict[int, list[dict[str, str]]] = {}

    async def ask(caller: Caller, number: int, turn: int) -> None:
        name = f"/episodes/e{number}-{turn // turns}"
        if turn % turns == 0:
            await caller.post(name, msgspec.json.encode({"sampling": SAMPLING, "deadline_s": 60}))
            said[number] = []
        messages = said[number]
        messages.append({"role": "user", "content": f"{number // GROUP} {turn} ".ljust(PROMPT - 20, "a")})
        await caller.post(f"{name}/v1/chat/completions", msgspec.json.encode({"messages": messages}))
        messages.append({"role": "assistant", "content": TEXT})
        if turn % turns == turns - 1:
            await caller.post(f"{name}/finish", b"{}")

    return ask


WAYS: dict[str, Ask] = {"direct": direct, "native": native, "chat": chat(1), "chat4": chat(4)}


def computed_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def rate(ask: Ask, url: str, callers: int, seconds: float, begin_s: float = 0.0) -> tuple[float, int]:
    """Turns a second of `callers` that each ask again as soon as they have their answer, and turns in all.

    They begin at any time in the first `begin_s`, by the same draws every time.
    """
    loop = asyncio.get_running_loop()
    where = urlsplit(url)
    host, port = where.hostname or "", where.port or 0
    lines = [(await loop.create_connection(Caller, host, port))[1] for _ in range(callers)]
    done, draws = 0, random.Random(1)
    begins = [draws.uniform(0.0, begin_s) for _ in lines]
    await asyncio.gather(*(ask(line, number, 0) for number, line in enumerate(lines)))
    started = time.perf_counter()

    async def play(number: int, line: Caller) -> None:
        nonlocal done
        turn = 0
        await asyncio.sleep(begins[number])
        while time.perf_counter() - started < seconds:
            turn += 1
            await ask(line, number, turn)
            done += 1

    await asyncio.gather(*(play(number, line) for number, line in enumerate(lines)))
    took = time.perf_counter() - started
    for line in lines:
        line.transport.close()
    return done / took, done + callers


def begin(target: Any, *args: Any) -> tuple[Any, Connection, str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    if not ours.poll(120):
        raise TimeoutError(f"{target.__name__} did not start")
    return process, ours, ours.recv()


def measure(answer_s: float, spread: float, asked: argparse.Namespace) -> None:
    """Prints a line for each number of episodes. The engine is called directly before and after the other ways."""
    engine, _, engine_url = begin(serve_engine, answer_s, spread)
    gateway, pipe, gateway_url = begin(serve_gateway, engine_url, asked.profile)

    def run(way: str, callers: int) -> tuple[float, float]:
        before = computed_s(gateway.pid)
        url = engine_url if way == "direct" else gateway_url
        turns_s, turns = asyncio.run(rate(WAYS[way], url, callers, asked.seconds + 2 * answer_s, 2 * spread * answer_s))
        return turns_s, (computed_s(gateway.pid) - before) / turns * 1e3

    try:
        asyncio.run(rate(chat(1), gateway_url, 1, 0.0))  # the chat template is loaded with the first turn
        for callers in asked.episodes:
            row: dict[str, Any] = {"answer_s": answer_s, "spread": spread, "episodes": callers}
            first, _ = run("direct", callers)
            found = {way: run(way, callers) for way in asked.ways}
            last, _ = run("direct", callers)
            row["direct"] = [round(first, 1), round(last, 1)]
            for way, (turns_s, cpu_ms) in found.items():
                row[way] = round(turns_s, 1)
                row |= {f"{way}_ratio": round(2 * turns_s / (first + last), 3), f"{way}_cpu_ms": round(cpu_ms, 2)}
            print(json.dumps(row), flush=True)
        pipe.send("end")
        gateway.join(20)
    finally:
        for process in (gateway, engine):
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--answer", nargs="+", default=["2:0.5", "2:0", "0:0"])
    parser.add_argument("--ways", nargs="+", default=["native", "chat", "chat4"])
    parser.add_argument("--profile")
    asked = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}")
    for answer in asked.answer:
        answer_s, spread = map(float, answer.split(":"))
        measure(answer_s, spread, asked)
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
