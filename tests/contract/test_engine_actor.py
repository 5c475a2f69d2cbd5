"""The engine actor on a real server of its own: boot, refits, a kill. Rank 0 is the trainer's own sender."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from msgspec.structs import replace
from torch.distributed import PrefixStore, TCPStore

from actors.engine.torch_server.config import read_config
from actors.engine.torch_server.weights import Weights
from actors.refit.transports.gloo import GlooSender
from config.schema import EngineConfig, GatewayConfig, ModelConfig, RefitConfig, RunConfig
from contracts.events import (
    EngineDead,
    EngineDrained,
    EngineFailed,
    EngineLoaded,
    EngineReady,
    Member,
    Rank,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    TransferOffered,
    TransferStarted,
)
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
        refit=RefitConfig(**({"deadline_s": 30.0, "drain_deadline_s": 10.0} | refit)),
        gateway=GatewayConfig(request_deadline_s=30.0),
    )


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path_factory.getbasetemp() / "sluice-cache"))


class Refits:
    """Coordinator and trainer in one: takes a driver through the barrier."""

    def __init__(self, driver: Driver) -> None:
        from actors import models

        self.driver = driver
        self.sender = GlooSender("127.0.0.1", 4096)
        self._model_dir = models.resolve("random", models.cache_dir(), PARAMS)
        self._deadline_s = driver.config.refit.deadline_s

    def weights(self, seed: int) -> list[tuple[str, torch.Tensor]]:
        weights = Weights(read_config(self._model_dir), torch.float32, torch.device("cpu"))
        weights.randomise(seed)
        return [(name, tensor.clone()) for name, tensor in weights.named.items()]

    def request(self, epoch: int, drain: Any = "finish") -> None:
        members = (Member("engine-0", self.driver.boot),)
        deadline_at = time.time() + self._deadline_s
        self.driver.publish(
            RefitRequested(
                epoch=epoch,
                version=100 + epoch,
                step=epoch,
                engines=members,
                gateways=(),
                drain=drain,
                deadline_at=deadline_at,
            )
        )

    def offer(self, epoch: int, seed: int, spoil: bool = False) -> str:
        """`spoil`: one tensor is longer than the model's."""
        weights = self.weights(seed)
        if spoil:
            name, tensor = weights[-1]
            weights[-1] = (name, torch.cat((tensor, tensor)))
        offer = self.sender.offer(weights)
        self._port = offer.port
        self.driver.publish(
            TransferOffered(
                epoch=epoch,
                version=100 + epoch,
                trainer_boot=1,
                address=offer.address,
                port=offer.port,
                buckets=offer.buckets,
                bytes=offer.bytes,
                digest=offer.digest,
            )
        )
        return offer.digest

    def start(self, epoch: int, group: str, fresh: bool) -> TransferStarted:
        started = TransferStarted(
            epoch=epoch,
            version=100 + epoch,
            group=group,
            fresh=fresh,
            members=(Rank("engine-0", self.driver.boot, 1, 1),),
            world_size=2,
        )
        self.driver.publish(started)
        return started

    def commit(self, epoch: int) -> None:
        self.driver.publish(
            RefitCommitted(
                epoch=epoch,
                version=100 + epoch,
                step=epoch,
                engines=(Member("engine-0", self.driver.boot),),
                world_size=2,
                pause_s=0.0,
                drain_s=0.0,
                transfer_s=0.0,
                bytes=0,
            )
        )

    def awaits(self, group: str) -> bool:
        """The engine has come to the meeting point of a new group."""
        store = TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False)
        return PrefixStore("cpu/", PrefixStore(f"{group}/", PrefixStore(group, store))).check(["0/1"])

    async def load(self, epoch: int, seed: int, group: str, fresh: bool) -> None:
        """From the request to the commit."""
        self.request(epoch)
        digest = self.offer(epoch, seed)
        await self.driver.event(EngineDrained, epoch=epoch)
        started = self.start(epoch, group, fresh)
        await asyncio.to_thread(self.sender.send, started, 20.0)
        loaded = await self.driver.event(EngineLoaded, epoch=epoch)
        assert loaded.digest == digest
        self.commit(epoch)
        await self.driver.mode("serving")


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
