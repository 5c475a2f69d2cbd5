"""The view is what the events say, whatever came before a restart, a restore or a resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from story import Story, batch, booted, committed, failed, issued, requested, rolled, stepped, trained

from contracts import events
from pipeline.view import RATE_S, View


def view_of(story: Story, keep: int | None = None) -> View:
    return View(keep).apply_all(story.log)


def test_each_finished_step_is_a_row_with_its_batch_and_refit() -> None:
    view = view_of(trained(4))
    assert view.step == 4
    assert [row.step for row in view.rows] == [1, 2, 3, 4]
    assert view.rewards() == [(n / 4 + 0.5) / 2 for n in range(1, 5)]
    row = view.rows[-1]
    assert row.contents is not None
    assert (row.contents.lags, row.ready_groups, row.open_groups, row.generated_tokens) == ({0: 1, 1: 1}, 1, 2, 10)
    assert row.refit is not None
    assert (row.refit.version, row.refit.pause_s, row.refits_total) == (3, 0.5, 4)
    assert row.flat()["staleness/mean"] == 0.5
    assert row.flat()["tokens/generated_per_s"] == pytest.approx(10 / 6)


def test_invalid_samples_enter_no_mean() -> None:
    story = Story()
    story.add(batch(1, [1.0, 0.0, -1.0]))
    story.add(stepped(1))
    story.add(batch(2, [-1.0]))
    story.add(stepped(2))
    view = view_of(story)
    assert view.rewards() == [0.5]
    assert view.rows[1].reward is None
    assert view.rows[0].contents is not None
    assert view.rows[0].contents.invalid == 1


def test_the_mean_reward_needs_a_full_window() -> None:
    view = view_of(trained(4))
    assert view.mean_reward(5) is None
    assert view.mean_reward(2) == pytest.approx((0.625 + 0.75) / 2)


def test_abandoned_steps_leave_the_history() -> None:
    story = trained(4)
    story.add(events.PolicyReady(version=5, step=2, parent_version=2, trainer_boot=2, abandoned=(3, 4)))
    story.add(stepped(3, version=6, parent=5))
    view = view_of(story)
    assert [(row.step, row.version) for row in view.rows] == [(1, 1), (2, 2), (3, 6)]
    assert view.step == 3


def test_the_driver_holds_only_the_newest_rows() -> None:
    view = view_of(trained(6), keep=2)
    assert [row.step for row in view.rows] == [5, 6]
    assert len(view.refits) == 2
    assert view.totals["refits"] == 7


def test_open_waits_say_who_waits_for_whom_and_since_when() -> None:
    story = Story()
    story.add(events.WaitStarted(actor="trainer", on="buffer", cause="no batch", deadline_at=5.0))
    story.add(events.WaitStarted(actor="source", on="buffer", cause="no credit"))
    story.add(events.WaitStarted(actor="refit", on="trainer", cause="no offer"))
    story.add(events.WaitEnded(actor="source", on="buffer", seconds=1.0))
    view = view_of(story)
    assert [(w.actor, w.on, w.since) for w in view.longest_waits(1100.0)] == [
        ("trainer", "buffer", 1001.0),
        ("refit", "trainer", 1003.0),
    ]
    assert [w.actor for w in view.longest_waits(1003.5, least_s=2.0)] == ["trainer"]
    view.apply(story.add(booted("trainer", 2)))
    assert [w.actor for w in view.longest_waits(1100.0)] == ["refit"]


def test_waits_are_summed_by_kinds_of_actors() -> None:
    story = Story()
    story.add(events.WaitEnded(actor="refit", on="engine-0,engine-1,trainer", seconds=1.0))
    story.add(events.WaitEnded(actor="refit", on="trainer, engine-1", seconds=2.0))
    story.add(stepped(1))
    story.add(stepped(2))
    view = view_of(story)
    assert view.rows[0].waits == {"refit/engine+trainer": 3.0}
    assert view.rows[0].flat()["wait_s/refit/engine+trainer"] == 3.0
    assert view.rows[1].waits == {}


def test_refits_failures_and_quarantines_are_told_apart() -> None:
    story = Story()
    story.add(requested(1, 0))
    view = view_of(story)
    assert view.refitting == (1, 0, 1001.0)
    assert view.first_commit_at is None
    view.apply(story.add(events.RefitFailed(epoch=1, version=0, phase="transfer", reason="deadline")))
    assert view.refitting is None
    view.apply(story.add(requested(2, 0)))
    view.apply(story.add(events.EngineQuarantined(epoch=2, engine="engine-1", boot=1, reason="digest")))
    view.apply(story.add(committed(2, 0, "engine-0", "engine-1")))
    assert view.first_commit_at == story.now
    assert view.serving == {"engine-0": 0, "engine-1": 0}
    view.apply(story.add(events.EngineDead(engine="engine-1", boot=1, reason="killed")))
    assert view.serving == {"engine-0": 0}
    assert [(m.epoch, m.engine, m.reason) for m in view.mishaps] == [
        (1, None, "transfer: deadline"),
        (2, "engine-1", "digest"),
    ]
    assert (view.totals["failed_refits"], view.totals["quarantines"], view.totals["refits"]) == (1, 1, 1)


def test_the_generation_rate_forgets_what_is_old() -> None:
    story = Story()
    story.add(events.RunStarted(config_digest=""))
    for _ in range(60):
        story.add(rolled(0, 0, tokens=30))
    view = view_of(story)
    assert view.generated_per_s(story.now) == pytest.approx(30.0)
    assert view.generated_per_s(story.now + RATE_S) == 0.0
    assert view.totals["generated_tokens"] == 1800
    assert view.totals["trajectories"] == 60


def test_a_run_is_starved_once_the_rest_can_not_fill_a_batch() -> None:
    story = Story()
    for index in range(5):
        story.add(issued(index))
    story.add(issued(-1, split="eval"))
    story.add(batch(1, [1.0], groups=2))
    story.add(stepped(1))
    view = view_of(story)
    assert not view.starved(4)
    view.apply(story.add(events.DataExhausted(issued=5)))
    assert view.issued == 5
    assert view.starved(4)
    assert not view.starved(3)
    view.apply(story.add(events.GroupDropped(task="t", index=4, reason="stale", samples=2)))
    assert view.starved(3)


def test_groups_of_abandoned_steps_are_open_again() -> None:
    story = Story()
    for index in range(4):
        story.add(issued(index))
    story.add(events.DataExhausted(issued=4))
    for number in (1, 2):
        story.add(batch(number, [1.0], groups=2))
        story.add(stepped(number))
    story.add(events.CheckpointSaved(version=1, step=1, batch=1, path="c", bytes=1, seconds=0.1))
    view = view_of(story)
    assert view.starved(1)
    view.apply(story.add(events.PolicyReady(version=3, step=1, parent_version=1, trainer_boot=2, abandoned=(2,))))
    assert not view.starved(2)
    assert view.starved(3)
    assert view.checkpoint is not None


def test_deaths_are_counted_by_boots_or_by_last_words() -> None:
    story = Story()
    for boot in range(1, 4):
        story.add(booted("buffer", boot), 10.0)
    for _ in range(4):
        story.add(failed("source", fatal=False), 1.0, actor="source", boot=0)
    story.add(failed("recorder", fatal=False), actor="recorder", boot=1)
    view = view_of(story)
    assert view.recent_deaths("buffer", story.now, 1000.0) == 2
    assert view.recent_deaths("buffer", story.now, 8.0) == 1
    assert view.recent_deaths("source", story.now, 1000.0) == 4
    assert view.recent_deaths("recorder", story.now, 1000.0) == 0
    assert view.recent_deaths("nobody", story.now, 1000.0) == 0
    assert len(view.failures) == 5


def test_a_new_session_forgets_processes_but_not_the_training() -> None:
    story = trained(3)
    story.add(events.WaitStarted(actor="trainer", on="buffer", cause="no batch"))
    story.add(failed("trainer", fatal=True))
    story.add(events.RunStopping(reason="interrupted"))
    story.add(events.RunFinished(reason="interrupted"))
    view = view_of(story)
    assert (view.stopping, view.finished) == ("interrupted", "interrupted")
    view.apply(story.add(events.RunStarted(config_digest="", resumed=True)))
    assert (view.stopping, view.finished, view.first_commit_at) == (None, None, None)
    assert (dict(view.boots), dict(view.waits), list(view.failures)) == ({}, {}, [])
    assert view.step == 3


def test_samples_evaluations_and_the_end_are_noted() -> None:
    story = Story()
    story.add(events.SampleFailed(task="t", index=0, sample=0, attempt=3, samples=2, failure="timeout", reason="slow"))
    story.add(events.TrajectoryRejected(task="t", index=0, sample=0, reason="duplicate"))
    story.add(events.EvalFinished(version=2, step=2, mean_reward=0.25, samples=8))
    story.add(stepped(1))
    story.add(events.TrainingFinished(version=2, step=2))
    view = view_of(story)
    assert view.totals["failed:timeout"] == view.totals["rejected:duplicate"] == 1
    assert [(e.step, e.reward) for e in view.evaluations] == [(2, 0.25)]
    assert view.rows[0].eval_reward == 0.25
    assert view.rows[0].failed_samples_total == 1
    assert view.training_finished


@given(st.permutations(range(40)))
def test_no_order_of_events_breaks_the_fold(order: list[int]) -> None:
    log = trained(5).log[:40]
    view = View(keep=3)
    for index in order:
        view.apply(log[index])
    assert view.events == 40
