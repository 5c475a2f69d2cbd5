"""The fold that `pipeline why` stands on."""

from __future__ import annotations

from msgspec.structs import replace

from config.schema import RunConfig
from contracts import events
from pipeline.why.look import Look
from pipeline.why.model import Model
from pipeline.why.result import Evidence
from tests.unit.view.story import Story, batch, booted, committed, issued, requested, rolled, stepped


def fold(story: Story) -> Model:
    return Model().apply_all(story.log)


def test_a_group_is_complete_when_every_sample_has_ended_and_gone_when_it_is_batched_or_dropped():
    story = Story()
    for index in (0, 1, 2):
        story.add(issued(index))
    story.add(rolled(0, 0))
    story.add(rolled(0, 0))
    story.add(rolled(1, 0))
    assert fold(story).begun().keys() == {0, 1}
    assert fold(story).untouched().keys() == {2}
    assert fold(story).groups[0].missing() == [1]
    story.add(
        events.SampleFailed(task="t0", index=0, sample=1, attempt=3, samples=2, failure="data", reason="no answer")
    )
    assert fold(story).complete().keys() == {0}
    story.add(batch(0, [1.0]))
    story.add(events.GroupDropped(task="t1", index=1, reason="stale", samples=1))
    assert fold(story).groups.keys() == {2}
    assert fold(story).drops == {"stale": 1}


def test_held_out_tasks_and_what_was_never_issued_leave_no_group():
    story = Story()
    story.add(issued(-1, split="eval"))
    story.add(replace(rolled(-1, 0), split="eval"))
    story.add(rolled(7, 0))
    assert fold(story).groups == {}
    assert (fold(story).issued, fold(story).evals) == (0, 1)


def test_samples_that_are_issued_again_are_out_again_and_the_others_stay():
    story = Story()
    story.add(issued(0))
    story.add(rolled(0, 0))
    story.add(events.SampleFailed(task="t0", index=0, sample=1, attempt=3, samples=2, failure="infra", reason="reset"))
    assert fold(story).complete().keys() == {0}
    story.add(replace(issued(0), only=(1,), first_attempt=4))
    assert fold(story).groups[0].missing() == [1]
    assert fold(story).begun().keys() == {0}
    story.add(rolled(0, 1))
    assert fold(story).complete().keys() == {0}


def test_batches_of_abandoned_versions_are_owed_again():
    story = Story()
    for number in (1, 2):
        story.add(batch(number, [1.0]))
        story.add(stepped(number))
    assert fold(story).untrained() == {}
    story.add(events.PolicyReady(version=3, step=1, parent_version=1, trainer_boot=2, abandoned=(2,)))
    assert fold(story).untrained().keys() == {2}
    assert fold(story).step == 1


def test_a_batch_that_is_requeued_after_it_was_trained_is_not_owed():
    story = Story()
    for number in (1, 2):
        story.add(batch(number, [1.0]))
        story.add(stepped(number))
    story.add(events.CheckpointSaved(version=1, step=1, batch=1, path="/c/1", bytes=1, seconds=0.1))
    story.add(batch(2, [1.0]))
    assert fold(story).untrained() == {}
    story.add(batch(1, [1.0]))  # covered and forgotten
    story.add(events.BatchRejected(batch=1, reason="duplicate"))
    story.add(events.BatchRejected(batch=2, reason="duplicate"))
    assert fold(story).batches.keys() == {2}


def test_an_epoch_shows_who_owes_what_in_each_phase():
    story = Story()
    story.add(events.RunStarted(config_digest=""))
    ask = replace(requested(1, 0), engines=(events.Member("engine-0", 1),), gateways=(events.Member("gateway-0", 1),))
    story.add(ask, actor="refit")
    barrier = fold(story).barrier
    assert barrier is not None
    owed = {"gate.closed": ["gateway-0"], "engine.drained": ["engine-0"], "transfer.offered": ["trainer"]}
    assert (barrier.phase, barrier.missing()) == ("drain", owed)
    story.add(events.GateClosed(epoch=1, gateway="gateway-0", boot=1, held=0, interrupted=0, seconds=0.1))
    story.add(events.EngineDrained(epoch=1, engine="engine-0", boot=1, seconds=0.1))
    story.add(events.TransferOffered(epoch=1, version=0, trainer_boot=1, address="a", port=1, bytes=1, digest="d"))
    ranks = (events.Rank("engine-0", 1, 1, 1),)
    story.add(events.TransferStarted(epoch=1, version=0, group="g", fresh=True, members=ranks, world_size=2))
    barrier = fold(story).barrier
    assert barrier is not None
    assert barrier.missing() == {"transfer.finished": ["trainer"], "engine.loaded": ["engine-0"]}
    story.add(events.TransferFinished(epoch=1, version=0, seconds=0.1, bytes=1))
    story.add(events.EngineLoaded(epoch=1, engine="engine-0", boot=1, digest="d", seconds=0.1))
    barrier = fold(story).barrier
    assert barrier is not None
    assert (barrier.phase, barrier.missing()) == ("verify", {})
    story.add(committed(1, 0))
    assert fold(story).barrier is None
    assert [each.end for each in fold(story).past] == ["committed"]
    assert fold(story).engines["engine-0"].mode == "serving"


