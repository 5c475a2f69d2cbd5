"""The engine actor on the real server: one boot goes through the barrier again and again, by gloo and by shared memory.

The tests share one server, in order; each leaves it serving, and the last one kills it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from actors.engine.direct import Direct
from actors.refit.transports import TransferError
from config.schema import EngineConfig, GatewayConfig, LaunchConfig, ModelConfig, RefitConfig, RunConfig
from contracts.events import EngineDead, EngineDrained, EngineFailed, EngineLoaded, EngineReady, Rank
from tests.contract.refits import Refits
from tests.unit.engine.driver import Driver

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMS: dict[str, Any] = {
    "vocabulary": {"texts": ["one two three four"]},
    "layers": 2,
    "width": 32,
    "heads": 2,
    "positions": 4096,
    "init_std": 0.2,
    "tied": False,
}
PROMPT = [3, 4, 5]
PATIENCE_S = 300.0
LONG = 3500
"""Tokens of an answer that is far from its end when it is aborted."""


class Bench:
    """One boot and its refits. `epoch` is the last one."""

    def __init__(self, driver: Driver, http: aiohttp.ClientSession) -> None:
        self.driver = driver
        self.http = http
        self.refits = Refits(driver)
        self.epoch = 0

    def use(self, transport: Any, receiver: Any = "direct", verify: Any = "digest") -> None:
        """From now on weights travel so; the server, which was started for our receiver, has its own too."""
        self.refits.sender.close()
        settings, shell = self.driver.config, self.driver.shell
        refit = replace(settings.refit, transport=transport, receiver=receiver, verify=verify)
        settings = replace(settings, refit=refit)
        self.driver.config = shell._operations._config = settings
        shell._operations._direct = Direct(shell._client) if receiver == "direct" else None
        self.refits = Refits(self.driver, digests=receiver == "direct")

    async def load(self, seed: int) -> None:
        """One whole refit, in a fresh group."""
        self.epoch += 1
        await self.refits.load(self.epoch, seed, f"g{self.epoch}", fresh=True)

    async def drained(self, seed: int, drain: str = "finish", spoil: bool = False) -> None:
        """Up to the transfer."""
        self.epoch += 1
        self.refits.request(self.epoch, drain)
        self.refits.offer(self.epoch, seed, spoil)
        await self.driver.event(EngineDrained, epoch=self.epoch)

    async def generate(self, rid: str, new: int = 8, temperature: float = 1.0) -> tuple[Any, str]:
        """The answer and the version it is stamped with."""
        body = {
            "input_ids": PROMPT,
            "rid": rid,
            "sampling_params": {"temperature": temperature, "max_new_tokens": new, "ignore_eos": True},
            "return_logprob": True,
        }
        headers = {"x-sluice-epoch": str(self.epoch), "x-sluice-rids": rid}
        async with self.http.post(f"{self.driver.url}/generate", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json(), response.headers["x-sluice-version"]

    async def begun(self, rid: str, new: int) -> asyncio.Task[tuple[Any, str]]:
        """A generation that is known to run."""
        task = asyncio.create_task(self.generate(rid, new))
        async with asyncio.timeout(PATIENCE_S):
            while self.driver.shell._proxy.running == 0:  # noqa: ASYNC110 - nothing tells us
                await asyncio.sleep(0.01)
        return task


def config(python: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(params=PARAMS),
        engine=EngineConfig(
            kind="sglang", python=python, max_total_tokens=4096, max_running=8, lease_s=10.0, restart_backoff_s=0.1
        ),
        refit=RefitConfig(deadline_s=150.0, drain_deadline_s=90.0, bucket_mib=8192 / 2**20),
        gateway=GatewayConfig(request_deadline_s=200.0),
        launch=LaunchConfig(start_deadline_s=PATIENCE_S),
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bench(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    torch.set_num_threads(1)
    cache = pytest.MonkeyPatch()
    cache.setenv("SLUICE_CACHE", str(tmp_path_factory.getbasetemp() / "sluice-cache"))
    settings = config(sglang_python)
    async with Driver(settings, tmp_path_factory.mktemp("run")) as driver, aiohttp.ClientSession() as http:
        ready = await driver.until(
            lambda: next(iter(driver.find(EngineReady)), None), "EngineReady", timeout=PATIENCE_S
        )
        assert (ready.ranks, ready.url) == (1, driver.url)
        bench = Bench(driver, http)
        yield bench
        bench.refits.sender.close()
    cache.undo()


def reference(bench: Bench, seed: int, ids: list[int]) -> list[float]:
    """Log-probabilities of `ids` behind the prompt, by transformers with the weights of `seed`."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(bench.refits._model_dir), dtype=torch.float32)
    model.load_state_dict(dict(bench.refits.weights(seed)))
    with torch.no_grad():
        logits = model.eval()(torch.tensor([PROMPT + ids])).logits[0].log_softmax(-1)
    return [float(logits[len(PROMPT) - 1 + i, token]) for i, token in enumerate(ids)]


