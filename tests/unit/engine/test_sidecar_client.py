"""The client says what SGLang expects, within its deadline, and tells a refusal from silence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors.engine import client as client_module
from actors.engine.client import CallError, HttpEngineClient
from contracts.engine import EngineClient, EngineError
from contracts.events import TensorSpec
from tests.unit.engine.fake_server import FakeServer

SPECS = (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", ()))


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer() as server:
        yield server


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[HttpEngineClient]:
    client = HttpEngineClient(server.url)
    yield client
    await client.close()


def test_it_is_an_engine_client() -> None:
    checked: EngineClient = HttpEngineClient.__new__(HttpEngineClient)
    assert checked is not None


@pytest.mark.parametrize(
    ("call", "path", "body"),
    [
        (lambda c: c.abort("r-1", 5), "/abort_request", {"rid": "r-1"}),
        (lambda c: c.abort_all(5), "/abort_request", {"rid": "", "abort_all": True}),
        (lambda c: c.flush(1.5), "/flush_cache", {"timeout": "1.500"}),
        (lambda c: c.pause(5), "/pause_generation", {"mode": "in_place"}),
        (lambda c: c.resume(5), "/continue_generation", {"torch_empty_cache": False}),
        (
            lambda c: c.join_group("10.0.0.1", 7, 3, 9, "g", "gloo", 5),
            "/init_weights_update_group",
            {
                "master_address": "10.0.0.1",
                "master_port": 7,
                "rank_offset": 3,
                "world_size": 9,
                "group_name": "g",
                "backend": "gloo",
            },
        ),
        (lambda c: c.leave_group("g", 5), "/destroy_weights_update_group", {"group_name": "g"}),
        (
            lambda c: c.receive(SPECS, "g", "17", 5),
            "/update_weights_from_distributed",
            {
                "names": ["a", "b"],
                "dtypes": ["float32", "bfloat16"],
                "shapes": [[2, 3], []],
                "group_name": "g",
                "flush_cache": False,
                "abort_all_requests": False,
                "weight_version": "17",
                "load_format": "flattened_bucket",
                "torch_empty_cache": False,
            },
        ),
        (
            lambda c: c.take(("a place",), "17", 5),
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": ["a place"],
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "abort_all_requests": False,
                "weight_version": "17",
                "torch_empty_cache": False,
            },
        ),
        (lambda c: c.checksums(5), "/weights_checker", {"action": "checksum"}),
        (lambda c: c.weight_version(5), "/model_info", {}),
        (lambda c: c.ranks(5), "/server_info", {}),
    ],
)
async def test_calls_have_sglangs_form(
    client: HttpEngineClient, server: FakeServer, call: Any, path: str, body: Any
) -> None:
    await call(client)
    assert server.calls == [(path, body)]


async def test_answers_are_understood(client: HttpEngineClient, server: FakeServer) -> None:
    assert await client.flush(0) is True
    assert await client.checksums(5) == [dict.fromkeys("abc", "00")]
    assert await client.weight_version(5) == "default"
    assert await client.ranks(5) == 2
    assert await client.healthy(5) is True
    server.answers["/generate"] = (200, {"output_ids": [1]})
    assert await client.generate({"input_ids": [1]}, 5) == {"output_ids": [1]}


async def test_a_refused_flush_is_not_an_error_and_anything_else_is(
    client: HttpEngineClient, server: FakeServer
) -> None:
    server.answers["/flush_cache"] = (400, b"Flush cache failed.")
    assert await client.flush(0) is False
    server.answers["/flush_cache"] = (500, b"no")
    with pytest.raises(CallError, match="/flush_cache: 500: no"):
        await client.flush(0)


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_server_without_checksums_says_none(client: HttpEngineClient, server: FakeServer, status: int) -> None:
    server.answers["/weights_checker"] = (status, {})
    assert await client.checksums(5) is None


async def test_an_older_server_is_asked_for_its_info_by_the_older_name(
    client: HttpEngineClient, server: FakeServer
) -> None:
    server.answers["/server_info"] = (404, {})
    assert await client.ranks(5) == 2
    server.answers["/server_info"] = (500, {})
    with pytest.raises(CallError, match="500"):
        await client.ranks(5)


async def test_an_error_names_call_status_and_text(client: HttpEngineClient, server: FakeServer) -> None:
    server.answers["/pause_generation"] = (400, {"error": {"message": "scheduler is gone"}})
    with pytest.raises(EngineError) as caught:
        await client.pause(5)
    error = caught.value
    assert isinstance(error, CallError)
    assert (error.call, error.status) == ("/pause_generation", 400)
    assert "scheduler is gone" in str(error)


async def test_an_update_that_answers_no_success_is_an_error(client: HttpEngineClient, server: FakeServer) -> None:
    server.answers["/update_weights_from_distributed"] = (200, {"success": False, "message": "shapes differ"})
    with pytest.raises(CallError, match="shapes differ"):
        await client.receive(SPECS, "g", "1", 5)


async def test_an_answer_that_is_not_json_is_an_error(client: HttpEngineClient, server: FakeServer) -> None:
    server.answers["/model_info"] = (200, b"<html>")
    with pytest.raises(CallError, match="<html>"):
        await client.weight_version(5)
    assert await client.healthy(5) is False


async def test_silence_ends_at_the_deadline_and_has_no_status(client: HttpEngineClient, server: FakeServer) -> None:
    server.hang.add("/pause_generation")
    with pytest.raises(CallError, match=r"/pause_generation: no answer: deadline of 0\.05 s passed") as caught:
        await client.pause(0.05)
    assert caught.value.status is None


async def test_a_server_that_is_gone_is_an_error_without_status(client: HttpEngineClient, server: FakeServer) -> None:
    await server.__aexit__()
    with pytest.raises(CallError, match="Connect") as caught:
        await client.abort("r", 5)
    assert caught.value.status is None


async def test_answers_are_bounded(
    client: HttpEngineClient, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ANSWER_LIMIT", 100)
    server.answers["/weights_checker"] = (200, b"x" * 101)
    with pytest.raises(CallError, match="exceeds 100 bytes"):
        await client.checksums(5)


async def test_connections_are_kept(client: HttpEngineClient, server: FakeServer) -> None:
    for _ in range(5):
        await client.pause(5)
    (pool,) = client._session.connector._conns.values()  # type: ignore[union-attr]
    assert len(pool) == 1


async def test_forward_passes_bytes_and_any_status(client: HttpEngineClient, server: FakeServer) -> None:
    server.answers["/generate"] = (422, b"as it is")
    async with client.forward("/generate", b'{"rid": "r"}', 5) as reply:
        answer = await reply.read()
    assert (answer.status, answer.body, answer.content_type) == (422, b"as it is", "text/plain")
