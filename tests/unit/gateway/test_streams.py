"""Streams: pieces as they are sampled, add up to the answer, and callers that don't read are cut off."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway import http
from actors.gateway.client import GatewayClient, Generated, InfraProblem
from actors.gateway.parsing import Parsed, parse, shown
from actors.gateway.serving import Live
from actors.gateway.tokens import CHARACTER, Tokens, Unfolding
from actors.gateway.upstream import AnswerError, Arriving, Draft, Job
from contracts.trajectory import Sampling
from tests.unit.gateway.agents import Front, Policy, write_chat_model

HI = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
WAIT_S = 30.0
CALL = '<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens(write_chat_model(tmp_path_factory.mktemp("model"), context=100_000))


# --- what can be shown -----------------------------------------------------------------------------------------------

PIECES = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, " ", "a", "\n", "{", "<", "</"])


@settings(max_examples=120, deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join), st.booleans(), st.booleans())
def test_what_was_shown_is_never_taken_back_and_adds_up_to_the_answer(text: str, tools: bool, thinking: bool):
    names = ["look"] if tools else None
    before = shown("", names, thinking, ended=False)
    for size in range(len(text) + 1):
        now = shown(text[:size], names, thinking, ended=False)
        assert (now.reasoning or "").startswith(before.reasoning or "")
        assert now.content.startswith(before.content)
        before = now
    end, whole = shown(text, names, thinking, ended=True), parse(text, names, thinking)
    assert (end.reasoning or "").startswith(before.reasoning or "")
    assert end.content.startswith(before.content)
    if not _unopened(whole):
        assert ((end.reasoning or ""), end.content.strip()) == ((whole.reasoning or ""), whole.content.strip())


def _unopened(whole: Parsed) -> bool:
    return any(flaw.what.endswith("was never opened") for flaw in whole.flaws)


def test_a_character_is_shown_when_its_bytes_are_there_or_never_will_be():
    class Bytes:
        def text(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    unfolding = Unfolding(Bytes().text)  # pyright: ignore[reportArgumentType]
    ids = list("aé".encode())
    assert [unfolding.more(ids[: n + 1]) for n in range(3)] == ["a", "", "é"]
    broken = Unfolding(Bytes().text)  # pyright: ignore[reportArgumentType]
    said = [broken.more([0xE2] * n) for n in range(1, CHARACTER + 1)]
    assert said[:-1] == [""] * (CHARACTER - 1)
    assert said[-1]


# --- an engine's stream ----------------------------------------------------------------------------------------------


def event(ids: list[int], finish: str | None = None, index: int = 0, **wrong: Any) -> bytes:
    reason = None if finish is None else {"type": finish}
    entries = wrong.get("entries", [[-1.0, token, None] for token in ids])
    meta = {"finish_reason": reason, "output_token_logprobs": entries}
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta, "index": index}).encode() + b"\n\n"


def arriving(samples: int = 1) -> tuple[Arriving, list[Draft]]:
    from actors.gateway.state import Call

    job = Job("s", [5], samples, 1.0, 4, None, (1,), 0.0)
    call = Call(1, 1, tuple(range(samples)), "engine-0", 1, "", 1, 10, "r-")
    drafts = [Draft() for _ in range(samples)]
    return Arriving(job, drafts, call, 64), drafts


def test_events_are_taken_wherever_their_bytes_are_split():
    data = event([3]) + event([3, 4]) + event([3, 4], "stop") + b"data: [DONE]\n\n"
    for size in range(1, len(data)):
        found, (draft,) = arriving()
        for start in range(0, len(data), size):
            found.feed(data[start : start + size])
        assert draft.ids == [3, 4]
        assert [part.finish for part in found.parts()] == ["stop"]


def test_samples_of_one_stream_grow_by_themselves_and_the_unfinished_go_on():
    found, drafts = arriving(2)
    found.feed(event([3], index=1) + event([4], index=0) + event([3, 5], "stop", index=1))
    assert [draft.ids for draft in drafts] == [[4], [3, 5]]
    assert [(part.tokens, part.finish) for part in found.parts()] == [(1, "abort"), (2, "stop")]
    assert not found.whole


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (event([3, 99]), "token 99 at 1 is not in the vocabulary"),
        (event([3, 4], entries=[[-1.0, 3, None], [0.5, 4, None]]), "logprob 0.5 at 1"),
        (event([3, 4, 5, 6, 7]), "5 tokens, at most 4"),
        (event([], "stop"), "no token"),
        (event([3], "banana"), "banana"),
        (event([3], index=3), "index 3"),
        (b'data: {"error": {"message": "no"}}\n\n', "not a generation"),
        (b"data: " + b"x" * 100_000, "exceeds"),
    ],
)
def test_a_wrong_event_is_named_and_leaves_what_came_before(bad: bytes, says: str):
    found, (draft,) = arriving()
    found.feed(event([3]))
    with pytest.raises(AnswerError, match=says):
        found.feed(bad)
    assert draft.ids == [3]


# --- through gateway and engine --------------------------------------------------------------------------------------


class Streaming:
    """An engine's answer to one call: events at the test's word."""

    def __init__(self, engine: Any, *, breaks: bool = False) -> None:
        self.steps: asyncio.Queue[int | None] = asyncio.Queue()
        self.engine, self.breaks = engine, breaks
        self.body: Any = None
        engine.script.append(self._answer)

    async def _answer(self, engine: Any, request: web.Request, body: Any) -> web.StreamResponse:
        self.body = body
        assert body["stream"] is True
        headers = {"content-type": "text/event-stream", "x-sluice-boot": str(engine.boot)}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        start, limit = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        count = 0
        while count < limit:
            step = asyncio.ensure_future(self.steps.get())
            while not step.done() and not engine.aborted(body["rid"]):
                await asyncio.wait((step,), timeout=0.01)
            if not step.done():
                break
            count += step.result() or 0
            if step.result() is None:
                assert request.transport is not None
                request.transport.abort()
                return response
            ids = [(start + k) % 64 for k in range(count)]
            await response.write(event(ids, "length" if count == limit else None))
        if count < limit:
            await response.write(event([(start + k) % 64 for k in range(count)], "abort"))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


FOUR = Sampling(temperature=1.0, max_new_tokens=4)


@pytest.fixture
async def episode(serving: Any) -> AsyncIterator[tuple[GatewayClient, str]]:
    client = GatewayClient(serving.url)
    yield client, await client.open("e", FOUR, 30.0, "error")
    await client.close()


class Reader:
    """A chat stream being read."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response, self.content, self.whole = response, "", ""

    async def until(self, content: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.content != content:
                await self._more()

    async def end(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while "[DONE]" not in self.whole:
                await self._more()

    async def _more(self) -> None:
        line = (await self.response.content.readuntil(b"\n\n")).decode()
        self.whole += line
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                self.content += choice["delta"].get("content", "")


async def test_tokens_are_passed_on_as_the_engine_makes_them(episode: Any, engines: list[Any], until: Any):
    _, url = episode
    engine = Streaming(engines[0])
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "logprobs": True}
    engine.steps.put_nowait(1)
    async with aiohttp.ClientSession() as session, session.post(f"{url}/chat/completions", json=body) as response:
        reader = Reader(response)
        await until(lambda: engine.body)
        first = _letters(engine.body, 4)
        await reader.until(first[:1])
        engine.steps.put_nowait(2)
        await reader.until(first[:3])
        engine.steps.put_nowait(1)
        await reader.end()
    assert reader.content == first
    chunks = [json.loads(line[6:]) for line in reader.whole.split("\n\n") if line.startswith("data: {")]
    said = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry["logprob"] for part in said for entry in part["content"]] == [-1.0] * 4
    assert chunks[-1]["choices"][0]["delta"]["generation_token_ids"] == [
        (len(engine.body["input_ids"]) + k) % 64 for k in range(4)
    ]


