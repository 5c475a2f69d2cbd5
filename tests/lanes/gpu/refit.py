"""Refits of a real SGLang server on GPUs, through the product's own sidecar and senders; prints one JSON line.

    python -m tests.lanes.gpu.refit nccl --python ENV/bin/python            # trainer on GPU 0, engine on GPU 1
    python -m tests.lanes.gpu.refit ipc  --python ENV/bin/python            # both on GPU 0
    python -m tests.lanes.gpu.refit ipc  --engine torch                     # the embedded engine in place of SGLang

The model is a random Llama of `--width` and `--layers`. Every refit sends other weights; after each, the
log-probabilities that the engine reports for its greedy tokens are held against transformers on the weights that were
sent. `ipc --engine torch --device cpu --width 256 --layers 2` tries the script itself without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.refit.transports.choice import sender, settings
from config.schema import EngineConfig, GatewayConfig, LaunchConfig, ModelConfig, RefitConfig, RunConfig, TrainerConfig
from contracts.events import (
    EngineDrained,
    EngineLoaded,
    EngineReady,
    Member,
    Rank,
    RefitCommitted,
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
TOLERANCE = 0.15
"""Of a log-probability whose logits, of 4 to 8, come in steps of 1/32 in bfloat16."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transport", choices=("nccl", "ipc", "gloo"))
    parser.add_argument("--engine", choices=("sglang", "torch"), default="sglang")
    parser.add_argument("--python", help="interpreter that has sglang; default: this one")
    parser.add_argument("--device", default="cuda:0", help="of the trainer")
    parser.add_argument("--bucket-mib", type=float, default=512.0)
    parser.add_argument("--refits", type=int, default=8, help="the first two are not counted")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    return parser.parse_args()


def checkpoint(args: argparse.Namespace, device: torch.device) -> tuple[Path, Any]:
    """A directory with config.json alone, and the model of it."""
    shape = LlamaConfig(
        vocab_size=32000,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=max(1, args.width // 256),
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    path = Path(tempfile.mkdtemp(prefix="sluice-gpu-"))
    with device:
        model = LlamaForCausalLM(shape).to(torch.bfloat16).eval()
    shape.architectures = ["LlamaForCausalLM"]
    shape.save_pretrained(path)
    return path, model


def config(args: argparse.Namespace, model_dir: Path) -> RunConfig:
    # the engine sees the trainer's GPU too: memory of a GPU that is not visible can't be opened
    apart = args.transport == "nccl"
    flags = (*FLAGS, *(("--base-gpu-id", "1") if apart else ())) if args.engine == "sglang" else ()
    return RunConfig(
        model=ModelConfig(source=str(model_dir), dtype="bfloat16"),
        trainer=TrainerConfig(device=args.device),
        engine=EngineConfig(
            kind=args.engine,
            python=args.python,
            device="cuda:1" if apart else args.device,
            args=flags,
            max_running=64,
            max_total_tokens=65536,
            lease_s=30.0,
        ),
        refit=RefitConfig(
            transport=args.transport, deadline_s=120.0, drain_deadline_s=30.0, bucket_mib=args.bucket_mib
        ),
        gateway=GatewayConfig(request_deadline_s=120.0),
        launch=LaunchConfig(start_deadline_s=400.0),
    )


class Refits:
    """Trainer and coordinator."""

    def __init__(self, driver: Driver, model: Any) -> None:
        self.driver = driver
        self.model = model
        self.sender = sender(driver.config)
        self.member = Member("engine-0", 1)

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.detach().clone()) for name, tensor in self.model.state_dict().items()]

    @torch.no_grad()
    def change(self, seed: int) -> None:
        source = torch.Generator(self.model.device).manual_seed(seed)
        for tensor in self.model.parameters():
            if tensor.dim() == 2:
                tensor.normal_(0.0, 0.02, generator=source)

    async def load(self, epoch: int) -> dict[str, float]:
        """One refit; milliseconds of its parts, and its GiB."""
        driver, began = self.driver, time.perf_counter()
        deadline_at = time.time() + driver.config.refit.deadline_s
        driver.publish(
            RefitRequested(
                epoch=epoch,
                version=epoch,
                step=epoch,
                engines=(self.member,),
                gateways=(),
                drain="finish",
                deadline_at=deadline_at,
            )
        )
        offer = await asyncio.to_thread(self.sender.offer, self.weights())
        offered = time.perf_counter()
        driver.publish(
            TransferOffered(
                epoch=epoch,
                version=epoch,
                trainer_boot=1,
                address=offer.address,
                port=offer.port,
                buckets=offer.buckets,
                bytes=offer.bytes,
                digest=offer.digest,
            )
        )
        await driver.event(EngineDrained, epoch=epoch)
        started = TransferStarted(
            epoch=epoch,
            version=epoch,
            group="g1",
            fresh=epoch == 1,
            members=(Rank("engine-0", 1, 1, 1),),
            world_size=2,
        )
        begun = time.perf_counter()
        driver.publish(started)
        sent = await asyncio.to_thread(self.sender.send, started, 100.0)
        await driver.event(EngineLoaded, epoch=epoch)
        loaded = time.perf_counter()
        driver.publish(
            RefitCommitted(
                epoch=epoch,
                version=epoch,
                step=epoch,
                engines=(self.member,),
                world_size=2,
                pause_s=0.0,
                drain_s=0.0,
                transfer_s=0.0,
                bytes=0,
            )
        )
        await driver.mode("serving")
        return {
            "offer": 1e3 * (offered - began),
            "broadcast": 1e3 * sent.seconds,
            "transfer": 1e3 * (loaded - begun),
            "gib": offer.bytes / 2**30,
        }


