"""Requests a second through the gateway, as a share of what calling its engine directly gives, in one run.

    python -m tests.bench.gateway [--seconds 5] [--episodes 64 512] [--answer-s 2 0]

A fake engine in a process of its own answers 256 tokens with their logprobs after --answer-s: 2 is a fast engine, 128
tokens a second for every sequence; 0 leaves nothing but the cost of the way there: JSON, tokens, checks, the core's
steps, two hops instead of one. Each caller has one request in flight. `native` is POST /generate, `chat` a whole
episode of one turn: open, /v1/chat/completions, finish.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

ANSWER, PROMPT = 256, 64


def serve_engine(pipe: Connection, answer_s: float) -> None:
    """An engine whose every answer is the same `ANSWER` tokens, encoded once, after `answer_s`."""
    ids = [3 + k % 50 for k in range(ANSWER)]
    meta = {
        "finish_reason": {"type": "length", "length": ANSWER},
        "output_token_logprobs": [[-0.1 - k / 1000, token, None] for k, token in enumerate(ids)],
    }
    answer = msgspec.json.encode({"output_ids": ids, "meta_info": meta})

    async def generate(request: web.Request) -> web.Response:
        msgspec.json.decode(await request.read())
        await asyncio.sleep(answer_s)
        return web.Response(body=answer, content_type="application/json", headers={"x-sluice-boot": "1"})

    async def main() -> None:
        app = web.Application(client_max_size=2**26)
        app.add_routes([web.post("/generate", generate)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(main())


def serve_gateway(pipe: Connection, engine: str) -> None:
    """The gateway's real shell and core; the runtime's store is left out, as it is no part of the way."""
    from actors.gateway.actor import build
    from config.schema import EngineConfig, GatewayConfig, ModelConfig, RunConfig
    from contracts.events import EngineReady, Member, RefitCommitted
    from tests.unit.gateway.agents import write_chat_model
    from tests.unit.gateway.conftest import Host

    async def main() -> None:
        with tempfile.TemporaryDirectory() as directory:
            model = write_chat_model(Path(directory))
            config = RunConfig(
                model=ModelConfig(source=str(model)),
                engine=EngineConfig(max_total_tokens=100_000),
                gateway=GatewayConfig(max_episodes=10_000),
            )
            host = await Host(build(config, "gateway-0")).start()
            host.feed(EngineReady(engine="engine-0", boot=1, url=engine, ranks=1, seconds=0.0))
            members = (Member("engine-0", 1),)
            host.feed(RefitCommitted(
                epoch=1, version=1, step=1, engines=members, world_size=2, pause_s=0, drain_s=0, transfer_s=0, bytes=0,
            ))  # fmt: skip
            pipe.send(host.url)
            await asyncio.Event().wait()

    asyncio.run(main())


Ask = Callable[[aiohttp.ClientSession, int, int], Awaitable[None]]


async def post(session: aiohttp.ClientSession, url: str, body: bytes) -> None:
    async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
        data = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {data[:300]!r}")


def direct(url: str) -> Ask:
    prompt = [3 + k % 50 for k in range(PROMPT)]

    async def ask(session: aiohttp.ClientSession, caller: int, turn: int) -> None:
        params = {"temperature": 1.0, "max_new_tokens": ANSWER, "stop_token_ids": [1]}
        body = {"input_ids": prompt, "rid": f"r{caller}-{turn}", "sampling_params": params, "return_logprob": True}
        await post(session, f"{url}/generate", msgspec.json.encode(body))

    return ask


def native(url: str) -> Ask:
    prompt = [3 + k % 50 for k in range(PROMPT)]

    async def ask(session: aiohttp.ClientSession, caller: int, turn: int) -> None:
        sampling = {"temperature": 1.0, "max_new_tokens": ANSWER}
        body = {"session": f"s{caller}", "input_ids": prompt, "sampling": sampling}
        await post(session, f"{url}/generate", msgspec.json.encode(body))

    return ask


def chat(url: str) -> Ask:
    async def ask(session: aiohttp.ClientSession, caller: int, turn: int) -> None:
        name = f"{url}/episodes/e{caller}-{turn}"
        form = {"sampling": {"temperature": 1.0, "max_new_tokens": ANSWER}, "deadline_s": 60}
        await post(session, name, msgspec.json.encode(form))
        body = {"messages": [{"role": "user", "content": "a" * (PROMPT - 20)}]}
        await post(session, f"{name}/v1/chat/completions", msgspec.json.encode(body))
        await post(session, f"{name}/finish", b"{}")

    return ask


async def rate(ask: Ask, callers: int, seconds: float) -> float:
    """Turns a second of `callers` that each ask again as soon as they have their answer."""
    connector = aiohttp.TCPConnector(limit=0)
    done = 0
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(ask(session, caller, 0) for caller in range(callers)))
        started = time.perf_counter()

        async def loop(caller: int) -> None:
            nonlocal done
            turn = 0
            while time.perf_counter() - started < seconds:
                turn += 1
                await ask(session, caller, turn)
                done += 1

        await asyncio.gather(*(loop(caller) for caller in range(callers)))
        return done / (time.perf_counter() - started)


def begin(target: Any, *args: Any) -> tuple[Any, str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    if not ours.poll(120):
        raise TimeoutError(f"{target.__name__} did not start")
    return process, ours.recv()


def measure(answer_s: float, episodes: list[int], seconds: float) -> None:
    engine, engine_url = begin(serve_engine, answer_s)
    gateway, gateway_url = begin(serve_gateway, engine_url)
    ways = {"direct": direct(engine_url), "native": native(gateway_url), "chat": chat(gateway_url)}
    try:
        for callers in episodes:
            rates = {name: asyncio.run(rate(ask, callers, seconds + 2 * answer_s)) for name, ask in ways.items()}
            row = {f"{name}_per_s": round(value, 1) for name, value in rates.items()}
            ratios = {f"{name}_ratio": round(rates[name] / rates["direct"], 3) for name in ("native", "chat")}
            print(json.dumps({"answer_s": answer_s, "episodes": callers, **row, **ratios}), flush=True)
    finally:
        for process in (gateway, engine):
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--answer-s", type=float, nargs="+", default=[2.0, 0.0])
    asked = parser.parse_args()
    for answer_s in asked.answer_s:
        measure(answer_s, asked.episodes, asked.seconds)


if __name__ == "__main__":
    main()
