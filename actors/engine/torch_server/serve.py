"""Assembly and life of a server process: load, listen, serve, end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from aiohttp import web

from actors.engine.torch_server.app import Server
from actors.engine.torch_server.config import ModelConfig, read_config
from actors.engine.torch_server.groups import Groups
from actors.engine.torch_server.model import Model
from actors.engine.torch_server.protocol import Limits
from actors.engine.torch_server.scheduler import Scheduler
from actors.engine.torch_server.weights import DTYPES, Weights

MIB = 2**20
DEFAULT_CACHE = 2048 * MIB


async def serve(args: argparse.Namespace) -> int:
    """Load, listen, write the port file, wait for the end. Raises what loading and binding raise."""
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    weights = load(args, read_config(args.model_path), device)
    server = build(args, weights)
    stop = server.stopped.set
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if args.exit_with_stdin:
        watch_stdin(lambda: loop.call_soon_threadsafe(stop))
    runner = web.AppRunner(server.app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port, backlog=1024)
    await site.start()
    server.scheduler.start()
    port = runner.addresses[0][1]
    if args.port_file:
        partial = args.port_file.with_name(args.port_file.name + ".tmp")
        partial.write_text(f"{port}\n")
        partial.replace(args.port_file)
    logging.getLogger("sluice.engine").info("listening on %s:%d", args.host, port)
    await server.stopped.wait()
    await asyncio.to_thread(server.scheduler.stop, 2.0)
    await runner.cleanup()
    return 0 if server.failure is None else 1


def load(args: argparse.Namespace, config: ModelConfig, device: torch.device) -> Weights:
    weights = Weights(config, DTYPES[args.dtype], device)
    if args.load_format == "dummy":
        weights.randomise(args.seed)
    else:
        weights.load(args.model_path)
    return weights


def build(args: argparse.Namespace, weights: Weights) -> Server:
    """Scheduler and server around loaded weights; call it on the loop."""
    config = weights.config
    context = min(args.context_length or config.positions, config.positions)
    token = 2 * config.layers * config.kv_heads * config.head_dim * weights.dtype.itemsize  # bytes of keys and values
    total = args.max_total_tokens or max(context, min(args.max_running * context, DEFAULT_CACHE // token))
    scheduler = Scheduler(
        Model(weights, context),
        max_running=args.max_running,
        max_total_tokens=total,
        prefix_tokens=args.prefix_cache_mib * MIB // token,
        chunk=args.prefill_chunk,
        threads=args.threads,
    )
    limits = Limits(config.vocab, context, total, config.eos, args.seed, args.max_queued)
    model = {
        "model_path": str(args.model_path),
        "tokenizer_path": str(args.model_path),
        "is_generation": True,
        "model_type": config.model_type,
        "architectures": config.raw.get("architectures"),
    }
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    info = {"model": model, "server": options | {"max_total_num_tokens": total, "context_length": context}}
    server = Server(scheduler, Groups(weights.device, args.group_timeout_s), limits, info, args.max_body_mib * MIB)
    scheduler.connect(server.publish, server.crashed)
    return server


def watch_stdin(ended: Callable[[], object]) -> None:
    """Call `ended` (from a thread) when stdin reaches its end."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        ended()

    threading.Thread(target=wait, name="stdin", daemon=True).start()
