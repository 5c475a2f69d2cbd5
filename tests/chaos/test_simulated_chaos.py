"""Seeded kills and pauses of any actor on virtual time: the run ends, and its log breaks no promise."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import msgspec
import pytest

from config.schema import BufferConfig, EngineConfig, LaunchConfig, RefitConfig, RolloutConfig, RunConfig
from contracts.events import GroupDropped
from pipeline.simulate.run import Faults, Result, simulate


def config(seed: int, steps: int = 12) -> RunConfig:
    return RunConfig(
        steps=steps,
        engine=EngineConfig(count=3),
        launch=LaunchConfig(collectors=2),
        buffer=BufferConfig(groups=4, max_staleness=seed % 3),
        rollout=RolloutConfig(samples=4, open_groups=8),
        refit=RefitConfig(drain="interrupt" if seed % 2 else "finish"),
    )


def digest(result: Result) -> str:
    lines = hashlib.sha256()
    for entry in result.world.store.log:
        lines.update(entry.stream.encode() + b"\0" + entry.data)
    return lines.hexdigest()


@pytest.mark.parametrize("seed", range(12))
def test_a_run_survives_kills_of_any_actor_at_any_moment(seed: int):
    result = simulate(config(seed), seed, Faults(kills=15))
    assert result.ok, (result.finished, result.findings[:3], result.trained)
    assert result.summary.steps == 12


@pytest.mark.parametrize("seed", range(100, 106))
def test_an_actor_that_is_stopped_and_goes_on_later_breaks_nothing(seed: int):
    result = simulate(config(seed), seed, Faults(kills=3, pauses=6))
    assert result.ok, (result.finished, result.findings[:3], result.trained)


def test_in_order_and_without_faults_every_task_is_trained_and_nothing_is_dropped():
    ordered = msgspec.structs.replace(config(1), buffer=BufferConfig(groups=4, max_staleness=1, sampler="in_order"))
    result = simulate(ordered, 1)
    assert result.ok
    assert (result.summary.dropped, result.summary.failed_refits, result.summary.trained) == (0, 0, 48)


def test_without_faults_first_come_first_trained_drops_only_stragglers():
    result = simulate(config(1), 1)
    assert result.ok
    assert {event.body.reason for event in result.log() if isinstance(event.body, GroupDropped)} <= {"stale"}


def test_the_same_seed_gives_the_same_log_whatever_the_hash_seed():
    code = (
        "from tests.chaos.test_simulated_chaos import config, digest\n"
        "from pipeline.simulate.run import Faults, simulate\n"
        "print(digest(simulate(config(5, steps=4), 5, Faults(kills=5))))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        for seed in ("1", "2")
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout == digest(simulate(config(5, steps=4), 5, Faults(kills=5))) + "\n"


def test_other_seeds_give_other_logs():
    assert digest(simulate(config(1, steps=2), 1)) != digest(simulate(config(1, steps=2), 2))
