"""Three steps and their refits with 1, 2 and 4 engines, each on a GPU of its own; one JSON line a size, and judged.

    python -m tests.lanes.gpu.fanout --python ENV/bin/python              # every size that this machine has GPUs for
    python -m tests.lanes.gpu.fanout --engines 4 --python ENV/bin/python  # five GPUs: world_size=5
    python -m tests.lanes.gpu.fanout --engines 4 --cpu                    # the script itself: gloo, embedded engines

A size with too few GPUs fails. Pauses are held against a bare NCCL broadcast of the same bytes over as many ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from contracts.events import RefitCommitted, TransferStarted
from pipeline.eventlog import archived
from pipeline.rundir import RunDir
from tests.lanes.gpu.run_up import ROOT, carried_out
from tests.lanes.gpu.wire import measure

SIZES = (1, 2, 4)
LIMIT_S = 540.0
"""Longest run of one size."""
ON_CPU = (
    *("trainer.device=cpu", "trainer.threads=1", "model.dtype=float32", "refit.transport=gloo"),
    *("engine.kind=torch", "engine.device=cpu", "engine.args=[]"),
    *("model.params.layers=2", "model.params.width=128", "model.params.heads=4", "model.params.mlp=256"),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="*", help=f"default: those of {SIZES} that there are GPUs for")
    parser.add_argument("--python", help="interpreter that has sglang; default: this one")
    parser.add_argument("--cpu", action="store_true", help="a tiny model and embedded engines")
    return parser.parse_args()


def words(engines: int, args: argparse.Namespace, run: Path) -> list[str]:
    """Settings of the run with so many engines."""
    common = [f"run_dir={run}", f"engine.count={engines}"]
    if args.cpu:
        return [*common, *ON_CPU]
    gpus = ",".join(str(number) for number in range(1, engines + 1))
    return [*common, f"engine.gpus=[{gpus}]", *([f"engine.python={args.python}"] if args.python else [])]


def up(engines: int, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One `pipeline up` and `pipeline verify`, and what its log says of the refits."""
    run = work / f"engines-{engines}"
    log = run.with_suffix(".log")
    recipe = str(Path(__file__).with_name("fanout.yaml"))
    done = carried_out([recipe, *words(engines, args, run)], run, log, LIMIT_S)
    if done.status != 0:
        return {"failures": [f"pipeline up: {done.status}: {log.read_text()[-2000:]}"]}
    said = judged(run, engines)
    said["trace"] = traced(run, engines, said["commits"])
    said["failures"] += done.unverified
    return {**said, "verify_rc": done.verify_rc, "seconds": round(done.seconds, 1)}


def traced(run: Path, engines: int, epoch: int) -> str:
    """The timeline of the run's last refit, in $OUT."""
    path = Path(os.environ.get("OUT", str(run.parent))) / f"refit-{engines}-engines.json"
    command = [sys.executable, "-m", "pipeline", "trace", str(run), "--epoch", str(epoch), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    return str(path) if done.returncode == 0 else done.stderr[-500:]


def judged(run: Path, engines: int) -> dict[str, Any]:
    """Commits by their events, and the marker of each in the coordinator's log."""
    events = [envelope.body for _, envelope in archived(RunDir(run))]
    commits = [event for event in events if isinstance(event, RefitCommitted)]
    groups = [event for event in events if isinstance(event, TransferStarted) and event.fresh]
    marker = re.compile(rf'"event": "refit committed".*"engines": {engines}, "world_size": {engines + 1}, ')
    marked = len(marker.findall((run / "logs" / "refit.jsonl").read_text()))
    failures = []
    if len(commits) < 4 or any(len(commit.engines) != engines for commit in commits):
        failures.append(f"not 4 commits of {engines} engines: {[len(commit.engines) for commit in commits]}")
    if marked != len(commits):
        failures.append(f"{marked} markers of {len(commits)} commits")
    if len(groups) != 1:
        failures.append(f"{len(groups)} groups were formed for one fleet")
    pauses = [1e3 * commit.pause_s for commit in commits]
    return {
        "failures": failures,
        "world_size": engines + 1,
        "commits": len(commits),
        "bytes": commits[0].bytes if commits else 0,
        "first_pause_ms": round(pauses[0], 1) if pauses else None,
        "steady_pause_ms": round(statistics.median(pauses[1:]), 1) if pauses[1:] else None,
        "steady_transfer_ms": [round(1e3 * commit.transfer_s, 1) for commit in commits[1:]],
        "drain_ms": [round(1e3 * commit.drain_s, 1) for commit in commits[1:]],
    }


def main(args: argparse.Namespace) -> int:
    """0 if every size did what it should."""
    gpus = torch.cuda.device_count()
    sizes = args.engines or [size for size in SIZES if args.cpu or size < gpus]
    work, failed = Path(tempfile.mkdtemp(prefix="sluice-fanout-")), not sizes
    for engines in sizes:
        if not args.cpu and engines >= gpus:
            said: dict[str, Any] = {
                "failures": [f"{engines} engines and a trainer need {engines + 1} GPUs, not {gpus}"]
            }
        else:
            said = up(engines, args, work)
            if said.get("bytes"):
                said["wire_ms"] = round(measure(said["bytes"], "cpu" if args.cpu else "cuda", ranks=engines + 1), 2)
        failed |= bool(said["failures"])
        print(json.dumps({"engines": engines, **said}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(arguments()))
