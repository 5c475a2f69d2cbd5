"""An engine without memory for what is sent costs an epoch: from its allocation to the commit of the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from actors.engine.actor import EngineShell
from actors.engine.server import attach
from actors.engine.torch_server import groups as groups_module
from actors.engine.torch_server.app import Server
from actors.engine.torch_server.groups import Groups, Incoming
from actors.engine.torch_server.protocol import Limits
from actors.refit.transports import Offer, TransferError
from actors.refit.transports.gloo import GlooSender
from actors.refit.transports.staging import MIB, ON_CPU
from config.schema import EngineConfig, LaunchConfig, RefitConfig, RunConfig
from contracts.events import (
    EngineDrained,
    EngineFailed,
    EngineLoaded,
    EngineReady,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    TransferFinished,
    TransferOffered,
    TransferStarted,
)
from tests.unit.engine.driver import Driver
from tests.unit.refit.drive import Drive

EXHAUSTED = "CUDA out of memory. Tried to allocate 2.00 GiB"


class NoMemory:
    """torch, but for `empty`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError(EXHAUSTED)


class Refits:
    """Trainer and coordinator of one engine, whose events go to and fro."""

    def __init__(self, driver: Driver, sender: GlooSender, tensors: dict[str, torch.Tensor]) -> None:
        self.driver, self.sender, self.tensors = driver, sender, tensors
        self.coordinator = Drive(engines=1)
        self.coordinator.fleet()
        self.offer: Offer | None = None

    async def begin(self) -> asyncio.Task[Any]:
        """An epoch up to its transfer, which is under way then."""
        driver, coordinator = self.driver, self.coordinator
        coordinator.open()
        request = coordinator.one(RefitRequested)
        driver.publish(replace(request, deadline_at=time.time() + 60.0))
        offer = self.offer = await asyncio.to_thread(self.sender.offer, self.tensors.items())
        offered = TransferOffered(
            epoch=request.epoch,
            version=0,
            trainer_boot=1,
            address=offer.address,
            port=offer.port,
            bytes=offer.bytes,
            digest=offer.digest,
            payload=driver.keep(offer.buckets),
        )
        driver.publish(offered)
        drained = await driver.event(EngineDrained, epoch=request.epoch)
        coordinator.hear(coordinator.gate(), drained, offered)
        started = coordinator.one(TransferStarted)
        driver.publish(started)
        return asyncio.create_task(asyncio.to_thread(self.sender.send, started, 60.0))


async def test_an_engine_out_of_memory_fails_the_epoch_and_smaller_buckets_are_committed_in_the_next(
    stepped: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = stepped().scheduler
    limits = Limits(vocab=160, context=512, total=8192, eos=frozenset(), seed=0, sequences=4)
    groups = Groups(torch.device("cpu"), 60.0)
    app = Server(scheduler, groups, limits, {"model": {}, "server": {}}, 2**20)
    scheduler.connect(app.publish, app.crashed)
    scheduler.start()
    named = scheduler.model.weights.named
    tensors = {name: tensor.clone() + 1.0 for name, tensor in named.items()}
    config = RunConfig(
        engine=EngineConfig(kind="external", urls=("http://a",), count=1, lease_s=60.0),
        refit=RefitConfig(deadline_s=60.0, drain_deadline_s=40.0),
        launch=LaunchConfig(start_deadline_s=60.0),
    )
    sender = GlooSender("127.0.0.1", None)
    async with TestServer(app.app) as server:
        url = str(server.make_url("")).rstrip("/")
        monkeypatch.setattr(EngineShell, "_launch", lambda self, deadline_s: attach(url, deadline_s))
        async with Driver(config, tmp_path) as driver:
            await driver.event(EngineReady)
            refits = Refits(driver, sender, tensors)
            with monkeypatch.context() as patch:
                patch.setattr(groups_module, "torch", NoMemory())
                sending = await refits.begin()
                told = await driver.event(EngineFailed, epoch=1)
            assert (told.phase, told.error) == ("receive", "CallError")
            assert EXHAUSTED in told.reason
            refits.coordinator.hear(told)
            failure = refits.coordinator.one(RefitFailed)
            driver.publish(failure)
            await asyncio.to_thread(sender.abandon, 1, failure.reason)
            with pytest.raises(TransferError, match="abandoned"):
                await sending
            await driver.mode("uncertain")

            refits.coordinator.wake()
            sending = await refits.begin()
            assert refits.offer is not None
            assert refits.offer.note.startswith(f"buckets of at most {ON_CPU / 2 / MIB:g} MiB")
            sent = await sending
            loaded = await driver.event(EngineLoaded, epoch=2)
            finished = TransferFinished(epoch=2, version=0, seconds=sent.seconds, bytes=sent.bytes)
            refits.coordinator.hear(finished, loaded)
            driver.publish(refits.coordinator.one(RefitCommitted))
            await driver.mode("serving")
            assert all(torch.equal(named[name], tensor) for name, tensor in tensors.items())
    await asyncio.to_thread(sender.close)
    for name in groups.names():
        groups.leave(name)
    scheduler.stop(20)


def test_tensors_that_there_is_no_memory_for_are_an_error_that_leaves_the_group_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = Groups(torch.device("cuda"), 5.0)  # nothing is asked of the GPU
    groups._groups["g"] = object(), torch.device("cuda")
    monkeypatch.setattr(groups_module, "torch", NoMemory())
    with pytest.raises(
        groups_module.GroupError, match=r"no memory for 16 bytes of group 'g' .*out of memory"
    ) as caught:
        groups.receive("g", [Incoming("w", torch.float32, (4,))], bucket=True)
    assert not isinstance(caught.value, groups_module.GroupLost), "no kernel waits, so the process may go on"
