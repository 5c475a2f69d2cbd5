"""The gateway as its callers and engines see it, failures caused one by one."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from actors.gateway.actor import build
from actors.gateway.client import (
    DataProblem,
    DeadlineProblem,
    GatewayClient,
    Generated,
    InfraProblem,
    Span,
)
from actors.gateway.state import AbortAll, Call
from config.schema import RunConfig
from contracts.core import Fatal
from contracts.events import EngineDead, RefitFailed, WaitEnded, WaitStarted
from contracts.trajectory import Sampling

FOUR = Sampling(temperature=1.0, max_new_tokens=4)


def ask(client: GatewayClient, sampling: Sampling = FOUR, deadline_s: float = 30.0, **given: Any) -> Any:
    if not given.keys() & {"input_ids", "prompt", "messages"}:
        given["input_ids"] = [5, 6, 7]
    return asyncio.ensure_future(client.generate(session="s", sampling=sampling, deadline_s=deadline_s, **given))


def by(engine: Any, start: int, end: int, version: int) -> Span:
    return Span(start, end, version, engine.name, engine.boot)


async def raw(host: Any, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    async with aiohttp.ClientSession() as session, session.post(f"{host.url}/generate", data=data) as response:
        return response.status, await response.json()


# --- plain answers ---------------------------------------------------------------------------------------------------


async def test_an_answer_carries_exact_ids_logprobs_and_origin(serving: Any, client: GatewayClient, engines: list[Any]):
    found = await ask(client, input_ids=[5, 6, 7])
    assert found == Generated([5, 6, 7], found.samples, found.held_s)
    (sample,) = found.samples
    assert sample.output_ids == [3, 4, 5, 6]
    assert sample.logprobs == [-1.0, -2.0, -3.0, -4.0]
    assert sample.spans == [by(engines[0], 0, 4, 10)]
    assert (sample.finish_reason, sample.text) == ("length", "abcd")


async def test_special_tokens_in_an_answer_are_told_beside_its_text(serving: Any, client: GatewayClient):
    (sample,) = (await ask(client, input_ids=[5, 6])).samples
    assert (sample.output_ids, sample.text, sample.written) == ([2, 3, 4, 5], "abc", "<start>abc")
    (sample,) = (await ask(client, input_ids=[5, 6, 7])).samples
    assert sample.written is None


async def test_one_sample_is_asked_for_in_the_single_form(serving: Any, client: GatewayClient, engines: list[Any]):
    await ask(client)
    (body,), (headers,) = engines[0].bodies, engines[0].headers
    assert body == {
        "input_ids": [5, 6, 7],
        "rid": "gateway-0-00000001-0000000001-0000",
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 4, "stop_token_ids": [1, 63]},
        "return_logprob": True,
        "stream": False,
    }
    assert headers["x-sluice-epoch"] == "1"
    assert headers["x-sluice-rids"] == body["rid"]


async def test_samples_go_to_one_engine_in_one_call_with_an_id_each(
    serving: Any, client: GatewayClient, engines: list[Any]
):
    found = await ask(client, n=3, prompt="abc")
    assert found.prompt_ids == [3, 4, 5]
    assert [sample.output_ids for sample in found.samples] == [[3, 4, 5, 6]] * 3
    (body,), (headers,) = engines[0].bodies, engines[0].headers
    assert body["input_ids"] == [[3, 4, 5]] * 3
    assert len(set(body["rid"])) == 3
    assert headers["x-sluice-rids"].split(",") == body["rid"]
    assert isinstance(body["sampling_params"], dict)


async def test_seeds_differ_between_samples_and_repeat_between_requests(
    serving: Any, client: GatewayClient, engines: list[Any]
):
    seeded = Sampling(temperature=1.0, max_new_tokens=4, seed=7)
    await ask(client, seeded, n=3)
    await ask(client, seeded, n=3)
    first, second = ([p["sampling_seed"] for p in body["sampling_params"]] for body in engines[0].bodies)
    assert len(set(first)) == 3
    assert first == second


async def test_new_tokens_stay_within_the_context(serving: Any, client: GatewayClient, engines: list[Any]):
    await ask(client, Sampling(temperature=1.0, max_new_tokens=1000), input_ids=[5] * 40)
    assert engines[0].bodies[0]["sampling_params"]["max_new_tokens"] == 8


async def test_requests_before_the_first_commit_wait_for_it(host: Any, client: GatewayClient, engines: list[Any]):
    running = ask(client)
    await until_held(host)
    host.commit(1, engines[0])
    found = await running
    assert found.held_s > 0
    assert [w.on for w in host.of(WaitStarted)] == ["refit"]
    assert [w.on for w in host.of(WaitEnded)] == ["refit"]


async def until_held(host: Any) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(10):
        while True:
            async with session.get(f"{host.url}/status") as response:
                if (await response.json())["held"]:
                    return


async def test_health_and_status_tell_the_state(serving: Any, client: GatewayClient, engines: list[Any], until: Any):
    engines[0].gate.clear()
    running = ask(client, n=3)
    await until(lambda: engines[0].bodies)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{serving.url}/status") as response:
            status = await response.json()
        async with session.get(f"{serving.url}/health") as response:
            assert response.status == 200
    assert status == {"gate": "open", "epoch": 1, "version": 10, "requests": 1, "in_flight": 3, "held": 0}
    await engines[0].release()
    await running


# --- chat and prefixes -----------------------------------------------------------------------------------------------


async def test_a_conversation_continues_the_exact_tokens_of_its_turns(
    serving: Any, client: GatewayClient, engines: list[Any]
):
    turns = [{"role": "user", "content": "ab"}]
    first = await ask(client, Sampling(temperature=1.0, max_new_tokens=4), messages=turns)
    carried = first.prompt_ids + first.samples[0].output_ids
    turns += [{"role": "assistant", "content": first.samples[0].text}, {"role": "user", "content": "c"}]
    second = await ask(client, messages=turns, prefix_ids=carried, carried=2)
    assert second.prompt_ids[: len(carried)] == carried
    whole = await ask(client, messages=turns)
    assert whole.prompt_ids == second.prompt_ids
    for wrong in (0, 1, 3):
        with pytest.raises(DataProblem, match=f"carried={wrong} of 3"):
            await ask(client, messages=turns, prefix_ids=carried, carried=wrong)


async def test_text_and_ids_follow_the_prefix_untouched(serving: Any, client: GatewayClient):
    assert (await ask(client, prompt="ab", prefix_ids=[60, 61])).prompt_ids == [60, 61, 3, 4]
    assert (await ask(client, input_ids=[9], prefix_ids=[60, 61])).prompt_ids == [60, 61, 9]


async def test_messages_that_the_template_refuses_are_bad_data(
    serving: Any, client: GatewayClient, model: Any, write_model: Any
):
    write_model(model, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataProblem, match="roles must alternate"):
        await ask(client, messages=[{"role": "user", "content": "a"}])


async def test_messages_need_a_chat_template(serving: Any, client: GatewayClient, model: Any, write_model: Any):
    write_model(model, None)
    with pytest.raises(DataProblem, match="no chat template"):
        await ask(client, messages=[{"role": "user", "content": "a"}])


# --- bad requests ----------------------------------------------------------------------------------------------------

GOOD = {"session": "s", "input_ids": [5], "sampling": {"temperature": 1, "max_new_tokens": 2}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"sampling": {"temperature": 1, "max_new_tokens": 2, "top_p": 0.9}},
            "top_p.*logprobs must be the policy's own",
        ),
        ({"sampling": {"temperature": 1, "max_new_tokens": 2, "top_k": 5}}, "top_k"),
        ({"sampling": {"temperature": 1, "max_new_tokens": 2, "frequency_penalty": 1}}, "frequency_penalty"),
        ({"sampling": {"temperature": -1, "max_new_tokens": 2}}, "temperature"),
        ({"sampling": {"temperature": 1, "max_new_tokens": 0}}, "max_new_tokens"),
        ({"n": 0}, r"\$.n"),
        ({"n": 1000}, r"\$.n"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"colour": "red"}, "colour"),
        ({"prompt": "a"}, "got input_ids, prompt"),
        ({"input_ids": None}, "got none"),
        ({"input_ids": []}, "no token"),
        ({"input_ids": [5] * 48}, "48 tokens, a context of 48"),
        ({"input_ids": [5, 64]}, r"input_ids\[1\] is 64.*0 to 63"),
        ({"input_ids": [-1]}, r"input_ids\[0\] is -1"),
        ({"prefix_ids": [5, 5, 99]}, r"prefix_ids\[2\] is 99"),
    ],
)
async def test_a_bad_request_is_refused_by_name(serving: Any, engines: list[Any], change: Any, says: str):
    status, body = await raw(serving, GOOD | change)
    assert status == 400
    assert body["error"]["type"] == "data"
    assert re.search(says, body["error"]["message"]), body
    assert engines[0].bodies == []


async def test_a_body_that_is_not_json_or_too_large_is_refused(serving: Any):
    status, body = await raw(serving, b"{")
    assert (status, body["error"]["type"]) == (400, "data")
    status, body = await raw(serving, GOOD | {"input_ids": [5] * 2**20})
    assert (status, body["error"]["type"]) == (413, "data")
    assert "max_body_mib=1" in body["error"]["message"]


# --- engines that fail -----------------------------------------------------------------------------------------------


def answers(status: int, body: Any, **headers: str) -> Any:
    async def script(engine: Any, request: web.Request, _: Any) -> web.Response:
        return web.json_response(body, status=status, headers={"x-sluice-boot": str(engine.boot), **headers})

    return script


async def reset(engine: Any, request: web.Request, _: Any) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def altered(change: Any) -> Any:
    """The engine's own answer, changed."""

    async def script(engine: Any, request: web.Request, body: Any) -> web.Response:
        answer = await engine.answer(body)
        return engine.reply(change(answer) or answer)

    return script


