"""Tokens per second of the embedded engine against `transformers.generate`, same tiny model, one run.

python tests/bench/engine_server.py [--concurrency 512] [--prompt 20] [--new 4] [--model DIR] [--threads 2]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[2]
START_DEADLINE = 60.0


def tiny_model(path: Path) -> None:
    """Two layers, width 128, grouped heads, tied embeddings, vocabulary of 320."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def start(model: Path, args: argparse.Namespace, port_file: Path) -> tuple[subprocess.Popen[bytes], str, float]:
    """The server, its URL, and the seconds until it answered."""
    command = [sys.executable, "-m", "actors.engine.torch_server", "--model-path", str(model)]
    command += ["--port-file", str(port_file), "--threads", str(args.threads), "--max-running", str(args.concurrency)]
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while not port_file.exists():
        if process.poll() is not None or time.perf_counter() - began > START_DEADLINE:
            raise RuntimeError(f"the server did not start: exit status {process.poll()}")
        time.sleep(0.02)
    return process, f"http://127.0.0.1:{port_file.read_text().strip()}", time.perf_counter() - began


async def drive(url: str, prompts: list[list[int]], new: int, repeats: int) -> dict[str, float]:
    """Median seconds of a wave: `singles`, one POST a prompt, all at once; `batch`, one POST for all."""
    params = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:

        async def post(ids: Any) -> None:
            body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
            async with session.post(f"{url}/generate", json=body) as response:
                response.raise_for_status()
                await response.read()

        found: dict[str, list[float]] = {"singles": [], "batch": []}
        for _ in range(repeats + 1):
            began = time.perf_counter()
            await asyncio.gather(*(post(prompt) for prompt in prompts))
            found["singles"].append(time.perf_counter() - began)
            began = time.perf_counter()
            await post(prompts)
            found["batch"].append(time.perf_counter() - began)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def reference(model: Path, prompts: list[list[int]], new: int, threads: int, repeats: int) -> float:
    """Median seconds of `transformers.generate` on all prompts in one batch."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor(prompts)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        loaded.generate(
            ids, attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True, **options
        )
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=20)
    parser.add_argument("--new", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--model", type=Path, help="default: a tiny random one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or Path(scratch) / "model"
        if args.model is None:
            tiny_model(model)
        draw = random.Random(0)
        prompts = [[draw.randrange(3, 300) for _ in range(args.prompt)] for _ in range(args.concurrency)]
        process, url, seconds = start(model, args, Path(scratch) / "port")
        try:
            times = asyncio.run(drive(url, prompts, args.new, args.repeats))
        finally:
            process.terminate()
            process.wait(10)
        base = reference(model, prompts, args.new, args.threads, args.repeats)
    total = args.concurrency * args.new
    wave = f"{args.concurrency} prompts of {args.prompt} tokens, {args.new} new, {args.threads} threads"
    print(f"start {seconds:.1f} s; {wave}")
    for name, value in (*times.items(), ("transformers", base)):
        print(f"{name:>13}: {value * 1e3:8.1f} ms {total / value:9.0f} tok/s  x{base / value:.2f}")


if __name__ == "__main__":
    main()
