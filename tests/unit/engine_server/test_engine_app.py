"""Failures of the HTTP side that no real peer causes on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from actors.engine.torch_server.app import Server
from actors.engine.torch_server.groups import GroupError, GroupLost
from actors.engine.torch_server.protocol import Limits

UPDATE = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"}


class Failing:
    """Groups whose receive raises `error`."""

    timeout = timedelta(seconds=5)

    def __init__(self) -> None:
        self.error: Exception = GroupError("gone")

    def receive(self, name: str, incoming: Any, bucket: bool) -> Any:
        raise self.error


@pytest.fixture
async def server(stepped: Callable[..., Any]) -> AsyncIterator[tuple[Server, TestClient[Any, Any]]]:
    scheduler = stepped().scheduler
    limits = Limits(vocab=160, context=512, total=8192, eos=frozenset(), seed=0, sequences=4)
    made = Server(scheduler, Failing(), limits, {"model": {}, "server": {}}, 2**20)  # type: ignore[arg-type]
    scheduler.connect(made.publish, made.crashed)
    scheduler.start()
    async with TestClient(TestServer(made.app)) as client:
        yield made, client
    scheduler.stop(5)


async def test_a_receive_that_failed_on_the_host_leaves_the_engine_serving(server: Any) -> None:
    made, client = server
    response = await client.post("/update_weights_from_distributed", json=UPDATE)
    assert (response.status, await response.json()) == (400, {"success": False, "message": "gone"})
    assert not made.stopped.is_set()
    assert (await client.post("/generate", json={"input_ids": [5]})).status == 200


async def test_a_receive_that_failed_on_a_gpu_answers_and_ends_the_process(server: Any) -> None:
    made, client = server
    made.groups.error = GroupLost("stuck")
    response = await client.post("/update_weights_from_distributed", json=UPDATE)
    assert (response.status, await response.json()) == (400, {"success": False, "message": "stuck"})
    assert made.stopped.is_set()
    assert made.failure is made.groups.error


async def test_more_sequences_than_may_be_queued_are_turned_away(server: Any) -> None:
    made, client = server
    made.live.update(dict.fromkeys("abc"))
    body = {"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 1}}
    assert (await client.post("/generate", json=body)).status == 503
    made.live.clear()
    assert (await client.post("/generate", json=body)).status == 200
    too_many = {"input_ids": [[5]] * 5}
    assert (await client.post("/generate", json=too_many)).status == 400


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"dtypes": ["int7"]}, "int7"),
        ({"shapes": [[1], [2]]}, "2 shapes"),
        ({"shapes": [[-1]]}, "[-1]"),
    ],
)
async def test_an_announcement_that_makes_no_sense_answers_400(server: Any, change: dict[str, Any], want: str) -> None:
    _, client = server
    response = await client.post("/update_weights_from_distributed", json=UPDATE | change)
    assert response.status == 400
    message = (await response.json())["message"]
    assert want in message
    assert "partially updated" in message