def logprob(at: int, value: Any) -> Any:
    def change(answer: Any) -> None:
        answer["meta_info"]["output_token_logprobs"][at][0] = value

    return change


@pytest.mark.parametrize(
    "fault",
    [
        reset,
        answers(409, {"error": "no lease for epoch 1"}),
        answers(500, {"error": "oom"}),
        answers(503, {}),
        answers(200, {"nonsense": 1}),
        altered(logprob(2, 0.5)),
        altered(lambda answer: answer["output_ids"].pop() and None),
    ],
    ids=["reset", "409", "500", "503", "form", "logprob", "length"],
)
async def test_a_failed_call_is_repeated_on_another_engine(
    host: Any, client: GatewayClient, engines: list[Any], fault: Any
):
    host.commit(1, *engines)
    for engine in engines:
        engine.script = [fault]
    engines[1].script = []
    first = await ask(client)
    second = await ask(client)
    assert first.samples == [second.samples[0]]
    assert first.samples[0].spans == [by(engines[1], 0, 4, 10)]
    ids = [body["rid"] for engine in engines for body in engine.bodies]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (altered(logprob(2, 0.5)), "sample 0: logprob 0.5 at 2 is not"),
        (altered(logprob(1, None)), "sample 0: logprob None at 1 is not"),
        (altered(logprob(3, float("nan"))), "not a generation"),
        (altered(lambda a: a["meta_info"].pop("output_token_logprobs") and None), "0 logprobs for 4 tokens"),
        (altered(lambda a: a["output_ids"].__setitem__(1, 9)), "token 9 at 1 has the logprob of token 4"),
        (altered(lambda a: a["output_ids"].__setitem__(1, 64)), "token 64 at 1 is not in the vocabulary"),
        (altered(lambda a: [a, a]), "2 answers to 1 prompts"),
        (altered(lambda a: a["meta_info"]["finish_reason"].update(type="tired")), "finish_reason is 'tired'"),
        (altered(lambda a: a["meta_info"].update(finish_reason=None)), "finish_reason is None"),
        (altered(lambda a: {"output_ids": [], "meta_info": {"finish_reason": {"type": "stop"}}}), "no token"),
        (altered(lambda a: a | {"pad": "x" * 10**6}), "exceeds"),
        (answers(200, {}, **{"x-sluice-boot": "7"}), "boot 7 answered, boot 1 is committed"),
        (answers(500, {"error": "oom"}), "500.*oom"),
        (reset, "Disconnected"),
    ],
)
async def test_what_an_engine_gets_wrong_is_named_and_never_passed_on(
    serving: Any, client: GatewayClient, engines: list[Any], fault: Any, says: str
):
    engines[0].script = [fault] * 3
    with pytest.raises(InfraProblem, match=f"engine-0: 3 calls failed.*{says}"):
        await ask(client)


