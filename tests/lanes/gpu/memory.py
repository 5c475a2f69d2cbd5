"""Memory that trainer and engine share on one GPU: what is given back, taken again, and still right then.

    python -m tests.lanes.gpu.memory --python ENV/bin/python     # one GPU: real SGLang, engine.release=all, CUDA IPC
    python -m tests.lanes.gpu.memory --only buckets ...         # of the parts engine, buckets, trainer: that one
    python -m tests.lanes.gpu.memory --backend megatron          # one GPU: the megatron trainer alone
    python -m tests.lanes.gpu.memory --try                       # the script itself, on a CPU with the embedded engine

Prints JSON lines. A server is started, loaded, gives its memory back, is loaded with the same weights and must generate
what it generated before. Buckets that don't fit, at the trainer and at the engine, must cost their epoch and no more.
Then policies train with trainer.offload and must be equal to one that stays.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import aiohttp
import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from transformers import Qwen2Config, Qwen2ForCausalLM

from actors.refit.transports import TransferError
from actors.refit.transports.choice import sender
from actors.refit.transports.gloo import GlooSender
from actors.trainer.backend import Job, open_policy
from actors.trainer.packing import Sample
from config.schema import EngineConfig, GatewayConfig, LaunchConfig, ModelConfig, RefitConfig, RunConfig, TrainerConfig
from contracts.events import (
    EngineDrained,
    EngineFailed,
    EngineLoaded,
    EngineReady,
    EngineReleased,
    Member,
    Rank,
    RefitFailed,
    ReleaseRequested,
    TransferStarted,
)
from tests.lanes.gpu.bench import FLAGS, committed, offered, requested
from tests.unit.engine.driver import Driver

LARGE: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ME, PATIENCE_S, MIB = Member("engine-0", 1), 200.0, 2**20
MODES: tuple[Literal["none", "optimizer", "all"], ...] = ("none", "optimizer", "all")
TOKENS = 262144
"""Of the engine's cache."""


class Place:
    """The model, and what of the memory is free."""

    def __init__(self, dry: bool, python: str | None) -> None:
        self.dry = dry
        self.device = "cpu" if dry else "cuda:0"
        self.path = Path(tempfile.mkdtemp(prefix="sluice-memory-"))
        shape = Qwen2Config(**(SMALL if dry else LARGE), tie_word_embeddings=True, max_position_embeddings=2048)
        shape.architectures = ["Qwen2ForCausalLM"]
        shape.save_pretrained(self.path)
        dtype = "float32" if dry else "bfloat16"
        with torch.device(self.device):
            torch.manual_seed(1)
            model: Any = Qwen2ForCausalLM(shape).to(getattr(torch, dtype))
        self.weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        self.bytes = sum(tensor.nbytes for tensor in self.weights.values())
        sizes = SMALL if dry else LARGE
        width = sizes["hidden_size"] // sizes["num_attention_heads"]
        values = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * width
        self.kv = values * (4 if dry else 2) * TOKENS
        engine = EngineConfig(
            kind="torch" if dry else "sglang",
            count=1,
            python=python,
            device=self.device,
            args=() if dry else FLAGS,
            max_running=8,
            max_total_tokens=4096 if dry else TOKENS,
            lease_s=30.0,
            release="all",
        )
        self.config = RunConfig(
            sync=True,
            model=ModelConfig(source=str(self.path), dtype=dtype),
            trainer=TrainerConfig(device=self.device),
            engine=engine,
            refit=RefitConfig(transport="ipc", deadline_s=60.0, drain_deadline_s=30.0),
            gateway=GatewayConfig(request_deadline_s=60.0),
            launch=LaunchConfig(start_deadline_s=PATIENCE_S),
        )

    def free(self) -> int:
        """Bytes that no process has."""
        if self.dry:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(0)[0]


def transfer(epoch: int, group: str, fresh: bool) -> TransferStarted:
    members = (Rank("engine-0", 1, 1, 1),)
    return TransferStarted(epoch=epoch, version=epoch, group=group, fresh=fresh, members=members, world_size=2)


