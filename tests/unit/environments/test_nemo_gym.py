"""NeMo-Gym's side over HTTP: rows become runs of its agents, and whatever fails is recorded by its kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from actors.collector.core import Cancel, SampleDone, SampleProblem
from actors.environments.nemo_gym import NemoGym
from actors.environments.nemo_gym import head as heads
from actors.environments.nemo_gym.head import Gym, GymError
from contracts.producer import DataError, Endpoint, Outcome, Place, Task
from tests.unit.collector.test_collector_shell import REF, SAID, Gateway, Stand

ENDPOINT = Endpoint(
    base_url="http://g/v1", session="c-1", temperature=0.5, max_new_tokens=32, deadline_s=9.0, sample=2, attempt=1
)
PLACE = Place(actor="collector-0", collectors=1, run_dir="/nowhere", gateway_url=None)
ROW = {"responses_create_params": {"input": "hi", "top_p": 0.9, "metadata": {"extra_body": '{"k": 1}'}}, "answer": 7}
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def rewarded(request: web.Request) -> web.StreamResponse:
    return web.json_response({"reward": 0.5, "response": {"output": []}, "reward_components": {"a": 1, "b": None}})


class FakeGym:
    """A head server and one agent on the same port, which answers what `answer` makes of it."""

    def __init__(self) -> None:
        self.answer: Answer = rewarded
        self.bodies: list[Any] = []
        self.gone = asyncio.Event()
        self.arrived = asyncio.Event()
        self.blocks: dict[str, Any] = {}

    async def start(self) -> FakeGym:
        app = web.Application(client_max_size=2**26)
        app.add_routes([web.get("/global_config_dict_yaml", self._config), web.post("/run", self._run)])
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        self.blocks = {
            "policy_api_key": "x",
            "env": {"resources_servers": {"env": {"host": "127.0.0.1", "port": 1}}},
            "player": {"responses_api_agents": {"simple_agent": {"host": "127.0.0.1", "port": port}}},
        }
        return self

    async def _config(self, request: web.Request) -> web.Response:
        return web.json_response(yaml.safe_dump(self.blocks))

    async def _run(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.arrived.set()
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.gone.set()
            raise


@pytest.fixture
async def gym() -> AsyncIterator[FakeGym]:
    fake = await FakeGym().start()
    yield fake
    await fake.runner.cleanup()


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def producer(gym: FakeGym, tmp_path: Path) -> NemoGym:
    return NemoGym([write(tmp_path / "rows.jsonl", ROW)], agent="player", head=gym.url)


# --- rows ------------------------------------------------------------------------------------------------------------


async def first(producer: NemoGym, count: int, cursor: str | None = None, seed: int = 0, split: str = "train") -> Any:
    tasks = producer.tasks(cursor, seed, split)
    return [await anext(tasks) for _ in range(count)]


async def test_every_row_comes_once_a_pass_in_an_order_that_the_seed_decides(tmp_path: Path):
    rows = [{"responses_create_params": {}, "n": n} for n in range(20)]
    files = [write(tmp_path / "a.jsonl", *rows[:12]), write(tmp_path / "b.jsonl", *rows[12:])]
    producer = NemoGym(files, head="http://x")
    tasks = await first(producer, 40)
    numbers = [task.payload["row"]["n"] for task in tasks]
    assert sorted(numbers[:20]) == sorted(numbers[20:]) == list(range(20))
    assert numbers[:20] != numbers[20:]
    assert len({task.id for task in tasks}) == 40
    assert await first(producer, 40) == tasks
    assert await first(producer, 5, cursor=tasks[17].cursor) == tasks[18:23]
    assert await first(producer, 40, seed=1) != tasks


async def test_a_file_may_name_the_agent_of_its_rows(gym: FakeGym, tmp_path: Path):
    own = {"responses_create_params": {}, "agent_ref": {"name": "own"}}
    file = write(tmp_path / "a.jsonl", {"responses_create_params": {}}, own)
    producer = NemoGym([{"path": file, "agent": "filed"}], head=gym.url)
    tasks = await first(producer, 2)
    assert {task.payload["row"]["agent_ref"]["name"] for task in tasks} == {"filed", "own"}


async def test_held_out_rows_are_never_trained_on(tmp_path: Path):
    data = [write(tmp_path / "a.jsonl", *[{"responses_create_params": {}, "n": n} for n in range(40)])]
    producer = NemoGym(data, head="http://x", held_out_every=4)
    train = {task.payload["row"]["n"] for task in await first(producer, 60)}
    held = {task.payload["row"]["n"] for task in await first(producer, 30, split="eval")}
    assert held
    assert train | held == set(range(40))
    assert not train & held
    apart = NemoGym(data, head="http://x", eval_data=[write(tmp_path / "e.jsonl", ROW)])
    assert {task.payload["row"]["answer"] for task in await first(apart, 3, split="eval")} == {7}
    with pytest.raises(ValueError, match="evaluation needs eval_data"):
        await first(NemoGym(data, head="http://x"), 1, split="eval")


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "holds no row"), ("{\n", "rows.jsonl:1: not JSON"), ("[]\n", "rows.jsonl:1: a Gym row is an object")],
)
async def test_unusable_rows_are_named_by_file_and_line(tmp_path: Path, text: str, says: str):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match=says):
        await first(NemoGym([str(tmp_path / "rows.jsonl")], head="http://x"), 1)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"data": "rows.jsonl", "head": "http://x"}, "a list of JSONL files is due"),
        ({"data": ["nowhere.jsonl"], "head": "http://x"}, "nowhere.jsonl is neither a file here nor one of NeMo-Gym"),
        ({"data": ["a"]}, "either head=URL"),
        ({"data": [{"file": "a"}], "head": "http://x"}, "is neither a file nor"),
        ({"data": ["a"], "head": "http://x", "start": True}, "either head=URL"),
        ({"data": ["a"], "start": True}, "needs config_paths"),
        ({"data": ["a"], "head": "http://x", "held_out_every": 1}, "held_out_every=1"),
    ],
)
def test_settings_that_can_not_work_are_refused(args: Any, says: str):
    with pytest.raises(ValueError, match=says):
        NemoGym(**args)


async def test_a_foreign_cursor_is_refused(producer: NemoGym):
    with pytest.raises(ValueError, match="cursor 'x'"):
        await first(producer, 1, cursor="x")


# --- one rollout -----------------------------------------------------------------------------------------------------


class Speaks:
    async def endpoint(self) -> Endpoint:
        return ENDPOINT


async def play(producer: NemoGym, row: Any = ROW) -> Outcome:
    session: Any = Speaks()
    try:
        return await producer.rollout(Task(id="t", payload={"row": row}, cursor="1"), session)
    finally:
        await producer.close()


async def test_a_row_goes_to_its_agent_with_the_runs_sampling_and_its_episode(producer: NemoGym, gym: FakeGym):
    await producer.start(PLACE)
    outcome = await play(producer)
    assert outcome == Outcome(reward=0.5, components={"a": 1.0}, info={"agent": "player"})
    (body,) = gym.bodies
    params = body["responses_create_params"]
    assert (params["temperature"], params["max_output_tokens"], params["input"]) == (0.5, 32, "hi")
    assert "top_p" not in params
    assert json.loads(params["metadata"]["extra_body"]) == {"k": 1, "session": "c-1"}
    assert (body["answer"], body["agent_ref"]["name"], body["_ng_rollout_index"]) == (7, "player", 2)


async def test_a_rows_own_agent_goes_first_and_an_unknown_one_is_bad_data(producer: NemoGym):
    with pytest.raises(DataError, match="no agent 'other'; it has player"):
        await play(producer, {**ROW, "agent_ref": {"name": "other"}})


async def test_a_task_of_another_producer_is_bad_data(producer: NemoGym):
    session: Any = Speaks()
    with pytest.raises(DataError, match="no row"):
        await producer.rollout(Task(id="t", payload={"question": 1}, cursor="1"), session)


async def test_a_row_without_an_agent_is_bad_data(gym: FakeGym, tmp_path: Path):
    with pytest.raises(DataError, match="no agent_ref"):
        await play(NemoGym([write(tmp_path / "a.jsonl", ROW)], head=gym.url))


@pytest.mark.parametrize(
    ("value", "mask"), [(True, "the environment masked it"), ("cheated", "cheated"), (False, None), (None, None)]
)
async def test_an_environments_mask_is_kept(producer: NemoGym, gym: FakeGym, value: Any, mask: str | None):
    async def masked(request: web.Request) -> web.StreamResponse:
        return web.json_response({"reward": 1, "mask_sample": value})

    gym.answer = masked
    assert (await play(producer)).mask == mask


async def test_a_head_that_is_not_there_or_answers_nonsense_is_named(gym: FakeGym):
    with pytest.raises(GymError, match=r"no head server at http://127\.0\.0\.1:9"):
        await Gym("http://127.0.0.1:9").agents()
    gym.blocks = []  # pyright: ignore[reportAttributeAccessIssue]
    client = Gym(gym.url)
    with pytest.raises(GymError, match="answered no configuration"):
        await client.agents()
    await client.close()


async def test_starting_gym_needs_a_fixed_gateway_and_one_collector(tmp_path: Path):
    producer = NemoGym([write(tmp_path / "a.jsonl", ROW)], start=True, config_paths=["x"], python="/nowhere/python")
    with pytest.raises(ValueError, match=r"set gateway\.port"):
        await producer.start(PLACE)
    with pytest.raises(ValueError, match=r"launch\.collectors=2"):
        await producer.start(Place(actor="c", collectors=2, run_dir=str(tmp_path), gateway_url="http://g"))


# --- faults, as they are recorded ------------------------------------------------------------------------------------


@pytest.fixture
async def stand(monkeypatch: pytest.MonkeyPatch) -> Any:
    gateway = Gateway()
    await gateway.start()
    turn = {"sequence": 0, "fresh_ids": [8, 9], "sample": SAID}
    gateway.record = {"turns": [turn], "served": 1, "superseded": 0}
    stand = Stand(gateway, monkeypatch)
    stand.payload = {"row": ROW}
    yield stand
    await stand.shell.close()
    await gateway.runner.cleanup()


async def attempt(stand: Stand) -> Any:
    """The one result of one more attempt."""
    stand.inputs.clear()
    (result,) = await stand.run(samples=1)
    return result


def answers(status: int, text: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    return answer


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "failure", "reason"),
    [
        (cut, "infra", "agent 'player' at"),
        (answers(500, "nested"), "infra", "answered 500 nested"),
        (answers(503, "busy"), "infra", "answered 503 busy"),
        (answers(422, "top_k"), "data", "refuses the row: 422 top_k"),
        (answers(200, "{}"), "infra", "answered no result"),
        (answers(200, "no JSON"), "infra", "answered no result"),
        (answers(200, '{"reward": null, "response": {}}'), "infra", "reward None"),
        (answers(200, '{"reward": NaN}'), "infra", "reward nan"),
    ],
)
async def test_an_answer_without_a_result_is_recorded_by_its_kind_and_its_episode_is_over(
    stand: Stand, producer: NemoGym, gym: FakeGym, answer: Answer, failure: str, reason: str
):
    await stand.start(producer)
    gym.answer = answer
    result = await attempt(stand)
    assert isinstance(result, SampleProblem)
    assert result.failure == failure
    assert reason in result.reason
    assert stand.gateway.finished == list(stand.gateway.opened)


async def test_two_failures_and_then_a_result_are_three_attempts(stand: Stand, producer: NemoGym, gym: FakeGym):
    await stand.start(producer)
    script = [answers(500, "a"), answers(500, "b"), rewarded]
    found = []
    for gym.answer in script:
        found.append(type(await attempt(stand)))
    assert found == [SampleProblem, SampleProblem, SampleDone]


async def test_a_server_that_died_and_came_back_elsewhere_is_found_again(stand: Stand, producer: NemoGym, gym: FakeGym):
    await stand.start(producer)
    gym.answer = cut
    assert (await attempt(stand)).failure == "infra"
    other = await FakeGym().start()
    gym.blocks["player"] = other.blocks["player"]
    assert isinstance(await attempt(stand), SampleDone)
    assert len(other.bodies) == 1
    await other.runner.cleanup()


async def test_an_agent_that_never_ends_is_a_timeout_and_its_connection_is_closed(
    stand: Stand, producer: NemoGym, gym: FakeGym
):
    await stand.start(producer, deadline_s=0.3)
    gym.answer = hang
    result = await attempt(stand)
    assert (result.failure, "not over after 0.3 s" in result.reason) == ("timeout", True)
    await asyncio.wait_for(gym.gone.wait(), 30)


async def test_a_rollout_that_is_no_longer_ours_is_left_and_its_episode_finished(
    stand: Stand, producer: NemoGym, gym: FakeGym
):
    await stand.start(producer)
    gym.answer = hang
    running = asyncio.ensure_future(stand.run(samples=1))
    await asyncio.wait_for(gym.arrived.wait(), 30)
    await stand.shell.perform(Cancel(REF))
    assert await running == []
    await asyncio.wait_for(gym.gone.wait(), 30)
    async with asyncio.timeout(30):
        while not stand.gateway.finished:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_an_answer_beyond_its_bound_is_not_read(
    stand: Stand, producer: NemoGym, gym: FakeGym, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(heads, "ANSWER_MIB", 1)
    await stand.start(producer)
    gym.answer = answers(200, "x" * (2**20 + 1))
    assert "more than 1 MiB" in (await attempt(stand)).reason
