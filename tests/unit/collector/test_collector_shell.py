"""The collector's shell with a gateway of a few lines and environments that work, fail, hang and lie."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from aiohttp import web

from actors.collector import actor
from actors.collector.actor import STUCK, CollectorShell, StuckThreads, build
from actors.collector.core import (
    Cancel,
    CancelAll,
    Cancelled,
    Discard,
    GatewayGone,
    Restart,
    Rollout,
    SampleDone,
    SampleProblem,
    ThreadsStuck,
    Try,
)
from config.schema import ProducerConfig, RolloutConfig, RunConfig
from contracts import trajectory
from contracts.core import Fatal, Ref
from contracts.events import Provenance, TaskIssued
from contracts.producer import DataError, Outcome, Place, Session, Task

REF = Ref("tasks", "1-0")
WAIT_S = 60.0


class Gateway:
    """POST /generate answers what `answer` makes of the body."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], Awaitable[tuple[int, Any]]] = self.echo
        self.arrived = asyncio.Event()
        self.opened: dict[str, Any] = {}
        self.finished: list[str] = []
        self.record: dict[str, Any] = {"turns": [], "served": 0, "superseded": 0}

    async def _open(self, request: web.Request) -> web.Response:
        self.opened[request.match_info["name"]] = await request.json()
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        self.finished.append(request.match_info["name"])
        return web.json_response(self.record)

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/episodes/{name}", self._open),
                web.post("/episodes/{name}/finish", self._finish),
            ]
        )
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.arrived.set()
        status, answer = await self.answer(body)
        return web.json_response(answer, status=status)

    @staticmethod
    async def echo(body: dict[str, Any]) -> tuple[int, Any]:
        """Sample `k` of `n` is the tokens [k, k]; the prompt is two tokens more each turn."""
        samples = [
            {
                "output_ids": [k, k],
                "logprobs": [-0.5, -0.25],
                "spans": [{"start": 0, "end": 2, "version": 4, "engine": "engine-0", "boot": 2}],
                "finish_reason": "stop",
                "text": str(k),
            }
            for k in range(body["n"])
        ]
        return 200, {"prompt_ids": [*body.get("prefix_ids", []), 8, 9], "samples": samples, "held_s": 0.0}


class Single:
    """A single-turn environment: the reward is the number in the text."""

    contract = 1

    def tasks(self, cursor: str | None, seed: int, split: str) -> Any:
        raise NotImplementedError

    def prompt(self, task: Task) -> Any:
        return f"Q{task.payload['n']}"

    def score(self, task: Task, completion: str) -> Any:
        return float(completion)


class Multi:
    """A multi-turn environment of two turns."""

    contract = 1

    def tasks(self, cursor: str | None, seed: int, split: str) -> Any:
        raise NotImplementedError

    async def rollout(self, task: Task, session: Session) -> Any:
        first = await session.generate("a")
        second = await session.generate("b")
        return Outcome(reward=0.5, components={"turns": 2.0}, mask="why", info={"said": first.text + second.text})


