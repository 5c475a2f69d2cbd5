"""Coordinator and trainer in one, for tests that take a real engine actor through the barrier."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from actors.engine.torch_server.config import read_config
from actors.engine.torch_server.weights import Weights
from actors.refit.transports.choice import sender
from contracts.events import (
    EngineDrained,
    EngineLoaded,
    Member,
    Rank,
    RefitCommitted,
    RefitRequested,
    TransferOffered,
    TransferStarted,
)
from tests.unit.engine.driver import Driver


class Refits:
    """Takes a driver through the barrier. `digests`: whether its server can tell what it holds."""

    def __init__(self, driver: Driver, digests: bool = True) -> None:
        from actors import models

        self.driver = driver
        self._digests = digests
        self.sender = sender(driver.config)
        self._model_dir = models.resolve("random", models.cache_dir(), driver.config.model.params)
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
                bytes=offer.bytes,
                digest=offer.digest,
                payload=self.driver.keep(offer.buckets),
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

    async def load(self, epoch: int, seed: int, group: str, fresh: bool, drain: Any = "finish") -> None:
        """From the request to the commit."""
        self.request(epoch, drain)
        digest = self.offer(epoch, seed)
        await self.driver.event(EngineDrained, epoch=epoch)
        started = self.start(epoch, group, fresh)
        await asyncio.to_thread(self.sender.send, started, 20.0)
        loaded = await self.driver.event(EngineLoaded, epoch=epoch)
        assert loaded.digest == (digest if self._digests else "")
        self.commit(epoch)
        await self.driver.mode("serving")