def test_answers_for_another_epoch_change_nothing():
    story = Story()
    story.add(replace(requested(2, 0), engines=(events.Member("engine-0", 1),)))
    story.add(events.EngineDrained(epoch=1, engine="engine-0", boot=1, seconds=0.1))
    barrier = fold(story).barrier
    assert barrier is not None
    assert barrier.drained == {"engine-0": None}


def test_a_boot_ends_the_waits_of_the_boot_before():
    story = Story()
    story.add(booted("trainer"))
    story.add(events.WaitStarted(actor="trainer", on="buffer", cause="no batch"))
    story.add(events.WaitStarted(actor="source", on="buffer", cause="no credit"))
    story.add(booted("trainer", 2))
    assert fold(story).waits.keys() == {("source", "buffer")}
    story.add(events.WaitEnded(actor="source", on="buffer", seconds=4.0))
    assert fold(story).waits == {}
    assert [each.seconds for each in fold(story).waited["source", "buffer"]] == [4.0]


def test_a_process_that_writes_after_its_successor_booted_is_noted():
    story = Story()
    story.add(booted("refit", 1), actor="refit", boot=1)
    story.add(booted("refit", 2), actor="refit", boot=2)
    assert fold(story).usurped == []
    story.add(requested(3, 1), actor="refit", boot=1)
    assert [each[:3] for each in fold(story).usurped] == [("refit", 1, 2)]


def test_a_clock_that_jumps_against_the_monotonic_one_is_noted_with_its_length():
    story = Story()
    story.log.append(replace(story.add(booted("trainer"), actor="trainer"), mono_ns=int(5e9)))
    jumped = story.add(stepped(1), after=3600.0, actor="trainer")
    story.log[-1] = replace(jumped, mono_ns=int(6e9))
    skew = fold(story).clocks.skews["trainer"]
    assert abs(skew.seconds - 3599.0) < 0.01


def test_an_actor_that_writes_long_before_its_past_is_noted_as_behind():
    story = Story()
    story.add(booted("trainer"), actor="trainer")
    story.now -= 100.0
    story.add(booted("engine-0"), actor="engine-0")
    skew = fold(story).clocks.skews["engine-0"]
    assert -100.0 < skew.seconds < -90.0


def test_given_up_entries_mark_the_group_and_the_batch_that_they_held():
    model = Model()
    story = Story()
    story.add(issued(0))
    story.add(rolled(0, 1))
    story.add(batch(5, [1.0]))
    for position, envelope in enumerate(story.log, 11):
        model.apply(envelope, position)
    model.apply(story.add(events.DataLost(stream="trajectories", entries=("12-0",), reason="poison")), 14)
    assert model.groups[0].lost == [1]
    model.apply(story.add(events.DataLost(stream="batches", entries=("13-0",), reason="poison")), 15)
    assert model.batches[5].lost
    model.apply(story.add(events.DataLost(stream="tasks", entries=("11-0",), reason="poison")), 16)
    assert model.groups[0].lost == [1, 0]


def test_the_fleet_is_what_scaling_and_the_coordinator_say():
    story = Story()
    for name in ("engine-0", "engine-1"):
        story.add(events.EngineReady(engine=name, boot=1, url="u", ranks=1, seconds=1.0))
    story.add(events.FleetScaled(engines=1))
    story.add(events.EngineHealth(engine="engine-1", boot=1, was="healthy", health="retired", reason="scaled down"))
    story.add(events.EngineHealth(engine="engine-0", boot=0, was="healthy", health="dead", reason="an older boot"))
    model = fold(story)
    assert model.wanted_engines == 1
    assert (model.engines["engine-0"].mode, model.engines["engine-1"].mode) == ("uncertain", "retired")
    look = Look(model, RunConfig(), story.now, Evidence(), 15.0)
    assert [name for name in look.names if name.startswith("engine-")] == ["engine-0"]


def test_who_left_or_was_retired_waits_for_nobody():
    story = Story()
    for name in ("source", "engine-1", "engine-0"):
        story.add(events.WaitStarted(actor=name, on="refit", cause="no commit"))
    story.add(events.ActorLeft(actor="source", boot=1))
    story.add(events.EngineHealth(engine="engine-1", boot=1, was="healthy", health="retired", reason="scaled down"))
    assert fold(story).waits.keys() == {("engine-0", "refit")}