class Stand:
    """A shell under test; collects what it delivers."""

    def __init__(self, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gateway = gateway
        self.inputs: list[Any] = []
        self.payload: Any = {"n": 1}
        self._monkeypatch = monkeypatch
        self.shell: CollectorShell

    async def start(self, producer: Any, **rollout: Any) -> CollectorShell:
        self._monkeypatch.setattr(actor, "load", lambda name, args: producer)
        self.shell = build(RunConfig(rollout=RolloutConfig(**{"score_deadline_s": WAIT_S, **rollout})), "collector-0")
        clock = SimpleNamespace(now=asyncio.get_running_loop().time)
        context: Any = SimpleNamespace(
            actor="collector-0",
            boot=3,
            clock=clock,
            deliver=self.inputs.append,
            log=structlog.get_logger(),
            run_dir="/nowhere",
        )
        await self.shell.start(context)
        return self.shell

    def rollout(self, samples: int = 2, ref: Ref = REF, url: str | None = None, split: Any = "train") -> Rollout:
        task = TaskIssued(
            task="t",
            index=6,
            samples=samples,
            payload=json.dumps(self.payload).encode(),
            producer="p",
            seed=0,
            split=split,
        )
        tries = tuple(Try(k, 1) for k in range(samples))
        return Rollout(ref=ref, task=task, tries=tries, url=url or self.gateway.url)

    async def run(self, **changes: Any) -> list[Any]:
        async with asyncio.timeout(WAIT_S):
            assert await self.shell.perform(self.rollout(**changes)) is None
        return self.inputs


@pytest.fixture
async def stand(monkeypatch: pytest.MonkeyPatch) -> Any:
    gateway = Gateway()
    await gateway.start()
    stand = Stand(gateway, monkeypatch)
    yield stand
    await stand.shell.close()
    await gateway.runner.cleanup()


# --- single turn -----------------------------------------------------------------------------------------------------


async def test_a_group_is_one_request_and_each_sample_a_scored_checked_trajectory(stand: Stand) -> None:
    shell = await stand.start(Single(), temperature=0.5, max_new_tokens=7)
    inputs = await stand.run(samples=3)
    (body,) = stand.gateway.bodies
    assert (body["prompt"], body["n"]) == ("Q1", 3)
    assert (body["sampling"]["temperature"], body["sampling"]["max_new_tokens"]) == (0.5, 7)
    assert sorted((done.sample, done.reward) for done in inputs) == [(0, 0.0), (1, 1.0), (2, 2.0)]
    done = next(done for done in inputs if done.sample == 2)
    assert (done.prompt_tokens, done.completion_tokens, done.stop_reason) == (2, 2, "stop")
    assert done.sources == (Provenance(4, "engine-0", 2),)
    assert done.mask_reason is None
    payload = shell.payload(done.handle)
    assert len(payload) == done.size
    held = trajectory.decode(payload)
    assert (held.task, held.index, held.sample, held.attempt, held.reward) == ("t", 6, 2, 1, 2.0)
    assert held.sequences[0].ids == bytes([8, 0, 0, 0, 9, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0])


async def test_random_numbers_depend_on_task_sample_and_attempt_only(stand: Stand) -> None:
    await stand.start(Single())
    await stand.run()
    await stand.run(ref=Ref("tasks", "2-0"))
    first, again = (body["sampling"]["seed"] for body in stand.gateway.bodies)
    assert first == again


async def test_a_chat_prompt_goes_out_as_messages(stand: Stand) -> None:
    class Chat(Single):
        def prompt(self, task: Task) -> Any:
            return [{"role": "user", "content": "hi"}]

    await stand.start(Chat())
    await stand.run()
    assert stand.gateway.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("raised", "failure", "reason"),
    [
        (DataError("no answer"), "data", "producer 'reasoning_gym': no answer"),
        (ZeroDivisionError("oops"), "infra", "producer 'reasoning_gym': score raised ZeroDivisionError: oops"),
    ],
)
async def test_a_failing_score_fails_its_sample_only(
    stand: Stand, raised: Exception, failure: str, reason: str
) -> None:
    class Fails(Single):
        def score(self, task: Task, completion: str) -> Any:
            if completion == "0":
                raise raised
            return 1.0

    await stand.start(Fails())
    problem, done = sorted(await stand.run(), key=lambda input: input.sample)
    assert problem == SampleProblem(REF, 0, 1, failure, reason)  # type: ignore[arg-type]
    assert isinstance(done, SampleDone)


async def test_a_failing_prompt_fails_all_samples(stand: Stand) -> None:
    class Fails(Single):
        def prompt(self, task: Task) -> Any:
            raise DataError("bad row")

    await stand.start(Fails())
    assert [(p.sample, p.failure) for p in await stand.run()] == [(0, "data"), (1, "data")]
    assert stand.gateway.bodies == []


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), "0.5", None, Outcome(reward=float("nan"))])
async def test_a_reward_that_is_not_a_finite_number_is_a_data_failure(stand: Stand, answer: Any) -> None:
    class Lies(Single):
        def score(self, task: Task, completion: str) -> Any:
            return answer

    await stand.start(Lies())
    for problem in await stand.run():
        assert problem.failure == "data"
        assert "finite" in problem.reason


