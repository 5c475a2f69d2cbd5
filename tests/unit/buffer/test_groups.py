"""What becomes of groups with failed, missing and lost samples, and of their credit."""

from __future__ import annotations

from typing import Any

import pytest

from config.schema import RolloutConfig
from contracts import limits
from contracts.core import Delivered, Ref
from contracts.envelope import Envelope
from contracts.events import (
    ActorFailed,
    EngineQuarantined,
    GroupDropped,
    Member,
    Provenance,
    TaskIssued,
    WaitEnded,
    WaitStarted,
)
from tests.unit.buffer.harness import ENGINE, started

# --- lost tasks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["shrink", "drop", "wait"])
def test_a_task_that_is_lost_gives_its_credit_back_with_the_reason(policy: str):
    buffer = started(sync=True, groups=2, group_policy=policy)
    entries = [buffer.issue(index) for index in range(2)]
    assert buffer.state.credit == 2
    buffer.lose(entries[1])
    assert buffer.of(GroupDropped) == [GroupDropped(task="t1", index=1, reason="lost", samples=0)]
    assert buffer.state.credit == 3
    buffer.group(0)
    buffer.issue(2)
    buffer.group(2)
    assert buffer.batches() == [[0, 2]]


def test_a_loss_that_is_told_before_the_task_was_seen_counts_all_the_same():
    buffer = started()
    buffer.lose(f"{buffer.count + 2}-0")
    entry = buffer.issue(0)
    assert buffer.drops() == [(0, "lost")]
    assert buffer.state.lost == frozenset()
    buffer.lose(entry)
    assert buffer.drops() == [(0, "lost")]


def test_the_loss_of_a_task_that_is_trained_already_is_no_loss():
    buffer = started(groups=1)
    buffer.group(0)
    buffer.lose(f"{buffer.count + 2}-0")
    buffer.issue(0)
    assert buffer.drops() == []
    assert buffer.state.lost == frozenset()


def test_a_group_of_a_lost_task_is_trained_on_what_has_come():
    buffer = started(groups=1)
    entry = buffer.issue(0, samples=3)
    buffer.sample(0, 0, samples=3)
    buffer.sample(0, 1, samples=3)
    buffer.lose(entry)
    assert buffer.batches() == [[0]]
    assert buffer.sample(0, 2, samples=3)[0].reason == "the group is closed"


def test_a_lost_task_whose_group_is_complete_changes_nothing():
    buffer = started(groups=2)
    entry = buffer.issue(0)
    buffer.group(0)
    assert buffer.lose(entry) == []
    assert set(buffer.state.ready) == {0}


def test_a_lost_result_gives_every_silent_group_a_deadline():
    buffer = started(groups=1, group_deadline_s=10.0)
    buffer.issue(0)
    assert (buffer.core.wake(buffer.state) or 0) < 10.0
    buffer.lose("9-0", stream="trajectories")
    buffer.lose("9-0", stream="batches")
    buffer.tick(10.0)
    assert buffer.drops() == [(0, "too_few_valid")]


def test_a_task_that_is_read_again_after_its_group_is_open_ready_or_closed_is_no_new_one():
    buffer = started(groups=1)
    buffer.group(0)
    buffer.group(1)
    buffer.group(2)
    buffer.sample(3, 0)
    for index in range(4):
        buffer.issue(index)
    assert buffer.state.issued == {}


# --- replace ---------------------------------------------------------------------------------------------------------


def test_replace_issues_failed_and_missing_samples_again_with_attempts_of_their_own_and_then_shrinks():
    buffer = started(groups=1, group_policy="replace", replacements=2, group_deadline_s=10.0)
    buffer.issue(0, samples=4)
    buffer.sample(0, 0, samples=4)
    buffer.sample(0, 1, samples=4)
    buffer.failed(0, 2, samples=4)
    buffer.tick(10.0)
    (again,) = buffer.issued_again()
    assert (again.index, again.samples, again.only, again.first_attempt) == (0, 4, (2, 3), 4)
    assert again.payload == b"{}"
    assert buffer.core.wake(buffer.state) == 20.0, "they have a deadline of their own"
    buffer.sample(0, 3, samples=4, attempt=4)
    buffer.failed(0, 2, samples=4, attempt=6)
    assert [(event.only, event.first_attempt) for event in buffer.issued_again()] == [((2, 3), 4), ((2,), 7)]
    assert buffer.drops() == []
    buffer.failed(0, 2, samples=4, attempt=9)
    assert buffer.batches() == [[0]]
    assert len(buffer.issued_again()) == 2


def test_a_replaced_sample_that_comes_twice_counts_once():
    buffer = started(groups=2, group_policy="replace", group_deadline_s=10.0)
    buffer.issue(0)
    buffer.sample(0, 0)
    buffer.tick(10.0)
    buffer.sample(0, 1)
    assert set(buffer.state.ready) == {0}
    assert buffer.sample(0, 1, attempt=2)[0].reason == "the group is closed"


def test_a_lost_task_is_issued_again_and_so_is_a_lost_replacement():
    buffer = started(groups=1, group_policy="replace", replacements=2)
    entry = buffer.issue(0)
    buffer.lose(entry)
    for _ in range(2):
        again = buffer.issued_again()[-1]
        assert again.only == (0, 1)
        buffer.event(again)
        buffer.lose(f"{buffer.count}-0")
    assert len(buffer.issued_again()) == 2
    assert buffer.drops() == [(0, "lost")]
    buffer.event(buffer.issued_again()[-1])
    assert buffer.state.open == buffer.state.issued == {}


