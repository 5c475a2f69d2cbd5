"""One boot of the engine actor before a real SGLang server; trainer and coordinator that take it through refits."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch
from msgspec.structs import replace
from transformers import Qwen2Config, Qwen2ForCausalLM

from actors.engine.direct import Direct
from actors.refit.transports import Offer, TransferError
from actors.refit.transports.choice import sender
from config.schema import EngineConfig, GatewayConfig, LaunchConfig, ModelConfig, RefitConfig, RunConfig, TrainerConfig
from contracts.events import (
    EngineDead,
    EngineDrained,
    EngineLoaded,
    EngineReady,
    Member,
    PayloadRef,
    Rank,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    TransferOffered,
    TransferStarted,
)
from tests.unit.engine.driver import Driver

PROMPT = list(range(3, 19))
FLAGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.4", "--context-length", "2048", "--cuda-graph-max-bs", "2"),
    "--disable-piecewise-cuda-graph",
)
PATIENCE_S = 300.0


class Shape:
    """The model, and where trainer and engine are: `devices` of the trainer apart from the engine, and beside it."""

    def __init__(self, tiny: bool, device: str) -> None:
        on_gpu = device == "cuda"
        self.device = device
        self.gpus = torch.cuda.device_count() if on_gpu else 0
        self.devices = ("cuda:0", f"cuda:{min(self.gpus, 2) - 1}") if on_gpu else ("cpu", "cpu")
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.tolerance = 0.2 if on_gpu else 1e-3
        """Of a log-probability; in bfloat16 logits of 4 to 8 come in steps of 1/32."""
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 320}
        if not tiny:
            sizes: dict[str, Any] = {
                "hidden_size": 1536,
                "intermediate_size": 8960,
                "num_hidden_layers": 28,
                "vocab_size": 151936,
            }
        heads: dict[str, Any] = {"num_attention_heads": 4 if tiny else 12, "num_key_value_heads": 2}
        self.config = Qwen2Config(
            **sizes,
            **heads,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            initializer_range=0.2 if tiny else 0.02,
            dtype=str(self.dtype).removeprefix("torch."),
        )
        self.path = Path(tempfile.mkdtemp(prefix="sluice-gpu-"))
        self.config.architectures = ["Qwen2ForCausalLM"]
        self.config.save_pretrained(self.path)
        with torch.device(self.devices[0]):
            self.model: Any = Qwen2ForCausalLM(self.config)
        self.model.to(self.dtype).eval()
        self.bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())

    @torch.no_grad()
    def weights(self, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Other weights for each seed, which the model has from now on too: a copy, by name."""
        source = torch.Generator(self.model.device).manual_seed(seed)
        for tensor in self.model.parameters():
            if tensor.dim() == 2:
                tensor.normal_(0.0, self.config.initializer_range, generator=source)
            elif tensor.dim() == 1:
                tensor.uniform_(0.5, 1.5, generator=source)
        return {name: tensor.detach().to(device, copy=True) for name, tensor in self.model.named_parameters()}

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> list[float]:
        """Of `ids` behind the prompt."""
        logits = self.model(torch.tensor([PROMPT + ids], device=self.model.device)).logits[0].float()
        scored = logits.log_softmax(-1)
        return [float(scored[len(PROMPT) - 1 + i, token]) for i, token in enumerate(ids)]


def run_config(shape: Shape, python: str | None) -> RunConfig:
    on_gpu = shape.device == "cuda"
    return RunConfig(
        model=ModelConfig(source=str(shape.path), dtype=str(shape.dtype).removeprefix("torch.")),  # type: ignore[arg-type]
        trainer=TrainerConfig(device=shape.devices[0]),
        engine=EngineConfig(
            kind="sglang",
            python=python,
            device="cuda:1" if on_gpu else "cpu",
            args=(*FLAGS, "--base-gpu-id", shape.devices[1].removeprefix("cuda:")) if on_gpu else (),
            max_running=8,
            max_total_tokens=65536 if on_gpu else 4096,
            lease_s=30.0,
        ),
        refit=RefitConfig(transport="nccl" if on_gpu else "gloo", deadline_s=60.0, drain_deadline_s=30.0),
        gateway=GatewayConfig(request_deadline_s=120.0),
        launch=LaunchConfig(start_deadline_s=PATIENCE_S),
    )