class Turns:
    """Takes one engine through refits and releases, as coordinator and trainer would."""

    def __init__(self, place: Place, driver: Driver) -> None:
        self.place, self.driver = place, driver
        self.sender = sender(place.config)
        self.epoch = 0

    def _begin(self) -> float:
        self.epoch += 1
        self.driver.registers["epoch"] = self.epoch
        return time.time() + self.place.config.refit.deadline_s

    async def load(self) -> dict[str, Any]:
        """One refit to the commit; milliseconds."""
        return await self.turn("g", fresh=self.epoch == 0)

    async def turn(self, group: str, fresh: bool = True) -> dict[str, Any]:
        """`load` over `group`."""
        deadline_at, driver, began = self._begin(), self.driver, time.perf_counter()
        offer = await asyncio.to_thread(self.sender.offer, self.place.weights.items())
        made = time.perf_counter()
        epoch = self.epoch
        driver.publish(requested(epoch, ME, deadline_at))
        driver.publish(offered(epoch, offer, driver.keep(offer.buckets)))
        await driver.event(EngineDrained, epoch=epoch)
        drained = time.perf_counter()
        started = transfer(epoch, group, fresh)
        driver.publish(started)
        await asyncio.to_thread(self.sender.send, started, 50.0)
        loaded = await driver.event(EngineLoaded, epoch=epoch)
        driver.publish(committed(epoch, ME))
        await driver.mode("serving")
        assert loaded.digest in ("", offer.digest), "it holds what was sent"
        assert loaded.digest or driver.config.refit.receiver == "sglang"
        phases = {phase.name: round(1e3 * phase.seconds, 1) for phase in loaded.phases}
        return {
            "offer_ms": round(1e3 * (made - began), 1),
            "drain_and_weights_ms": round(1e3 * (drained - made), 1),
            "receiver": loaded.receiver,
            "fallback": loaded.fallback,
            "phases_ms": phases,
        }

    async def give_back(self) -> dict[str, Any]:
        deadline_at = self._begin()
        self.driver.publish(
            ReleaseRequested(epoch=self.epoch, step=1, engines=(ME,), drain="finish", deadline_at=deadline_at)
        )
        told = await self.driver.event(EngineReleased, epoch=self.epoch)
        return {"tags": told.tags, "ms": round(1e3 * told.seconds, 1), "call_ms": round(1e3 * told.release_s, 1)}

    async def tokens(self) -> list[int]:
        """Greedily, behind a fixed prompt."""
        body = {
            "input_ids": list(range(3, 19)),
            "rid": f"rid-{self.epoch:06d}",
            "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
        }
        headers = {"x-sluice-epoch": str(self.epoch), "x-sluice-rids": body["rid"]}
        async with aiohttp.ClientSession() as http:
            answer = await http.post(f"{self.driver.url}/generate", json=body, headers=headers)
            assert answer.status == 200, await answer.text()
            return (await answer.json())["output_ids"]


async def engine(place: Place) -> dict[str, Any]:
    """Three turns of an engine at the memory."""
    began = time.perf_counter()
    async with Driver(place.config, Path(tempfile.mkdtemp(prefix="sluice-memory-run-"))) as driver:
        await driver.until(lambda: next(iter(driver.find(EngineReady)), None), "EngineReady", timeout=PATIENCE_S)
        said: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 1)}
        turns = Turns(place, driver)
        said["first"] = await turns.load()
        before, held = await turns.tokens(), place.free()
        given = again = held
        for turn in range(3):
            said["release"] = await turns.give_back()
            given = place.free()
            said["refit"] = await turns.load()
            again = place.free()
            assert await turns.tokens() == before, f"turn {turn}: other tokens than before the release"
            wanted = 0 if place.dry else 0.9 * (place.bytes + place.kv)
            assert given - held >= wanted, (
                f"turn {turn}: {(given - held) / MIB:.0f} MiB given back, not {wanted / MIB:.0f}"
            )
            assert abs(again - held) <= 512 * MIB, f"turn {turn}: {(held - again) / MIB:.0f} MiB more than before"
        said |= {"held_mib": round((given - again) / MIB), "weights_mib": round(place.bytes / MIB)}
        said["cache_mib"] = round(place.kv / MIB)
        turns.sender.close()
        return said


class Short(Turns):
    """Refits with little memory left."""

    def use(self, **refit: Any) -> None:
        """From now on weights travel so."""
        self.sender.close()
        shell, config = self.driver.shell, self.place.config
        config = replace(config, refit=replace(config.refit, receiver="sglang", **refit))
        self.driver.config = shell._operations._config = config
        shell._operations._direct = None
        self.sender = sender(config)
        self.group = f"g-{self.epoch}"

    async def load(self) -> dict[str, Any]:
        """As before, over a group of its own."""
        return await self.turn(self.group)

    async def breaks(self) -> tuple[str, str]:
        """One refit that must fail, and at whom; the trainer hears of the epoch's end as from the coordinator."""
        deadline_at, driver, epoch = self._begin(), self.driver, self.epoch
        driver.publish(requested(epoch, ME, deadline_at))
        await driver.event(EngineDrained, epoch=epoch)
        sending: Any = None
        try:
            offer = await asyncio.to_thread(self.sender.offer, self.place.weights.items())
            driver.publish(offered(epoch, offer, driver.keep(offer.buckets)))
            started = transfer(epoch, self.group, fresh=True)
            driver.publish(started)
            sending = asyncio.create_task(asyncio.to_thread(self.sender.send, started, 50.0))
            failing = asyncio.create_task(driver.event(EngineFailed, epoch=epoch))
            await asyncio.wait((sending, failing), return_when="FIRST_COMPLETED")
            await asyncio.wait((sending,), timeout=5.0)  # the engine may hear of the trainer's failure first
            if sending.done():
                failing.cancel()
                await sending
                raise AssertionError("a bucket of that size fitted")
            who, reason = "engine", (await failing).reason
        except TransferError as error:
            who, reason = "trainer", error.reason
        driver.publish(RefitFailed(epoch=epoch, version=epoch, phase="transfer", reason=reason))
        await asyncio.to_thread(self.sender.abandon, epoch, reason)
        if sending is not None:
            await asyncio.wait((sending,))
            assert isinstance(sending.exception(), TransferError), "the sender came out"
        await driver.mode("uncertain")
        return who, reason[:300]


