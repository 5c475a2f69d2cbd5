"""Real NeMo-Gym servers that fail: what the collector records of each fault, which is never a reward.

One Gym with one game plays over the gateway's real HTTP side. Between the two is a door, behind which the test decides
what Gym's model server is answered.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from actors.collector.core import Cancel, Rollout, SampleDone, SampleProblem
from actors.environments.nemo_gym import NemoGym
from actors.environments.nemo_gym.keeper import below
from actors.environments.nemo_gym.servers import Launch, Servers
from actors.gateway.tokens import Tokens
from contracts.core import Ref
from tests.unit.collector.test_collector_shell import Stand
from tests.unit.gateway.agents import Front, Policy, write_chat_model

GYM = os.environ.get("SLUICE_LANE_GYM")
AGENT = "blackjack_gymnasium_agent"
PATIENCE_S = 300.0
"""Longest that anything may take on a loaded machine."""
Answer = Callable[[], Awaitable[web.StreamResponse]]

pytestmark = [
    pytest.mark.skipif(GYM is None, reason="needs NeMo-Gym: make test-gym"),
    pytest.mark.timeout(4 * PATIENCE_S),
]


class Door:
    """Passes requests on to the gateway, or answers the next ones by `script`; while `shut` is set they wait."""

    def __init__(self, behind: str) -> None:
        self._behind = behind
        self.script: list[Answer] = []
        self.always: Answer | None = None
        self.asked = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.requests = 0

    async def __aenter__(self) -> Door:
        self._http = aiohttp.ClientSession()
        app = web.Application(client_max_size=2**26)
        app.add_routes([web.post("/{path:.*}", self._pass)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._http.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        data = await request.read()
        self.asked.set()
        await self.open.wait()
        if self.always is not None:
            return await self.always()
        if self.script:
            return await self.script.pop(0)()
        async with self._http.post(self._behind + request.path, data=data) as response:
            return web.Response(status=response.status, body=await response.read(), content_type=response.content_type)


def answering(status: int, body: Any) -> Answer:
    async def answer() -> web.StreamResponse:
        return web.json_response(body, status=status)

    return answer


class Table:
    """The game, and everything that a rollout of it goes through."""

    def __init__(self, door: Door, front: Front, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.door, self.front, self.servers = door, front, servers
        self._monkeypatch = monkeypatch
        self._stands: list[Stand] = []
        self._entries = 0

    async def stand(self, deadline_s: float) -> Stand:
        """A collector whose rollouts may take that long."""
        assert GYM is not None
        rows = ["environments/blackjack/data/example.jsonl"]
        producer = NemoGym(rows, head=self.servers.gym.head, python=GYM)
        gateway: Any = SimpleNamespace(url=self.front.url)
        stand = Stand(gateway, self._monkeypatch)
        task = await anext(producer.tasks(None, 0, "train"))
        stand.payload = dict(task.payload)
        await stand.start(producer, deadline_s=deadline_s)
        self._stands.append(stand)
        return stand

    async def play(self, stand: Stand, samples: int = 2) -> list[Any]:
        stand.inputs.clear()
        async with asyncio.timeout(PATIENCE_S):
            await stand.shell.perform(self.task(stand, samples))
        return list(stand.inputs)

    def task(self, stand: Stand, samples: int) -> Rollout:
        """A task of its own: Gym goes on playing what was given up, under the name of that episode."""
        self._entries += 1
        asked = stand.rollout(samples=samples, ref=Ref("tasks", f"{self._entries}-0"))
        replace = msgspec.structs.replace
        return replace(asked, task=replace(asked.task, task=f"t{self._entries}", index=self._entries))

    def agent(self) -> int:
        """The process of the game's agent."""
        assert self.servers._process is not None
        url = self.servers.gym._agents[AGENT]
        return listener(int(url.rsplit(":", 1)[1]), below(self.servers._process.pid))

    async def close(self) -> None:
        for stand in self._stands:
            await stand.shell.close()


