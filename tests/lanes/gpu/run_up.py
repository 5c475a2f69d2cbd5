"""Whole runs on GPUs by `pipeline up smollm2-gpu` and its variants; prints one JSON line each, and judges them.

    python -m tests.lanes.gpu.run_up --python ENV/bin/python          # every variant that this machine has GPUs for
    python -m tests.lanes.gpu.run_up --python ENV/bin/python --only nccl,sync
    python -m tests.lanes.gpu.run_up --try                            # the script itself, on a CPU, in some minutes

Variants that start a SGLang server of their own do so all at once. The others use one that this script starts beside
them on the second GPU and keeps, so that they are over sooner: first those that are not timed, one after the other;
then, with the machine to itself, that server is measured alone, and after it those whose times are compared. A variant
that fails, or is not done in its time, keeps no other from running. What is left of them goes to $OUT.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import torch

from actors import models
from actors.engine import server
from config import loading
from config.schema import RunConfig
from contracts import events
from contracts.engine import EngineError
from pipeline import machine
from pipeline.eventlog import archived
from pipeline.rundir import RunDir
from tests.lanes.gpu.bench import children

ROOT = Path(__file__).parents[3]
MISMATCH = 1.05
"""Upper bound of the mean exp|trainer - engine| over tokens of the current version, in every step."""
RISE = 0.05
"""How much the mean reward of the last fifth of the steps must exceed that of the first fifth."""
SAMPLE_S = 0.01
"""Pause between two looks at the GPU's memory."""
GIVEN_MIB = 2048
"""What an engine with engine.release=all gives back at least: its cache alone is 2,880 MiB."""
LOG_BYTES = 200_000
"""End of each log that is kept."""


class Variant(msgspec.Struct, frozen=True):
    """`settings` of a run. `own`: it starts its server itself. `timed`: it runs alone. `rises`: the reward must.

    `colocated`: trainer and engine share the last GPU, and weights go over ipc. `killed`: its engine's scheduler gets
    SIGKILL in the middle of the run, which has to end all the same.
    """

    name: str
    gpus: int
    steps: int
    limit_s: float
    own: bool = False
    timed: bool = False
    rises: bool = False
    colocated: bool = False
    killed: bool = False
    settings: tuple[str, ...] = ()