def requested(epoch: int, member: Member, deadline_at: float) -> RefitRequested:
    return RefitRequested(
        epoch=epoch,
        version=epoch,
        step=epoch,
        engines=(member,),
        gateways=(),
        drain="finish",
        deadline_at=deadline_at,
    )


def offered(epoch: int, offer: Offer, plan: PayloadRef) -> TransferOffered:
    return TransferOffered(
        epoch=epoch,
        version=epoch,
        trainer_boot=1,
        address=offer.address,
        port=offer.port,
        bytes=offer.bytes,
        digest=offer.digest,
        checksum=offer.checksum,
        payload=plan,
    )


def committed(epoch: int, member: Member) -> RefitCommitted:
    return RefitCommitted(
        epoch=epoch,
        version=epoch,
        step=epoch,
        engines=(member,),
        world_size=2,
        pause_s=0.0,
        drain_s=0.0,
        transfer_s=0.0,
        bytes=0,
    )


class Bench:
    """Trainer and coordinator of one boot."""

    def __init__(self, shape: Shape, driver: Driver, http: aiohttp.ClientSession) -> None:
        self.shape, self.driver, self.http = shape, driver, http
        self.sender: Any = None
        self.member = Member("engine-0", driver.boot)
        self.fallback = ""
        self.buckets = 0

    @classmethod
    async def start(cls, shape: Shape, python: str | None, run_dir: Path, boot: int) -> Bench:
        driver = Driver(run_config(shape, python), run_dir, boot=boot)
        await driver.__aenter__()
        try:
            await driver.until(lambda: next(iter(driver.find(EngineReady)), None), "EngineReady", timeout=PATIENCE_S)
        except BaseException:
            await driver.__aexit__(None, None, None)
            raise
        return cls(shape, driver, aiohttp.ClientSession())

    async def close(self) -> None:
        if self.sender is not None:
            await asyncio.to_thread(self.sender.close)
        await self.http.close()
        await self.driver.__aexit__(None, None, None)

    def use(self, receiver: Any, transport: Any, bucket_mib: float | None) -> None:
        """From now on weights travel so; the server can take them either way."""
        if self.sender is not None:
            self.sender.close()
        shell, config = self.driver.shell, self.driver.config
        refit = replace(config.refit, transport=transport, receiver=receiver, bucket_mib=bucket_mib)
        config = replace(config, refit=refit)
        self.driver.config = shell._operations._config = config
        shell._operations._direct = Direct(shell._client) if receiver == "direct" else None
        self.sender = sender(config)
        self.group = f"{receiver}-{transport}-{bucket_mib}-{time.monotonic_ns()}"
        self.device = self.shape.devices[1 if transport == "ipc" else 0]

    async def begun(self, epoch: int, fresh: bool) -> tuple[TransferStarted, dict[str, float]]:
        """Up to the start of the transfer, which is not published yet."""
        driver = self.driver
        weights = self.shape.weights(epoch, self.device)
        if self.shape.device == "cuda":
            for device in set(self.shape.devices):
                torch.cuda.synchronize(device)
        began = time.perf_counter()
        offer = await asyncio.to_thread(self.sender.offer, weights.items())
        made = time.perf_counter()
        self.buckets = len(offer.buckets)
        driver.publish(requested(epoch, self.member, time.time() + driver.config.refit.deadline_s))
        driver.publish(offered(epoch, offer, driver.keep(offer.buckets)))
        self.digest = offer.digest
        await driver.event(EngineDrained, epoch=epoch)
        drained = time.perf_counter()
        started = TransferStarted(
            epoch=epoch,
            version=epoch,
            group=self.group,
            fresh=fresh,
            members=(Rank("engine-0", driver.boot, 1, 1),),
            world_size=2,
        )
        return started, {"offer": 1e3 * (made - began), "drain": 1e3 * (drained - made)}

    async def load(self, epoch: int, fresh: bool) -> dict[str, float]:
        """One refit; milliseconds of its parts. `stop`: from the request to serving, the join of a group left out."""
        started, spent = await self.begun(epoch, fresh)
        driver, began = self.driver, time.perf_counter()
        driver.publish(started)
        sent = await asyncio.to_thread(self.sender.send, started, 50.0)
        loaded = await driver.event(EngineLoaded, epoch=epoch)
        received = time.perf_counter()
        driver.publish(committed(epoch, self.member))
        await driver.mode("serving")
        resumed = time.perf_counter()
        self.fallback = loaded.fallback
        if driver.config.refit.receiver == "direct" and not loaded.fallback:
            assert loaded.digest == self.digest, (loaded.digest, self.digest)
        phases = {phase.name: 1e3 * phase.seconds for phase in loaded.phases}
        apart = phases.get("join", 0.0) + phases.get("prepare", 0.0)
        return spent | {
            "transfer": 1e3 * (received - began),
            "send": 1e3 * sent.seconds,
            "resume": 1e3 * (resumed - received),
            "stop": spent["drain"] + 1e3 * (resumed - began) - apart,
            **{f"in_{name}": value for name, value in phases.items()},
        }

    async def broken(self, epoch: int, number: int, deadline: float) -> dict[str, Any]:
        """A transfer into a scheduler that gets a signal in the middle of it. Seconds until each side is out of it."""
        process: Any = self.driver.shell._server.process  # type: ignore[union-attr]
        (scheduler,) = [pid for pid, name in children(process.pid).items() if "schedul" in name]
        started, _ = await self.begun(epoch, fresh=False)
        if number == signal.SIGSTOP:  # before it has asked its GPU, which would go on without it
            os.kill(scheduler, number)
        self.driver.publish(started)
        if number == signal.SIGKILL:  # while its GPU waits for rank 0
            await asyncio.sleep(0.3)
            os.kill(scheduler, number)
        began, reason = time.perf_counter(), ""
        try:
            await asyncio.to_thread(self.sender.send, started, deadline)
        except TransferError as error:
            reason = f"{error.phase}: {error.reason}"
        sender_s = time.perf_counter() - began
        self.driver.publish(RefitFailed(epoch=epoch, version=epoch, phase="transfer", reason=reason))
        dead = await self.driver.event(EngineDead, boot=self.driver.boot)
        return {
            "sender_s": round(sender_s, 2),
            "sender": reason,
            "engine_s": round(time.perf_counter() - began, 2),
            "engine": dead.reason[:300],
        }

    async def gap(self, epoch: int, served: int) -> float:
        """The largest gap between the engine's log-probabilities and transformers' on the weights of `epoch`."""
        if epoch != served:
            self.shape.weights(epoch, self.shape.devices[0])
        rid = f"check-{time.monotonic_ns()}"
        body = {
            "input_ids": PROMPT,
            "rid": rid,
            "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
            "return_logprob": True,
        }
        headers = {"x-sluice-epoch": str(served), "x-sluice-rids": rid}
        async with self.http.post(f"{self.driver.url}/generate", json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
            assert response.headers["x-sluice-version"] == str(served)
        ids = answer["output_ids"]
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        return max(abs(a - b) for a, b in zip(found, self.shape.logprobs(ids), strict=True))


def children(parent: int) -> dict[int, str]:
    """Processes below `parent`, by id, and how each is called."""
    found: dict[int, str] = {}
    above: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                above[int(entry.name)] = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                line = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name)] = f"{entry.joinpath('comm').read_text().strip()} {line}"[:200]
            except OSError:
                continue  # it ended
    below, grown = {parent}, True
    while grown:
        more = {pid for pid, up in above.items() if up in below} - below
        below, grown = below | more, bool(more)
    return {pid: found[pid] for pid in below - {parent} if pid in found}