@pytest.mark.parametrize("receiver", ["direct", "sglang"])
@pytest.mark.parametrize("transport", ["gloo", "ipc"])
async def test_tokens_are_those_of_the_weights_that_were_sent(bench: Bench, transport: str, receiver: str) -> None:
    bench.use(transport, receiver)
    for seed in (5, 6):
        await bench.load(seed)
        answer, version = await bench.generate(f"rid-{bench.epoch:04}")
        assert version == str(100 + bench.epoch)
        assert answer["meta_info"]["weight_version"] == version
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(reference(bench, seed, answer["output_ids"]), abs=1e-4)
        loaded = await bench.driver.event(EngineLoaded, epoch=bench.epoch)
        assert (loaded.receiver, loaded.fallback) == (receiver, "")
        spent = {phase.name: phase.seconds for phase in loaded.phases}
        assert ("load" in spent if transport == "ipc" else "broadcast" in spent) == (receiver == "direct"), spent
        assert 0 < sum(spent.values()) < loaded.seconds


async def test_sglangs_checksums_tell_weights_apart_however_they_came(bench: Bench) -> None:
    found: list[str] = []
    for transport, seed in (("gloo", 5), ("ipc", 6), ("ipc", 5)):
        bench.use(transport, "sglang", "fleet")
        await bench.load(seed)
        loaded = await bench.driver.event(EngineLoaded, epoch=bench.epoch)
        found.append(loaded.fingerprint)
    assert found[0] == found[2] != found[1] != ""


async def test_a_drain_lets_what_runs_finish_under_its_old_version(bench: Bench) -> None:
    before = str(100 + bench.epoch)
    running = await bench.begun("fin-0001", new=200)
    await bench.load(7)
    answer, version = await running
    assert version == before
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert len(answer["output_ids"]) == 200


async def test_an_interrupt_keeps_the_tokens_made_so_far(bench: Bench) -> None:
    """The gateway aborts through the proxy; the engine drains without waiting for the end."""
    running = await bench.begun("int-0001", new=LONG)
    await bench.http.post(f"{bench.driver.url}/abort_request", json={"rid": "int-0001"})
    await bench.load(8)
    answer, _ = await running
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < LONG
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


@pytest.mark.parametrize("transport", ["gloo", "ipc"])
async def test_a_bad_transfer_costs_one_epoch_and_the_next_one_is_served(bench: Bench, transport: str) -> None:
    """Over gloo a tensor of another shape, which the server refuses; over shared memory a trainer that gives up."""
    bench.use(transport)
    if transport == "gloo":
        await bench.drained(9, spoil=True)
        started = bench.refits.start(bench.epoch, f"g{bench.epoch}", fresh=True)
        await asyncio.to_thread(bench.refits.sender.send, started, 30.0)
    else:
        await bench.drained(9)
        started = bench.refits.start(bench.epoch, f"g{bench.epoch}", fresh=True)
        absent = replace(started, members=(*started.members, Rank("engine-9", 1, 2, 1)), world_size=3)
        with pytest.raises(TransferError, match=r"never came: engine-9"):
            await asyncio.to_thread(bench.refits.sender.send, absent, 2.0)
    told = await bench.driver.event(EngineFailed, epoch=bench.epoch)
    assert told.phase == "receive"
    await bench.load(10)
    answer, _ = await bench.generate(f"rid-{bench.epoch:04}")
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(reference(bench, 10, answer["output_ids"]), abs=1e-4)


async def test_a_killed_server_is_told_and_the_process_ends(bench: Bench) -> None:
    """Its successor starts a new server: that is a boot like the first."""
    os.kill(bench.driver.shell._server.process.pid, 9)  # type: ignore[union-attr]
    dead = await bench.driver.event(EngineDead, boot=1)
    assert "signal SIGKILL" in dead.reason
    assert "signal SIGKILL" in str(await bench.driver.ended())
