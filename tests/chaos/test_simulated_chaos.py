"""Seeded faults on virtual time: whatever goes wrong no promise is broken, and once it stops the run ends.

More of them: `python -m tests.chaos.schedules --seeds 100`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from actors.source import core as source
from actors.trainer.core import TrainerCore
from actors.trainer.state import Pending
from config.schema import BufferConfig
from contracts import limits
from contracts.events import ActorFailed, GroupDropped
from pipeline.bus import Committed, TooLarge
from pipeline.simulate.faults import Faults
from pipeline.simulate.process import Broken
from pipeline.simulate.run import Result, simulate
from pipeline.simulate.shells import SourceSim
from pipeline.simulate.store import MemoryStore
from tests.chaos import schedules
from tests.chaos.schedules import config, play, replay


def digest(result: Result) -> str:
    lines = hashlib.sha256()
    for entry in result.world.store.log:
        lines.update(entry.stream.encode() + b"\0" + entry.data)
    return lines.hexdigest()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mode", schedules.MODES)
def test_a_schedule_of_faults_keeps_what_its_mode_asks_for(seed: int, mode: str):
    _, problem = play(seed, mode)
    assert problem is None, f"{problem}; again: {replay(seed, mode)}"


@pytest.mark.parametrize("seed", range(4))
def test_a_run_survives_kills_of_any_actor_at_any_moment(seed: int):
    result = simulate(config(seed), seed, Faults(kills=15))
    assert result.ok, (result.finished, result.findings[:3], result.trained)
    assert result.summary.steps == 12


@pytest.mark.parametrize("seed", range(100, 104))
def test_an_actor_that_is_stopped_and_goes_on_later_breaks_nothing(seed: int):
    result = simulate(config(seed), seed, Faults(kills=3, pauses=6))
    assert result.ok, (result.finished, result.findings[:3], result.trained)


@pytest.mark.parametrize("seed", range(4))
def test_trainer_and_engines_that_take_turns_at_a_device_survive_kills_and_pauses(seed: int):
    base = config(seed)
    turns = msgspec.structs.replace(
        base,
        sync=True,
        engine=msgspec.structs.replace(base.engine, release="all"),
        refit=msgspec.structs.replace(base.refit, drain=("finish", "interrupt")[seed % 2]),
    )
    result = simulate(turns, seed, Faults(kills=8, pauses=4))
    assert result.ok, (result.finished, result.findings[:3], result.trained)
    released = [entry for entry in result.world.store.log if b"release.finished" in entry.data]
    assert len(released) >= result.summary.steps == 12


@pytest.mark.parametrize("seed", range(3))
def test_a_store_that_is_killed_and_comes_back_whole_costs_time_only(seed: int):
    result = simulate(config(seed), seed, Faults(outages=4, outage_s=(0.1, 5.0), window_s=8.0))
    assert result.ok, (result.finished, result.findings[:3], result.trained)
    assert result.summary.boots == len(result.world.actors)


@pytest.mark.parametrize("seed", range(3))
def test_after_a_loss_of_power_a_store_that_synced_always_goes_on_where_it_was(seed: int):
    result = simulate(config(seed), seed, Faults(blackouts=2, window_s=8.0))
    assert result.ok, (result.finished, result.findings[:3], result.trained)
    assert result.summary.boots >= 2 * len(result.world.actors)


@pytest.mark.parametrize("seed", range(6))
def test_after_a_loss_of_power_a_store_that_lost_its_last_second_goes_on_consistently(seed: int):
    result = simulate(config(seed), seed, Faults(blackouts=2, lost_s=1.0, window_s=8.0))
    assert result.ok, (result.halted, result.finished, result.findings[:3], result.trained)


@pytest.mark.parametrize("seed", range(6))
def test_a_store_that_is_lost_altogether_is_rebuilt_from_an_archive_that_ends_anywhere(seed: int):
    result = simulate(config(seed), seed, Faults(kills=4, wipes=2, window_s=8.0))
    assert result.ok, (result.halted, result.finished, result.findings[:3], result.trained)


@pytest.mark.parametrize("seed", range(4))
def test_a_torn_checkpoint_is_passed_over_and_what_it_covered_is_trained_again(seed: int):
    result = simulate(config(seed), seed, Faults(tears=1, window_s=6.0))
    assert result.ok, (result.finished, result.findings[:3], result.trained)
    said = [e.body for e in result.log() if isinstance(e.body, ActorFailed) and e.body.error == "CheckpointDamaged"]
    assert len(said) <= 1
    assert not any(failure.fatal for failure in said)


def test_a_store_that_went_back_under_live_actors_halts_the_run_and_says_why():
    results = [simulate(config(seed), seed, Faults(rewinds=1, lost_s=1.0, window_s=5.0)) for seed in range(4)]
    said = [result.halted for result in results if not result.ok]
    assert said
    assert all(text and ("went back" in text or "ahead of the store" in text) for text in said), said


# --- the harness can tell ---


def test_a_trainer_that_takes_a_batch_twice_is_found(monkeypatch: pytest.MonkeyPatch):
    def careless(self: TrainerCore, state: Any, pending: Pending, now: float) -> Any:
        state = msgspec.structs.replace(state, queue=(*state.queue, pending))
        return self._next(state, now) if state.phase == "idle" else (state, ())

    monkeypatch.setattr(TrainerCore, "_batch", careless)
    found: set[str] = set()
    for seed in range(8):  # not every schedule hands a batch over twice
        result = simulate(config(seed), seed, Faults(kills=6, redeliveries=30, window_s=6.0), limit_s=20.0)
        found |= {finding.rule for finding in result.findings}
        if "trained-once" in found:
            return
    pytest.fail(f"only {found}")


def test_a_store_that_lets_a_replaced_process_commit_is_found(monkeypatch: pytest.MonkeyPatch):
    real = MemoryStore.commit

    def unfenced(self: MemoryStore, actor: str, commit: Any) -> Any:
        if commit.boot == self.boots[actor]:
            return real(self, actor, commit)
        return Committed((), again=False)

    monkeypatch.setattr(MemoryStore, "commit", unfenced)
    with pytest.raises(Broken, match="committed after boot"):
        simulate(config(0), 0, Faults(ghosts=4))


def test_prompts_of_64k_tokens_go_through_all_actors(monkeypatch: pytest.MonkeyPatch):
    def perform(self: SourceSim, actor: Any, command: Any) -> None:
        first = int(command.cursor or 0)
        numbers = range(first, first + min(command.n, limits.FETCH // (256 << 10)))
        tasks = tuple(source.FetchedTask(f"t{n}", b"x" * (256 << 10), str(n + 1)) for n in numbers)
        actor.after(0.001, source.Fetched(command.split, tasks))

    monkeypatch.setattr(SourceSim, "perform", perform)
    settings = config(0)
    buffer = msgspec.structs.replace(settings.buffer, group_policy="replace")
    result = simulate(msgspec.structs.replace(settings, buffer=buffer), 0, Faults(kills=3))
    assert result.ok, (result.finished, result.findings[:3])


def test_what_a_real_store_refuses_for_its_size_ends_a_simulated_run(monkeypatch: pytest.MonkeyPatch):
    def perform(self: SourceSim, actor: Any, command: Any) -> None:
        task = source.FetchedTask("long", b"x" * limits.ENTRY, "1")
        actor.after(0.001, source.Fetched(command.split, (task,)))

    monkeypatch.setattr(SourceSim, "perform", perform)
    with pytest.raises(TooLarge, match=r"a journal record has 8,388,\d{3} bytes, limit 8,388,608"):
        simulate(config(0), 0, Faults())


def test_a_failing_schedule_prints_the_command_that_runs_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = play(3, "liveness")[0]
    monkeypatch.setattr(schedules, "play", lambda seed, mode: (real, "broken: on purpose" if seed == 3 else None))
    assert schedules.main(["--seeds", "2", "--first", "2", "--mode", "liveness"]) == 1
    said = capsys.readouterr().out
    assert "python -m tests.chaos.schedules --seed 3 --mode liveness" in said
    assert "schedules=2 failed=1" in said


# --- without faults ---


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
        "from pipeline.simulate.run import simulate\nfrom pipeline.simulate.faults import Faults\n"
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