async def test_more_tokens_than_asked_for_are_an_error(serving: Any, client: GatewayClient, engines: list[Any]):
    def more(answer: Any) -> None:
        answer["output_ids"].append(9)
        answer["meta_info"]["output_token_logprobs"].append([-1.0, 9, None])

    engines[0].script = [altered(more)] * 3
    with pytest.raises(InfraProblem, match="5 tokens, at most 4"):
        await ask(client)


async def test_a_request_that_the_engine_calls_bad_is_not_repeated(
    serving: Any, client: GatewayClient, engines: list[Any]
):
    engines[0].script = [answers(400, {"error": {"message": "too long"}})]
    with pytest.raises(DataProblem, match=r"engine-0: 400.*too long"):
        await ask(client)
    assert len(engines[0].bodies) == 1


async def test_without_a_lease_anywhere_a_request_waits_for_the_next_commit(
    serving: Any, client: GatewayClient, engines: list[Any], until: Any
):
    engines[0].script = [answers(409, {})]
    running = ask(client)
    await until(lambda: [w for w in serving.of(WaitStarted) if w.on == "engine"])
    serving.request_refit(2, "finish")
    assert (await serving.closed(2)).held == 1
    serving.commit(2, engines[0])
    found = await running
    assert found.samples[0].spans == [by(engines[0], 0, 4, 20)]


