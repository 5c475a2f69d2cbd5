"""OpenAI's APIs as an agent sees them: answers, streams, refusals, and episodes that end under it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from actors.gateway import http
from actors.gateway.client import GatewayClient, Generated, InfraProblem
from actors.gateway.tokens import Tokens
from actors.gateway.upstream import Job
from contracts.trajectory import Sampling
from tests.unit.gateway.agents import Front, Policy, write_chat_model

TOOLS = [{"type": "function", "function": {"name": "look"}}]
CALLS = '<think>hm</think>See: <tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>'
HI = [{"role": "user", "content": "hi"}]
ON = [*HI, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
OTHER = [{"role": "user", "content": "ho"}, *ON[1:]]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def _asking(arguments: str) -> str:
    """A message that calls a tool with this text."""
    call = {"function": {"name": "look", "arguments": arguments}}
    return json.dumps({"role": "assistant", "content": "", "tool_calls": [call]})


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens(write_chat_model(tmp_path_factory.mktemp("model"), context=400))


@pytest.fixture
def policy(tokens: Tokens) -> Policy:
    return Policy(tokens, lambda _: "ok")


@pytest.fixture
async def front(tokens: Tokens, policy: Policy) -> AsyncIterator[Front]:
    async with Front(tokens, policy, max_body_mib=1, max_episodes=2) as front:
        yield front


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_a_chat_answer_is_taken_apart_and_carries_exact_tokens_with_their_versions(front: Front, policy: Policy):
    policy.say = lambda _: CALLS
    status, body = await front.post(CHAT, {"messages": HI, "tools": TOOLS, "model": "m", "logprobs": True})
    assert status == 200
    (choice,) = body["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"], choice["finish_reason"]) == ("See:", "hm", "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"x": 1}'}
    count = len(message["generation_token_ids"])
    assert message["prompt_token_ids"] == policy.jobs[0].prompt_ids
    assert message["generation_log_probs"] == [-1.0] * count
    assert message["generation_policy_versions"] == [7] * count
    assert len(choice["logprobs"]["content"]) == count
    assert body["usage"]["completion_tokens"] == count
    assert (body["object"], body["model"], body["sluice"]["held_s"]) == ("chat.completion", "m", 0.25)


async def test_parameters_reach_the_job_and_the_length_limit_is_told(front: Front, policy: Policy):
    policy.finish = "length"
    asked = {"messages": HI, "temperature": 0.5, "max_completion_tokens": 3, "seed": 4, "n": 2, "user": "u"}
    _, body = await front.post(CHAT, asked)
    (job,) = policy.jobs
    assert (job.temperature, job.max_new_tokens, job.seed, job.n) == (0.5, 3, 4, 2)
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]


async def test_template_variables_reach_the_template(tokens: Tokens, policy: Policy, tmp_path: Path):
    directory = write_chat_model(tmp_path)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% if enable_thinking %}<think>{% endif %}{{ messages[-1].content }}"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    async with Front(Tokens(directory), policy) as front:
        for kwargs in ({"enable_thinking": True}, None):
            status, _ = await front.post(CHAT, {"messages": HI, "chat_template_kwargs": kwargs})
            assert status == 200
    decoded = [tokens._tokenizer.decode(job.prompt_ids, skip_special_tokens=False) for job in policy.jobs]
    assert decoded == ["<think>hi", "hi"]


async def test_the_responses_api_says_the_same_in_items(front: Front, policy: Policy):
    policy.say = lambda _: CALLS
    tool = {"type": "function", "name": "look", "parameters": {}, "strict": True}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    status, body = await front.post(RESPONSES, {"input": items, "tools": [tool], "instructions": "be brief"})
    assert status == 200, body
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    assert "generation_token_ids" in body["output"][-1]
    assert "generation_token_ids" not in body["output"][0]
    assert body["status"] == "completed"
    again = [*items, *body["output"]]
    again.append({"type": "function_call_output", "call_id": body["output"][-1]["call_id"], "output": "seen"})
    status, body = await front.post(RESPONSES, {"input": again, "tools": [tool], "instructions": "be brief"})
    assert status == 200, body
    first, second = policy.jobs
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    text = policy.tokens._tokenizer.decode(second.prompt_ids, skip_special_tokens=False)
    assert "be brief" in text
    assert text.endswith("<|im_start|>tool\nseen<|im_end|>\n<|im_start|>assistant\n")
    assert "<think>hm</think>See: <tool_call>" in text


async def test_a_text_is_input_too_and_a_cut_answer_is_incomplete(front: Front, policy: Policy):
    policy.finish = "length"
    _, body = await front.post(RESPONSES, {"input": "hi", "max_output_tokens": 2})
    assert policy.jobs[0].max_new_tokens == 2
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["content"][0]["text"] == "ok"


async def test_the_policy_is_the_only_model(front: Front):
    async with front.http.get(f"{front.url}/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["policy"]


# --- streams ---------------------------------------------------------------------------------------------------------


async def stream(front: Front, path: str, body: Any) -> list[str]:
    async with front.http.post(front.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        return (await response.text()).split("\n\n")[:-1]


async def test_a_chat_stream_adds_up_to_the_answer(front: Front, policy: Policy):
    policy.say = lambda _: CALLS
    lines = await stream(front, CHAT, {"messages": HI, "tools": TOOLS, "stream_options": {"include_usage": True}})
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant"}
    assert "".join(delta.get("content", "") for delta in deltas) == "See:"
    assert next(call for delta in deltas for call in delta.get("tool_calls", ()))["function"]["name"] == "look"
    assert deltas[-1]["generation_token_ids"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["total_tokens"] > 0


async def test_a_stream_of_the_responses_api_ends_with_the_whole_answer(front: Front, policy: Policy):
    policy.say = lambda _: CALLS
    tool = {"type": "function", "name": "look"}
    lines = await stream(front, RESPONSES, {"input": "hi", "tools": [tool]})
    events = [json.loads(line.partition("\ndata: ")[2]) for line in lines]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]
    assert "response.function_call_arguments.done" in [event["type"] for event in events]


async def test_a_stream_shows_life_while_it_waits_and_ends_with_its_error(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "ALIVE_EVERY_S", 0.01)
    release = asyncio.Event()

    async def submit(job: Job) -> Generated:
        await release.wait()
        raise InfraProblem("no engine")

    asked = {"messages": HI, "stream": True}
    async with Front(tokens, submit) as front, front.http.post(front.url + CHAT, json=asked) as response:
        assert await response.content.readuntil(b"\n\n") == b": waiting\n\n"
        release.set()
        rest = await response.text()
    assert '"type":"infra","message":"no engine","code":503' in rest


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"top_p": 0.9}, "top_p=0.9 is not supported"),
        ({"top_k": 5}, "top_k"),
        ({"stop": ["x"]}, "stop"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature=-1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"n": 1000}, "n=1000"),
        ({"n": -1}, "n=-1"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, r"\$.messages"),
        ({"messages": [{"content": "a"}]}, "role None"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' can't be used"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is int"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": [{}]}, *HI]}, "no function.name"),
        ({"messages": [{"role": "user", "content": "a" * 500}]}, "maximum context length is 400"),
        ({"tools": [{"type": "web_search"}]}, "can't be offered"),
        ({"chat_template_kwargs": {"tools": []}}, "may not hold tools"),
        (
            {"messages": [*HI, {"role": "assistant", "prompt_token_ids": [1], "generation_token_ids": [9999]}, *HI]},
            r"carried by messages\[1\] is 9999",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "prompt_token_ids": [1], "generation_token_ids": [2]}]},
            "own: a user",
        ),
        ({"session": "nobody"}, "episode 'nobody' is not open"),
    ],
)
async def test_what_would_not_be_sampled_as_asked_is_refused(front: Front, policy: Policy, change: Any, says: str):
    status, body = await front.post(CHAT, {"messages": HI, **change})
    assert status in (400, 410)
    assert body["error"]["type"] == "data"
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(body["error"]["message"])
    assert policy.jobs == []


async def test_values_that_change_nothing_are_taken(front: Front):
    neutral = {"top_p": 1.0, "top_k": -1, "presence_penalty": 0, "stop": None, "tool_choice": "none", "tools": TOOLS}
    status, _ = await front.post(CHAT, {"messages": HI, **neutral})
    assert status == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": []}, "input is empty"),
        ({"input": "a", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call' can't be used"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "without text"),
    ],
)
async def test_input_that_the_model_can_not_read_is_refused(front: Front, body: Any, says: str):
    status, answer = await front.post(RESPONSES, body)
    assert status == 400
    assert says in answer["error"]["message"]


async def test_a_body_beyond_its_bound_and_one_that_is_no_json_are_refused(front: Front):
    async with front.http.post(front.url + CHAT, data=b"x" * 2**20 + b"y") as response:
        assert response.status == 413
    async with front.http.post(front.url + CHAT, data=b"{") as response:
        assert response.status == 400
    async with front.http.post(f"{front.url}/episodes/e", data=b"{}") as response:
        assert (response.status, (await response.json())["error"]["type"]) == (400, "data")


# --- episodes --------------------------------------------------------------------------------------------------------


async def test_an_episode_samples_as_it_was_opened_and_is_recorded(front: Front, policy: Policy):
    await front.open("e")
    await front.chat("e", HI, temperature=1.0, max_tokens=5)
    await front.chat("e", ON, temperature=None)
    first, second = policy.jobs
    assert (first.session, first.max_new_tokens, second.max_new_tokens <= 1000) == ("e", 5, True)
    assert first.seed != second.seed
    record = await front.finish("e")
    assert [turn["sequence"] for turn in record["turns"]] == [0, 0]
    assert (record["served"], record["superseded"], record["diverged"]) == (2, 0, None)


async def test_an_agent_with_a_fixed_address_names_its_episode_in_the_body(front: Front, policy: Policy):
    await front.open("e")
    status, _ = await front.post(CHAT, {"messages": HI, "session": "e"})
    assert status == 200
    assert len((await front.finish("e"))["turns"]) == 1


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"n": 2}])
async def test_an_agent_can_not_change_how_its_episode_samples(front: Front, policy: Policy, change: Any):
    await front.open("e")
    status, body = await front.post("/episodes/e" + CHAT, {"messages": HI, **change})
    assert (status, body["error"]["type"]) == (400, "data")
    assert policy.jobs == []


async def test_a_rewritten_conversation_is_refused_with_its_place(front: Front):
    await front.open("e")
    await front.chat("e", HI)
    status, body = await front.post("/episodes/e" + CHAT, {"messages": OTHER})
    assert (status, body["error"]["type"]) == (400, "noncontiguous")
    assert "message 0, character 1" in body["error"]["message"]
    record = await front.finish("e")
    assert (record["diverged"]["turn"], record["diverged"]["message"], len(record["turns"])) == (2, 0, 1)


@pytest.mark.parametrize(
    ("messages", "message", "what"),
    [
        ([*HI, {"role": "assistant", "content": "no"}, HI[0]], 1, "'no' where it was 'ok'"),
        ([*HI, {"role": "user", "content": "ok"}], 1, "the policy's answer is due"),
        ([{"role": "system", "content": "hi"}, *ON[1:]], 0, "role 'system'"),
        (
            [*HI, {"role": "assistant", "content": "ok", "tool_calls": [{"function": {"name": "f"}}]}, HI[0]],
            1,
            "tool calls",
        ),
    ],
)
async def test_every_way_to_leave_an_episode_is_named(front: Front, messages: Any, message: int, what: str):
    await front.open("e", noncontiguous="drop")
    await front.chat("e", HI)
    await front.chat("e", messages)
    diverged = (await front.finish("e"))["diverged"]
    assert diverged["message"] == message
    assert what in diverged["what"]


async def test_an_empty_answer_that_an_agent_leaves_out_is_still_a_turn_of_the_episode(front: Front, policy: Policy):
    policy.say = lambda _: ""
    await front.open("e")
    await front.chat("e", HI)
    await front.chat("e", [*HI, *HI])
    await front.chat("e", [*HI, *HI, *HI])
    await front.chat("e", [*HI, {"role": "assistant", "content": ""}, *HI, *HI, *HI])
    record = await front.finish("e")
    assert (len(record["turns"]), record["diverged"]) == (4, None)
    text = policy.tokens._tokenizer.decode(policy.jobs[2].prompt_ids, skip_special_tokens=False)
    assert text.count("<|im_start|>assistant\n<|im_end|>\n<|im_start|>user") == 2


async def test_other_tools_and_a_shorter_conversation_leave_the_episode(front: Front):
    await front.open("e", noncontiguous="truncate")
    await front.chat("e", ON, tools=TOOLS)
    await front.chat("e", ON)
    assert "other tools" in (await front.finish("e"))["diverged"]["what"]
    await front.open("e", noncontiguous="truncate")
    await front.chat("e", ON)
    await front.chat("e", HI)
    record = await front.finish("e")
    assert "ends before message 1" in record["diverged"]["what"]
    assert (len(record["turns"]), record["served"]) == (1, 2)


async def test_split_begins_a_new_sequence_with_the_turn_that_left(front: Front, policy: Policy):
    await front.open("e", noncontiguous="split")
    await front.chat("e", HI)
    await front.chat("e", OTHER)
    await front.chat("e", [*OTHER, {"role": "assistant", "content": "ok"}, HI[0]])
    record = await front.finish("e")
    assert [turn["sequence"] for turn in record["turns"]] == [0, 1, 1]
    assert record["turns"][1]["fresh_ids"] == policy.jobs[1].prompt_ids


async def test_a_turn_asked_again_takes_the_place_of_its_first_answer(front: Front, policy: Policy):
    await front.open("e")
    await front.chat("e", HI)
    policy.say = lambda _: "other"
    await front.chat("e", HI)
    assert policy.jobs[0].prompt_ids == policy.jobs[1].prompt_ids
    assert policy.jobs[0].seed != policy.jobs[1].seed
    record = await front.finish("e")
    assert (len(record["turns"]), record["superseded"]) == (1, 1)
    assert record["turns"][0]["sample"]["text"] == "other"


async def test_a_finished_episode_takes_no_more_and_can_not_be_finished_twice(front: Front, policy: Policy):
    await front.open("e")
    await front.finish("e")
    status, body = await front.post("/episodes/e" + CHAT, {"messages": HI})
    assert (status, policy.jobs) == (410, [])
    assert "finished" in body["error"]["message"]
    status, body = await front.post("/episodes/e/finish", {})
    assert (status, body["error"]["type"]) == (503, "infra")


async def test_an_episode_past_its_deadline_takes_no_more(front: Front):
    await front.open("e", deadline_s=1e-6)
    status, body = await front.post("/episodes/e" + CHAT, {"messages": HI})
    assert (status, "time is over" in body["error"]["message"]) == (410, True)


async def test_only_so_many_episodes_are_open_at_a_time(front: Front):
    await front.open("old", deadline_s=1e-6)
    await front.open("a")
    await front.open("b")
    sampling = {"temperature": 1.0, "max_new_tokens": 5}
    status, body = await front.post("/episodes/c", {"sampling": sampling, "deadline_s": 5})
    assert (status, "gateway.max_episodes=2" in body["error"]["message"]) == (503, True)
    await front.finish("a")
    await front.open("c")


async def test_finishing_an_episode_cuts_off_what_still_runs_for_it(tokens: Tokens):
    began, ended = asyncio.Event(), asyncio.Event()

    async def submit(job: Job) -> Generated:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with Front(tokens, submit) as front:
        await front.open("e")
        asking = asyncio.ensure_future(front.post("/episodes/e" + CHAT, {"messages": HI}))
        await began.wait()
        record = await front.finish("e")
        await asyncio.wait_for(ended.wait(), 10)
        assert record["turns"] == []
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_a_failed_turn_is_told_and_forgotten_once_another_succeeds(tokens: Tokens, policy: Policy):
    answers: list[Any] = [InfraProblem("no engine"), None, InfraProblem("again")]

    async def submit(job: Job) -> Generated:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return await policy(job)

    async with Front(tokens, submit) as front:
        await front.open("e")
        status, _ = await front.post("/episodes/e" + CHAT, {"messages": HI})
        assert status == 503
        await front.chat("e", HI)
        status, _ = await front.post("/episodes/e" + CHAT, {"messages": ON})
        assert status == 503
        record = await front.finish("e")
    assert (len(record["turns"]), record["failure"]) == (1, {"type": "infra", "message": "again"})


# --- with the real gateway and an engine -----------------------------------------------------------------------------


async def test_a_turn_is_aborted_at_the_engine_when_its_agent_leaves(serving: Any, engines: list[Any], until: Any):
    client = GatewayClient(serving.url)
    url = await client.open("e", Sampling(temperature=1.0, max_new_tokens=4), 30.0, "error")
    engines[0].gate.clear()
    body = {"messages": [{"role": "user", "content": "a"}]}
    async with aiohttp.ClientSession() as session:
        asking = asyncio.ensure_future(session.post(f"{url}/chat/completions", json=body))
        await until(lambda: engines[0].bodies)
        asking.cancel()
        await until(lambda: engines[0].aborts)
    assert engines[0].bodies[0]["rid"].startswith(engines[0].aborts[0])
    assert (await client.finish("e")).turns == []
    await client.close()


async def test_a_turn_is_held_over_a_refit_and_continued_under_the_new_version(
    serving: Any, engines: list[Any], until: Any
):
    client = GatewayClient(serving.url)
    url = await client.open("e", Sampling(temperature=1.0, max_new_tokens=4), 30.0, "error")
    engines[0].gate.clear()
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    async with aiohttp.ClientSession() as session:
        asking = asyncio.ensure_future(session.post(f"{url}/chat/completions", json=body))
        await until(lambda: engines[0].bodies)
        serving.request_refit(2, "interrupt")
        await serving.closed(2)
        await engines[0].release()
        serving.commit(2, engines[0])
        response = await asking
        assert response.status == 200
        assert "error" not in await response.text()
    (turn,) = (await client.finish("e")).turns
    assert [span.version for span in turn.sample.spans] == [10, 20]
    await client.close()


def test_the_tokenizer_tells_thinking_that_a_prompt_opened(tmp_path: Path, tokens: Tokens):
    ids = tokens._tokenizer.encode("a<think>\n", add_special_tokens=False).ids
    assert tokens.thinking(ids)
    assert not tokens.thinking(ids[:1])


# --- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("HEAD", "/health", 200),
        ("GET", "/health?x=1", 200),
        ("GET", "/episodes/a%20b/v1/models", 200),
        ("GET", "/v1/models/", 404),
        ("GET", "/episodes/", 404),
        ("GET", "/episodes//v1/models", 404),
        ("GET", "/episodes/e/v2/models", 404),
        ("GET", "/generate", 405),
        ("POST", "/health", 405),
        ("DELETE", "/episodes/e", 405),
    ],
)
async def test_a_path_leads_to_what_it_names_and_no_other(tokens: Tokens, method: str, path: str, status: int):
    async with (
        Front(tokens, Policy(tokens, lambda _: "a")) as front,
        front.http.request(method, front.url + path) as response,
    ):
        assert response.status == status
        assert (status == 405) == ("allow" in response.headers)


async def test_an_episode_is_found_by_its_name_however_it_is_written(tokens: Tokens):
    async with Front(tokens, Policy(tokens, lambda _: "a")) as front:
        await front.open("a%2Fb%20c")
        assert (await front.chat("a%2fb%20c", [{"role": "user", "content": "hi"}]))["content"] == "a"
        status, _ = await front.post("/v1/chat/completions", {"messages": HI, "session": "a/b c"})
        assert status == 200


async def test_a_caller_that_asks_before_it_sends_is_told_to(tokens: Tokens):
    async with Front(tokens, Policy(tokens, lambda _: "a")) as front:
        async with front.http.post(
            front.url + "/v1/chat/completions", json={"messages": HI}, expect100=True
        ) as response:
            assert response.status == 200
        headers = {"expect": "a gift"}
        async with front.http.post(
            front.url + "/v1/chat/completions", json={"messages": HI}, headers=headers
        ) as response:
            assert response.status == 417


DEEP = "[" * 50_000 + "]" * 50_000


@pytest.mark.parametrize("base", ["", "/episodes/e"])
@pytest.mark.parametrize(
    ("message", "says"),
    [
        ('{"role": "user", "content": ' + DEEP + "}", "the body is not JSON: maximum recursion depth"),
        ('{"role": "user", "content": "\\ud800"}', "the body is not JSON"),
        ('{"role": "assistant", "tool_calls": 5}', "tool_calls is int; a list of calls is due"),
        (_asking(DEEP), "the arguments of a call are nested too deeply"),
        (_asking('{"x": "\\ud800"}'), "the prompt has half a character"),
    ],
)
async def test_what_can_be_no_conversation_is_refused_and_is_no_error_of_ours(
    tokens: Tokens, base: str, message: str, says: str
):
    body = '{"messages": [' + message + ', {"role": "user", "content": "hi"}]}'
    async with Front(tokens, Policy(tokens, lambda _: "a")) as front:
        await front.open("e")
        async with front.http.post(front.url + base + CHAT, data=body) as response:
            answer = await response.json()
    assert response.status == 400
    assert answer["error"]["message"].startswith(says)


@pytest.mark.parametrize("content", [DEEP, '"\\ud800"'])
async def test_a_native_request_or_an_opening_that_is_no_json_is_refused(tokens: Tokens, content: str):
    async with Front(tokens, Policy(tokens, lambda _: "a")) as front:
        for path in ("/generate", "/episodes/e"):
            async with front.http.post(front.url + path, data='{"session": ' + content + "}") as response:
                assert response.status == 400