async def buckets(place: Place) -> dict[str, Any]:
    """Too large a refit.bucket_mib: for the trainer, and where a GPU is shared behind its back, for the engine."""
    place.config = replace(place.config, engine=replace(place.config.engine, release="none"))
    async with Driver(place.config, Path(tempfile.mkdtemp(prefix="sluice-memory-run-"))) as driver:
        await driver.until(lambda: next(iter(driver.find(EngineReady)), None), "EngineReady", timeout=PATIENCE_S)
        turns, said, full = Short(place, driver), {}, contextlib.nullcontext()
        turns.use()
        await turns.load()
        before = await turns.tokens()
        if place.dry:
            full = mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device"))
            ballast = None
        else:
            ballast = torch.empty(place.free() - int(0.8 * place.bytes), dtype=torch.uint8, device=place.device)
        turns.use(bucket_mib=4096.0)
        with full:
            said["trainer"] = await turns.breaks()
        assert said["trainer"][0] == "trainer", said
        assert "lower refit.bucket_mib" in said["trainer"][1], said
        turns.use(bucket_mib=64.0)
        await turns.load()
        assert await turns.tokens() == before
        if not place.dry:
            turns.use(transport="gloo", bucket_mib=4096.0)
            turns.sender.close()
            turns.sender = GlooSender("127.0.0.1", 2**32)  # which knows nothing of the engine's GPU
            said["engine"] = await turns.breaks()
            assert said["engine"][0] == "engine", said
            assert "out of memory" in said["engine"][1], said
            turns.use(transport="gloo", bucket_mib=64.0)
            await turns.load()
            assert await turns.tokens() == before
        del ballast
        turns.sender.close()
        return said


def samples(count: int, vocabulary: int) -> list[Sample]:
    rng = np.random.default_rng(count)
    made = []
    for number in range(count):
        mask = np.r_[np.zeros(16, np.uint8), np.ones(48, np.uint8)]
        made.append(
            Sample(
                ids=rng.integers(0, vocabulary, 64).astype(np.int32),
                loss_mask=mask,
                behaviour=(-rng.uniform(4, 12, 64) * mask).astype(np.float32),
                advantage=float(rng.normal()),
                lag=0,
                group=number // 4,
                temperature=1.0,
            )
        )
    return made


def trainer(place: Place, backend: Literal["torch", "megatron"]) -> dict[str, Any]:
    """Two steps of a policy that stays, and of two that don't."""
    batch = samples(16, (SMALL if place.dry else LARGE)["vocab_size"])
    exports, held, seconds = {}, {}, {}
    base = place.free()
    for offload in MODES:
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings = TrainerConfig(backend=backend, device=place.device, lr=1e-4, microbatch_tokens=2048, offload=offload)
        work = Job(model_dir=str(place.path), trainer=settings, dtype=place.config.model.dtype, seed=1, total_steps=9)
        policy = open_policy(work)
        for _ in range(2):
            began = time.perf_counter()
            policy.train_step(batch)
            seconds[offload] = round(time.perf_counter() - began, 3)
        held[offload] = round((base - place.free()) / MIB)
        exports[offload] = {name: tensor.cpu() for name, tensor in policy.export()}
        policy.close()
        del policy
        gc.collect()
    held["left by closed ones"] = round((base - place.free()) / MIB)
    stayed = exports.pop("none")
    differing = {
        mode: sum(not torch.equal(tensor, moved[name]) for name, tensor in stayed.items())
        for mode, moved in exports.items()
    }
    worst = max(float((moved[n] - t).abs().max()) for moved in exports.values() for n, t in stayed.items())
    told = {
        "backend": backend,
        "held_between_steps_mib": held,
        "step_s": seconds,
        "differing": differing,
        "worst": worst,
    }
    if place.dry:
        assert not any(differing.values()), told
    else:
        assert worst < 1e-3, told
        assert held["all"] < 0.2 * held["none"], told
        assert held["optimizer"] < 0.5 * held["none"], told
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter that has sglang and torch_memory_saver; default: this one")
    parser.add_argument(
        "--backend", choices=("torch", "megatron"), default="torch", help="megatron: without the engine"
    )
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--try", dest="dry", action="store_true")
    args = parser.parse_args()
    place, failed = Place(args.dry, args.python), False
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "engine": lambda: asyncio.run(engine(place)),
        "buckets": lambda: asyncio.run(buckets(place)),
        "trainer": lambda: trainer(place, args.backend),
    }
    if args.backend == "megatron":
        del parts["engine"], parts["buckets"]
    parts = {name: work for name, work in parts.items() if args.only in name}
    for name, work in parts.items():
        try:
            said = {"part": name, **work()}
        except AssertionError as error:
            said, failed = {"part": name, "failure": str(error)}, True
        print(json.dumps(msgspec.to_builtins(said)), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