async def test_calls_on_a_dead_engine_are_cut_off_and_repeated_elsewhere(
    host: Any, client: GatewayClient, engines: list[Any], until: Any
):
    host.commit(1, *engines)
    for engine in engines:
        engine.gate.clear()
        engine.deaf = True
    running = ask(client)
    await until(lambda: engines[0].bodies or engines[1].bodies)
    lost, other = sorted(engines, key=lambda engine: -len(engine.bodies))
    other.gate.set()
    host.feed(EngineDead(engine=lost.name, boot=1, reason="killed"))
    assert (await running).samples[0].spans == [by(other, 0, 4, 10)]
    await until(lambda: lost.hung_up == 1)


# --- deadlines and leaving -------------------------------------------------------------------------------------------


async def test_a_slow_answer_ends_at_the_deadline_and_is_aborted(
    serving: Any, client: GatewayClient, engines: list[Any], until: Any
):
    engines[0].gate.clear()
    began = time.monotonic()
    with pytest.raises(DeadlineProblem, match="generating on engine-0"):
        await ask(client, deadline_s=0.3)
    assert 0.3 <= time.monotonic() - began < 3
    await until(lambda: not serving.current.calls)
    assert engines[0].aborts[0] == "gateway-0-00000001-0000000001-"


async def test_a_held_request_ends_at_its_deadline(host: Any, client: GatewayClient):
    with pytest.raises(DeadlineProblem, match="no refit is committed yet"):
        await ask(client, deadline_s=0.1)