async def test_a_score_that_never_returns_is_a_timeout_that_names_the_producer(stand: Stand) -> None:
    gate = threading.Event()

    class Hangs(Single):
        def score(self, task: Task, completion: str) -> Any:
            return gate.wait(WAIT_S) if completion == "0" else 1.0

    await stand.start(Hangs(), score_deadline_s=0.05)
    inputs = await stand.run()
    gate.set()
    (problem,) = [input for input in inputs if isinstance(input, SampleProblem)]
    assert (problem.sample, problem.failure) == (0, "timeout")
    assert problem.reason == "producer 'reasoning_gym': score gave no answer within 0.05 s"


async def test_too_many_stuck_threads_are_reported_once_after_the_problems_and_end_the_process(stand: Stand) -> None:
    gate = threading.Event()

    class Hangs(Single):
        def score(self, task: Task, completion: str) -> Any:
            return gate.wait(WAIT_S)

    shell = await stand.start(Hangs(), score_deadline_s=0.05)
    inputs = await stand.run(samples=STUCK + 2)
    gate.set()
    (stuck,) = [input for input in inputs if isinstance(input, ThreadsStuck)]
    assert stuck.count >= STUCK
    assert "'reasoning_gym'" in stuck.reason
    with pytest.raises(StuckThreads, match="8 stuck"):
        await shell.perform(Restart("8 stuck"))


@pytest.mark.parametrize(
    ("status", "kind", "failure"),
    [
        (400, "data", "data"),
        (503, "infra", "infra"),
        (504, "timeout", "timeout"),
        (400, "noncontiguous", "noncontiguous"),
    ],
)
async def test_a_refusal_of_the_gateway_keeps_its_kind(stand: Stand, status: int, kind: str, failure: str) -> None:
    async def refuse(body: dict[str, Any]) -> tuple[int, Any]:
        return status, {"error": {"type": kind, "message": "no"}}

    stand.gateway.answer = refuse
    await stand.start(Single())
    assert await stand.run() == [
        SampleProblem(REF, sample, 1, failure, "gateway: no")  # type: ignore[arg-type]
        for sample in (0, 1)
    ]


async def test_an_address_where_nobody_listens_is_an_outage_not_an_attempt(stand: Stand) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    await stand.start(Single())
    (gone,) = await stand.run(url=f"http://127.0.0.1:{port}")
    assert isinstance(gone, GatewayGone)
    assert gone.tries == (Try(0, 1), Try(1, 1))