def test_tasks_are_kept_to_be_issued_again_as_far_as_there_is_room_for_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "TASKS", 5)
    buffer = started(groups=2, group_policy="replace", replacements=1, group_deadline_s=10.0)
    for index in range(4):
        buffer.issue(index)
    buffer.issue(1)  # a dead letter that was requeued
    (told,) = buffer.of(ActorFailed)
    assert (told.error, told.fatal) == ("TasksTooLarge", False)
    assert "buffer.group_policy=replace" in told.message
    assert "lower buffer.groups=2, or shorten" in told.message
    assert buffer.state.kept == 4
    for index in range(4):
        buffer.sample(index, 0)
    buffer.tick(10.0)
    assert [task.index for task in buffer.issued_again()] == [0, 1]
    assert buffer.drops() == [(2, "too_few_valid"), (3, "too_few_valid")]
    buffer.sample(0, 1)
    assert buffer.state.kept == 2
    buffer.issue(4)
    assert buffer.state.kept == 4
    buffer.tick(20.0)
    assert buffer.drops()[2:] == [(1, "too_few_valid")]
    assert buffer.state.kept == 2, "that of group 4"
    assert len(buffer.of(ActorFailed)) == 1


@pytest.mark.parametrize("policy", ["shrink", "replace"])
def test_a_buffer_that_holds_the_largest_tasks_has_a_state_that_the_store_takes(policy: Any):
    buffer = started(groups=128, group_policy=policy)
    payload = b" " * (limits.TASK - limits.TASK_ID)
    core, state, size = buffer.core, buffer.state, 0
    for index in range(256):
        task = TaskIssued(task=f"t{index}", index=index, samples=2, payload=payload, producer="p", seed=0)
        envelope: Envelope[Any] = Envelope(
            id="x", run="r", stream="tasks", actor="x", boot=1, epoch=0, wall_ns=0, mono_ns=0, body=task
        )
        state, _ = core.step(state, Delivered(Ref("tasks", f"{index + 9}-0"), envelope), 0.0)
        size = sum(len(held.task.payload) for held in state.issued.values())
    assert len(state.issued) == 256
    assert size == (0 if policy == "shrink" else 64 * len(payload))
    assert size <= limits.TASKS <= limits.SNAPSHOT // 2


# --- wait ------------------------------------------------------------------------------------------------------------


def test_wait_says_once_that_a_group_is_late_and_trains_it_whole():
    buffer = started(groups=1, group_policy="wait", group_deadline_s=10.0)
    buffer.issue(0)
    buffer.sample(0, 0)
    (late,) = [event for event in buffer.tick(10.0) if event.on == "group 0"]
    assert isinstance(late, WaitStarted)
    assert late.cause.startswith("task t0 lacks samples [1] after buffer.group_deadline_s=10")
    assert buffer.core.wake(buffer.state) == 20.0
    assert buffer.tick(20.0) == []
    assert WaitEnded(actor="buffer", on="group 0", seconds=10.0) in buffer.sample(0, 1)
    assert buffer.batches() == [[0]]


def test_wait_does_not_wait_for_what_has_failed():
    buffer = started(groups=1, group_policy="wait")
    buffer.sample(0, 0, samples=3)
    buffer.sample(0, 1, samples=3)
    buffer.failed(0, 2, samples=3)
    assert buffer.batches() == [[0]]


def test_a_late_group_that_is_dropped_is_waited_for_no_more():
    buffer = started(groups=1, group_policy="wait", group_deadline_s=10.0)
    buffer.sample(0, 0)
    buffer.tick(10.0)
    buffer.now = 12.0
    events = buffer.failed(0, 1)
    assert WaitEnded(actor="buffer", on="group 0", seconds=2.0) in events
    assert buffer.drops() == [(0, "too_few_valid")]


# --- the door --------------------------------------------------------------------------------------------------------


def test_overlong_samples_are_rejected_with_the_reason_only_if_asked_to():
    for overlong, valid in (("keep", 2), ("mask", 2), ("drop", 1)):
        buffer = started(groups=1, rollout=RolloutConfig(overlong=overlong, max_new_tokens=8))  # type: ignore[arg-type]
        buffer.sample(0, 0, stop_reason="length")
        buffer.sample(0, 1)
        assert len(buffer.batches()) == valid - 1
        reasons = ["overlong: cut off at rollout.max_new_tokens=8"] if overlong == "drop" else []
        assert buffer.rejections() == reasons


def test_a_quarantined_boot_is_named_until_it_is_committed_again():
    buffer = started()
    buffer.event(EngineQuarantined(epoch=5, engine="engine-0", boot=1, reason="x"))
    buffer.sample(0, 0)
    buffer.sample(0, 1, sources=(Provenance(0, "engine-0", 2),))
    assert buffer.rejections() == [
        "engine-0 boot 1 is quarantined since epoch 5",
        "no commit covers version 0 on engine-0 boot 2",
    ]
    buffer.commit(0, engines=(ENGINE, Member("engine-1", 1)))
    assert buffer.state.barred == {}
    buffer.sample(1, 0)
    assert len(buffer.rejections()) == 2