async def test_a_deadline_holds_even_if_nothing_can_be_committed(
    serving: Any, client: GatewayClient, until: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.gateway.actor.BACKSTOP_S", 0.1)
    await until(lambda: serving.current.committed)
    serving.frozen = True
    with pytest.raises(DeadlineProblem, match="could not act"):
        await ask(client, deadline_s=0.1)


async def test_a_caller_that_leaves_ends_its_call(serving: Any, client: GatewayClient, engines: list[Any], until: Any):
    engines[0].gate.clear()
    running = ask(client)
    await until(lambda: engines[0].bodies)
    running.cancel()
    await until(lambda: engines[0].aborts)
    await until(lambda: not serving.current.calls and not serving.current.requests)
    assert serving.shell._entries == {}
    assert serving.shell._flights == {}


async def test_an_engine_that_ignores_aborts_is_cut_off_in_time(
    serving: Any, client: GatewayClient, engines: list[Any], until: Any
):
    engines[0].gate.clear()
    engines[0].deaf = True
    with pytest.raises(DeadlineProblem):
        await ask(client, deadline_s=0.1)
    await until(lambda: not serving.current.calls)
    assert len(engines[0].aborts) > 2
    await until(lambda: engines[0].hung_up == 1)


# --- refits ----------------------------------------------------------------------------------------------------------


async def test_an_interrupted_request_goes_on_from_its_partial_tokens_under_the_next_version(
    serving: Any, client: GatewayClient, engines: list[Any], until: Any
):
    engines[0].gate.clear()
    running = ask(client, Sampling(temperature=1.0, max_new_tokens=5, seed=3), n=2, input_ids=[5, 6, 7])
    await until(lambda: engines[0].bodies)
    serving.request_refit(2, "interrupt")
    closed = await serving.closed(2)
    assert (closed.held, closed.interrupted) == (1, 1)
    assert not running.done()
    engines[0].gate.set()
    serving.commit(2, engines[1])
    found = await running
    for sample in found.samples:
        assert sample.output_ids == [3, 4, 5, 6, 7]
        assert sample.logprobs == [-1.0, -2.0, -1.0, -2.0, -3.0]
        assert sample.spans == [by(engines[0], 0, 2, 10), by(engines[1], 2, 5, 20)]
    before, after = engines[0].bodies[0], engines[1].bodies[0]
    assert after["input_ids"] == [[5, 6, 7, 3, 4]] * 2
    assert [p["max_new_tokens"] for p in after["sampling_params"]] == [3, 3]
    seeds = [p["sampling_seed"] for body in (before, after) for p in body["sampling_params"]]
    assert len(set(seeds)) == 4
    assert not set(before["rid"]) & set(after["rid"])
    assert found.held_s > 0


async def test_only_unfinished_samples_go_on(serving: Any, client: GatewayClient, engines: list[Any], until: Any):
    def first_ended(answer: Any) -> None:
        answer[0]["meta_info"]["finish_reason"] = {"type": "stop", "matched": 4}

    engines[0].gate.clear()
    engines[0].script = [altered(first_ended)]
    running = ask(client, n=3)
    await until(lambda: engines[0].bodies)
    serving.request_refit(2, "interrupt")
    await serving.closed(2)
    engines[0].gate.set()
    serving.commit(2, engines[0])
    found = await running
    assert [sample.finish_reason for sample in found.samples] == ["stop", "length", "length"]
    assert [len(sample.output_ids) for sample in found.samples] == [2, 4, 4]
    assert len(engines[0].bodies[1]["rid"]) == 2
    assert engines[0].bodies[1]["sampling_params"]["max_new_tokens"] == 2


@pytest.mark.parametrize(("held", "limit", "ends"), [(4, 4, "length"), (2, 9, "stop")])
async def test_an_abort_behind_the_last_token_ends_the_sample(
    serving: Any, client: GatewayClient, engines: list[Any], until: Any, held: int, limit: int, ends: str
):
    engines[0].gate.clear()
    engines[0].held_tokens = held
    prompt = [5] * (30 if ends == "length" else 40)

    def end_token(answer: Any) -> None:
        if ends == "stop":
            answer["output_ids"][-1] = answer["meta_info"]["output_token_logprobs"][-1][1] = 63

    engines[0].script = [altered(end_token)]
    running = ask(client, Sampling(temperature=1.0, max_new_tokens=limit), input_ids=prompt)
    await until(lambda: engines[0].bodies)
    serving.request_refit(2, "interrupt")
    await serving.closed(2)
    assert (await running).samples[0].finish_reason == ends


async def test_finish_lets_calls_end_and_holds_newcomers(
    serving: Any, client: GatewayClient, engines: list[Any], until: Any
):
    engines[0].gate.clear()
    early = ask(client)
    await until(lambda: engines[0].bodies)
    serving.request_refit(2, "finish")
    late = ask(client)
    await until_held(serving)
    await engines[0].release()
    assert (await early).samples[0].spans == [by(engines[0], 0, 4, 10)]
    assert (await serving.closed(2)).held == 1
    serving.feed(RefitFailed(epoch=2, version=20, phase="transfer", reason="x"))
    serving.request_refit(3, "finish")
    await serving.closed(3)
    assert not late.done()
    serving.commit(3, engines[0])
    assert (await late).samples[0].spans == [by(engines[0], 0, 4, 30)]
    assert engines[0].aborts == []


async def test_finish_gives_up_on_a_call_that_outlives_the_drain(
    config: RunConfig, engines: list[Any], until: Any, Host: Any
):
    refit = msgspec.structs.replace(config.refit, drain_deadline_s=0.5)
    host = await Host(build(msgspec.structs.replace(config, refit=refit), "gateway-0")).start()
    client = GatewayClient(host.url)
    host.commit(1, engines[0])
    engines[0].gate.clear()
    engines[0].deaf = True
    running = ask(client)
    await until(lambda: engines[0].bodies)
    host.request_refit(2, "finish")
    closed = await host.closed(2)
    assert (closed.held, closed.interrupted) == (1, 1)
    assert closed.seconds == pytest.approx(0.45, abs=0.3)
    engines[0].gate.set()
    host.commit(2, engines[0])
    assert (await running).samples[0].spans == [by(engines[0], 0, 4, 20)]
    await client.close()
    await host.close()


async def test_stretches_of_one_origin_share_a_span(
    serving: Any, client: GatewayClient, engines: list[Any], until: Any
):
    engines[0].gate.clear()
    engines[0].aborts = ["gateway-0-00000001-0000000001-"]
    running = ask(client)
    await until(lambda: serving.current.avoided)
    engines[0].gate.set()
    found = await running
    assert len(engines[0].bodies) == 2
    assert found.samples[0].spans == [by(engines[0], 0, 4, 10)]
    assert found.samples[0].output_ids == [3, 4, 5, 6]


# --- start and end ---------------------------------------------------------------------------------------------------


async def test_a_port_in_use_is_fatal_and_names_the_setting(config: RunConfig, host: Any, Host: Any):
    port = int(host.url.rsplit(":", 1)[1])
    taken = msgspec.structs.replace(config, gateway=msgspec.structs.replace(config.gateway, port=port))
    second = Host(build(taken, "gateway-0"))
    with pytest.raises(Fatal, match=f"gateway.port={port} is in use on 127.0.0.1.*or 0"):
        await second.start()
    await second.close()


async def test_a_restart_waits_for_its_predecessor_to_leave_the_port(config: RunConfig, host: Any, Host: Any):
    port = int(host.url.rsplit(":", 1)[1])
    same = msgspec.structs.replace(config, gateway=msgspec.structs.replace(config.gateway, port=port))
    successor = Host(build(same, "gateway-0"), boot=2)
    starting = asyncio.ensure_future(successor.start())
    await host.shell.close()
    await starting
    assert successor.url == host.url
    await successor.close()


async def test_an_address_of_another_host_is_fatal(config: RunConfig, Host: Any):
    away = msgspec.structs.replace(config, network=msgspec.structs.replace(config.network, host="203.0.113.7"))
    second = Host(build(away, "gateway-0"))
    with pytest.raises(Fatal, match=r"network.host='203.0.113.7'"):
        await second.start()
    await second.close()


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
async def test_a_model_without_its_files_is_fatal(config: RunConfig, model: Any, Host: Any, missing: str):
    (model / missing).unlink()
    broken = Host(build(config, "gateway-0"))
    with pytest.raises(Fatal, match=f"model.source=.*{missing}"):
        await broken.start()
    await broken.close()


async def test_callers_wait_until_the_gateway_has_announced_itself(config: RunConfig, engines: list[Any], Host: Any):
    host = Host(build(config, "gateway-0"))
    await host.shell.start(host.context)
    client = GatewayClient(host.shell._url)
    early = ask(client)
    while not host.shell._entries:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await host.start_actor()
    host.commit(1, engines[0])
    assert (await early).samples[0].output_ids == [3, 4, 5, 6]
    await client.close()
    await host.close()


async def test_a_restart_aborts_what_its_predecessor_left_on_the_engines(
    serving: Any, client: GatewayClient, engines: list[Any], until: Any
):
    engines[0].gate.clear()
    running = ask(client)
    await until(lambda: engines[0].bodies)
    prefix = "gateway-0-00000001-"
    await serving.shell.perform(AbortAll((engines[0].url, "http://127.0.0.1:9"), (prefix,)))
    assert engines[0].aborts == [prefix]
    engines[0].gate.set()
    await running


async def test_a_call_whose_caller_has_left_is_not_sent(serving: Any, engines: list[Any]):
    call = Call(9, 99, (0,), "engine-0", 1, engines[0].url, 1, 10, "x")
    assert (await serving.shell.perform(call)).reason == "the caller left"
    assert engines[0].bodies == []


async def test_the_client_tells_a_gateway_that_is_gone_from_a_slow_one(host: Any, monkeypatch: pytest.MonkeyPatch):
    client = GatewayClient("http://127.0.0.1:9")
    with pytest.raises(InfraProblem, match="can't be reached"):
        await ask(client)
    monkeypatch.setattr("actors.gateway.client.MARGIN_S", -0.1)
    client.url = host.url
    with pytest.raises(DeadlineProblem, match="did not answer"):
        await ask(client, deadline_s=0.2)
    await client.close()


async def test_the_client_does_not_trust_a_stranger(engines: list[Any]):
    client = GatewayClient(engines[0].url)
    engines[0].script = [answers(200, {"x": 1}), answers(502, ["x"])]
    for status in (200, 502):
        with pytest.raises(InfraProblem, match=f"answered {status}"):
            await ask(client)
    await client.close()
