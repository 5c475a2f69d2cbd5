"""`pipeline up` trains, leaves what it promises, and survives what it must."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.moments import (
    Moment,
    coordinator_killed,
    engine_loaded,
    store_restarted,
    strike,
    trainer_mid_broadcast,
)
from tests.e2e.conftest import Run, boots, steps

Start = Callable[..., Run]
STEPS = 60
"""Of the tiny recipe: long enough on a quick machine for a fault in the middle."""


def test_a_run_trains_refits_and_leaves_everything_it_promises(start: Start):
    run = start("steps=4")
    assert run.end() == 0, run.tail()
    summary = run.verify()
    assert summary["steps"] == 4
    assert summary["commits"] >= 4
    assert summary["trained"] == 16
    for name in ("events/index.json", "metrics.jsonl", "report.html", "config.yaml", "logs/trainer.jsonl"):
        assert (run.path / name).stat().st_size > 0, name
    assert list((run.path / "tensorboard").iterdir())
    assert [p.name for p in sorted((run.path / "checkpoints").iterdir())][-1].endswith("step00000004")
    log = run.events()
    assert {event["body"]["digest"] for event in log if event["kind"] == "engine.loaded"} == {
        event["body"]["digest"] for event in log if event["kind"] == "transfer.offered"
    }
    assert [event["body"]["version"] for event in steps(log)] == [1, 2, 3, 4]
    assert "report.html" in run.output.read_text().splitlines()[-1]


def test_the_synchronous_loop_trains_on_nothing_but_the_current_version(start: Start):
    """Its weights travel through shared memory, and trainer and engines take turns at the memory of their device."""
    run = start("steps=3", "sync=true", "refit.transport=ipc", "engine.release=all", "trainer.offload=all")
    assert run.end() == 0, run.tail()
    summary = run.verify()
    assert summary["failed_refits"] == summary["quarantines"] == 0
    log = run.events()
    assert [event["body"]["metrics"]["staleness_max"] for event in steps(log)] == [0.0, 0.0, 0.0]
    released = [event["body"] for event in log if event["kind"] == "engine.released"]
    assert [body["tags"] for body in released] == [["kv_cache", "weights"]] * 6
    turns = [
        event["kind"] for event in log if event["kind"] in ("release.finished", "step.finished", "refit.committed")
    ]
    assert turns[:7] == ["refit.committed", *["release.finished", "step.finished", "refit.committed"] * 2]
    assert turns[7:9] == ["release.finished", "step.finished"]


def test_a_run_finishes_although_trainer_and_engine_are_killed_at_once(start: Start):
    run = start()
    log = run.wait_for(lambda log: len(steps(log)) >= 2)
    for victim in ("trainer", "engine-1"):
        os.kill(boots(log, victim)[-1]["body"]["pid"], signal.SIGKILL)
    assert run.end() == 0, run.tail()
    assert run.verify()["steps"] == STEPS


def test_a_run_that_was_stopped_then_killed_with_its_driver_and_moved_goes_on_to_its_end(start: Start):
    """Its refits interrupt answers: its one engine runs one at a time, more slowly than they are trained on."""
    slow = ("engine.count=1", "engine.max_running=1", "rollout.max_new_tokens=64")
    run = start("steps=1000", "refit.drain=interrupt", *slow)
    run.wait_for(lambda log: len(steps(log)) >= 2 and bool(mixed(log)))
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.tail()
    assert f"pipeline up --resume {run.path}" in run.output.read_text()
    log = run.events()
    finished = [event["body"] for event in log if event["kind"] == "trajectory.finished"]
    assert {body["attempt"] for body in finished} == {1}, "an interrupted answer is no failed sample"
    assert not [event for event in log if event["kind"] == "sample.failed"]
    assert any(event["body"]["interrupted"] for event in log if event["kind"] == "gate.closed")
    before = len(steps(log))
    whole = before + 16

    again = start(f"steps={whole}", resume=run)
    log = again.wait_for(lambda log: len(steps(log)) > before)
    pids = {event["body"]["pid"] for event in log if event["kind"] == "actor.booted"}
    again.kill()
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if _lives(pid)] + _mentions(run.path):
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.2)

    run.path = run.path.rename(run.path.with_name("moved"))
    last = start(resume=run)
    assert last.end() == 0, last.tail()
    assert last.verify()["steps"] == whole
    assert not [event for event in last.events() if event["kind"] == "actor.failed"], "its checkpoint moved with it"


def mixed(log: list[dict]) -> list[dict]:
    """Trajectories that hold tokens of two versions."""
    finished = (event for event in log if event["kind"] == "trajectory.finished")
    return [event for event in finished if len({source["version"] for source in event["body"]["sources"]}) > 1]


@pytest.mark.parametrize("victim", ["collector-0", "buffer", "gateway-0", "recorder", "source"])
def test_kill_9_of_one_actor_in_the_middle_stops_no_training_and_loses_nothing(endless: Run, victim: str):
    whole = endless.wait_for(lambda log: len(steps(log)) >= 2)
    before = boots(whole, victim)
    os.kill(before[-1]["body"]["pid"], signal.SIGKILL)
    log = endless.wait_for(lambda log: len(boots(log, victim)) > len(before))
    trained = len(steps(log))
    after = endless.wait_for(lambda log: len(steps(log)) >= trained + 2)
    assert others(after, victim) == others(whole, victim), "nobody else was started again"


def others(log: list[dict], victim: str) -> Counter[str]:
    """How often each actor but `victim` was started."""
    return Counter(event["actor"] for event in log if event["kind"] == "actor.booted" and event["actor"] != victim)


@pytest.mark.parametrize("moment", [trainer_mid_broadcast, engine_loaded, coordinator_killed, store_restarted])
def test_a_fault_at_its_moment_in_a_refit_stops_no_training_and_loses_nothing(endless: Run, moment: Moment):
    """`make chaos` causes the others too."""
    endless.wait_for(lambda log: len(steps(log)) >= 2)
    strike(endless, moment)


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def _mentions(path: Path) -> list[int]:
    """Processes (servers, supervisors) whose command line names the run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(path).encode() in (entry / "cmdline").read_bytes() and _lives(int(entry.name)):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found
