"""What a broadcast of so many bytes takes with nothing around it; `measure` answers milliseconds."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist


def measure(size: int, device: str, times: int = 7, ranks: int = 2) -> float:
    """Median of a broadcast from GPU 0 to the `ranks` - 1 next ones, or over gloo between as many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = get_context("spawn")
    answers: Any = context.Queue()
    common = (ranks, size, device, times, port, answers)
    processes = [context.Process(target=_rank, args=(rank, *common)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        return answers.get(timeout=120.0)
    finally:
        for process in processes:
            process.join(20.0)
            process.kill()


def _rank(rank: int, world: int, size: int, device: str, times: int, port: int, answers: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_CUMEM_ENABLE": "0"}
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=world)
    data = torch.empty(size, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    spent = []
    for _ in range(times + 3):
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.broadcast(data, 0)
        if on_gpu:
            torch.cuda.synchronize()
        spent.append(1e3 * (time.perf_counter() - began))
    if rank == 0:
        answers.put(statistics.median(spent[3:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    print(measure(int(sys.argv[1]), sys.argv[2]))