def listener(port: int, pids: list[int]) -> int:
    """Which of the processes listens on `port`."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[3] == "0A" and int(line[1].split(":")[1], 16) == port}
    for pid in pids:
        try:
            held = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
        if held & sockets:
            return pid
    raise AssertionError(f"none of {pids} listens on {port}")


@pytest.fixture
async def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Table]:
    assert GYM is not None
    tokens = Tokens(write_chat_model(tmp_path / "model"))
    policy = Policy(tokens, lambda _: "<action>hit</action>")
    async with Front(tokens, policy, max_episodes=64) as front, Door(front.url) as door:
        launch = Launch(
            python=Path(GYM),
            config_paths=(
                "environments/blackjack/config.yaml",
                "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
            ),
            overrides=(),
            policy_url=f"{door.url}/v1",
            run_dir=tmp_path,
            deadline_s=PATIENCE_S,
        )
        servers = Servers(launch)
        began = time.monotonic()
        try:
            await servers.start()
            print(f"Gym was up after {time.monotonic() - began:.0f} s")
            table = Table(door, front, servers, monkeypatch)
            yield table
            await table.close()
        finally:
            await servers.close()


async def test_every_fault_of_real_servers_is_recorded_by_its_kind_and_the_next_game_is_played(table: Table):
    patient, hurried = await table.stand(PATIENCE_S), await table.stand(8.0)
    door = table.door
    games = await table.play(patient)
    assert [type(game) for game in games] == [SampleDone] * 2, games

    door.script = [answering(500, {"error": "a"})] * 2
    (game,) = await table.play(patient, samples=1)
    assert isinstance(game, SampleDone), "500 twice, then an answer"

    door.always = answering(500, {"error": "broken"})
    (game,) = await table.play(patient, samples=1)
    assert (type(game), game.failure) == (SampleProblem, "infra"), "500 for ever"

    door.always = answering(200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": []})
    (game,) = await table.play(patient, samples=1)
    assert (type(game), game.failure) == (SampleProblem, "infra"), "no choices"

    door.always = answering(503, {"error": "busy"})
    (game,) = await table.play(hurried, samples=1)
    assert (type(game), game.failure) == (SampleProblem, "timeout"), "503 for ever, which Gym asks again for ever"
    door.always = None

    await leave_in_the_middle(table, patient)
    await stop_the_agent(table, hurried)
    games = await table.play(patient)
    assert [type(game) for game in games] == [SampleDone] * 2, games

    await kill_the_agent(table, patient)


async def leave_in_the_middle(table: Table, stand: Stand) -> None:
    """The collector gives a game up: its episode is over, what Gym goes on asking for is refused, nothing counts."""
    door = table.door
    door.open.clear()
    door.asked.clear()
    stand.inputs.clear()
    given_up = table.task(stand, 1)
    playing = asyncio.ensure_future(stand.shell.perform(given_up))
    async with asyncio.timeout(PATIENCE_S):
        await door.asked.wait()
        await stand.shell.perform(Cancel(given_up.ref))
        await playing
    assert stand.inputs == []
    door.open.set()


async def stop_the_agent(table: Table, stand: Stand) -> None:
    """An agent that never ends, because its process stands still."""
    pid = table.agent()
    os.kill(pid, signal.SIGSTOP)
    try:
        games = await table.play(stand)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [(type(game), game.failure) for game in games] == [(SampleProblem, "timeout")] * 2, games


async def kill_the_agent(table: Table, stand: Stand) -> None:
    """In the middle of two games. That Gym ends with it and is started anew takes a minute, and is tested elsewhere."""
    door, pid = table.door, table.agent()
    door.open.clear()
    door.asked.clear()
    playing = asyncio.ensure_future(table.play(stand))
    async with asyncio.timeout(PATIENCE_S):
        await door.asked.wait()
    os.kill(pid, signal.SIGKILL)
    games = await playing
    door.open.set()
    assert [(type(game), game.failure) for game in games] == [(SampleProblem, "infra")] * 2, games
