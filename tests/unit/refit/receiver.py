"""A receiver that joins a weight-update group as SGLang 0.5.14 does; driven by JSON lines, answers JSON lines."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

GROUPS: dict[str, Any] = {}


def join(address: str, port: int, rank: int, world_size: int, group: str, timeout: float) -> dict[str, Any]:
    limit = timedelta(seconds=timeout)
    store, _, _ = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=limit))
    store.set_timeout(limit)
    prefixed = PrefixStore(group, store)
    built, _ = _new_process_group_helper(
        world_size, rank, [], Backend("gloo"), prefixed, group_name=group, timeout=limit
    )
    _world.pg_group_ranks[built] = {i: i for i in range(world_size)}
    GROUPS[group] = built
    return {"joined": group}


def receive(group: str, sizes: list[int]) -> dict[str, Any]:
    checksums = []
    for size in sizes:
        flat = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=GROUPS[group])
        checksums.append(xxhash.xxh3_128(flat.numpy().data).hexdigest())
    return {"checksums": checksums}


def main() -> None:
    torch.set_num_threads(1)
    calls = {"join": join, "receive": receive}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = calls[request.pop("call")](**request)
        except (RuntimeError, OSError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
