"""When a run ends: every ending has its code, and names what a person needs to know."""

from __future__ import annotations

from pathlib import Path

import pytest
from story import ACTORS, Story, booted, committed, failed, requested, trained

from config.schema import LaunchConfig, RunConfig
from contracts import events
from pipeline.errors import Exit
from pipeline.host import Left
from pipeline.verdict import Verdict, judge, log_file
from pipeline.view import View

CONFIG = RunConfig(launch=LaunchConfig(start_deadline_s=60.0, restarts=2, restart_window_s=100.0))


def verdict(story: Story, config: RunConfig = CONFIG, left: dict[str, Left] | None = None) -> Verdict | None:
    return judge(config, View().apply_all(story.log), left or {}, story.now, 1000.0)


def ended(story: Story, config: RunConfig = CONFIG, left: dict[str, Left] | None = None) -> Verdict:
    found = verdict(story, config, left)
    assert found is not None
    return found


def test_a_healthy_run_goes_on() -> None:
    assert verdict(trained(5)) is None


def test_a_run_ends_when_its_steps_are_trained() -> None:
    story = trained(5)
    story.add(events.TrainingFinished(version=5, step=5))
    assert ended(story) == Verdict(Exit.DONE, "trained", "trained 5 steps")


def test_a_run_ends_when_the_target_was_held_for_the_window() -> None:
    story = trained(10)
    rewards = View().apply_all(story.log).rewards()
    reached = sum(rewards[-3:]) / 3
    assert verdict(story, RunConfig(target_reward=reached + 1e-6, target_window=3)) is None
    found = ended(story, RunConfig(target_reward=reached - 1e-6, target_window=3))
    assert (found.code, found.reason) == (Exit.DONE, "target reward reached")
    assert verdict(story, RunConfig(target_reward=0.0, target_window=11)) is None


def test_a_run_ends_when_its_producer_has_no_more_tasks() -> None:
    story = trained(5)
    story.add(events.DataExhausted(issued=5))
    found = ended(story)
    assert (found.code, found.reason) == (Exit.DONE, "no more tasks")


def test_a_fatal_failure_ends_the_run_and_names_actor_and_cause() -> None:
    story = trained(2)
    story.add(failed("buffer", fatal=False))
    assert verdict(story) is None
    story.add(failed("trainer", fatal=True, message="model.source=x: not there"))
    assert ended(story) == Verdict(Exit.FAILED, "trainer failed", "trainer: model.source=x: not there")


@pytest.mark.parametrize(
    ("left", "code", "message"),
    [
        (Left("done"), Exit.FAILED, "buffer: left the run (done)"),
        (Left("fenced"), Exit.FAILED, "buffer: left the run (fenced)"),
        (Left("fatal", "no"), Exit.FAILED, "buffer: no"),
        (Left("foreign", "config resolves to x"), Exit.MISSING, "buffer: config resolves to x"),
    ],
)
def test_an_actor_that_leaves_unasked_ends_the_run(left: Left, code: Exit, message: str) -> None:
    assert ended(trained(1), left={"buffer": left}) == Verdict(code, "buffer failed", message)


def test_an_actor_that_keeps_dying_ends_the_run() -> None:
    story = trained(1)
    for boot in range(2, 5):
        story.add(failed("buffer", fatal=False, message="boom"), 1.0, actor="buffer", boot=0)
        if boot < 4:
            story.add(booted("buffer", boot))
            assert verdict(story) is None
    found = ended(story)
    assert found.code is Exit.FAILED
    assert "buffer: was restarted 3 times within 100 s (launch.restarts=2): ValueError: boom" in found.message


def test_an_actor_that_died_long_ago_may_die_again() -> None:
    story = trained(1)
    for boot in range(2, 9):
        story.add(booted("buffer", boot), 60.0)
    assert verdict(story) is None


def test_a_run_that_never_served_says_what_is_missing() -> None:
    story = Story()
    for actor in ("source", "collector-0", "buffer", "trainer", "refit", "gateway-0", "engine-0"):
        story.add(booted(actor))
    story.add(requested(1, 0))
    story.add(events.WaitStarted(actor="refit", on="engine-0", cause="engine.loaded of epoch 1"))
    story.add(events.RefitFailed(epoch=1, version=0, phase="load", reason="deadline"))
    assert verdict(story) is None
    story.now = 1061.0
    found = ended(story)
    assert found.code is Exit.START
    for part in (
        "launch.start_deadline_s=60",
        "not up: recorder, engine-1",
        "refit waits for engine-0 (engine.loaded of epoch 1)",
        "epoch 1: load: deadline",
    ):
        assert part in found.message
    story.add(committed(2, 0))
    assert verdict(story) is None


def test_a_run_that_is_up_and_silent_says_so() -> None:
    story = Story()
    for actor in ACTORS:
        story.add(booted(actor), 0.0)
    story.now = 1100.0
    assert "every actor is up and none says" in ended(story).message


def test_a_failure_points_to_the_log_of_the_actor(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.jsonl").touch()
    assert log_file(tmp_path, Verdict(Exit.FAILED, "trainer failed", "")) == tmp_path / "logs" / "trainer.jsonl"
    assert log_file(tmp_path, Verdict(Exit.START, "start-up deadline", "")) == tmp_path / "logs"