def _letters(body: Any, count: int) -> str:
    """What the model's tokenizer makes of the ids that the engine answers."""
    characters = "abcdefghijklmnopqrstuvwxyz :+0123456789"
    start = len(body["input_ids"])
    return "".join(characters[(start + k) % 64 - 3] for k in range(count))


async def test_a_refit_in_the_middle_of_a_stream_is_a_pause_for_its_reader(
    episode: Any, serving: Any, engines: list[Any], until: Any
):
    client, url = episode
    before, after = Streaming(engines[0]), Streaming(engines[0])
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    before.steps.put_nowait(2)
    async with aiohttp.ClientSession() as session, session.post(f"{url}/chat/completions", json=body) as response:
        reader = Reader(response)
        await until(lambda: before.body)
        letters = _letters(before.body, 4)
        await reader.until(letters[:2])
        serving.request_refit(2, "interrupt")
        await serving.closed(2)
        serving.commit(2, engines[0])
        await until(lambda: after.body)
        after.steps.put_nowait(2)
        await reader.end()
    assert reader.content == letters
    assert "error" not in reader.whole
    start = before.body["input_ids"]
    assert after.body["input_ids"] == [*start, len(start), len(start) + 1]
    (turn,) = (await client.finish("e")).turns
    assert [(span.start, span.end, span.version) for span in turn.sample.spans] == [(0, 2, 10), (2, 4, 20)]


async def test_a_stream_that_breaks_goes_on_elsewhere_from_what_was_passed_on(
    episode: Any, serving: Any, engines: list[Any], until: Any
):
    client, url = episode
    serving.commit(2, *engines)
    first, second = Streaming(engines[0]), Streaming(engines[1])
    # whichever engine is asked first breaks off, and the other one goes on
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    first.steps.put_nowait(1)
    second.steps.put_nowait(1)
    async with aiohttp.ClientSession() as session, session.post(f"{url}/chat/completions", json=body) as response:
        reader = Reader(response)
        await until(lambda: first.body or second.body)
        broken, other = (first, second) if first.body else (second, first)
        letters = _letters(broken.body, 4)
        await reader.until(letters[:1])
        broken.steps.put_nowait(None)
        await until(lambda: other.body)
        other.steps.put_nowait(2)
        await reader.end()
    assert reader.content == letters
    assert len(other.body["input_ids"]) == len(broken.body["input_ids"]) + 1
    (turn,) = (await client.finish("e")).turns
    assert [span.engine for span in turn.sample.spans] == [broken.engine.name, other.engine.name]


