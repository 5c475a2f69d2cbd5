"""The sidecar's side of our own receiver: one call a refit, and a digest from the parts that ranks hold."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace

from actors.engine.actor import EngineShell
from actors.engine.client import CallError, HttpEngineClient
from actors.engine.direct import Answer, Direct, inner, merged, slowest, whole
from actors.engine.server import Server, attach
from actors.refit.transports.ipc import IpcSender
from config.schema import EngineConfig, LaunchConfig, RefitConfig, RunConfig
from contracts.events import Bucket, EngineDrained, EngineFailed, EngineLoaded, EngineReady, TensorSpec
from contracts.weights import digest
from tests.unit.engine.driver import Driver
from tests.unit.engine.fake_server import FakeServer
from tests.unit.engine.test_sidecar_shell import BUCKETS as SENT
from tests.unit.engine.test_sidecar_shell import Bench
from tests.unit.engine.world import committed, failed, offered, started

TENSORS = tuple(TensorSpec(name, "float32", (4, 2)) for name in ("model.embed_tokens.weight", "b"))
BUCKETS = (Bucket(TENSORS[:1], 32), Bucket(TENSORS[1:], 32))


EMBED = "model.embed_tokens.weight"


def test_parts_on_several_ranks_add_up_and_copies_count_once() -> None:
    parts = [[(EMBED, "all", 8), ("b", side, 4)] for side in ("left", "right")]
    sums = [["07", f"{2**64 - 1:016x}"], ["07", "03"]]
    assert merged(parts, sums, BUCKETS) == {EMBED: f"{7:016x}", "b": f"{2:016x}"}


def test_a_part_that_is_not_there_or_differs_between_ranks_is_no_digest_of_the_whole() -> None:
    assert merged([[(EMBED, "all", 8), ("b", "left", 4)]], [["07", "01"]], BUCKETS) == {EMBED: f"{7:016x}"}
    assert merged(2 * [[(EMBED, "all", 8)]], [["07"], ["08"]], BUCKETS) == {}


def test_of_one_rank_with_whole_tensors_sums_are_taken_as_they_are() -> None:
    own = [[(EMBED, "all", 8), ("b", "all", 8)]]
    assert whole(own, BUCKETS) == [EMBED, "b"]
    assert whole(2 * own, BUCKETS) is None
    assert whole([[(EMBED, "all", 8), ("b", "left", 4)]], BUCKETS) is None
    assert whole([[(EMBED, "all", 8), ("b", "left", 8), ("b", "right", 8)]], BUCKETS) is None


@pytest.mark.parametrize("sums", [None, [None], []])
def test_what_can_not_be_told_is_none(sums: Any) -> None:
    assert merged([[(EMBED, "all", 8)]], [sums], BUCKETS) is None


def test_a_tied_head_has_the_checksum_of_the_matrix_it_is() -> None:
    buckets = (*BUCKETS, Bucket((TensorSpec("lm_head.weight", "float32", (4, 2)),), 32))
    found = merged([[(EMBED, "all", 8), ("b", "all", 8)]], [["07", "01"]], buckets)
    assert found is not None
    assert found["lm_head.weight"] == found[EMBED]


def test_a_receiver_gives_up_before_its_caller_and_the_slowest_rank_counts() -> None:
    assert [inner(timeout) for timeout in (0.4, 60.0)] == [pytest.approx(0.3), 59.0]
    assert slowest([Answer("", {"load": 1.0}), Answer("", {"load": 3.0})]) == {"load": 3.0}
    assert slowest([]) == {}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer() as made:
        made.receivers = {"prepare": [{"fallback": ""}], "broadcast": [{"fallback": ""}]}
        yield made


async def test_where_tensors_go_is_asked_once_for_the_same_tensors(server: FakeServer) -> None:
    client = HttpEngineClient(server.url)
    told = Direct(client)
    for buckets in (BUCKETS, BUCKETS, BUCKETS[:1]):
        await told.prepare(buckets, 9.0)
    asked = [body["names"] for _, body in server.calls]
    assert asked == [["model.embed_tokens.weight", "b"], ["model.embed_tokens.weight"]]
    await client.close()


@pytest.mark.parametrize("message", ["Succeeded", "sluice:nonsense]", "sluice:"])
async def test_a_server_without_our_receiver_is_named(server: FakeServer, message: str) -> None:
    server.answers["/update_weights_from_distributed"] = (200, {"success": True, "message": message})
    client = HttpEngineClient(server.url)
    with pytest.raises(CallError, match=r"update_weights_from_distributed"):
        await Direct(client).prepare(BUCKETS, 9.0)
    await client.close()


@pytest_asyncio.fixture
async def bench(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Bench]:
    async def launch(self: EngineShell, deadline_s: float) -> Server:
        return await attach(server.url, deadline_s)

    monkeypatch.setattr(EngineShell, "_launch", launch)
    config = RunConfig(
        engine=EngineConfig(kind="sglang", lease_s=30.0),
        refit=RefitConfig(transport=getattr(request, "param", "gloo"), deadline_s=60.0, drain_deadline_s=40.0),
        launch=LaunchConfig(start_deadline_s=60.0),
    )
    async with Driver(config, tmp_path) as driver:
        await driver.event(EngineReady)
        server.calls.clear()
        async with aiohttp.ClientSession() as http:
            yield Bench(driver, server, http)


async def test_one_call_takes_everything_with_no_pause_and_tells_its_phases(bench: Bench) -> None:
    parts = [(spec.name, "all", math.prod(spec.shape)) for bucket in SENT for spec in bucket.tensors]
    phases = {"broadcast": 0.25, "digest": 0.5}
    bench.server.receivers["prepare"] = [{"fallback": "", "parts": parts}]
    bench.server.receivers["broadcast"] = [{"fallback": "", "phases": phases, "sums": len(parts) * [f"{10:016x}"]}]
    loaded = await bench.load(1)
    update = "/update_weights_from_distributed"
    assert bench.server.paths() == ["/flush_cache", "/init_weights_update_group", update, update]
    assert loaded.digest == digest(dict.fromkeys((name for name, _, _ in parts), f"{10:016x}"))
    assert (loaded.receiver, loaded.fallback) == ("direct", "")
    spent = {phase.name: phase.seconds for phase in loaded.phases}
    assert list(spent) == ["join", "prepare", "receive", "broadcast", "digest", "verify"]
    assert spent["broadcast"] == 0.25
    bench.driver.publish(committed(1, 1))
    await bench.driver.mode("serving")
    assert "/continue_generation" not in bench.server.paths()


async def test_a_drain_rests_on_whole_answers_once_the_receiver_is_there(bench: Bench) -> None:
    await bench.serve(1)
    await bench.serve(2, "g2")
    assert bench.server.paths().count("/flush_cache") == 1


async def test_a_drain_flushes_when_a_request_ended_without_its_whole_answer(bench: Bench) -> None:
    await bench.serve(1)
    bench.server.cut.add("/generate")
    assert (await bench.generate(1))[0] == 502
    await bench.serve(2, "g2")
    assert bench.server.paths().count("/flush_cache") == 2
    await bench.serve(3, "g3")
    assert bench.server.paths().count("/flush_cache") == 2


async def test_a_scheduler_that_is_not_through_with_what_it_answered_is_asked_again(bench: Bench) -> None:
    await bench.serve(1)
    held = (400, {"success": False, "message": "Held: requests are held: weights can't change under them"})
    bench.server.once["/update_weights_from_distributed"] = [held, held]
    loaded = await bench.load(2, "g2")
    assert loaded.epoch == 2


async def test_requests_that_stay_held_fail_the_load_at_its_deadline(server: FakeServer) -> None:
    held = {"success": False, "message": "Held: requests are held: weights can't change under them"}
    server.answers["/update_weights_from_distributed"] = (400, held)
    client = HttpEngineClient(server.url)
    with pytest.raises(CallError, match="requests are held"):
        await Direct(client).broadcast("g", "1", 0.5)
    assert len(server.calls) > 1
    await client.close()


async def test_a_model_that_goes_through_sglangs_loader_is_told_with_the_reason(bench: Bench) -> None:
    bench.server.receivers["prepare"] = [{"fallback": ""}, {"fallback": "quantised"}]
    bench.server.receivers["broadcast"] = 2 * [{"fallback": "quantised", "phases": {}, "sums": None}]
    loaded = await bench.load(1)
    assert (loaded.receiver, loaded.fallback, loaded.digest) == ("sglang", "quantised", "")


async def test_a_cache_that_was_not_flushed_is_no_load(bench: Bench) -> None:
    bench.server.receivers["broadcast"] = [{"fallback": "", "sums": [], "flushed": False}]
    bench.request(1)
    await bench.driver.event(EngineDrained, epoch=1)
    bench.start(1)
    told = await bench.driver.event(EngineFailed, epoch=1)
    assert (told.phase, told.error) == ("verify", "Busy")
    assert not bench.driver.find(EngineLoaded)


async def test_weights_that_the_model_has_not_are_told_before_anything_is_received(bench: Bench) -> None:
    refused = {"success": False, "message": "Mismatch: the model's 'z' is not among what is sent"}
    bench.server.answers["/update_weights_from_distributed"] = (400, refused)
    bench.request(1)
    await bench.driver.event(EngineDrained, epoch=1)
    bench.start(1)
    told = await bench.driver.event(EngineFailed, epoch=1)
    assert told.phase == "prepare"
    assert "'z' is not among" in told.reason


@pytest.mark.parametrize("bench", ["ipc"], indirect=True)
async def test_memory_that_is_new_is_opened_in_a_call_of_its_own_that_counts_as_the_join(bench: Bench) -> None:
    for do in ("open", "copy"):
        bench.server.receivers[do] = [{"fallback": "", "phases": {}, "sums": None}]
    sender = IpcSender(None, "direct")
    weights = {"a": torch.ones(2), "b": torch.ones(1), "c": torch.ones(4)}
    seen = []
    for epoch in (1, 2):
        bench.request(epoch)
        await bench.driver.event(EngineDrained, epoch=epoch)
        offer = await asyncio.to_thread(sender.offer, weights.items())
        bench.driver.publish(replace(offered(epoch), address=offer.address, payload=bench.driver.keep(offer.buckets)))
        begun = started(epoch, 1)
        bench.driver.publish(begun)
        await asyncio.to_thread(sender.send, begun, 60.0)
        loaded = await bench.driver.event(EngineLoaded, epoch=epoch)
        bench.driver.publish(committed(epoch, 1))
        await bench.driver.mode("serving")
        commands = [body["load_format"] for path, body in bench.server.calls if path.startswith("/update")]
        seen.append([word for command in commands for word in ("prepare", "open", "copy") if word in command])
        assert all(phase.seconds >= 0.0 for phase in loaded.phases)
        assert ("join" in [phase.name for phase in loaded.phases]) == (epoch == 1)
        bench.server.calls.clear()
    assert seen == [["prepare", "open", "copy"], ["copy"]]
    await asyncio.to_thread(sender.close)


async def test_a_receiver_out_of_memory_fails_the_engine_with_the_reason_and_the_next_epoch_loads(bench: Bench) -> None:
    await bench.serve(1)
    short = {"success": False, "message": "Failed: after 0.1 s: CUDA out of memory. Tried to allocate 2.00 GiB"}
    bench.server.once["/update_weights_from_distributed"] = [(400, short)]
    bench.request(2)
    await bench.driver.event(EngineDrained, epoch=2)
    bench.start(2, fresh=False)
    told = await bench.driver.event(EngineFailed, epoch=2)
    assert told.phase == "receive"
    assert "CUDA out of memory" in told.reason
    bench.driver.publish(failed(2))
    await bench.driver.mode("uncertain")
    await bench.serve(3, "g3")
