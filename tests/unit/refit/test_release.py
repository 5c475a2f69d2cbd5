"""The coordinator lets the trainer have a shared device: engines give memory back, and no refit begins meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from actors.refit.state import FsyncHigh, HighWritten, RefitState
from contracts.core import Booted
from contracts.events import (
    ActorFailed,
    EngineDead,
    EngineHealth,
    EngineQuarantined,
    EngineReleased,
    Member,
    MemoryWanted,
    RefitRequested,
    ReleaseFinished,
    ReleaseRequested,
    RunStopping,
    WaitEnded,
    WaitStarted,
)
from tests.unit.refit.drive import Drive, booted, engine_ready, policy_ready, stepped

BOTH = (Member("engine-0", 1), Member("engine-1", 1))


def wanted(step: int = 1, boot: int = 1) -> MemoryWanted:
    return MemoryWanted(step=step, trainer_boot=boot)


def given(drive: Drive, engine: int, epoch: int | None = None, boot: int | None = None) -> EngineReleased:
    return EngineReleased(
        epoch=drive.epoch if epoch is None else epoch,
        engine=f"engine-{engine}",
        boot=drive.boot(engine) if boot is None else boot,
        tags=("kv_cache",),
        seconds=0.2,
        release_s=0.1,
    )


@pytest.fixture
def serving() -> Drive:
    """Epoch 1 is committed."""
    drive = Drive()
    drive.fleet()
    drive.committed()
    return drive


@pytest.fixture
def releasing(serving: Drive) -> Drive:
    """The trainer wants memory for step 1, in epoch 2."""
    serving.hear(wanted())
    serving.open()
    return serving


@pytest.fixture
def yielded(releasing: Drive) -> Drive:
    """The trainer takes step 1."""
    releasing.hear(given(releasing, 0), given(releasing, 1))
    return releasing


def test_a_release_is_an_epoch_of_its_own_that_nothing_serves_in(serving: Drive):
    assert FsyncHigh(2) in serving.hear(wanted())
    assert serving.emitted(ReleaseRequested) == [], "not before its number is durable"
    serving.open()
    request = serving.one(ReleaseRequested)
    assert (request.epoch, request.step, request.engines) == (2, 1, BOTH)
    assert request.deadline_at == serving.now + serving.core._refit.deadline_s
    assert serving.raised() == [("epoch", 2)]
    assert not any(e.serving for e in serving.state.engines.values())
    waiting = serving.one(WaitStarted)
    assert (waiting.on, waiting.deadline_at) == ("engine-0,engine-1", serving.now + 30.0)
    assert waiting.cause == "release epoch 2 awaits engine.released from engine-0, engine-1"
    assert serving.emitted(RefitRequested) == []


def test_the_trainer_goes_once_every_engine_gave_its_memory_back(releasing: Drive):
    releasing.now += 1.5
    assert releasing.hear(given(releasing, 0)) == []
    assert releasing.hear(given(releasing, 0)) == [], "a repeat"
    assert releasing.hear(given(releasing, 1, epoch=1), given(releasing, 1, boot=7)) == [], "not of this epoch and boot"
    releasing.hear(given(releasing, 1))
    finished = releasing.one(ReleaseFinished)
    assert (finished.epoch, finished.step, finished.trainer_boot, finished.engines) == (2, 1, 1, BOTH)
    assert finished.seconds == pytest.approx(1.5)
    assert releasing.one(WaitEnded).on == "engine-0,engine-1"
    waiting = releasing.one(WaitStarted)
    assert (waiting.on, waiting.cause) == ("trainer", "the device is the trainer's for step 1")
    assert waiting.deadline_at == releasing.now + 1800.0


def test_no_refit_begins_before_the_step_is_over_and_then_one_does(yielded: Drive):
    assert yielded.hear(engine_ready(1, boot=2)) == [], "an engine that is up again waits too"
    assert FsyncHigh(3) in yielded.hear(stepped(1, 1))
    yielded.open()
    assert yielded.one(RefitRequested).engines == (Member("engine-0", 1), Member("engine-1", 2))
    yielded.drain()
    yielded.load()
    assert yielded.state.committed is not None
    assert yielded.state.committed.version == 1
    assert FsyncHigh(4) in yielded.hear(wanted(step=2))


def test_a_dead_trainer_ends_the_pause(yielded: Drive):
    yielded.hear(booted("trainer", 2))
    assert yielded.state.yielded is None
    assert FsyncHigh(3) in yielded.hear(policy_ready(1, 0, boot=2))


def test_a_release_for_a_trainer_that_died_meanwhile_ends_without_a_pause(releasing: Drive):
    releasing.hear(booted("trainer", 2), policy_ready(1, 0, boot=2))
    releasing.hear(given(releasing, 0), given(releasing, 1))
    assert (releasing.state.release, releasing.state.yielded) == (None, None)
    assert FsyncHigh(3) in releasing.said, "the restored policy is refitted"


def test_only_the_living_trainer_may_want_memory(serving: Drive):
    assert serving.hear(wanted(boot=2)) == []
    assert Drive().hear(wanted()) == []


def test_a_refit_that_is_due_comes_first(serving: Drive):
    serving.hear(EngineDead(engine="engine-1", boot=1, reason="r"), engine_ready(1, boot=2))
    serving.hear(wanted())
    serving.at(max(serving.now, serving.state.engines["engine-1"].eligible_at))
    serving.open()
    assert serving.emitted(ReleaseRequested) == []
    serving.one(RefitRequested)
    serving.drain()
    assert FsyncHigh(3) in serving.load(), "and then the release"
    serving.open()
    assert serving.one(ReleaseRequested).engines == (Member("engine-0", 1), Member("engine-1", 2))


def test_an_engine_that_dies_gave_its_memory_back_too(releasing: Drive):
    releasing.hear(given(releasing, 0), EngineDead(engine="engine-1", boot=1, reason="it did not"))
    assert releasing.one(EngineQuarantined).reason == "died: it did not"
    assert releasing.one(ReleaseFinished).engines == BOTH[:1]


def test_an_engine_that_dies_after_it_gave_memory_back_is_not_named(releasing: Drive):
    releasing.hear(given(releasing, 0), EngineDead(engine="engine-0", boot=1, reason="r"))
    assert releasing.emitted(ReleaseFinished) == []
    releasing.hear(given(releasing, 1))
    assert releasing.one(ReleaseFinished).engines == BOTH[1:]


def test_a_death_that_is_no_part_of_the_release_changes_nothing(releasing: Drive):
    releasing.hear(EngineDead(engine="engine-1", boot=1, reason="r"))
    said = releasing.hear(engine_ready(1, boot=2), EngineDead(engine="engine-1", boot=2, reason="r"))
    assert releasing.emitted(EngineQuarantined) == []
    assert said is not None
    assert releasing.state.release is not None


def test_an_engine_that_says_nothing_is_quarantined_at_the_drains_deadline_and_the_step_is_taken(releasing: Drive):
    releasing.hear(given(releasing, 0))
    releasing.wake()
    assert releasing.now == 1030.0
    quarantined = releasing.one(EngineQuarantined)
    assert (quarantined.epoch, quarantined.engine, quarantined.boot) == (2, "engine-1", 1)
    assert quarantined.reason == "did not give its memory back in 30 s (refit.drain_deadline_s)"
    assert releasing.one(ReleaseFinished).engines == BOTH[:1]
    assert isinstance(releasing.health[-1], EngineHealth)
    assert releasing.health[-1].health == "quarantined"
    assert "engine quarantined" in releasing.logged()


def test_a_step_that_does_not_end_fails_the_run(yielded: Drive):
    yielded.wake()
    failed = yielded.one(ActorFailed)
    assert failed.fatal
    assert "step 1 of the trainer was not done in 1800 s (trainer.step_deadline_s)" in failed.message
    assert yielded.core.wake(yielded.state) is None


def test_a_coordinator_that_was_killed_goes_on_with_the_release(releasing: Drive):
    releasing.state = msgspec.msgpack.decode(msgspec.msgpack.encode(releasing.state), type=RefitState)
    releasing.step(Booted(2))
    releasing.hear(given(releasing, 0), given(releasing, 1))
    releasing.one(ReleaseFinished)


def test_what_was_wanted_is_dropped_with_the_run(serving: Drive):
    serving.hear(wanted())
    serving.hear(RunStopping(reason="r"))
    assert serving.step(HighWritten(2)) == []
    assert serving.core.done(serving.state)


def test_a_refit_whose_need_is_gone_gives_way_to_a_release(serving: Drive):
    """Its number was being written when the run had no use for it any more."""
    serving.hear(stepped(1, 1))
    assert serving.state.phase == "opening"
    serving.hear(wanted(step=2))
    serving.step(HighWritten(2))
    serving.one(RefitRequested)
