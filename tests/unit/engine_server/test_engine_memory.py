"""The embedded engine gives memory back and takes it again as SGLang does, and is safe where SGLang would end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer

from actors.engine.torch_server.app import Server
from actors.engine.torch_server.groups import Groups
from actors.engine.torch_server.protocol import Limits
from actors.engine.torch_server.scheduler import MemoryMisuse

GIVE, TAKE = "/release_memory_occupation", "/resume_memory_occupation"
ALL: dict[str, Any] = {}


def test_released_memory_is_free_and_a_load_makes_the_model_what_it_was(stepped: Callable[..., Any]) -> None:
    made = stepped()
    first = made.add([5, 6, 7])
    made.run()
    scheduler, weights = made.scheduler, made.weights
    held = {name: tensor.clone() for name, tensor in weights.named.items()}
    size = weights.bytes
    assert size == sum(tensor.nbytes for tensor in held.values())
    assert scheduler.cache.bytes > 0
    weights.checksums()
    scheduler.give_back(["kv_cache", "weights"])
    stats = scheduler.stats()
    assert (stats["weight_bytes"], stats["cache_bytes"], stats["prefix_tokens"]) == (0, 0, 0)
    assert stats["released"] == ["kv_cache", "weights"]
    scheduler.take(["weights"])
    assert weights.bytes == size
    assert all(tensor.isnan().all() for tensor in weights.named.values()), "nothing of the old is left to be used"
    scheduler.apply(list(held.items()), "2", flush=False)
    scheduler.take(["kv_cache"])
    again = made.add([5, 6, 7])
    made.run()
    assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)


def test_weights_that_were_not_loaded_generate_nothing(stepped: Callable[..., Any]) -> None:
    made = stepped()
    made.scheduler.give_back(["weights"])
    made.scheduler.take(["weights"])
    spoiled = made.add([5, 6, 7])
    made.run()
    assert spoiled.finish is not None
    assert (spoiled.finish["type"], spoiled.tokens[3:]) == ("abort", [])


def test_what_can_not_be_done_changes_nothing(stepped: Callable[..., Any]) -> None:
    made = stepped()
    scheduler = made.scheduler
    with pytest.raises(MemoryMisuse, match="weights: not released"):
        scheduler.take(["weights"])
    made.add([5, 6, 7])
    with pytest.raises(MemoryMisuse, match="only when server is idle"):
        scheduler.give_back(["kv_cache"])
    made.run()
    scheduler.give_back(["weights"])
    with pytest.raises(MemoryMisuse, match="weights: already released"):
        scheduler.give_back(["kv_cache", "weights"])
    assert scheduler.released == {"weights"}
    with pytest.raises(ValueError, match="released"):
        scheduler.apply([("model.norm.weight", torch.ones(64))], "2", flush=False)


def test_nothing_runs_while_memory_is_released(stepped: Callable[..., Any]) -> None:
    scheduler = stepped().scheduler
    scheduler.give_back(["kv_cache"])
    scheduler.waiting.append(object())
    assert not scheduler._busy
    scheduler.take(["kv_cache"])
    assert scheduler._busy


@pytest.fixture
async def client(stepped: Callable[..., Any]) -> AsyncIterator[TestClient[Any, Any]]:
    scheduler = stepped().scheduler
    limits = Limits(vocab=160, context=512, total=8192, eos=frozenset(), seed=0, sequences=4)
    server = Server(scheduler, Groups(torch.device("cpu"), 5.0), limits, {"model": {}, "server": {}}, 2**20)
    scheduler.connect(server.publish, server.crashed)
    scheduler.start()
    async with TestClient(TestServer(server.app)) as client:
        yield client
    scheduler.stop(5)


async def test_calls_that_need_the_memory_are_refused_meanwhile(client: Any) -> None:
    prompt = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    for body in (ALL, {"tags": []}, {"tags": ["weights", "kv_cache"]}):
        answer = await client.post(GIVE, json=body)
        assert (answer.status, await answer.json()) == (200, None)
        refused = [
            await client.post("/generate", json=prompt),
            await client.post("/generate", json=prompt | {"stream": True}),
            await client.post("/weights_checker", json={"action": "checksum"}),
            await client.post("/get_weights_by_name", json={"name": "model.norm.weight"}),
            await client.post(GIVE, json={"tags": ["kv_cache"]}),
        ]
        assert [answer.status for answer in refused] == [400] * 5
        assert (await client.get("/health_generate")).status == 503
        assert (await client.get("/model_info")).status == 200
        assert (await client.post("/flush_cache")).status == 200
        assert (await client.post(TAKE, json={"tags": ["weights"]})).status == 200
        assert (await client.post("/generate", json=prompt)).status == 400, "the cache is not there yet"
        assert (await client.post(TAKE, json={"tags": ["kv_cache"]})).status == 200
    assert (await client.get("/health")).status == 200


async def test_an_unknown_tag_is_named(client: Any) -> None:
    answer = await client.post(GIVE, json={"tags": ["cuda_graph"]})
    assert answer.status == 400
    assert "tags names cuda_graph; this engine knows kv_cache, weights" in (await answer.json())["error"]["message"]
