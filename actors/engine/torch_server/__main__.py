"""Command line of the embedded engine: `python -m actors.engine.torch_server --model-path DIR`."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

from actors.startup import uncollected

PR_SET_PDEATHSIG = 1


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m actors.engine.torch_server", description=__doc__)
    p.add_argument("--model-path", type=Path, required=True, help="directory with config.json (and safetensors)")
    p.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=0, help="0: any free one, see --port-file")
    p.add_argument("--port-file", type=Path, help="written, with the port, once requests are answered")
    p.add_argument("--device", default="cpu", help="cpu or cuda[:N]")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    p.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="of the forward")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--max-running", type=int, default=64, help="sequences decoded together")
    p.add_argument("--max-total-tokens", type=int, help="sequences x their longest reach; default: 2 GiB of cache")
    p.add_argument("--context-length", type=int, help="default: the model's")
    p.add_argument("--prefill-chunk", type=int, default=2048, help="prompt tokens of one forward")
    p.add_argument("--prefix-cache-mib", type=int, default=256, help="kept for shared prefixes; 0: none")
    p.add_argument("--max-queued", type=int, default=16384, help="sequences held at all; more answer 503")
    p.add_argument("--max-body-mib", type=int, default=64, help="larger requests answer 413")
    p.add_argument("--group-timeout-s", type=float, default=60.0, help="of joining, of a broadcast, of waiting for one")
    p.add_argument("--exit-with-stdin", action="store_true", help="end when stdin closes")
    return p


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT, the parent's death or a failure; the exit status says which (0, 0, killed, 1)."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # threads that spin between two operations starve whoever shares the cores; read once, when torch is loaded
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # a failed NCCL collective first answers its caller; torch's own watchdog would end the process before that
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # what SGLang sets for itself, and the sender with it: a communicator whose ends differ in it fails
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    with uncollected():
        from actors.engine.torch_server.serve import serve

    return asyncio.run(serve(args))


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # a thread may sit in a rendezvous that nobody joins
