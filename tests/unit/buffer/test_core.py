"""The buffer's core, one rule a test."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from actors.waits import QUIET_S
from config.schema import EvalConfig
from contracts.core import Booted
from contracts.events import (
    BatchReady,
    BufferDepth,
    CheckpointSaved,
    CreditGranted,
    EngineQuarantined,
    EvalFinished,
    GroupDropped,
    PayloadRef,
    Provenance,
    RunStarted,
    RunStopping,
    TaskIssued,
    WaitEnded,
    WaitStarted,
)
from tests.unit.buffer.harness import Buffer, started

# --- credit ----------------------------------------------------------------------------------------------------------


def test_nothing_is_granted_before_the_first_commit() -> None:
    buffer = Buffer()
    assert buffer.ready() == []
    assert buffer.commit(0) == [CreditGranted(total=4)]


def test_a_commit_seen_before_the_policy_grants_once_the_policy_is_known() -> None:
    buffer = Buffer()
    assert buffer.commit(0) == []
    assert buffer.ready() == [CreditGranted(total=4)]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_credit_is_one_staleness_window_ahead_of_the_committed_step(staleness: int) -> None:
    buffer = started(max_staleness=staleness)
    assert buffer.state.credit == 2 * (1 + staleness)
    buffer.stepped(1)
    assert buffer.state.credit == 2 * (1 + staleness)
    buffer.commit(1)
    assert buffer.state.credit == 2 * (2 + staleness)


def test_credit_never_exceeds_the_groups_of_the_configured_steps() -> None:
    buffer = started(steps=1)
    assert buffer.state.credit == 2
    buffer.group(0, reward=1.0)
    buffer.group(1)
    assert buffer.batches() == [[0, 1]]
    buffer.stepped(1)
    assert buffer.commit(1) == []


def test_a_dropped_group_returns_its_credit() -> None:
    buffer = started()
    buffer.failed(0, 0)
    events = buffer.failed(0, 1)
    assert events == [GroupDropped(task="t0", index=0, reason="too_few_valid", samples=0), CreditGranted(total=5)]


# --- groups ----------------------------------------------------------------------------------------------------------


def test_a_batch_goes_out_when_its_groups_are_complete() -> None:
    buffer = started()
    assert buffer.group(0) == []
    assert buffer.sample(1, 0) == []
    batch, depth = buffer.sample(1, 1)
    assert [(g.task, [s.sample for s in g.samples]) for g in batch.groups] == [("t0", [0, 1]), ("t1", [0, 1])]
    assert batch.batch == 1
    assert depth == BufferDepth(batch=1, ready=0, open=0, lags={0: 4}, flat_groups=0)
    assert buffer.acked == 4


def test_a_group_with_failed_samples_goes_on_with_the_rest() -> None:
    buffer = started(groups=1)
    buffer.sample(0, 0, samples=3)
    buffer.failed(0, 1, samples=3)
    batch, _ = buffer.sample(0, 2, samples=3)
    assert [s.sample for s in batch.groups[0].samples] == [0, 2]


def test_a_group_with_failed_samples_is_dropped_if_configured() -> None:
    buffer = started(group_policy="drop")
    buffer.sample(0, 0, samples=3)
    buffer.failed(0, 1, samples=3)
    buffer.sample(0, 2, samples=3)
    assert buffer.drops() == [(0, "incomplete")]
    assert buffer.released == ["p0.0", "p0.2"]


def test_masked_samples_do_not_count_towards_a_group_but_travel_with_it() -> None:
    buffer = started(groups=1)
    buffer.group(0, valid=False, samples=2)
    assert buffer.drops() == [(0, "too_few_valid")]
    buffer.group(1, samples=3)
    batch, depth = buffer.sample(1, 2, valid=False, samples=3)
    assert [s.valid for s in batch.groups[0].samples] == [True, True, False]
    assert depth.lags == {0: 2}


@pytest.mark.parametrize("skip", [True, False])
def test_flat_groups_are_skipped_or_counted(skip: bool) -> None:
    buffer = started(groups=1, skip_flat_groups=skip)
    buffer.group(0, reward=0.5)
    if skip:
        assert buffer.drops() == [(0, "flat")]
    else:
        assert buffer.of(BufferDepth)[0].flat_groups == 1


def test_at_its_deadline_a_group_shrinks_or_is_dropped() -> None:
    buffer = started(group_deadline_s=10.0, groups=1)
    buffer.group(0, samples=3)
    buffer.now = 5.0
    buffer.sample(1, 0, samples=3)
    buffer.tick(QUIET_S)
    assert buffer.core.wake(buffer.state) == 10.0
    buffer.tick(10.0)
    assert buffer.batches() == [[0]]
    assert buffer.core.wake(buffer.state) == 15.0
    buffer.tick(15.0)
    assert buffer.drops() == [(1, "too_few_valid")]
    assert buffer.core.wake(buffer.state) is None


def test_results_of_a_closed_group_are_rejected_and_their_payload_released() -> None:
    buffer = started(groups=1, group_deadline_s=1.0, max_staleness=5)
    buffer.group(0, samples=3)
    buffer.tick(1.0)
    buffer.group(1)
    buffer.group(2)
    assert buffer.batches() == [[0], [1]]
    for index in (0, 2):
        buffer.sample(index, 2, payload=PayloadRef("late", 1))
    buffer.failed(0, 2)
    assert buffer.rejections() == ["the group is closed"] * 2
    assert buffer.released == ["late"] * 2


def test_the_first_result_of_a_sample_wins() -> None:
    buffer = started(groups=1)
    buffer.sample(0, 0, samples=3)
    buffer.sample(0, 0, samples=3, payload=PayloadRef("again", 1))
    buffer.failed(0, 1, samples=3)
    buffer.sample(0, 1, samples=3)
    buffer.failed(0, 0, samples=3)
    assert len(buffer.rejections()) == 2
    assert buffer.released == ["again", "p0.1"]
    buffer.sample(0, 2, samples=3)
    assert [s.payload.key for s in buffer.of(BatchReady)[0].groups[0].samples] == ["p0.0", "p0.2"]


# --- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (Provenance(1, "engine-0", 1), "version 1 on engine-0 boot 1"),
        (Provenance(0, "engine-1", 1), "version 0 on engine-1 boot 1"),
        (Provenance(0, "engine-0", 2), "version 0 on engine-0 boot 2"),
    ],
)
def test_tokens_of_uncommitted_sources_are_not_admitted_and_their_group_goes_on(source: Provenance, named: str) -> None:
    buffer = started(groups=1)
    buffer.sample(0, 0, samples=3)
    buffer.sample(0, 1, sources=(Provenance(0, "engine-0", 1), source), samples=3)
    assert buffer.rejections() == [f"no commit covers {named}"]
    buffer.sample(0, 2, samples=3)
    assert [s.sample for s in buffer.of(BatchReady)[0].groups[0].samples] == [0, 2]


def test_a_quarantined_engine_is_not_a_source_until_it_is_committed_again() -> None:
    buffer = started(groups=1)
    quarantine = EngineQuarantined(epoch=2, engine="engine-0", boot=1, reason="digest")
    buffer.event(quarantine)
    state = buffer.state
    buffer.event(quarantine)
    assert buffer.state == state
    buffer.group(0)
    assert buffer.drops() == [(0, "too_few_valid")]
    buffer.commit(0)
    buffer.group(1)
    assert buffer.batches() == [[1]]


def test_a_sample_without_sampled_tokens_has_no_source_and_no_staleness() -> None:
    buffer = started(groups=1)
    buffer.group(0, sources=())
    assert [s.lag for s in buffer.of(BatchReady)[0].groups[0].samples] == [0, 0]


def test_versions_are_forgotten_far_behind_the_window() -> None:
    buffer = started()
    for step in range(1, 40):
        buffer.stepped(step)
        buffer.commit(step)
    assert len(buffer.state.versions) < 15
    assert len(buffer.state.sources) < 15
    buffer.sample(0, 0, version=0)
    assert buffer.rejections() == ["stale"]


# --- batches ---------------------------------------------------------------------------------------------------------


def test_one_batch_may_wait_at_the_trainer_beyond_the_one_in_training() -> None:
    buffer = started(groups=1, max_staleness=5)
    for index in range(4):
        buffer.group(index)
    assert buffer.batches() == [[0], [1]]
    buffer.stepped(1)
    assert buffer.batches() == [[0], [1], [2]]
    assert [s.lag for b in buffer.of(BatchReady) for g in b.groups for s in g.samples] == [0, 0, 1, 1, 2, 2]


def test_a_group_that_became_too_stale_is_dropped_at_the_pick() -> None:
    buffer = started(groups=1, max_staleness=1)
    for index in range(3):
        buffer.group(index)
    assert buffer.batches() == [[0], [1]]
    assert buffer.drops() == [(2, "stale")]


def test_a_group_is_as_stale_as_its_oldest_valid_token() -> None:
    buffer = started(groups=1, max_staleness=1)
    buffer.group(0)
    buffer.stepped(1)
    buffer.commit(1)
    buffer.stepped(2, version=2)
    old, new = (Provenance(v, "engine-0", 1) for v in (0, 1))
    buffer.sample(5, 0, sources=(new,), samples=3)
    buffer.sample(5, 1, sources=(new,), samples=3)
    buffer.sample(5, 2, sources=(old, new), samples=3, valid=False)
    assert buffer.drops() == []
    buffer.sample(6, 0, sources=(new,))
    buffer.sample(6, 1, sources=(old, new))
    assert buffer.drops() == [(6, "stale")]


def test_sync_trains_each_batch_on_the_version_that_it_makes_current() -> None:
    buffer = started(sync=True, groups=1, max_staleness=7)
    for step in range(3):
        assert buffer.state.credit == step + 1
        buffer.group(step, version=step)
        assert buffer.batches()[-1] == [step]
        buffer.stepped(step + 1)
        assert buffer.state.credit == step + 1
        buffer.commit(step + 1)
    assert {s.lag for b in buffer.of(BatchReady) for g in b.groups for s in g.samples} == {0}


def test_in_order_waits_for_a_hole() -> None:
    buffer = started(groups=2, sampler="in_order")
    buffer.group(1)
    buffer.group(2)
    assert buffer.batches() == []
    buffer.failed(0, 0)
    buffer.failed(0, 1)
    assert buffer.batches() == [[1, 2]]


def test_no_batch_beyond_the_configured_steps() -> None:
    buffer = started(groups=1, steps=1, max_staleness=3)
    buffer.group(0)
    buffer.group(1)
    assert buffer.batches() == [[0]]


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_a_trainer_without_a_batch_makes_it_wait_for_collectors_and_say_so_once() -> None:
    buffer = started(groups=2, max_staleness=3)
    assert buffer.core.wake(buffer.state) == QUIET_S
    buffer.group(0)
    buffer.sample(1, 0)
    assert buffer.tick(QUIET_S - 1) == []
    (event,) = buffer.tick(QUIET_S)
    assert event == WaitStarted(
        actor="buffer", on="collector", cause="1 of 2 groups complete, 1 begun, 0 without a result"
    )
    assert buffer.tick(QUIET_S + 1) == []
    buffer.now = 9.0
    assert buffer.sample(1, 1)[-1] == WaitEnded(actor="buffer", on="collector", seconds=9.0)
    assert buffer.core.wake(buffer.state) is None
    buffer.now = 10.0
    buffer.stepped(1)
    assert buffer.core.wake(buffer.state) == 10.0 + QUIET_S
    buffer.group(2)
    buffer.group(3)
    assert buffer.of(WaitEnded) == [WaitEnded(actor="buffer", on="collector", seconds=9.0)]


def test_nothing_is_waited_for_before_the_start_and_after_the_last_batch() -> None:
    buffer = Buffer(groups=1, steps=1)
    buffer.ready()
    assert buffer.core.wake(buffer.state) is None
    buffer.commit(0)
    buffer.group(0)
    buffer.stepped(1)
    assert buffer.core.wake(buffer.state) is None


# --- the trainer falls back ------------------------------------------------------------------------------------------


def test_after_a_fallback_batches_are_numbered_on_and_their_step_stays_exact() -> None:
    buffer = started(groups=1, max_staleness=2)
    buffer.group(0)
    buffer.stepped(1)
    buffer.commit(1)
    buffer.group(1, version=1)
    buffer.stepped(2)
    buffer.commit(2)
    buffer.group(2, version=2)
    assert [b.batch for b in buffer.of(BatchReady)] == [1, 2, 3]
    # Back to step 1: batches 2 and 3 are trained again, so batch 4 is trained from step 3, after them.
    buffer.ready(version=3, step=1, abandoned=(2,))
    buffer.commit(3, step=1)
    buffer.group(3, version=3)
    assert len(buffer.batches()) == 3
    buffer.stepped(2, version=4)
    (batch, *_) = [e for e in buffer.emitted if isinstance(e, BatchReady) and e.batch == 4]
    assert batch.groups[0].samples[0].lag == 2


def test_groups_of_abandoned_versions_are_dropped_and_later_ones_refused() -> None:
    buffer = started(groups=3, max_staleness=2)
    buffer.stepped(1)
    buffer.commit(1)
    buffer.group(0, version=0)
    buffer.group(1, version=1)
    buffer.sample(2, 0, version=1)
    buffer.sample(3, 0, version=0)
    buffer.ready(version=2, step=0, abandoned=(1,))
    assert sorted(buffer.drops()) == [(1, "abandoned"), (2, "abandoned")]
    buffer.sample(3, 1, version=1)
    assert buffer.rejections() == ["abandoned"]
    assert buffer.drops()[2:] == [(3, "too_few_valid")]


def test_credit_does_not_fall_with_the_step_and_resumes_when_it_is_reached_again() -> None:
    buffer = started(groups=1)
    for step in (1, 2):
        buffer.group(step - 1, version=step - 1)
        buffer.stepped(step)
        buffer.commit(step)
    assert buffer.state.credit == 4
    buffer.ready(version=3, step=0, abandoned=(1, 2))
    assert buffer.commit(3, step=0) == []
    buffer.stepped(1, version=4)
    buffer.stepped(2, version=5)
    assert buffer.commit(5, step=2) == []
    buffer.group(2, version=5)
    buffer.stepped(3, version=6)
    assert buffer.commit(6, step=3) == [CreditGranted(total=5)]


def test_a_run_that_starts_from_a_later_step_counts_from_there() -> None:
    buffer = Buffer(groups=1, steps=12)
    buffer.ready(version=0, step=10)
    buffer.commit(0, step=10)
    assert buffer.state.credit == 2
    buffer.group(0)
    buffer.group(1)
    assert [s.lag for b in buffer.of(BatchReady) for g in b.groups for s in g.samples] == [0, 0, 1, 1]
    buffer.stepped(1, step=11)
    buffer.group(2)
    assert len(buffer.batches()) == 2


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluating(**settings: Any) -> Buffer:
    return started(evals=EvalConfig(every=1, groups=2, samples=2), **settings)


def test_a_held_out_task_is_owed_to_no_batch() -> None:
    buffer = evaluating()
    before = buffer.state
    task = TaskIssued(task="e", index=-1, samples=2, payload=b"{}", producer="p", seed=0, split="eval")
    assert buffer.event(task) == []
    assert buffer.state == before


def test_an_evaluation_is_the_mean_over_its_settled_samples_labelled_by_the_oldest_version() -> None:
    buffer = evaluating()
    buffer.stepped(1)
    buffer.commit(1)
    buffer.sample(-1, 0, split="eval", reward=1.0, version=1)
    buffer.sample(-1, 1, split="eval", reward=0.0, version=0)
    buffer.sample(-1, 1, split="eval", reward=9.0)
    buffer.failed(-2, 0, split="eval")
    (event,) = buffer.sample(-2, 1, split="eval", reward=0.5, version=1)
    assert event == EvalFinished(version=0, step=0, mean_reward=0.5, samples=3)
    assert buffer.rejections() == ["duplicate: the sample has a result"]
    buffer.sample(-2, 1, split="eval", payload=PayloadRef("late", 1))
    assert buffer.rejections()[1:] == ["the evaluation is closed"]
    assert buffer.released == ["p-1.0", "p-1.1", "p-1.1", "p-2.1", "late"]
    assert buffer.of(CreditGranted)[-1].total == 6


def test_an_evaluation_ends_at_its_deadline() -> None:
    buffer = evaluating(group_deadline_s=10.0)
    buffer.sample(-3, 0, split="eval", reward=1.0)
    buffer.sample(-3, 1, split="eval", valid=False)
    buffer.now = 5.0
    buffer.failed(-5, 0, split="eval")
    buffer.tick(5.0)
    assert buffer.core.wake(buffer.state) == 10.0
    assert buffer.tick(10.0) == [EvalFinished(version=0, step=0, mean_reward=1.0, samples=1)]
    (event,) = buffer.tick(15.0)
    assert (event.actor, event.fatal) == ("buffer", False)
    assert event.message == "held-out evaluation 2 ended with 1 results and no reward among them"


def test_an_evaluation_does_not_admit_uncommitted_sources_either() -> None:
    buffer = evaluating()
    buffer.sample(-1, 0, version=3, split="eval")
    assert buffer.rejections() == ["no commit covers version 3 on engine-0 boot 1"]


# --- life ------------------------------------------------------------------------------------------------------------


def test_after_stopping_it_is_done_at_once_and_keeps_its_groups_for_a_resume() -> None:
    buffer = started(groups=2)
    buffer.group(0)
    buffer.event(RunStopping(reason="test"))
    assert buffer.core.done(buffer.state)
    assert buffer.core.intake(buffer.state) == {}
    assert buffer.group(1) == []
    assert buffer.event(RunStarted(config_digest="", resumed=True))[0].batch == 1
    assert not buffer.core.done(buffer.state)
    assert buffer.core.intake(buffer.state)["trajectories"] > 0


def test_a_boot_goes_on_after_a_stop() -> None:
    buffer = started(groups=1)
    buffer.event(RunStopping(reason="test"))
    buffer.group(0)
    buffer.feed(Booted(2))
    assert buffer.batches() == [[0]]
    state = buffer.state
    buffer.feed(Booted(3))
    buffer.event(RunStarted(config_digest=""))
    assert buffer.state == state


def test_events_that_say_nothing_to_it_change_nothing() -> None:
    buffer = started()
    state = buffer.state
    assert buffer.event(CheckpointSaved(version=1, step=1, batch=1, path="", bytes=0, seconds=0)) == []
    assert buffer.tick(1.0) == []
    assert buffer.state == state


# --- samplers --------------------------------------------------------------------------------------------------------


def test_a_window_holds_back_as_much_credit_as_may_overtake_a_group():
    buffer = started(groups=4, max_staleness=2, sampler="windowed", window=3, steps=4)
    assert buffer.state.credit == 4 * 3 - 2
    assert started(groups=4, max_staleness=2, sampler="windowed", steps=4).core.batches.window == 3, "a quarter of 9"
    buffer.stepped(1)
    buffer.commit(1)
    assert buffer.state.credit == 4 * 4 - 2
    buffer.stepped(2)
    buffer.commit(2)
    assert buffer.state.credit == 4 * 4, "nothing is held back of the last steps"


def test_a_sampler_that_breaks_its_contract_ends_the_run_by_name_and_once():
    buffer = started(groups=2, sampler="tests.unit.buffer.test_core:greedy")
    buffer.group(0)
    (failed,) = buffer.group(1)
    assert failed.fatal
    assert failed.message.startswith("sampler 'tests.unit.buffer.test_core:greedy' chose [0, 1, 1]: one of them twice")
    assert buffer.group(2) == []
    assert buffer.batches() == []
    (again,) = buffer.feed(Booted(2))
    assert again == failed


def greedy(pool: Any) -> list[int]:
    return [0, 1, 1]


@pytest.mark.parametrize("seed", range(40))
def test_with_a_window_no_group_goes_stale_whatever_completes_first(seed: int):
    """Every task is sampled from the newest commit at its issue; the trainer trains what it has, whenever it likes."""
    random = Random(seed)
    groups, staleness, steps = random.randint(1, 4), random.randint(0, 3), 4
    window = random.randint(1, 1 + groups * staleness)
    buffer = started(groups=groups, max_staleness=staleness, sampler="windowed", window=window, steps=steps)
    sampled: dict[int, int] = {}
    waiting: list[int] = []
    trained = 0
    while trained < steps:
        for index in range(len(sampled), buffer.state.credit):
            sampled[index] = trained
            waiting.append(index)
        if trained < len(buffer.batches()) and (not waiting or random.random() < 0.5):
            trained += 1
            buffer.stepped(trained)
            buffer.commit(trained)
        else:
            assert waiting, "the run stalls"
            index = waiting.pop(random.randrange(len(waiting)))
            buffer.group(index, version=sampled[index], valid=random.random() < 0.9)
    assert {reason for _, reason in buffer.drops()} <= {"too_few_valid"}
    assert max(s.lag for b in buffer.of(BatchReady) for g in b.groups for s in g.samples) <= staleness