BOUND = (
    "producer.args.chat=true",
    "producer.args.prompt_template='Explain at length and step by step. {question}'",
    "rollout.max_new_tokens=128",
    "trainer.lr=1e-9",
    "checkpoint.every=1000",
)
"""Generation takes longer than training, and goes on doing so: answers stay as long as they are."""
VARIANTS = (
    Variant("ipc", 1, 40, 260.0, own=True, rises=True, colocated=True),
    Variant(
        "ipc-release",
        1,
        8,
        260.0,
        own=True,
        colocated=True,
        settings=("sync=true", "engine.release=all", "trainer.offload=optimizer"),
    ),
    Variant(
        "ipc-megatron-release",
        1,
        8,
        260.0,
        own=True,
        colocated=True,
        settings=("sync=true", "engine.release=all", "trainer.backend=megatron", "trainer.offload=all"),
    ),
    Variant("ipc-megatron", 1, 40, 260.0, own=True, rises=True, colocated=True, settings=("trainer.backend=megatron",)),
    Variant("nccl", 2, 40, 260.0, own=True, rises=True),
    Variant("nccl-killed", 2, 14, 300.0, own=True, killed=True),
    Variant("megatron", 2, 40, 150.0, rises=True, settings=("trainer.backend=megatron",)),
    Variant(
        "megatron-pp",
        2,
        8,
        120.0,
        settings=("trainer.backend=megatron", "trainer.ranks=2", "trainer.megatron.pipeline_parallel=2"),
    ),
    Variant(
        "fsdp",
        2,
        12,
        120.0,
        settings=("trainer.ranks=2", "trainer.packed=true", "trainer.activation_checkpointing=true"),
    ),
    Variant("async", 2, 14, 100.0, timed=True, settings=(*BOUND, "refit.drain=interrupt")),
    Variant("sync", 2, 14, 100.0, timed=True, settings=(*BOUND, "sync=true")),
    Variant("short-async", 2, 14, 80.0, timed=True),
    Variant("short-interrupt", 2, 14, 80.0, timed=True, settings=("refit.drain=interrupt",)),
    Variant("short-sync", 2, 14, 80.0, timed=True, settings=("sync=true",)),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter that has sglang; default: this one")
    parser.add_argument("--only", default="", help="names of variants, by comma")
    parser.add_argument("--budget-s", type=float, default=530.0, help="no variant may run past this")
    parser.add_argument("--try", dest="dry", action="store_true", help="a tiny model and the embedded engine, on a CPU")
    return parser.parse_args()


class Lane:
    """Runs variants one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.monotonic()
        self.out = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="sluice-up-"))
        self.work = Path(tempfile.mkdtemp(prefix="sluice-runs-"))
        self.results: list[dict[str, Any]] = []
        self.count = 2 if args.dry else torch.cuda.device_count()
        self.last = self.count - 1

    @property
    def left_s(self) -> float:
        return self.args.budget_s - (time.monotonic() - self.began)

    def common(self) -> list[str]:
        """Settings of every variant."""
        if self.args.dry:
            small = str(ROOT / "tests" / "e2e" / "tiny.yaml")
            return [small, "trainer.device=cpu", "engine.count=1", "eval.every=0"]
        python = [f"engine.python={self.args.python}"] if self.args.python else []
        return ["smollm2-gpu", "engine.count=1", *python]

    def words(self, variant: Variant, url: str | None) -> list[str]:
        """Recipe and settings of a variant; with `url` it uses the server there."""
        recipe, *settings = self.common()
        steps = variant.steps if variant.killed or not self.args.dry else 6
        chosen = [one for one in variant.settings if not (self.args.dry and "producer.args" in one)]
        if variant.colocated:
            chosen += ["refit.transport=ipc"]
            chosen += [] if self.args.dry else [f"engine.gpus=[{self.last}]", f"trainer.device=cuda:{self.last}"]
        words = [recipe, f"run_dir={self.work / variant.name}", *settings, *chosen, f"steps={steps}"]
        return words if url is None else [*words, "engine.kind=external", f"engine.urls=[{url}]", "engine.gpus=[]"]

    def up(self, variant: Variant, url: str | None) -> dict[str, Any]:
        """One `pipeline up` and `pipeline verify`, judged."""
        run = self.work / variant.name
        limit = min(variant.limit_s, self.left_s)
        with contextlib.ExitStack() as beside:
            sampler = beside.enter_context(Sampler(self.last if variant.colocated else 0))
            if variant.killed:
                beside.enter_context(Killer(run))
            done = carried_out(self.words(variant, url), run, run.with_suffix(".log"), limit)
        said = judged(variant, rows(run), self.args.dry)
        if "engine.release=all" in variant.settings:
            said["given_back_mib"], wrong = given_back(run, sampler.seen)
            said["failures"] += wrong
        if sampler.seen:  # of all that runs there, the trainer first of all
            free = [size for _, size in sampler.seen]
            said["memory_rise_mib"] = (max(free) - min(free)) // 2**20
        said |= {"rc": done.status, "verify_rc": done.verify_rc, "seconds": round(done.seconds, 1)}
        if done.status != 0:
            how = f"over after {limit:g} s" if done.status is None else done.status
            said["failures"].insert(0, f"pipeline up: {how}")
        said["failures"] += done.unverified
        return said

    def say(self, said: dict[str, Any]) -> None:
        self.results.append(said)
        print(json.dumps(said), flush=True)

    async def run(self) -> bool:
        """Every variant asked for; whether all of them did what they should."""
        chosen = [v for v in VARIANTS if not self.args.only or v.name in self.args.only.split(",")]
        for variant in [v for v in chosen if v.gpus > self.count]:
            self.say({"variant": variant.name, "skipped": f"needs {variant.gpus} GPUs, here are {self.count}"})
        chosen = [v for v in chosen if v.gpus <= self.count]
        shared = asyncio.create_task(self._shared()) if any(not v.own for v in chosen) else None
        try:
            beside = [v for v in chosen if not v.own and not v.timed]
            own = [self._each([v], None) for v in chosen if v.own]
            await asyncio.gather(self._each(beside, shared), *own)
            await self._each([v for v in chosen if v.timed], shared)
        finally:
            if shared is not None:
                with contextlib.suppress(server.ServerError):
                    await (await shared).close()
            self._keep()
        return all(not said.get("failures") for said in self.results)

    async def _each(self, variants: Sequence[Variant], shared: asyncio.Task[server.Server] | None) -> None:
        for variant in variants:
            if self.left_s < 40:
                self.say({"variant": variant.name, "failures": ["no time left"]})
            else:
                await self._one(variant, shared)

    async def _one(self, variant: Variant, shared: asyncio.Task[server.Server] | None) -> None:
        url = None
        try:
            if not variant.own:
                assert shared is not None
                url = (await shared).client.url
                if variant.timed and not any(said.get("variant") == "alone" for said in self.results):
                    self.say({"variant": "alone", **await alone((await shared), self._config())})
            self.say({"variant": variant.name, **await asyncio.to_thread(self.up, variant, url)})
            self._compare()
        except (server.ServerError, EngineError, subprocess.TimeoutExpired, OSError) as error:
            self.say({"variant": variant.name, "failures": [f"{type(error).__name__}: {error}"[-2000:]]})

    def _config(self) -> RunConfig:
        return loading.load(self.common()[0], [*self.common()[1:], *([] if self.args.dry else BOUND)])

    async def _shared(self) -> server.Server:
        """The server that several variants use."""
        config = self._config()
        model = await asyncio.to_thread(models.resolve, config.model.source, models.cache_dir(), config.model.params)
        if config.engine.kind == "torch":
            launch = server.torch_launch(config, model, self.work / "port")
        else:
            launch = server.sglang_launch(config, model, "shared")
        return await server.start(launch, self.work / "shared.server.log", min(300.0, self.left_s))

    def _compare(self) -> None:
        """What two variants say together, once both are there."""
        by = {said["variant"]: said for said in self.results}
        done = {said.get("ratio") for said in self.results}
        pairs = (
            ("sync over async, seconds a step", "sync", "async", "s_per_step"),
            ("sync over async, the recipe's answers", "short-sync", "short-async", "s_per_step"),
            ("sync over interrupted async, the recipe's answers", "short-sync", "short-interrupt", "s_per_step"),
            ("decoding while training over the engine alone, tokens/s", "async", "alone", "tokens_per_s"),
        )
        for what, above, below, key in pairs:
            a, b = by.get(above, {}).get(key), by.get(below, {}).get(key)
            if what not in done and a and b:
                self.say({"variant": "ratio", "ratio": what, "value": round(a / b, 3)})

    def _keep(self) -> None:
        """Small files that say what happened."""
        self.out.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(said) + "\n" for said in self.results)
        (self.out / "results.jsonl").write_text(lines)
        kept = [{"variant": run.name, **row} for run in sorted(self.work.iterdir()) for row in rows(run)]
        (self.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as archive:
            logs = [*self.work.glob("*.log"), *self.work.glob("*/logs/*"), *self.work.glob("*/report.html")]
            for path in [*logs, *self._traces()]:
                data = path.read_bytes()[-LOG_BYTES if path.suffix not in (".html", ".json") else 0 :]
                entry = tarfile.TarInfo(str(path.relative_to(self.work)))
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))

    def _traces(self) -> list[Path]:
        """The timeline of each run that has one."""
        found = []
        for run in [path.parent for path in self.work.glob("*/metrics.jsonl")]:
            trace = run.with_suffix(".json")
            command = [sys.executable, "-m", "pipeline", "trace", str(run), "-o", str(trace)]
            if subprocess.run(command, capture_output=True, timeout=60, cwd=ROOT).returncode == 0:
                found.append(trace)
        return found


class Done(NamedTuple):
    """How a run and its `pipeline verify` ended. `status`: None when it had to be ended."""

    status: int | None
    seconds: float
    verify_rc: int
    unverified: list[str]


def carried_out(words: Sequence[str], run: Path, log: Path, limit: float) -> Done:
    """`pipeline up` with `words`, its output in `log`, and `pipeline verify` of what it left at `run`."""
    began = time.monotonic()
    with log.open("w") as file:
        command = [sys.executable, "-m", "pipeline", "up", *words]
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, start_new_session=True)
        status = ended(process, limit)
    seconds = time.monotonic() - began
    verify = [sys.executable, "-m", "pipeline", "verify", str(run)]
    found = subprocess.run(verify, capture_output=True, text=True, timeout=60, cwd=ROOT)
    unverified = [f"pipeline verify: {(found.stdout + found.stderr)[-500:]}"] if found.returncode else []
    return Done(status, seconds, found.returncode, unverified)


def ended(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """Exit status, or None when it had to be ended: in order first, then by force."""
    for number, patience in ((None, max(limit, 1.0)), (signal.SIGINT, 30.0), (signal.SIGKILL, 10.0)):
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        try:
            status = process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        return status if number is None else None
    return None


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run directory; empty if there is none."""
    try:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except OSError:
        return []


def judged(variant: Variant, found: Sequence[dict[str, Any]], dry: bool) -> dict[str, Any]:
    """Figures of a run, and what is wrong with them."""
    steps = variant.steps if variant.killed or not dry else 6
    failures = []
    if len(found) != steps or [row["step"] for row in found] != list(range(1, steps + 1)):
        failures.append(f"{len(found)} of {steps} steps")
    if not found:
        return {"failures": failures}
    last = found[-1]
    rewards = [row["reward/train"] or 0.0 for row in found]
    fifth = max(1, len(rewards) // 5)
    first_reward, last_reward = statistics.mean(rewards[:fifth]), statistics.mean(rewards[-fifth:])
    gaps = [gap for row in found if (gap := row.get("policy/mismatch_exp_lag0"))]
    settled = found[min(5, len(found) - 1) :]
    between = [row["time/since_last_s"] for row in settled if row["time/since_last_s"]]
    refits = {row["refit/epoch"]: row for row in found if "refit/epoch" in row}
    if variant.rises and not dry and last_reward < first_reward + RISE:
        failures.append(f"the reward did not rise: {first_reward:.3f} to {last_reward:.3f}")
    if max(gaps, default=9.0) >= MISMATCH:
        failures.append(f"mismatch {max(gaps, default=9.0):.4f} is not under {MISMATCH}")
    if len(refits) < steps // 2:
        failures.append(f"{len(refits)} refits were committed in {steps} steps")
    for name in ("failed_refits", "quarantines", "restarts") if not variant.killed else ():
        if last[f"total/{name}"]:
            failures.append(f"{last[f'total/{name}']} {name}")
    if variant.killed and not last["total/restarts"]:
        failures.append("its engine was not started again")
    return {
        "failures": failures,
        "steps": len(found),
        "commits": last["total/refits"],
        "restarts": last["total/restarts"],
        "reward_first": round(first_reward, 4),
        "reward_last": round(last_reward, 4),
        "mismatch_max": max(gaps, default=None),
        "mismatch_steps": len(gaps),
        "mismatch_lagged": middle([gap for row in found if (gap := row.get("policy/mismatch_exp_lagged"))]),
        "s_per_step": middle(between),
        "step_s": middle([row["time/step_s"] for row in settled]),
        "waited_s": middle([row["time/waited_s"] for row in settled]),
        "tokens_per_s": sum(row["tokens/generated"] for row in settled) / max(sum(between), 1e-9),
        "pause_ms": middle([1e3 * row["refit/pause_s"] for row in refits.values()]),
        "transfer_ms": middle([1e3 * row["refit/transfer_s"] for row in refits.values()]),
        "drain_ms": middle([1e3 * row["refit/drain_s"] for row in refits.values()]),
    }


class Beside(threading.Thread):
    """A thread for the length of a block; `_over` is set at its end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


class Killer(Beside):
    """Kills the first boot of a run's engine once the run has taken some steps."""

    STEPS, LOOK_S = 4, 0.05

    def __init__(self, run: Path) -> None:
        super().__init__()
        self._run_dir = run

    def run(self) -> None:
        while not self._over.wait(self.LOOK_S):
            if len(rows(self._run_dir)) >= self.STEPS:
                for pid in self._victims():
                    os.kill(pid, signal.SIGKILL)
                return

    def _victims(self) -> list[int]:
        """The schedulers of an SGLang server, which is known by its label; the whole of an embedded one."""
        label = f"{RunDir.open(self._run_dir).info().run}-engine-0-1"
        port_file = str(self._run_dir / "engine-0-1.port")
        servers = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if any(word.encode() in entry.read_bytes() for word in (label, port_file)):
                    servers.append(int(entry.parent.name))
        below = {pid: line for server in servers for pid, line in children(server).items()}
        return [pid for pid, line in below.items() if "sglang::schedul" in line] or servers


class Sampler(Beside):
    """Looks again and again at what is free on one GPU. `seen`: seconds since the epoch and bytes."""

    def __init__(self, gpu: int) -> None:
        super().__init__()
        self._gpu = gpu
        self.seen: list[tuple[float, int]] = []

    def run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            found = machine.free_memory([self._gpu])
            if self._gpu in found:
                self.seen.append((time.time(), found[self._gpu]))


def given_back(run: Path, seen: Sequence[tuple[float, int]]) -> tuple[int | None, list[str]]:
    """MiB more that are free at some moment of a step than while engines serve; and what is wrong with that."""
    turns: dict[bool, list[int]] = {True: [], False: []}
    since: tuple[bool, float] | None = None
    for _, envelope in archived(RunDir.open(run)):
        at, body = envelope.wall_ns / 1e9, envelope.body
        if isinstance(body, events.ReleaseRequested | events.StepFinished) and since is not None:
            free = [size for moment, size in seen if since[1] <= moment <= at]
            turns[since[0]] += [max(free)] if free else []
            since = None
        if isinstance(body, events.ReleaseFinished | events.RefitCommitted):
            since = (isinstance(body, events.ReleaseFinished), at)
    if not seen or not turns[True] or not turns[False]:
        return None, [] if not seen else ["no release was seen"]
    given = int(statistics.median(turns[True]) - statistics.median(turns[False])) // 2**20
    return given, [] if given >= GIVEN_MIB else [f"{given} MiB were given back for a step, not {GIVEN_MIB}"]


def middle(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


async def alone(engine: server.Server, config: RunConfig) -> dict[str, Any]:
    """Tokens a second of a server that does nothing else, at the batch that a run keeps open."""
    samples, tokens = config.rollout.samples, config.rollout.max_new_tokens
    sampling = {"temperature": config.rollout.temperature, "max_new_tokens": tokens, "n": samples, "ignore_eos": True}

    async def group(number: int) -> int:
        ids = [5 + (number * 7 + place) % 25 for place in range(60)]
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        answer = await engine.client.generate(body, 60.0)
        return sum(item["meta_info"]["completion_tokens"] for item in answer)

    speeds = []
    for turn in range(3):
        began = time.perf_counter()
        numbers = range(config.buffer.groups * 2 * turn, config.buffer.groups * 2 * (turn + 1))
        made = sum(await asyncio.gather(*map(group, numbers)))
        speeds.append(made / (time.perf_counter() - began))
    return {"tokens_per_s": statistics.median(speeds[1:]), "speeds": speeds}


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(Lane(arguments()).run()) else 1)
