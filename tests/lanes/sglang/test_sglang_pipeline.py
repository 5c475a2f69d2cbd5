"""`pipeline up sglang-cpu`: a run whose tokens come from two real servers; one hangs in a refit, one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import aiohttp
import pytest

from contracts.events import (
    EngineQuarantined,
    EngineReady,
    Event,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    StepFinished,
)
from tests.chaos.moments import TRIES, Tour
from tests.chaos.processes import children, send
from tests.e2e.conftest import Run, boots, steps

PATIENCE_S = 400.0
"""Longest wait for an event of such a run on a loaded machine."""
HUNG, KILLED = "engine-1", "engine-0"


@pytest.mark.timeout(4 * PATIENCE_S)
def test_a_run_trains_on_tokens_of_real_servers_though_one_hangs_in_a_refit_and_one_is_killed(
    sglang_python: str, tmp_path: Path
) -> None:
    """Uncertain until it has loaded whole weights, which its tokens then show to be those of the trainer."""
    words = [f"run_dir={tmp_path / 'run'}", f"engine.python={sglang_python}", "steps=100000", "refit.verify=probe"]
    run = Run(
        tmp_path / "run",
        "sglang-cpu",
        *words,
        "engine.count=2",
        "engine.restart_backoff_s=0.1",
        patience_s=PATIENCE_S,
    )
    try:
        run.wait_for(lambda log: bool(steps(log)))
        epoch = asyncio.run(_hang(run))
        log = run.events()
        (server,) = children(boots(log, KILLED)[-1]["body"]["pid"])
        send(server, signal.SIGKILL)
        run.wait_for(lambda log: _trained_on(log, 2) is not None)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130, run.tail() + _logs(run.path)
    finally:
        run.kill()
    run.verify()
    log = run.events()

    def bodies(kind: str) -> list[dict]:
        return [event["body"] for event in log if event["kind"] == kind]

    # whoever hangs is out of the epoch, the other one is committed
    assert [event["engine"] for event in bodies("engine.quarantined") if event["epoch"] == epoch] == [HUNG]
    (commit,) = [event for event in bodies("refit.committed") if event["epoch"] == epoch]
    assert [member["actor"] for member in commit["engines"]] == [KILLED]
    (dead,) = [event for event in bodies("engine.dead") if event["engine"] == KILLED]
    assert (dead["boot"], "signal SIGKILL" in dead["reason"]) == (1, True), dead
    trained = [step["step"] for step in bodies("step.finished")]
    assert trained == [*range(1, len(trained) + 1)]
    health = [(event["boot"], event["health"]) for event in bodies("engine.health") if event["engine"] == KILLED]
    assert health.index((2, "uncertain")) < health.index((2, "healthy"))
    loads = [event for event in bodies("engine.loaded") if (event["engine"], event["boot"]) == (KILLED, 2)]
    assert loads
    assert all(len(load["probe"]) == 4 for load in loads), "its weights generate"
    # what a server says of its tokens is what the trainer computes for the same weights
    gaps = {event["batch"]: event["metrics"].get("mismatch_kl_lag0") for event in bodies("step.finished")}
    assert all(0 <= gap < 1e-4 for gap in gaps.values() if gap is not None), gaps
    for boot in (1, 2):
        assert _trained_on(log, boot) is not None, f"no step on fresh tokens of boot {boot}"


def _trained_on(log: list[dict], boot: int) -> int | None:
    """A batch with fresh tokens of this boot of the engine that is killed, of which the trainer knows the mismatch."""
    source = (KILLED, boot)
    finished = [event["body"] for event in log if event["kind"] == "trajectory.finished"]
    keys = {e["payload"]["key"] for e in finished if {(s["engine"], s["boot"]) for s in e["sources"]} == {source}}
    known = {
        step["body"]["batch"] for step in steps(log) if step["body"]["metrics"].get("mismatch_kl_lag0") is not None
    }
    for batch in (event["body"] for event in log if event["kind"] == "batch.ready"):
        samples = [sample for group in batch["groups"] for sample in group["samples"]]
        if batch["batch"] in known and any(s["lag"] == 0 and s["payload"]["key"] in keys for s in samples):
            return batch["batch"]
    return None


async def _hang(run: Run) -> int:
    """A server stops with a request in it, and a refit goes on without it; answers the epoch.

    The coordinator is held still until the request is in, so that the refit can't come before it.
    """
    async with Tour.of(run) as tour, aiohttp.ClientSession() as http, contextlib.AsyncExitStack() as still:
        for _ in range(TRIES):
            await tour.present()
            await tour.next(lambda e: isinstance(e.body, RefitCommitted) and _has(e.body), f"commit of {HUNG}")
            with tour.stopped("refit"):
                await tour.present()
                epoch = _served(tour)
                if epoch is None:
                    continue
                if not isinstance(_last(tour, RefitCommitted, StepFinished), StepFinished):
                    await tour.event(StepFinished)  # which the next refit begins with
                still.enter_context(tour.silent(HUNG))
                url = [e.body.url for e in tour.log if isinstance(e.body, EngineReady) and e.body.engine == HUNG][-1]
                request = asyncio.create_task(_request(http, url, epoch))
                still.callback(request.cancel)
                await _runs(http, url, request)
            quarantined = await tour.event(EngineQuarantined, engine=HUNG)
            await still.aclose()
            await tour.next(lambda e: isinstance(e.body, RefitCommitted) and _has(e.body), f"the return of {HUNG}")
            return quarantined.epoch
    raise AssertionError(f"{TRIES} times a refit was under way")


def _last(tour: Tour, *kinds: type[Event]) -> Event:
    return [e.body for e in tour.log if isinstance(e.body, kinds)][-1]


def _has(commit: RefitCommitted) -> bool:
    return HUNG in {member.actor for member in commit.engines}


def _served(tour: Tour) -> int | None:
    """The epoch that the engine serves; None in a refit."""
    last = _last(tour, RefitRequested, RefitCommitted, RefitFailed)
    return last.epoch if isinstance(last, RefitCommitted) and _has(last) else None


async def _request(http: aiohttp.ClientSession, url: str, epoch: int) -> None:
    body = {"input_ids": [3, 4], "rid": "hung-0001", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    headers = {"x-sluice-epoch": str(epoch), "x-sluice-rids": "hung-0001"}
    async with http.post(f"{url}/generate", json=body, headers=headers) as response:
        await response.read()


async def _runs(http: aiohttp.ClientSession, url: str, request: asyncio.Task[None]) -> None:
    """Until the sidecar says that something runs on its server, which answers nothing any more."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with http.get(f"{url}/status") as response:
                if (await response.json())["running"]:
                    return
            assert not request.done(), request.result()
            await asyncio.sleep(0.05)


def _logs(path: Path) -> str:
    return "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted((path / "logs").glob("engine*")))