async def test_an_agent_that_leaves_its_stream_ends_the_call(episode: Any, engines: list[Any], until: Any):
    _, url = episode
    engine = Streaming(engines[0])
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    engine.steps.put_nowait(1)
    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{url}/chat/completions", json=body)
        await until(lambda: engine.body)
        await Reader(response).until(_letters(engine.body, 1))
        response.close()
        await until(lambda: engines[0].aborts)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_what_fails_before_the_first_token_is_answered_by_its_status(tokens: Tokens, path: str):
    async def submit(job: Job) -> Generated:
        raise InfraProblem("no engine")

    body = {"messages": HI, "input": "hi", "stream": True}
    async with Front(tokens, submit) as front, front.http.post(front.url + path, json=body) as response:
        assert (response.status, (await response.json())["error"]["message"]) == (503, "no engine")


# --- the Responses API -----------------------------------------------------------------------------------------------


async def test_events_of_the_responses_api_build_the_answer_that_ends_them(tokens: Tokens):
    policy = Policy(tokens, lambda _: "")
    sample = policy.sample(f"<think>hm so</think>See: {CALL}")

    async def follow(job: Job, live: Live) -> Generated:
        draft = Draft()
        live.drafts = [draft]
        for token, logprob in zip(sample.output_ids, sample.logprobs, strict=True):
            draft.ids.append(token)
            draft.logprobs.append(logprob)
            live.news.set()
            await asyncio.sleep(0)
        return Generated(job.prompt_ids, [sample], 0.0)

    body = {"input": "hi", "tools": [{"type": "function", "name": "look"}], "stream": True}
    async with Front(tokens, policy, follow) as front, front.http.post(front.url + RESPONSES, json=body) as response:
        lines = (await response.text()).split("\n\n")[:-1]
    events = [json.loads(line.partition("\ndata: ")[2]) for line in lines]
    items: list[dict[str, Any]] = []
    said: dict[str, str] = {}
    for found in events:
        kind = found["type"]
        if kind == "response.output_item.added":
            assert found["output_index"] == len(items)
            items.append(found["item"])
        elif kind.endswith(".delta"):
            assert found["item_id"] == items[found["output_index"]]["id"]
            said[found["item_id"]] = said.get(found["item_id"], "") + found["delta"]
        elif kind == "response.output_item.done":
            items[found["output_index"]] = found["item"]
    answer = events[-1]["response"]
    assert answer["id"] == events[0]["response"]["id"]
    assert answer["output"] == items
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    thought, message, call = answer["output"]
    assert said[thought["id"]] == thought["summary"][0]["text"] == "hm so"
    assert said[message["id"]] == message["content"][0]["text"] == "See:"
    assert said[call["id"]] == call["arguments"] == '{"x": 1}'
    assert call["generation_token_ids"] == sample.output_ids


# --- callers that don't read -----------------------------------------------------------------------------------------


def shrink(front: Front) -> None:
    """Whoever connects from now on is sent to through a small buffer."""
    for site in front.server._runner.sites:
        for listening in site._server.sockets:  # pyright: ignore
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


async def post_unread(front: Front, body: Any) -> socket.socket:
    """Ask, and read nothing of the answer."""
    address = front.url.removeprefix("http://").split(":")
    caller = socket.socket()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    caller.connect((address[0], int(address[1])))
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    caller.sendall(head.encode() + data)
    return caller


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_caller_that_does_not_read_is_cut_off_and_holds_up_nobody(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch, streamed: bool
):
    policy = Policy(tokens, lambda _: "ok")
    large = policy.sample("a" * 50_000)
    finished = asyncio.Event()

    async def submit(job: Job) -> Generated:
        finished.set()
        return Generated(job.prompt_ids, [large] * job.n, 0.0)

    async def follow(job: Job, live: Live) -> Generated:
        return await submit(job)

    async with Front(tokens, submit, follow) as front:
        shrink(front)
        monkeypatch.setattr(http, "UNREAD_S", 0.3)
        caller = await post_unread(front, {"messages": HI, "n": 4, "stream": streamed})
        try:
            async with asyncio.timeout(WAIT_S):
                await finished.wait()
            status, _ = await front.post("/episodes/other", {"sampling": _sampling(), "deadline_s": 60})
            assert status == 200
            await _left_alone(front)
        finally:
            caller.close()


def _sampling() -> dict[str, Any]:
    return {"temperature": 1.0, "max_new_tokens": 4}


async def _left_alone(front: Front) -> None:
    """Nobody's connection is open but those of the test's own session."""
    server = front.server._runner.server
    assert server is not None
    async with asyncio.timeout(WAIT_S):
        while len(server.connections) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
