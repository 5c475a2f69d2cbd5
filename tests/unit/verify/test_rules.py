"""Each promise, broken alone in a small log, is reported under its own name and no other."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

from kept import (
    ENGINES,
    GROUPS,
    STALENESS,
    Log,
    Row,
    batch,
    clean,
    committed,
    depth,
    dropped,
    failed,
    group,
    lost,
    ref,
    refit,
    rejected,
    requested,
    result,
    step,
    task,
)

from actors.recorder.archive import Writer
from config import loading
from contracts import events as e
from contracts.envelope import encode
from pipeline import rundir
from pipeline.cli import main
from pipeline.errors import Exit
from pipeline.rundir import RunDir
from pipeline.verify import SHOWN, Finding, Summary, Verifier, told

ROOT = Path(__file__).parents[3]
Break = Callable[[Log], None]
BROKEN: list[tuple[str, str, Break]] = []


def breaks(rule: str, at: str) -> Callable[[Break], Break]:
    """Register a way to break `rule`; `at` is the row that shows it, or empty for the end of the log."""

    def register(change: Break) -> Break:
        BROKEN.append((rule, at, change))
        return change

    return register


def check(log: Log) -> list[Finding]:
    return Verifier(STALENESS, GROUPS).apply_all(log.envelopes()).findings()


# --- ids, boots, tasks ---


@breaks("unique-ids", at="depth 1")
def an_id_twice(log: Log) -> None:
    log["batch 1"].id = log["depth 1"].id = "buffer:7.0"


@breaks("fencing", at="step 2")
def an_earlier_boot_after_a_later_one(log: Log) -> None:
    log["step 1"].boot = 2


@breaks("task-issued-once", at="twice")
def a_task_twice(log: Log) -> None:
    log.insert("result 0.0", "twice", Row(task(3)))


@breaks("task-issued-once", at="part")
def part_of_a_task_that_was_never_issued(log: Log) -> None:
    log.insert("result 0.0", "part", Row(task(5, only=(1,))))


@breaks("no-task-skipped", at="task 5")
def a_task_ahead_of_its_turn(log: Log) -> None:
    log.move("task 5", before="task 4")


@breaks("within-credit", at="task 6")
def a_task_without_credit(log: Log) -> None:
    log.remove("credit 3")


@breaks("in-flight", at="task 7")
def more_tasks_than_the_next_batches_can_hold(log: Log) -> None:
    log["credit 3"].change(total=8)
    log.insert("result 4.0", "task 7", Row(task(7)))


# --- where samples are ---


@breaks("accounted", at="depth 2")
def a_complete_group_that_the_buffer_does_not_count(log: Log) -> None:
    log["batch 2"].change(groups=(group(2, ref(2, 0, lag=1), ref(2, 1)),))
    log["step 2"].change(tasks=(2,))


@breaks("accounted", at="depth 2")
def a_group_that_the_buffer_counts_neither_as_open_nor_as_ready(log: Log) -> None:
    log.move("result 5.0", before="result 4.0")
    log.move("result 6.0", before="result 4.0")
    log["result 6.0"].change(sources=())
    log.remove("lost 6.0")
    log["depth 2"].change(open=1)


@breaks("accounted", at="batch 3")
def a_complete_group_that_outlives_the_staleness_bound(log: Log) -> None:
    log["batch 2"].change(groups=(group(4, ref(4, 0), ref(4, 1)),))
    log["depth 2"].change(ready=1)
    log["step 2"].change(tasks=(4,))
    log.insert(None, "batch 3", Row(batch(3), "result 6.1"))


@breaks("accounted", at="result 4.0")
def a_sample_that_its_batch_lacks(log: Log) -> None:
    log["batch 2"].change(groups=(group(2, ref(2, 0, lag=1), ref(2, 1)), group(4, ref(4, 1))))


@breaks("accounted", at="late")
def a_late_sample_of_a_batched_group_that_nothing_rejects(log: Log) -> None:
    log.insert("result 4.1", "late", Row(result(0, 1, version=1, attempt=2)))


@breaks("accounted", at="requeued")
def a_dead_letter_that_is_read_again_and_forgotten(log: Log) -> None:
    log.insert("result 4.1", "late", Row(result(0, 1, version=1, attempt=2)))
    log.insert("result 4.1", "lost", Row(lost(log.number("late"))))
    log.insert("result 4.1", "requeued", Row(result(0, 1, version=1, attempt=2)))
    log["late"].id, log["requeued"].id = "collector-0:1.0", "collector-0:1.0+dead.1-0"


@breaks("recorded-reason", at="drop 3")
def a_drop_without_a_reason(log: Log) -> None:
    log["drop 3"].change(reason="")


@breaks("recorded-reason", at="reject 3.0")
def a_rejection_without_a_reason(log: Log) -> None:
    log["reject 3.0"].change(reason="")


@breaks("dropped-once", at="again")
def a_group_dropped_twice(log: Log) -> None:
    log.insert("task 6", "again", Row(log["drop 3"].event))


@breaks("dropped-not-trained", at="batch 2")
def a_dropped_group_in_a_batch(log: Log) -> None:
    log.insert("batch 2", "drop", Row(dropped(4, "stale")))


@breaks("dropped-not-trained", at="")
def a_trained_group_that_is_dropped(log: Log) -> None:
    log.insert(None, "drop", Row(dropped(4, "stale")))


# --- batches and steps ---


@breaks("batched-once", at="batch 2")
def a_sample_twice_in_a_batch(log: Log) -> None:
    log["batch 2"].change(
        groups=(group(2, ref(2, 0, lag=1), ref(2, 1)), group(4, ref(4, 0), ref(4, 1), ref(4, 1))),
    )


@breaks("trained-once", at="")
def a_batch_trained_twice_in_one_lineage(log: Log) -> None:
    log["step 2"].change(batch=1, step=1, tasks=(0, 1))


@breaks("trained-in-order", at="step 2")
def a_batch_passed_over(log: Log) -> None:
    log.insert("step 2", "batch 3", Row(batch(3)))
    log["step 2"].change(batch=3, tasks=())


@breaks("batches-dense", at="batch 4")
def a_batch_number_left_out(log: Log) -> None:
    log.insert(None, "batch 4", Row(batch(4)))


@breaks("from-the-log", at="batch 2")
def a_sample_that_nobody_finished(log: Log) -> None:
    log.remove("result 4.0")


@breaks("from-the-log", at="step 3")
def a_step_on_a_batch_that_was_never_ready(log: Log) -> None:
    log.insert(None, "step 3", Row(step(3)))


@breaks("from-the-log", at="step 1")
def a_step_that_leaves_a_group_of_its_batch_out(log: Log) -> None:
    log["step 1"].change(tasks=(0,))


@breaks("from-the-log", at="")
def a_trained_group_that_was_never_issued(log: Log) -> None:
    log["batch 2"].change(groups=(*log["batch 2"].event.groups, group(9)))
    log["step 2"].change(tasks=(2, 4, 9))


@breaks("committed-sources", at="batch 1")
def tokens_of_an_engine_that_no_commit_names(log: Log) -> None:
    log["result 0.0"].change(sources=(e.Provenance(0, "engine-7", 1),))


@breaks("quarantine", at="batch 2")
def tokens_that_were_finished_in_quarantine(log: Log) -> None:
    log.move("quarantine", before="result 4.1")


@breaks("staleness", at="batch 2")
def a_lag_that_the_log_contradicts(log: Log) -> None:
    log["batch 2"].change(groups=(group(2, ref(2, 0), ref(2, 1)), group(4, ref(4, 0), ref(4, 1))))


@breaks("staleness", at="batch 3")
def a_sample_beyond_the_bound(log: Log) -> None:
    log["result 6.1"].change(sources=(e.Provenance(0, "engine-0", 1),))
    log.insert(None, "batch 3", Row(batch(3, group(6, ref(6, 1, lag=2)))))


@breaks("lineage", at="step 2")
def a_version_that_does_not_grow_from_the_newest(log: Log) -> None:
    log["step 2"].change(parent_version=0)


@breaks("versions-rise", at="step 2")
def a_version_number_used_again(log: Log) -> None:
    log["step 2"].change(version=1)


# --- refits ---


@breaks("epochs-rise", at="again")
def an_epoch_number_used_again(log: Log) -> None:
    log.insert("credit 2", "again", Row(requested(2, 1)))


@breaks("epochs-rise", at="release")
def a_release_under_an_old_epoch(log: Log) -> None:
    release = e.ReleaseRequested(epoch=1, step=2, engines=ENGINES, drain="finish", deadline_at=9.0)
    log.insert("credit 2", "release", Row(release))


@breaks("one-end-an-epoch", at="end")
def an_epoch_that_fails_after_its_commit(log: Log) -> None:
    log.insert("credit 2", "end", Row(failed(2)))


@breaks("intent-before-effect", at="end")
def an_epoch_that_ends_without_a_request(log: Log) -> None:
    log.insert(None, "end", Row(failed(9)))


@breaks("commit-newest-epoch", at="commit 4")
def a_commit_after_a_newer_epoch_began(log: Log) -> None:
    log.insert("commit 4", "request 5", Row(requested(5, 2)))


@breaks("commits-rise", at="commit 5")
def a_commit_of_an_older_version(log: Log) -> None:
    log.insert(None, "request 5", Row(requested(5, 1)))
    log.insert(None, "commit 5", Row(committed(5, 1, engines=())))


@breaks("loaded-before-commit", at="commit 2")
def a_commit_of_an_engine_that_did_not_load(log: Log) -> None:
    log.remove("load 2 engine-1")


@breaks("digest", at="commit 2")
def a_commit_of_other_weights_than_were_sent(log: Log) -> None:
    log["load 2 engine-1"].change(digest="other")


# --- the table ---


@pytest.mark.parametrize(("rule", "at", "change"), BROKEN, ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_broken_promise_is_reported_alone_at_the_event_that_shows_it(rule: str, at: str, change: Break) -> None:
    log = clean()
    change(log)
    found = check(log)
    assert {finding.rule for finding in found} == {rule}, found
    ids = dict(zip(log.rows, (envelope.id for envelope in log.envelopes()), strict=True))
    assert found[0].event == (ids[at] if at else None), found


def test_every_rule_is_documented_and_broken_here() -> None:
    said = set(re.findall(r'(?:_find|Finding)\(\s*"([a-z-]+)"', (ROOT / "pipeline" / "verify.py").read_text()))
    page = (ROOT / "docs" / "reference" / "invariants.md").read_text()
    rows = re.findall(r"^\| ([a-z, -]+) \|", page, re.MULTILINE)
    documented = {rule for row in rows for rule in row.split(", ")} - {"rule", "---"}
    assert said == documented == {rule for rule, _, _ in BROKEN}


# --- what is no loss, and what stays one ---


def test_a_log_that_keeps_every_promise_has_no_finding_and_says_what_is_owed() -> None:
    verifier = Verifier(STALENESS, GROUPS).apply_all(clean().envelopes())
    assert verifier.findings() == []
    assert verifier.summary() == Summary(
        events=len(clean().rows),
        tasks=7,
        trajectories=14,
        trained=4,
        dropped=2,
        owed=1,
        owed_batched=0,
        owed_complete=0,
        owed_begun=1,
        owed_untouched=0,
        steps=2,
        commits=3,
        quarantines=1,
        failed_refits=1,
        boots=1,
    )


def test_any_beginning_of_a_clean_log_is_clean() -> None:
    envelopes = clean().envelopes()
    for count in range(len(envelopes)):
        assert Verifier(STALENESS, GROUPS).apply_all(envelopes[:count]).findings() == [], count


def test_what_is_not_known_to_be_taken_is_not_missed() -> None:
    log = clean()
    log.remove("lost 6.0")
    log.insert(None, "late", Row(result(0, 1, version=1, attempt=2)))
    log.insert(None, "depth 3", Row(depth(3, ready=0, open=1)))
    assert check(log) == []


def test_an_old_result_that_is_not_known_to_be_taken_does_not_age_its_group() -> None:
    log = clean()
    a_complete_group_that_outlives_the_staleness_bound(log)
    log["result 2.0"].change(sources=log["result 2.1"].event.sources)
    log["batch 3"].cause = None
    log.insert("batch 3", "again", Row(result(2, 0, version=0, attempt=2)))
    assert check(log) == []


def test_a_sample_that_enters_no_loss_does_not_age_its_group() -> None:
    log = clean()
    a_complete_group_that_outlives_the_staleness_bound(log)
    log["result 2.0"].change(valid=False)
    assert check(log) == []


def test_a_group_stays_complete_when_a_sample_comes_twice() -> None:
    log = clean()
    a_complete_group_that_the_buffer_does_not_count(log)
    log.insert("batch 2", "again", Row(result(4, 1, version=1, attempt=2)))
    assert {finding.rule for finding in check(log)} == {"accounted"}


def test_a_loss_is_told_once() -> None:
    log = clean()
    a_complete_group_that_the_buffer_does_not_count(log)
    log.insert(None, "depth 3", Row(depth(3, ready=0, open=2), "result 6.1"))
    assert len(check(log)) == 1
    log = clean()
    a_complete_group_that_outlives_the_staleness_bound(log)
    log.insert(None, "batch 4", Row(batch(4)))
    assert len(check(log)) == 1


def test_what_was_taken_stays_taken() -> None:
    log = clean()
    a_late_sample_of_a_batched_group_that_nothing_rejects(log)
    log.insert(None, "reject", Row(rejected(0, 0, "duplicate: the sample has a result"), "result 0.0"))
    assert [finding.event for finding in check(log)] == [log.envelopes()[log.number("late") - 1].id]


def test_a_late_sample_of_a_dropped_group_is_lost_with_it() -> None:
    log = clean()
    log.insert("result 4.1", "late", Row(result(3, 1, version=1, attempt=4)))
    assert check(log) == []


def test_a_dead_letter_that_is_read_again_takes_the_place_of_its_original() -> None:
    log = clean()
    log.insert("result 4.1", "late", Row(result(0, 1, version=1, attempt=2)))
    log.insert("result 4.1", "requeued", Row(result(0, 1, version=1, attempt=2)))
    log["late"].id, log["requeued"].id = "collector-0:1.0", "collector-0:1.0+dead.1-0"
    log.insert("result 4.1", "reject", Row(rejected(0, 1, "the group is closed"), "requeued"))
    assert check(log) == []


def test_a_grant_that_is_repeated_takes_no_credit_back() -> None:
    log = clean()
    log.insert("task 4", "again", Row(e.CreditGranted(total=4)))
    assert check(log) == []


def test_a_rejection_without_a_cause_is_matched_by_its_sample() -> None:
    log = clean()
    log.insert("result 4.1", "late", Row(result(0, 1, version=1, attempt=2)))
    log.insert("result 4.1", "reject", Row(rejected(0, 1, "the group is closed")))
    assert check(log) == []


def test_a_loss_that_is_announced_late_takes_the_doubt_back() -> None:
    log = clean()
    a_complete_group_that_the_buffer_does_not_count(log)
    log.insert(None, "lost", Row(lost(log.number("result 4.0"))))
    assert check(log) == []


def test_a_loss_in_another_stream_takes_no_doubt_back() -> None:
    log = clean()
    a_complete_group_that_the_buffer_does_not_count(log)
    log.insert(None, "lost", Row(e.DataLost(stream="tasks", entries=(f"{log.number('result 4.0')}-0",), reason="gone")))
    assert {finding.rule for finding in check(log)} == {"accounted"}


def test_samples_that_are_issued_again_leave_their_group_open() -> None:
    log = clean()
    log.remove("drop 3", "credit 3", "task 6", "result 6.0", "result 6.1", "lost 6.0")
    log.insert("result 4.0", "only", Row(task(3, only=(1,)), "failed 3.1"))
    assert check(log) == []


def test_what_an_engine_finished_before_its_quarantine_and_after_it_may_be_trained_on() -> None:
    log = clean()
    log.move("quarantine", before="batch 2")
    log["result 6.1"].change(sources=(e.Provenance(2, "engine-1", 1),))
    log.insert(None, "batch 3", Row(batch(3, group(6, ref(6, 1)))))
    assert check(log) == []


@pytest.mark.parametrize(
    ("version", "taken", "rules"), [(1, False, []), (0, False, ["quarantine"]), (1, True, ["quarantine"])]
)
def test_a_result_of_a_quarantine_may_be_trained_on_if_it_is_read_behind_a_commit_of_its_version(
    version: int, taken: bool, rules: list[str]
) -> None:
    log = clean()
    log.remove("request 3", "fail 3")
    log.move("quarantine", before="result 4.1")
    log["quarantine"].change(epoch=2)
    log["result 4.1"].change(sources=(e.Provenance(version, "engine-1", 1),))
    log["batch 2"].change(
        groups=(group(2, ref(2, 0, lag=1), ref(2, 1)), group(4, ref(4, 0), ref(4, 1, lag=1 - version)))
    )
    if taken:
        log.insert("batch 2", "credit 4", Row(e.CreditGranted(total=7), "result 4.1"))
    for label, row in refit(3, version=1).items():
        log.insert("batch 2", label, row)
    assert [finding.rule for finding in check(log)] == rules


def test_a_trainer_that_falls_back_trains_its_batches_again() -> None:
    log = clean()
    log.insert(None, "restore", Row(e.PolicyReady(version=3, step=1, parent_version=1, trainer_boot=2, abandoned=(2,))))
    log.insert(None, "step 2 again", Row(step(2, 2, 4)))
    log["step 2 again"].change(version=4, parent_version=3)
    verifier = Verifier(STALENESS, GROUPS).apply_all(log.envelopes())
    assert verifier.findings() == []
    assert (verifier.summary().steps, verifier.summary().owed_batched) == (2, 0)


def test_batches_that_are_behind_a_fall_back_are_owed() -> None:
    log = clean()
    log.insert(None, "restore", Row(e.PolicyReady(version=3, step=1, parent_version=1, trainer_boot=2, abandoned=(2,))))
    summary = Verifier(STALENESS, GROUPS).apply_all(log.envelopes()).summary()
    assert (summary.trained, summary.owed, summary.owed_batched) == (2, 3, 2)


# --- the command ---


def archived(path: Path, log: Log) -> RunDir:
    config = loading.load("quickstart", [f"buffer.groups={GROUPS}", f"buffer.max_staleness={STALENESS}"])
    run = RunDir.create(path, rundir.describe("r", config, loading.digest(config)), loading.dump(config))
    writer = Writer(run.events, 0.0)
    for number, envelope in enumerate(log.envelopes(), 1):
        writer.append(envelope.stream, f"{number}-0", encode(envelope))
    writer.close(0.0)
    run.unlock()
    return run


def test_the_command_names_rule_events_and_what_to_do_and_ends_with_1(tmp_path: Path) -> None:
    log = clean()
    a_complete_group_that_the_buffer_does_not_count(log)
    run = archived(tmp_path / "run", log)
    done = CliRunner().invoke(main, ["verify", str(run.path)])
    event = next(each.id for each in log.envelopes() if each.body == log["depth 2"].event)
    assert done.exit_code == Exit.FAILED
    first, *_ = done.output.splitlines()
    assert first == (
        f"accounted: 1 groups are complete after batch 2 (4), the buffer says that it holds 0 (at {event})"
    )
    assert "broken: accounted; docs/reference/invariants.md" in done.output
    assert f"pipeline log {run.path} --until {event}" in done.output
    assert "owed_complete=1" in done.output


def test_the_command_ends_with_0_for_a_clean_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["verify", str(archived(tmp_path / "run", clean()).path)])
    assert (done.exit_code, len(done.output.splitlines())) == (Exit.DONE, 1), done.output


def test_many_findings_of_a_rule_are_counted() -> None:
    lines = list(told([Finding("lineage", str(n), None) for n in range(SHOWN + 3)], "RUN"))
    assert lines[SHOWN] == "lineage: 3 more"
    assert "--until" not in "".join(lines)