async def check(refits: Refits, http: aiohttp.ClientSession, epoch: int, name: str = "check") -> float:
    """The largest gap between the engine's log-probabilities and transformers' on the weights that it has now."""
    rid = f"{name}-{epoch:04}"
    body = {
        "input_ids": PROMPT,
        "rid": rid,
        "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
        "return_logprob": True,
    }
    headers = {"x-sluice-epoch": str(epoch), "x-sluice-rids": rid}
    async with http.post(f"{refits.driver.url}/generate", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        assert response.headers["x-sluice-version"] == str(epoch)
    ids = answer["output_ids"]
    with torch.no_grad():
        logits = refits.model(torch.tensor([PROMPT + ids], device=refits.model.device)).logits[0].float()
    scored = logits.log_softmax(-1)
    want = [float(scored[len(PROMPT) - 1 + i, token]) for i, token in enumerate(ids)]
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return max(abs(a - b) for a, b in zip(found, want, strict=True))


async def main(args: argparse.Namespace) -> None:
    model_dir, model = checkpoint(args, torch.device(args.device))
    settled = config(args, model_dir)
    run_dir = Path(os.environ.get("OUT", tempfile.mkdtemp())) / f"{args.engine}-{args.transport}"
    async with Driver(settled, run_dir) as driver, aiohttp.ClientSession() as http:
        await driver.until(lambda: next(iter(driver.find(EngineReady)), None), "EngineReady", timeout=400.0)
        refits = Refits(driver, model)
        times, gaps, stale = [], [], []
        for epoch in range(1, args.refits + 1):
            refits.change(epoch)
            if epoch > 1:
                stale.append(await check(refits, http, epoch - 1, "stale"))
            times.append(await refits.load(epoch))
            gaps.append(await check(refits, http, epoch))
        refits.sender.close()
    middle = {name: round(statistics.median(one[name] for one in times[2:]), 2) for name in times[0]}
    said = {
        "engine": args.engine,
        "transport": args.transport,
        "bucket_mib": args.bucket_mib,
        "logprob_gap": max(gaps),
        "stale_gap": min(stale),
        "median_ms": middle,
        "first_ms": times[0],
        "settings": settings(settled),
    }
    print(json.dumps(said), flush=True)
    assert max(gaps) < TOLERANCE, gaps
    assert min(stale) > 3 * TOLERANCE, stale


if __name__ == "__main__":
    asyncio.run(main(arguments()))
