"""A Gym that fails, a real collector, gateway and store: what the event log of the run says of each fault."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import structlog
from aiohttp import web

from actors.collector.actor import build
from actors.gateway.tokens import Tokens
from config.schema import AttemptsConfig, BrokerConfig, ProducerConfig, RolloutConfig, RunConfig
from contracts.envelope import STREAM_OF, Envelope, decode, encode
from contracts.events import GatewayReady, TaskIssued
from pipeline import broker
from pipeline.bus import Bus
from pipeline.eventlog import render
from pipeline.runtime.clock import WallClock
from pipeline.runtime.loop import Runtime
from pipeline.runtime.machine import GROUP
from tests.unit.environments.test_nemo_gym import FakeGym, hang, write
from tests.unit.gateway.agents import Front, Policy, write_chat_model

WAIT_S = 60.0
ROW = {"responses_create_params": {"input": "hi"}}


class Agent:
    """An agent of Gym's: one turn through the gateway, then what the row asks for."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self.runs: dict[str, int] = {}

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        row = await request.json()
        fault = row["fault"]
        self.runs[fault] = run = self.runs.get(fault, 0) + 1
        extra = json.loads(row["responses_create_params"]["metadata"]["extra_body"])
        asked = {"messages": [{"role": "user", "content": "hi"}], **extra}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self._gateway}/v1/chat/completions", json=asked) as turn,
        ):
            assert turn.status == 200, await turn.text()
        match fault:
            case "500 twice" if run <= 2:
                return web.Response(status=500, text="nested")
            case "500 for ever":
                return web.Response(status=500, text="broken")
            case "503 for ever":
                return web.Response(status=503, text="busy")
            case "no choices":
                return web.Response(status=500, text="IndexError: choices[0]")
            case "refused":
                return web.Response(status=422, text="top_k")
            case "killed":
                assert request.transport is not None
                request.transport.abort()
            case "hangs":
                return await hang(request)
        return web.json_response({"reward": 1.0, "response": {}})


class Log:
    """The run's store."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._count = 0

    async def put(self, event: Any) -> None:
        stream = STREAM_OF[type(event)]
        self._count += 1
        envelope = Envelope(
            id=f"hand:{self._count}.0", run="gym", stream=stream, actor="hand", boot=1, epoch=0, wall_ns=0, mono_ns=0,
            body=event,
        )  # fmt: skip
        await self.bus.post(stream, encode(envelope))

    async def outcomes(self, count: int) -> dict[str, Any]:
        """The log of trajectories as `pipeline log` prints it, by task, once it has `count` entries."""
        async with asyncio.timeout(WAIT_S):
            while True:
                found = await self.bus.read_after({"trajectories": "0-0"}, count=999, block_ms=None)
                if len(found) >= count:
                    printed = [msgspec.json.decode(render(e, decode("trajectories", e.data))) for e in found]
                    return {event["body"]["task"]: event for event in printed}
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def playing(folder: Path, **rollout: Any) -> AsyncIterator[Log]:
    """A run's store, with a collector that plays what is put there."""
    with broker.choose({}, folder / "store", BrokerConfig()) as store:
        bus, actors = [await Bus.connect(store.url, "gym", actor=name) for name in ("hand", "collector-0")]
        await bus.ensure_group("tasks", GROUP)
        tokens = Tokens(write_chat_model(folder / "model"))
        gym = await FakeGym().start()
        async with Front(tokens, Policy(tokens, lambda _: "ok")) as front:
            gym.answer = Agent(front.url)
            rows = write(folder / "rows.jsonl", ROW)
            config = RunConfig(
                producer=ProducerConfig(name="nemo_gym", args={"data": [rows], "agent": "player", "head": gym.url}),
                rollout=RolloutConfig(retry_backoff_s=0.01, **rollout),
            )
            shell: Any = build(config, "collector-0")
            log = structlog.get_logger()
            runtime = Runtime(shell, actors, "gym", "collector-0", config, str(folder), WallClock(), log)
            running = asyncio.create_task(runtime.run())
            found = Log(bus)
            await found.put(GatewayReady(gateway="gateway-0", boot=1, url=front.url))
            yield found
            running.cancel()
            await asyncio.wait((running,))
        await gym.runner.cleanup()
        for each in (bus, actors):
            await each.close()


async def outcomes(log: Log, *faults: str) -> dict[str, Any]:
    for index, fault in enumerate(faults):
        payload = json.dumps({"row": {**ROW, "fault": fault}}).encode()
        await log.put(TaskIssued(task=fault, index=index, samples=1, payload=payload, producer="nemo_gym", seed=0))
    return await log.outcomes(len(faults))


async def test_faults_of_a_gym_are_in_the_log_with_kind_and_spent_budget_and_are_no_reward(tmp_path: Path):
    async with playing(tmp_path, deadline_s=WAIT_S) as log:
        found = await outcomes(
            log, "none", "500 twice", "500 for ever", "503 for ever", "no choices", "refused", "killed"
        )
    rewarded = {task: event["body"] for task, event in found.items() if event["kind"] == "trajectory.finished"}
    assert {task: (body["reward"], body["attempt"]) for task, body in rewarded.items()} == {
        "none": (1.0, 1),
        "500 twice": (1.0, 3),
    }
    failed = {task: event["body"] for task, event in found.items() if event["kind"] == "sample.failed"}
    assert {task: (body["failure"], body["attempt"]) for task, body in failed.items()} == {
        "500 for ever": ("infra", 3),
        "503 for ever": ("infra", 3),
        "no choices": ("infra", 3),
        "killed": ("infra", 3),
        "refused": ("data", 1),
    }
    assert "agent 'player' at" in failed["killed"]["reason"]
    assert "422 top_k" in failed["refused"]["reason"]
    for task in ("500 for ever", "503 for ever", "no choices", "killed"):
        assert failed[task]["reason"].endswith("(failure 3 of rollout.attempts.infra=3)")


async def test_an_agent_that_never_ends_is_in_the_log_as_a_timeout_of_its_environment(tmp_path: Path):
    async with playing(tmp_path, deadline_s=0.5, attempts=AttemptsConfig(timeout=2)) as log:
        found = await outcomes(log, "hangs")
    event = found["hangs"]
    assert (event["kind"], event["body"]["failure"], event["body"]["attempt"]) == ("sample.failed", "timeout", 2)
    assert event["body"]["reason"].endswith("(failure 2 of rollout.attempts.timeout=2)")