async def test_a_gateway_that_dies_during_a_request_is_an_outage(stand: Stand) -> None:
    async def die(body: dict[str, Any]) -> tuple[int, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    stand.gateway.answer = die
    await stand.start(Single())
    running = asyncio.ensure_future(stand.run())
    await stand.gateway.arrived.wait()
    await stand.gateway.runner.cleanup()
    (gone,) = await running
    assert isinstance(gone, GatewayGone)


async def test_tokens_that_break_an_invariant_are_a_data_failure_not_a_trajectory(stand: Stand) -> None:
    async def lie(body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = await Gateway.echo(body)
        answer["samples"][0]["logprobs"] = [-0.5, 0.25]
        answer["samples"][1]["spans"] = []
        return status, answer

    stand.gateway.answer = lie
    await stand.start(Single())
    problems = sorted(await stand.run(), key=lambda input: input.sample)
    assert [problem.failure for problem in problems] == ["data", "data"]
    assert "logprob 0.25 at 3" in problems[0].reason
    assert "spans end at 2" in problems[1].reason


@pytest.mark.parametrize(
    ("logprobs", "said"),
    [([-0.5, -1e39], "a logprob no float32"), ([-0.5, 0.25], "logprob 0.25 at 3"), ([-0.5], "logprobs has 12 bytes")],
)
async def test_infinite_positive_and_missing_logprobs_are_never_trained_on(
    stand: Stand, logprobs: Any, said: str
) -> None:
    async def lie(body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = await Gateway.echo(body)
        answer["samples"][0]["logprobs"] = logprobs
        return status, answer

    stand.gateway.answer = lie
    await stand.start(Single())
    (problem,) = [input for input in await stand.run() if isinstance(input, SampleProblem)]
    assert problem.sample == 0
    assert said in problem.reason


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("overlong", ["keep", "mask", "drop"])
async def test_overlong_train_samples_are_masked_if_asked_to(stand: Stand, overlong: str, split: str) -> None:
    async def cut(body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = await Gateway.echo(body)
        answer["samples"][0]["finish_reason"] = "length"
        return status, answer

    stand.gateway.answer = cut
    shell = await stand.start(Single(), overlong=overlong)
    done = sorted(await stand.run(split=split), key=lambda input: input.sample)
    masks = [trajectory.decode(shell.payload(input.handle)).mask_reason for input in done]
    assert masks == [input.mask_reason for input in done]
    expected = "overlong: cut off at rollout.max_new_tokens=" if (overlong, split) == ("mask", "train") else None
    assert masks[1] is None
    assert masks[0] is None if expected is None else (masks[0] or "").startswith(expected)


# --- multi turn ------------------------------------------------------------------------------------------------------


async def test_an_episode_is_one_session_whose_turns_carry_their_ids(stand: Stand) -> None:
    shell = await stand.start(Multi())
    (done,) = await stand.run(samples=1)
    first, second = stand.gateway.bodies
    assert first["session"] == second["session"]
    assert first["sampling"]["seed"] != second["sampling"]["seed"]
    assert second["prefix_ids"] == [8, 9, 0, 0]
    held = trajectory.decode(shell.payload(done.handle))
    assert list(held.sequences[0].loss_mask) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert (held.mask_reason, held.info, held.components) == ("why", {"said": "00"}, {"turns": 2.0})
    assert (done.mask_reason, done.reward, done.components) == ("why", 0.5, {"turns": 2.0})
    assert (done.prompt_tokens, done.completion_tokens) == (4, 4)


@pytest.mark.parametrize(
    ("raised", "failure", "reason"),
    [
        (DataError("no game"), "data", "producer 'reasoning_gym': no game"),
        (KeyError("board"), "infra", "producer 'reasoning_gym': rollout raised KeyError: 'board'"),
    ],
)
async def test_a_failing_episode_keeps_its_kind(stand: Stand, raised: Exception, failure: str, reason: str) -> None:
    class Fails(Multi):
        async def rollout(self, task: Task, session: Session) -> Any:
            raise raised

    await stand.start(Fails())
    (problem,) = await stand.run(samples=1)
    assert (problem.failure, problem.reason) == (failure, reason)


@pytest.mark.parametrize("ending", ["returns", "raises", "calls it data"])
async def test_an_environment_cannot_turn_an_infrastructure_failure_into_a_result(stand: Stand, ending: str) -> None:
    class Swallows(Multi):
        async def rollout(self, task: Task, session: Session) -> Any:
            try:
                await session.generate("a")
            except Exception as error:
                if ending == "raises":
                    raise RuntimeError("model failed") from error
                if ending == "calls it data":
                    raise DataError("model failed") from error
            return 0.0

    async def refuse(body: dict[str, Any]) -> tuple[int, Any]:
        return 503, {"error": {"type": "infra", "message": "no engine"}}

    stand.gateway.answer = refuse
    await stand.start(Swallows())
    (problem,) = await stand.run(samples=1)
    assert (problem.failure, problem.reason) == ("infra", "gateway: no engine")


async def test_a_prompt_that_the_gateway_refuses_is_a_data_failure_if_the_environment_lets_it_pass(
    stand: Stand,
) -> None:
    async def refuse(body: dict[str, Any]) -> tuple[int, Any]:
        return 400, {"error": {"type": "data", "message": "too long"}}

    stand.gateway.answer = refuse
    await stand.start(Multi())
    (problem,) = await stand.run(samples=1)
    assert problem.failure == "data"


async def test_an_episode_without_a_turn_is_a_data_failure(stand: Stand) -> None:
    class Silent(Multi):
        async def rollout(self, task: Task, session: Session) -> Any:
            return 1.0

    await stand.start(Silent())
    (problem,) = await stand.run(samples=1)
    assert (problem.failure, "without a turn" in problem.reason) == ("data", True)


async def test_an_episode_past_its_deadline_is_a_timeout_even_if_it_ignores_its_cancellation(stand: Stand) -> None:
    end = asyncio.Event()

    class Stubborn(Multi):
        async def rollout(self, task: Task, session: Session) -> Any:
            while not end.is_set():
                try:
                    await end.wait()
                except asyncio.CancelledError:
                    continue

    await stand.start(Stubborn(), deadline_s=0.05)
    (problem,) = await stand.run(samples=1)
    end.set()
    assert problem.failure == "timeout"
    assert problem.reason == "producer 'reasoning_gym': the rollout was not over after 0.05 s"


# --- cancellation and the rest ---------------------------------------------------------------------------------------


async def hang(body: dict[str, Any]) -> tuple[int, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_cancelled_task_delivers_nothing_and_another_goes_on(stand: Stand) -> None:
    stand.gateway.answer = hang
    shell = await stand.start(Single())
    lost = asyncio.ensure_future(shell.perform(stand.rollout()))
    await stand.gateway.arrived.wait()
    stand.gateway.answer = stand.gateway.echo
    await stand.run(ref=Ref("tasks", "2-0"))
    assert await shell.perform(Cancel(REF)) is None
    assert await asyncio.wait_for(lost, WAIT_S) is None
    assert {input.ref.entry for input in stand.inputs} == {"2-0"}


async def test_cancelling_drops_the_results_held_for_the_task(stand: Stand) -> None:
    shell = await stand.start(Single())
    first, second = await stand.run()
    await shell.perform(Discard(first.handle))
    await shell.perform(Cancel(REF))
    for done in (first, second):
        with pytest.raises(KeyError):
            shell.payload(done.handle)


async def test_cancelling_all_answers_when_nothing_runs_any_more(stand: Stand) -> None:
    stand.gateway.answer = hang
    shell = await stand.start(Single())
    running = asyncio.ensure_future(shell.perform(stand.rollout()))
    await stand.gateway.arrived.wait()
    assert await asyncio.wait_for(shell.perform(CancelAll()), WAIT_S) == Cancelled()
    assert await asyncio.wait_for(running, WAIT_S) is None
    assert stand.inputs == []


async def test_an_unknown_producer_is_fatal_at_start() -> None:
    context: Any = None
    shell = build(RunConfig(producer=ProducerConfig(name="chess")), "collector-0")
    with pytest.raises(Fatal, match="'chess' is not registered"):
        await shell.start(context)


async def test_commands_of_others_are_errors(stand: Stand) -> None:
    shell = await stand.start(Single())
    with pytest.raises(TypeError, match="can't perform"):
        await shell.perform(object())


# --- behind an endpoint ----------------------------------------------------------------------------------------------

SAID = {
    "output_ids": [5],
    "logprobs": [-0.5],
    "spans": [{"start": 0, "end": 1, "version": 4, "engine": "engine-0", "boot": 2}],
    "finish_reason": "stop",
    "text": "x",
}
TURN = {"sequence": 0, "fresh_ids": [8, 9], "sample": SAID, "flaws": []}
LEFT = {"turn": 2, "message": 1, "character": 3, "token": 7, "what": "other"}


class Agent(Multi):
    """Hands its session to an agent that need not be ours."""

    async def rollout(self, task: Task, session: Session) -> Any:
        self.endpoint = await session.endpoint()
        return 1.0


async def test_an_agents_turns_come_from_the_gateways_record(stand: Stand) -> None:
    agent = Agent()
    shell = await stand.start(agent, temperature=0.5, max_new_tokens=7, noncontiguous="truncate")
    flawed = {**TURN, "flaws": [{"kind": "invalid_tool_call", "at": 3, "what": "not JSON"}]}
    stand.gateway.record = {"turns": [flawed], "served": 2, "superseded": 0, "diverged": LEFT}
    (done,) = await stand.run(samples=1)
    name = agent.endpoint.session
    assert stand.gateway.finished == [name]
    assert agent.endpoint.base_url == f"{stand.gateway.url}/episodes/{name}/v1"
    opened = stand.gateway.opened[name]
    assert (opened["noncontiguous"], opened["sampling"]["temperature"]) == ("truncate", 0.5)
    assert done.sources == (Provenance(4, "engine-0", 2),)
    assert done.components == {"invalid_tool_calls": 1.0, "noncontiguous": 1.0}
    held = trajectory.decode(shell.payload(done.handle))
    assert [sequence.length for sequence in held.sequences] == [3]
    assert "token 7" in held.info["noncontiguous"]


@pytest.mark.parametrize("multi", [True, False])
async def test_patterns_see_the_special_tokens_of_an_answer(stand: Stand, multi: bool) -> None:
    async def answer(body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = await Gateway.echo(body)
        return status, {**answer, "samples": [{**each, "written": "<|call|>0"} for each in answer["samples"]]}

    shell = await stand.start(Agent() if multi else Single(), invalid_tool_call_patterns=(r"<\|call\|>\d",))
    stand.gateway.answer = answer
    turn = {**TURN, "sample": {**SAID, "written": "x<|call|>1"}}
    stand.gateway.record = {"turns": [TURN, {**turn, "fresh_ids": []}], "served": 2, "superseded": 0}
    (done,) = await stand.run(samples=1)
    assert done.components == {"invalid_tool_calls": 1.0}
    info = trajectory.decode(shell.payload(done.handle)).info
    assert info["invalid_tool_calls"].startswith("turn 2, character 1" if multi else "turn 1, character 0")


@pytest.mark.parametrize(
    ("record", "failure", "reason"),
    [
        ({"failure": {"type": "infra", "message": "no engine"}}, "infra", "no engine"),
        ({"failure": {"type": "timeout", "message": "late"}}, "timeout", "late"),
        ({"diverged": LEFT}, "noncontiguous", "message 1, character 3"),
        ({}, "data", "without a turn"),
    ],
)
async def test_what_went_wrong_behind_an_endpoint_is_never_a_reward(
    stand: Stand, record: Any, failure: str, reason: str
) -> None:
    await stand.start(Agent())
    stand.gateway.record |= record
    (problem,) = await stand.run(samples=1)
    assert isinstance(problem, SampleProblem)
    assert problem.failure == failure
    assert reason in problem.reason


async def test_a_rollout_that_overstays_has_its_episode_finished(stand: Stand) -> None:
    class Endless(Agent):
        async def rollout(self, task: Task, session: Session) -> Any:
            await session.endpoint()
            await asyncio.Event().wait()

    await stand.start(Endless(), deadline_s=0.2)
    (problem,) = await stand.run(samples=1)
    assert problem.failure == "timeout"
    async with asyncio.timeout(WAIT_S):
        while not stand.gateway.finished:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert stand.gateway.finished == list(stand.gateway.opened)


async def test_a_rollout_that_raises_has_its_episode_finished_and_keeps_its_reason(stand: Stand) -> None:
    class Raises(Agent):
        async def rollout(self, task: Task, session: Session) -> Any:
            await session.endpoint()
            raise DataError("unusable")

    await stand.start(Raises())
    (problem,) = await stand.run(samples=1)
    assert (problem.failure, problem.reason) == ("data", "producer 'reasoning_gym': unusable")
    assert len(stand.gateway.finished) == 1


# --- producers that need something running ---------------------------------------------------------------------------


class Served(Multi):
    """A producer that starts something."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self.log: list[Any] = []

    async def start(self, place: Place) -> None:
        self.log.append(place)
        if self.problem is not None:
            raise self.problem

    async def close(self) -> None:
        self.log.append("closed")


async def test_a_producer_is_started_where_it_is_told_and_closed_once(stand: Stand) -> None:
    producer = Served()
    shell = await stand.start(producer)
    await shell.close()
    assert producer.log == [Place(actor="collector-0", collectors=1, run_dir="/nowhere", gateway_url=None), "closed"]


async def test_a_producer_that_does_not_start_ends_the_run_with_its_reason_and_is_closed(stand: Stand) -> None:
    producer = Served(ConnectionError("no servers"))
    with pytest.raises(Fatal, match="'reasoning_gym' did not start: ConnectionError: no servers"):
        await stand.start(producer)
    await stand.shell.close()
    assert producer.log[1:] == ["closed"]
