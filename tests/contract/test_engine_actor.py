"""The engine actor on a real server of its own: boot, refits, a kill. Rank 0 is the trainer's own sender."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from msgspec.structs import replace

from actors.refit.transports import TransferError
from config.schema import EngineConfig, GatewayConfig, ModelConfig, RefitConfig, RunConfig
from contracts.events import EngineDead, EngineDrained, EngineFailed, EngineLoaded, EngineReady, Rank, RefitFailed
from tests.contract.refits import Refits
from tests.unit.engine.driver import Driver

PARAMS: dict[str, Any] = {
    "vocabulary": {"texts": ["one two three four"]},
    "layers": 1,
    "width": 16,
    "heads": 2,
    "positions": 256,
}


def config(**refit: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(params=PARAMS),
        engine=EngineConfig(max_total_tokens=4096, max_running=8, lease_s=2.0),
        refit=RefitConfig(**({"deadline_s": 30.0, "drain_deadline_s": 10.0, "bucket_mib": 4096 / 2**20} | refit)),
        gateway=GatewayConfig(request_deadline_s=30.0),
    )


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path_factory.getbasetemp() / "sluice-cache"))


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - nothing tells us
            await asyncio.sleep(0.01)


async def generate(
    http: aiohttp.ClientSession, url: str, epoch: int, rid: str, new: int = 4
) -> tuple[int, Any, dict[str, str]]:
    body = {
        "input_ids": [3, 4, 5],
        "rid": rid,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True, "sampling_seed": 1},
        "return_logprob": True,
    }
    headers = {"x-sluice-epoch": str(epoch), "x-sluice-rids": rid}
    async with http.post(f"{url}/generate", json=body, headers=headers) as response:
        return response.status, await response.json(), dict(response.headers)


async def test_a_boot_serves_after_a_commit_and_is_gone_with_its_server(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with Driver(config(), tmp_path) as driver:
        ready = await driver.event(EngineReady)
        assert (ready.ranks, ready.url) == (1, driver.url)
        status, answer, _ = await generate(http, driver.url, 0, "rid-000")
        assert (status, answer["error"]["type"]) == (409, "not_serving")

        refits = Refits(driver)
        await refits.load(1, seed=5, group="g1", fresh=True)
        status, first, headers = await generate(http, driver.url, 1, "rid-001")
        assert (status, headers["x-sluice-version"], headers["x-sluice-boot"]) == (200, "101", "1")
        assert len(first["output_ids"]) == 4
        assert (await generate(http, driver.url, 2, "rid-002"))[0] == 409

        await refits.load(2, seed=6, group="g1", fresh=False)
        assert (await generate(http, driver.url, 1, "rid-003"))[0] == 409
        status, second, headers = await generate(http, driver.url, 2, "rid-004")
        assert (status, headers["x-sluice-version"]) == (200, "102")
        assert second["meta_info"]["output_token_logprobs"] != first["meta_info"]["output_token_logprobs"]

        os.kill(driver.shell._server.process.pid, 9)  # type: ignore[union-attr]
        dead = await driver.event(EngineDead, boot=1)
        assert "signal SIGKILL" in dead.reason
        assert "signal SIGKILL" in str(await driver.ended())
        refits.sender.close()


async def test_what_runs_ends_with_its_version_and_a_bad_transfer_costs_one_epoch(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with Driver(config(), tmp_path) as driver:
        await driver.event(EngineReady)
        refits = Refits(driver)
        await refits.load(1, seed=5, group="g1", fresh=True)
        running = asyncio.create_task(generate(http, driver.url, 1, "rid-001", new=200))
        await eventually(lambda: driver.shell._proxy.running == 1)
        refits.request(2)
        refits.offer(2, seed=6, spoil=True)
        status, answer, headers = await running
        assert (status, headers["x-sluice-version"], len(answer["output_ids"])) == (200, "101", 200)
        await driver.event(EngineDrained, epoch=2)
        started = refits.start(2, "g1", fresh=False)
        await asyncio.to_thread(refits.sender.send, started, 20.0)
        told = await driver.event(EngineFailed, epoch=2)
        assert told.phase == "receive"
        assert "shape" in told.reason

        await refits.load(3, seed=7, group="g3", fresh=True)
        assert (await generate(http, driver.url, 3, "rid-002"))[0] == 200
        refits.sender.close()


async def test_in_flight_a_sequence_goes_on_over_a_refit_and_tells_its_versions_apart(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """It is far too long to end by itself. An epoch that fails ends it, with the tokens that it had."""
    settings = config()
    params = {**PARAMS, "positions": 32768}
    engine = replace(settings.engine, max_total_tokens=65536)
    async with Driver(replace(settings, model=ModelConfig(params=params), engine=engine), tmp_path) as driver:
        await driver.event(EngineReady)
        refits = Refits(driver)
        await refits.load(1, seed=5, group="g1", fresh=True)

        async def more() -> None:
            """A token is sampled."""
            seen = await generated()
            async with asyncio.timeout(20):
                while await generated() <= seen:  # noqa: ASYNC110 - nothing tells us
                    await asyncio.sleep(0.01)

        async def generated() -> int:
            async with http.get(f"{driver.shell._client.url}/server_info") as answer:
                return (await answer.json())["internal_states"][0]["generated_tokens"]

        running = asyncio.create_task(generate(http, driver.url, 1, "rid-001", new=30000))
        await eventually(lambda: driver.shell._proxy.running == 1)
        await more()
        await refits.load(2, seed=6, group="g1", fresh=False, drain="in_flight")
        assert (await driver.event(EngineDrained, epoch=2)).held == 1
        await more()

        refits.request(3, "in_flight")
        await driver.event(EngineDrained, epoch=3)
        driver.publish(RefitFailed(epoch=3, version=103, phase="offer", reason="the trainer is gone"))
        status, answer, _ = await running
        meta, count = answer["meta_info"], len(answer["output_ids"])
        (start, cut, old), (again, end, new) = meta["weight_version_spans"]
        assert (status, meta["finish_reason"]["type"]) == (200, "abort")
        assert (start, old, again, end, new) == (0, "101", cut, count, "102")
        assert 0 < cut < count

        await refits.load(4, seed=7, group="g4", fresh=True, drain="in_flight")
        assert (await driver.event(EngineDrained, epoch=4)).held == 0
        assert (await generate(http, driver.url, 4, "rid-002"))[1]["meta_info"]["weight_version_spans"] == [
            [0, 4, "104"]
        ]
        refits.sender.close()


async def test_a_server_that_waits_for_an_absent_sender_is_replaced(tmp_path: Path) -> None:
    async with Driver(config(), tmp_path) as driver:
        await driver.event(EngineReady)
        refits = Refits(driver)
        refits.request(1)
        refits.offer(1, seed=5)
        await driver.event(EngineDrained, epoch=1)
        refits.start(1, "g1", fresh=True)
        await eventually(lambda: refits.awaits("g1"))
        driver.publish(RefitFailed(epoch=1, version=101, phase="transfer", reason="the sender is gone"))
        dead = await driver.event(EngineDead, boot=1)
        assert "the server hangs after epoch 1 was given up" in dead.reason
        await driver.ended()
        process = driver.shell._server.process  # type: ignore[union-attr]
    assert not process.alive  # type: ignore[union-attr]
    async with Driver(config(), tmp_path, boot=2) as driver:
        await driver.event(EngineReady, boot=2)


async def test_a_server_that_can_not_start_says_why(tmp_path: Path) -> None:
    settings = config()
    settings = replace(settings, engine=replace(settings.engine, args=("--no-such-flag",)))
    async with Driver(settings, tmp_path) as driver:
        dead = await driver.event(EngineDead)
        assert "the server exited with status 2" in dead.reason
        assert "unrecognized arguments: --no-such-flag" in dead.reason
        await driver.ended()


async def test_weights_come_through_shared_memory_and_a_bad_bucket_costs_one_epoch(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with Driver(config(transport="ipc"), tmp_path) as driver:
        await driver.event(EngineReady)
        refits = Refits(driver)
        await refits.load(1, seed=5, group="g1", fresh=True)
        status, first, headers = await generate(http, driver.url, 1, "rid-001")
        assert (status, headers["x-sluice-version"]) == (200, "101")

        refits.request(2)
        refits.offer(2, seed=6, spoil=True)
        await driver.event(EngineDrained, epoch=2)
        with pytest.raises(TransferError, match=r"engine-0 refused bucket .*shape"):
            await asyncio.to_thread(refits.sender.send, refits.start(2, "g1", fresh=False), 20.0)
        told = await driver.event(EngineFailed, epoch=2)
        assert told.phase == "receive"
        assert "shape" in told.reason

        await refits.load(3, seed=7, group="g3", fresh=True)
        _, second, _ = await generate(http, driver.url, 3, "rid-002")
        assert second["meta_info"]["output_token_logprobs"] != first["meta_info"]["output_token_logprobs"]
        refits.sender.close()


async def test_a_trainer_that_is_not_there_or_goes_away_fails_the_engine_within_the_deadline(tmp_path: Path) -> None:
    async with Driver(config(transport="ipc"), tmp_path) as driver:
        await driver.event(EngineReady)
        refits = Refits(driver)
        refits.request(1)
        refits.offer(1, seed=5)
        await driver.event(EngineDrained, epoch=1)
        refits.sender.close()
        refits.start(1, "g1", fresh=True)
        told = await driver.event(EngineFailed, epoch=1)
        assert "refit.transport=ipc needs trainer and engines on one host" in told.reason

        refits.request(2)
        refits.offer(2, seed=5)
        await driver.event(EngineDrained, epoch=2)
        started = refits.start(2, "g2", fresh=True)
        sending = asyncio.create_task(
            asyncio.to_thread(refits.sender.send, replace(started, members=(*started.members, ABSENT)), 20.0)
        )
        await eventually(lambda: any(r.member is not None for r in _receivers(refits)))
        refits.sender.abandon()
        told = await driver.event(EngineFailed, epoch=2)
        assert "went away before bucket 0" in told.reason
        with pytest.raises(TransferError):
            await sending
        await refits.load(3, seed=5, group="g3", fresh=True)
        refits.sender.close()


ABSENT = Rank("engine-9", 1, 2, 1)


def _receivers(refits: Refits) -> list[Any]:
    attempt = refits.sender._attempt  # type: ignore[attr-defined]
    return [] if attempt is None else list(attempt._receivers)


async def test_the_probe_is_what_the_new_weights_generate_and_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    async with Driver(config(verify="probe"), tmp_path) as driver:
        await driver.event(EngineReady)
        refits = Refits(driver)
        probes = []
        for epoch, seed in ((1, 5), (2, 5), (3, 6)):
            await refits.load(epoch, seed=seed, group="g1", fresh=epoch == 1)
            probes.append((await driver.event(EngineLoaded, epoch=epoch)).probe)
        assert [len(probe) for probe in probes] == [4, 4, 4]
        assert probes[0] == pytest.approx(probes[1], abs=1e-5)
        assert probes[2] != pytest.approx(probes[0], abs=1e-2)
        refits.sender.close()
