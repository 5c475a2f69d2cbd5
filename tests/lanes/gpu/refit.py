"""Refits of a real SGLang server through the product's own sidecar and senders; prints JSON lines.

    python -m tests.lanes.gpu.refit --python ENV/bin/python      # two GPUs: NCCL from the one to the other, IPC on one;
                                                                 # one GPU: IPC alone
    python -m tests.lanes.gpu.refit --device cpu --tiny --python .venv-sglang/bin/python    # the script itself: gloo

The model is a random Qwen2 of 1.54 B parameters (3.09 GB in bfloat16). One server serves every case: each receiver over
each transport and bucket size. Every refit sends other weights, and log-probabilities of greedy tokens are held against
transformers on what was sent. A receiver stays away from a join; a sender is made beside a default process group that
is bound to another GPU. Then a scheduler is stopped, and one is killed, in mid-transfer: the sender has to come
out at its deadline, and the next boot has to take the next epoch. A case that fails is told, and the next one begins.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from actors.engine import loading
from actors.engine.inside import mix64
from actors.refit.transports import TransferError
from actors.refit.transports.choice import settings
from contracts.events import RefitFailed
from tests.lanes.gpu.bench import Bench, Shape
from tests.lanes.gpu.wire import measure

BUCKETS = (256, 128, 512, 1024)


class Case(NamedTuple):
    """`ahead`: how many buckets' calls SGLang's own receiver has beside the one that it loads."""

    receiver: str
    transport: str
    bucket_mib: float | None
    ahead: int = 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter that has sglang; default: this one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU serves")
    parser.add_argument("--refits", type=int, default=8, help="of each case; the first two are not counted")
    parser.add_argument("--minutes", type=float, default=7.5, help="no case begins after so long")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-faults", action="store_true")
    return parser.parse_args()


def cases(args: argparse.Namespace) -> list[Case]:
    over = "nccl" if args.device == "cuda" else "gloo"
    sizes = (0.01, 0.05) if args.tiny else BUCKETS
    found = [Case(receiver, transport, None) for receiver in ("direct", "sglang") for transport in (over, "ipc")]
    found += [Case("direct", over, size) for size in sizes]
    found += [Case("sglang", over, size, ahead) for size in (None, *sizes) for ahead in (1, 0)][1:]
    found += [Case("sglang", "ipc", size) for size in sizes]
    alone = args.device == "cuda" and torch.cuda.device_count() < 2
    found = [case for case in found if case.transport == "ipc" or not alone]
    return [case for case in found if args.only in "-".join(map(str, case))]


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Lane:
    """`bench` is the boot that serves, None when there is none."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.monotonic()
        self.over = "nccl" if args.device == "cuda" else "gloo"
        self.shape = Shape(args.tiny, args.device)
        self.boot = 0
        self.epoch = 0
        self.bench: Bench | None = None
        self.failed: list[str] = []
        self.run_dir = Path(os.environ.get("OUT", tempfile.mkdtemp())) / "refit"

    async def boots(self) -> Bench:
        """The boot that serves, started if there is none."""
        if self.bench is None:
            self.boot += 1
            began = time.monotonic()
            self.bench = await Bench.start(self.shape, self.args.python, self.run_dir, self.boot)
            say(case="start", boot=self.boot, seconds=round(time.monotonic() - began, 1))
        return self.bench

    async def ends(self) -> None:
        if self.bench is not None:
            bench, self.bench = self.bench, None
            await bench.close()

    async def attempt(self, name: str, work: Any, seconds: float = 200.0) -> None:
        """Run a case; a failure is told, and its boot ended."""
        if time.monotonic() - self.began > 60 * self.args.minutes:
            say(case=name, skipped="out of time")
            return
        try:
            say(case=name, **await asyncio.wait_for(work(), seconds))
        except Exception as error:
            self.failed.append(name)
            say(case=name, error=f"{type(error).__name__}: {error}"[:2000])
            traceback.print_exc()
            await self.ends()

    # --- cases -------------------------------------------------------------------------------------------------------

    async def wire(self) -> dict[str, Any]:
        size = self.shape.bytes
        self.wire_ms = await asyncio.to_thread(measure, size, self.args.device)
        return {"bytes": size, "ms": round(self.wire_ms, 2)}

    async def digest(self) -> dict[str, Any]:
        """What the checksums of the whole model take, and whether a CPU finds the same."""
        tensors = list(self.shape.weights(1, self.shape.devices[0]).values())
        few, total = [], 0
        for tensor in tensors[2:]:
            few.append(tensor)
            total += tensor.numel() * tensor.element_size()
            if total > 100 * 2**20:
                break
        equal = mix64.checksums(few) == mix64.checksums([tensor.cpu() for tensor in few])
        changed = few[-1].clone()
        changed.view(-1)[-1] += 1
        told = mix64.checksums([changed]) != mix64.checksums([few[-1]])
        began = time.perf_counter()
        mixer = mix64.Mixer([mix64.whole(tensor) for tensor in tensors])
        built = time.perf_counter()
        spent = []
        for _ in range(7):
            begun = time.perf_counter()
            mixer.run()
            spent.append(1e3 * (time.perf_counter() - begun))
        assert equal
        assert told
        ms = round(statistics.median(spent), 3)
        return {"equal": equal, "ms": ms, "plan_ms": round(1e3 * (built - began), 2), "kernel": mix64.has_kernel()}

    async def refits(self, case: Case) -> dict[str, Any]:
        bench = await self.boots()
        bench.use(case.receiver, case.transport, case.bucket_mib)
        loading.AHEAD = case.ahead
        times: list[dict[str, float]] = []
        gaps, stale = [], []
        for number in range(self.args.refits):
            self.epoch += 1
            if number == 1:
                stale.append(await bench.gap(self.epoch, served=self.epoch - 1))
            times.append(await bench.load(self.epoch, fresh=number == 0))
            if number in (0, self.args.refits - 1):
                gaps.append(await bench.gap(self.epoch, served=self.epoch))
        middle = {name: round(statistics.median(one.get(name, 0.0) for one in times[2:]), 2) for name in times[-1]}
        stop, first = middle["stop"], times[0]["stop"]
        said = {
            "median_ms": middle,
            "first_ms": {name: round(value, 1) for name, value in times[0].items()},
            "stop_ms": stop,
            "to_wire": round(stop / self.wire_ms, 2) if hasattr(self, "wire_ms") else None,
            "first_to_median": round(first / stop, 2),
            "gap": max(gaps),
            "stale_gap": min(stale),
            "fallback": bench.fallback,
            "buckets": bench.buckets,
            "settings": settings(bench.driver.config),
        }
        assert max(gaps) < self.shape.tolerance, said
        assert min(stale) > 3 * self.shape.tolerance, said
        return said

    async def absent(self) -> dict[str, Any]:
        """Nobody comes to the join: the sender comes out at its deadline, and the same boot takes the next epoch."""
        bench = await self.boots()
        bench.use("direct", self.over, None)
        self.epoch += 1
        started, _ = await bench.begun(self.epoch, fresh=True)
        deadline, began = 4.0, time.perf_counter()
        try:
            await asyncio.to_thread(bench.sender.send, started, deadline)
        except TransferError as error:
            told = {"phase": error.phase, "reason": error.reason, "sender_s": round(time.perf_counter() - began, 2)}
        else:
            raise AssertionError("it was sent to nobody")
        bench.driver.publish(RefitFailed(epoch=self.epoch, version=self.epoch, phase="join", reason=told["reason"]))
        await bench.driver.mode("uncertain")
        assert told["phase"] == "join", told
        assert told["sender_s"] < deadline + 3.0, told
        return told | {"next_gap": await self.whole(bench)}

    async def beside(self) -> dict[str, Any]:
        """The trainer's default group is bound to another device than its sender sends from."""
        bench = await self.boots()
        store, on_gpu = HashStore(), self.args.device == "cuda"
        bound = torch.device(self.shape.devices[1]) if on_gpu else None
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1, device_id=bound)
        try:
            one = torch.ones(1, device=bound)
            dist.all_reduce(one)
            gap = await self.whole(bench)
            dist.all_reduce(one)  # it is as it was
            assert float(one) == 1.0
            assert dist.group.WORLD is not None
            assert dist.group.WORLD.bound_device_id == bound
        finally:
            dist.destroy_process_group()
        return {"bound": str(bound), "from": self.shape.devices[0], "gap": gap}

    async def whole(self, bench: Bench) -> float:
        """A refit over a group that is made for it; how far off the engine is then."""
        bench.use("direct", self.over, None)
        self.epoch += 1
        await bench.load(self.epoch, fresh=True)
        gap = await bench.gap(self.epoch, served=self.epoch)
        assert gap < self.shape.tolerance, gap
        return gap

    async def fault(self, number: int, name: str) -> dict[str, Any]:
        """Signal the scheduler while it receives; then the next boot takes the next epoch."""
        bench = await self.boots()
        await self.whole(bench)
        self.epoch += 1
        deadline = 8.0
        told = await bench.broken(self.epoch, number, deadline)
        assert told["sender_s"] < deadline + 3.0, told
        await self.ends()
        return {"signal": name, **told, "next_gap": await self.whole(await self.boots())}


async def main(args: argparse.Namespace) -> int:
    sys.setswitchinterval(2e-4)  # trainer and sidecar, elsewhere two processes, must not hold each other up
    lane = Lane(args)
    if lane.shape.gpus != 1:
        await lane.attempt("wire", lane.wire)
    await lane.attempt("digest", lane.digest)
    first, rest = cases(args)[:4], cases(args)[4:]
    for case in first:
        await lane.attempt("-".join(map(str, case)), lambda case=case: lane.refits(case))
    apart = not args.no_faults and lane.shape.gpus != 1
    for name, work in (("absent", lane.absent), ("beside", lane.beside)) if apart else ():
        await lane.attempt(name, work)
    for number, name in () if not apart else ((9, "SIGKILL"), (19, "SIGSTOP")):
        await lane.attempt(f"fault-{name}", lambda number=number, name=name: lane.fault(number, name), 300.0)
    for case in rest:
        await lane.attempt("-".join(map(str, case)), lambda case=case: lane.refits(case))
    await lane.ends()
    say(case="end", failed=lane.failed, seconds=round(time.monotonic() - lane.began, 1))
    return 1 if lane.failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(arguments())))
