"""What the coordinator does with each input, one rule a test. The model test covers their interleavings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.refit.faults import BACKOFF_MAX_S, STRIKE_MAX_S
from actors.refit.state import FsyncHigh, HighWritten, RefitState
from contracts.core import Booted, Emit, Tick
from contracts.events import (
    ActorFailed,
    EngineDead,
    EngineQuarantined,
    GatewayReady,
    Member,
    Rank,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    RunFinished,
    RunStarted,
    RunStopping,
    TransferFailed,
    TransferStarted,
    WaitEnded,
    WaitStarted,
)
from tests.unit.refit.drive import DIGEST, Drive, booted, engine_ready, policy_ready, stepped

BOTH = (Member("engine-0", 1), Member("engine-1", 1))


@pytest.fixture
def drive() -> Drive:
    """The whole fleet is ready and the first epoch is being opened."""
    made = Drive()
    made.fleet()
    return made


@pytest.fixture
def serving(drive: Drive) -> Drive:
    """Epoch 1 is committed."""
    drive.committed()
    return drive


def transferring(drive: Drive) -> Drive:
    drive.open()
    drive.drain()
    return drive


def retry(drive: Drive) -> list[Any]:
    """The pause after a failed epoch ends, and the next one is requested."""
    drive.at(drive.state.retry_at)
    return drive.open()


# --- the first refit -------------------------------------------------------------------------------------------------


def test_first_refit_begins_with_the_last_member_of_the_fleet(drive: Drive) -> None:
    members = [
        GatewayReady(gateway="gateway-0", boot=1, url="g"),
        engine_ready(0),
        engine_ready(1),
        policy_ready(0, 0),
    ]
    for last in members:
        fresh = Drive()
        assert not [c for c in fresh.hear(*(m for m in members if m is not last)) if isinstance(c, FsyncHigh)]
        assert FsyncHigh(1) in fresh.hear(last)


def test_nothing_carries_an_epoch_before_its_number_is_durable(drive: Drive) -> None:
    assert drive.emitted(RefitRequested) == []
    assert drive.raised() == []
    said = drive.open()
    assert drive.raised() == [("epoch", 1)]
    request = drive.one(RefitRequested)
    assert (request.epoch, request.version, request.engines) == (1, 0, BOTH)
    assert request.gateways == (Member("gateway-0", 1),)
    assert request.deadline_at == drive.now + 60.0
    assert {c.correlation for c in said if isinstance(c, Emit) and c.event is request} == {"refit-1"}


def test_start_fails_at_its_deadline_naming_who_is_missing() -> None:
    drive = Drive()
    drive.hear(engine_ready(0), GatewayReady(gateway="gateway-0", boot=1, url="g"))
    assert drive.core.wake(drive.state) == 1100.0
    drive.at(1099.0)
    assert drive.emitted(ActorFailed) == []
    drive.wake()
    failed = drive.one(ActorFailed)
    assert failed.fatal
    assert "engine-1, trainer not ready after 100 s" in failed.message
    assert drive.core.wake(drive.state) is None
    assert drive.hear(engine_ready(1), policy_ready(0, 0)) == []


def test_wait_for_the_fleet_is_announced_and_ended() -> None:
    drive = Drive()
    wait = drive.one(WaitStarted)
    assert wait.on == "engine-0,engine-1,gateway-0,trainer"
    drive.now += 3
    drive.fleet()
    assert drive.emitted(WaitEnded)[-1] == WaitEnded(actor="refit", on="trainer", seconds=3.0)
    assert [w.on for w in drive.emitted(WaitStarted)] == ["engine-0,engine-1,trainer", "engine-1,trainer", "trainer"]
    assert {w.deadline_at for w in (wait, *drive.emitted(WaitStarted))} == {1100.0}


# --- one epoch -------------------------------------------------------------------------------------------------------


def test_transfer_waits_for_gate_engines_and_offer_in_any_order(drive: Drive) -> None:
    drive.open()
    answers = [drive.gate(), drive.drained(0), drive.drained(1), drive.offer()]
    base = drive.state
    for last in answers:
        drive.state = base
        assert drive.hear(*(a for a in answers if a is not last)) is drive.said
        assert drive.emitted(TransferStarted) == []
        drive.hear(last)
        assert drive.one(TransferStarted).members == (Rank("engine-0", 1, 1, 1), Rank("engine-1", 1, 2, 1))


def test_ranks_are_numbered_by_what_each_engine_holds() -> None:
    drive = Drive()
    drive.hear(GatewayReady(gateway="gateway-0", boot=1, url="g"), engine_ready(0, ranks=2), engine_ready(1, ranks=4))
    drive.hear(policy_ready(0, 0))
    transferring(drive)
    started = drive.one(TransferStarted)
    assert started.members == (Rank("engine-0", 1, 1, 2), Rank("engine-1", 1, 3, 4))
    assert started.world_size == 7


def test_commit_names_the_engines_that_loaded_and_measures_the_pause(drive: Drive) -> None:
    drive.open()
    drive.now += 2
    drive.drain()
    drive.now += 3
    drive.load()
    assert drive.raised() == [("committed", 1)]
    committed = drive.one(RefitCommitted)
    assert committed.engines == BOTH
    assert (committed.pause_s, committed.drain_s, committed.transfer_s) == (5.0, 2.0, 0.5)
    assert (committed.bytes, committed.world_size) == (400, 3)
    assert drive.logged()[-1] == "refit committed"


def test_commit_needs_the_trainer_to_have_sent_everything(drive: Drive) -> None:
    transferring(drive)
    drive.hear(drive.loaded(0), drive.loaded(1))
    assert drive.emitted(RefitCommitted) == []
    drive.hear(drive.sent())
    assert drive.one(RefitCommitted).engines == BOTH


def test_offered_version_may_be_newer_than_the_requested_one(drive: Drive) -> None:
    drive.open()
    drive.hear(drive.gate(), drive.drained(0), drive.drained(1), drive.offer(version=1))
    assert drive.emitted(TransferStarted) == []
    drive.hear(stepped(1, 1))
    assert drive.one(TransferStarted).version == 1
    drive.load()
    assert (drive.one(RefitCommitted).version, drive.one(RefitCommitted).step) == (1, 1)


def test_waits_of_an_epoch_name_who_is_missing(drive: Drive) -> None:
    drive.open()
    wait = drive.one(WaitStarted)
    assert wait.on == "gateway-0,engine-0,engine-1,trainer"
    assert wait.cause == (
        "refit epoch 1 awaits gate.closed from gateway-0; engine.drained from engine-0, engine-1; "
        "transfer.offered from trainer"
    )
    drive.drain()
    assert drive.one(WaitEnded).on == wait.on
    assert drive.one(WaitStarted).cause == (
        "refit epoch 1 awaits transfer.finished from trainer; engine.loaded from engine-0, engine-1"
    )
    drive.load()
    assert drive.one(WaitEnded).on == "trainer,engine-0,engine-1"


def test_answers_that_repeat_change_nothing(drive: Drive) -> None:
    drive.open()
    drive.hear(drive.gate(), drive.drained(0), drive.offer())
    assert drive.hear(drive.gate(), drive.drained(0), drive.offer(version=9)) == []
    drive.hear(drive.drained(1))
    drive.hear(drive.loaded(0))
    assert drive.hear(drive.loaded(0), drive.gate(), drive.drained(0)) == []


def test_answers_to_another_epoch_or_boot_change_nothing(drive: Drive) -> None:
    drive.open()
    stale = [drive.gate(epoch=0), drive.drained(0, epoch=0), drive.drained(0, boot=2), drive.gate(boot=0)]
    state = drive.state
    drive.hear(*stale, drive.offer(boot=2), drive.offer(epoch=2), drive.sent(), drive.loaded(0))
    assert drive.state == msgspec.structs.replace(state, barrier=drive.state.barrier)
    drive.drain()
    state = drive.state
    assert drive.hear(drive.sent(epoch=0), drive.loaded(0, boot=2), drive.loaded(1, epoch=2)) == []
    assert drive.state == state


def test_events_of_other_actors_and_ticks_change_nothing(serving: Drive) -> None:
    state = serving.state
    assert serving.hear(RunFinished(reason="r"), booted("collector-0", 3), serving.gate()) == []
    assert serving.step(Tick()) == []
    assert serving.state == state


# --- when the next one begins ----------------------------------------------------------------------------------------


def test_steps_are_coalesced_to_the_newest_version() -> None:
    drive = Drive(every=2)
    drive.fleet()
    drive.committed()
    assert drive.hear(stepped(1, 1)) == []
    assert FsyncHigh(2) in drive.hear(stepped(2, 2))
    drive.hear(stepped(3, 3))
    drive.open()
    assert (drive.one(RefitRequested).version, drive.one(RefitRequested).step) == (3, 3)
    drive.hear(stepped(4, 4), stepped(5, 5), drive.gate(), drive.drained(0), drive.drained(1), drive.offer(version=3))
    assert drive.one(TransferStarted).version == 3
    drive.load()
    assert FsyncHigh(3) in drive.said
    drive.open()
    assert drive.one(RefitRequested).version == 5


def test_steps_of_another_boot_are_not_refitted(serving: Drive) -> None:
    assert serving.hear(stepped(7, 7, boot=2)) == []
    assert Drive().hear(stepped(7, 7)) == []


def test_engine_that_became_ready_joins_at_the_same_version(serving: Drive) -> None:
    serving.hear(EngineDead(engine="engine-1", boot=1, reason="gone"))
    assert not [c for c in serving.said if isinstance(c, FsyncHigh)]
    assert FsyncHigh(2) in serving.hear(engine_ready(1, boot=2))
    serving.open()
    request = serving.one(RefitRequested)
    assert (request.version, request.engines) == (0, (Member("engine-0", 1), Member("engine-1", 2)))


def test_engine_that_is_known_to_serve_joins_nothing(serving: Drive) -> None:
    assert serving.hear(engine_ready(1, boot=1), engine_ready(0, boot=0)) == []
    assert (
        serving.hear(EngineDead(engine="engine-1", boot=9, reason=""), EngineDead(engine="x", boot=1, reason="")) == []
    )
    assert serving.hear(booted("engine-1", 1), booted("gateway-0", 1), booted("trainer", 1)) == []


def test_restarted_gateway_is_brought_back_by_a_commit(serving: Drive) -> None:
    assert serving.hear(booted("gateway-0", 2)) == []
    assert FsyncHigh(2) in serving.hear(GatewayReady(gateway="gateway-0", boot=2, url="g"))
    assert serving.hear(GatewayReady(gateway="gateway-0", boot=2, url="g")) == []
    assert serving.hear(GatewayReady(gateway="gateway-0", boot=1, url="g")) == []


def test_restored_trainer_is_refitted_even_to_an_older_step(serving: Drive) -> None:
    serving.hear(stepped(1, 1))
    serving.committed()
    assert serving.hear(booted("trainer", 2)) == []
    assert FsyncHigh(3) in serving.hear(policy_ready(2, 0, boot=2))
    serving.open()
    assert serving.one(RefitRequested).version == 2
    assert serving.hear(policy_ready(1, 1, boot=1)) == []


def test_epoch_without_a_trainer_waits_for_it_and_gives_up_at_the_deadline(serving: Drive) -> None:
    serving.hear(booted("trainer", 2), EngineDead(engine="engine-1", boot=1, reason="gone"))
    serving.hear(engine_ready(1, boot=2))
    assert serving.one(WaitStarted).on == "trainer"
    serving.wake()
    assert "trainer not ready" in serving.one(ActorFailed).message


def test_epoch_without_any_engine_waits_for_one(serving: Drive) -> None:
    serving.hear(*(EngineDead(engine=f"engine-{n}", boot=1, reason="gone") for n in (0, 1)), stepped(1, 1))
    assert serving.one(WaitStarted).on == "engine-0,engine-1"
    assert FsyncHigh(2) in serving.hear(engine_ready(1, boot=2))


def test_epoch_that_fails_at_its_deadline_leaves_restarting_engines_their_own_time(drive: Drive) -> None:
    drive.fleet()
    drive.open()
    drive.hear(drive.gate(), drive.offer(), booted("engine-0", 2))
    drive.wake()
    assert drive.one(RefitFailed).phase == "drain"
    assert drive.emitted(ActorFailed) == []
    assert drive.one(WaitStarted).on == "engine-0"
    assert not drive.state.halted


def test_epoch_is_not_asked_for_when_its_cause_is_gone(serving: Drive) -> None:
    serving.hear(EngineDead(engine="engine-1", boot=1, reason="gone"), engine_ready(1, boot=2))
    serving.hear(EngineDead(engine="engine-1", boot=2, reason="gone"))
    assert serving.open() == []
    assert serving.state.phase == "idle"
    assert FsyncHigh(3) in serving.hear(stepped(1, 1))


def test_epoch_is_not_asked_for_when_the_trainer_is_gone(serving: Drive) -> None:
    serving.hear(stepped(1, 1), booted("trainer", 2))
    serving.open()
    assert serving.emitted(RefitRequested) == []


# --- groups ----------------------------------------------------------------------------------------------------------


def test_group_is_used_again_by_the_same_members_and_named_anew_otherwise(serving: Drive) -> None:
    names = ["r-refit-1"]
    serving.hear(stepped(1, 1))
    transferring(serving)
    again = serving.one(TransferStarted)
    assert (again.group, again.fresh) == (names[0], False)
    serving.load()

    serving.hear(EngineDead(engine="engine-1", boot=1, reason="gone"), engine_ready(1, boot=2))
    transferring(serving)
    fresh = serving.one(TransferStarted)
    assert fresh.fresh
    assert fresh.group not in names


def test_group_does_not_outlive_the_trainer_or_an_engine_of_an_equal_boot(serving: Drive) -> None:
    base = serving.state
    serving.hear(booted("trainer", 2), policy_ready(1, 0, boot=2))
    transferring(serving)
    assert serving.one(TransferStarted).fresh
    serving.state = base
    serving.hear(EngineDead(engine="engine-1", boot=1, reason="gone"), engine_ready(1, boot=1))
    transferring(serving)
    assert serving.one(TransferStarted).fresh


def test_group_is_not_used_again_after_a_member_was_expelled(drive: Drive) -> None:
    transferring(drive)
    drive.hear(drive.failed(1, "verify"), drive.sent(), drive.loaded(0))
    assert drive.one(RefitCommitted).engines == (Member("engine-0", 1),)
    drive.at(drive.now + 1)
    transferring(drive)
    assert drive.one(TransferStarted).fresh
    assert len(drive.one(TransferStarted).members) == 2


# --- faults before the transfer --------------------------------------------------------------------------------------


def test_engine_that_does_not_drain_in_time_is_left_behind(drive: Drive) -> None:
    drive.open()
    drive.hear(drive.gate(), drive.drained(0), drive.offer())
    assert drive.core.wake(drive.state) == 1030.0
    drive.wake()
    expelled = drive.one(EngineQuarantined)
    assert (expelled.engine, expelled.boot) == ("engine-1", 1)
    assert "refit.drain_deadline_s" in expelled.reason
    assert [m.engine for m in drive.one(TransferStarted).members] == ["engine-0"]
    drive.load((0,))
    assert drive.one(RefitCommitted).engines == (Member("engine-0", 1),)


@pytest.mark.parametrize("loss", ["failed", "dead", "ready", "booted"])
def test_engine_lost_while_draining_is_left_behind_at_once(drive: Drive, loss: str) -> None:
    drive.open()
    drive.hear(drive.gate(), drive.drained(0), drive.offer())
    events = {
        "failed": drive.failed(1, "drain"),
        "dead": EngineDead(engine="engine-1", boot=1, reason="gone"),
        "ready": engine_ready(1, boot=2),
        "booted": booted("engine-1", 2),
    }
    drive.hear(events[loss])
    assert drive.one(EngineQuarantined).engine == "engine-1"
    assert [m.engine for m in drive.one(TransferStarted).members] == ["engine-0"]
    assert drive.hear(drive.drained(1, boot=1), drive.failed(1, "drain")) == []


def test_engine_without_a_part_is_no_loss(drive: Drive) -> None:
    drive.open()
    drive.hear(drive.failed(1, "drain"))
    assert not drive.emitted(RefitFailed)
    drive.hear(EngineDead(engine="engine-1", boot=1, reason="gone"))
    assert drive.emitted(EngineQuarantined) == []


def test_epoch_without_engines_left_fails(drive: Drive) -> None:
    drive.open()
    drive.hear(drive.failed(0, "drain"), drive.failed(1, "drain"))
    assert drive.one(RefitFailed).phase == "drain"
    assert "no engine" in drive.one(RefitFailed).reason


def test_gate_that_stays_open_fails_the_epoch_by_name(drive: Drive) -> None:
    drive.open()
    drive.hear(drive.drained(0), drive.drained(1), drive.offer())
    drive.wake()
    assert drive.one(RefitFailed).phase == "drain"
    assert "gateway-0 did not close" in drive.one(RefitFailed).reason


def test_offer_that_never_comes_fails_the_epoch_at_its_deadline(drive: Drive) -> None:
    drive.open()
    drive.hear(drive.gate(), drive.drained(0), drive.drained(1))
    assert drive.core.wake(drive.state) == 1060.0
    drive.at(1030.0)
    assert drive.said == []
    drive.wake()
    assert drive.one(RefitFailed).phase == "offer"


def test_trainer_that_can_not_offer_fails_the_epoch(drive: Drive) -> None:
    drive.open()
    drive.hear(TransferFailed(epoch=1, phase="offer", error="VersionGone", reason="not held"))
    assert drive.one(RefitFailed).phase == "offer"


def test_restarted_gateway_answers_for_itself(drive: Drive) -> None:
    drive.open()
    drive.hear(drive.drained(0), drive.drained(1), drive.offer())
    drive.hear(booted("gateway-0", 2), GatewayReady(gateway="gateway-0", boot=2, url="g"))
    assert drive.hear(drive.gate(boot=1)) != []
    assert drive.emitted(TransferStarted) == []
    drive.hear(drive.gate(boot=2))
    assert len(drive.emitted(TransferStarted)) == 1


def test_ack_of_a_restarted_gateway_may_come_before_its_boot(drive: Drive) -> None:
    drive.open()
    drive.hear(drive.drained(0), drive.drained(1), drive.offer(), drive.gate(boot=2))
    assert len(drive.emitted(TransferStarted)) == 1
    state = drive.state
    drive.hear(booted("gateway-0", 2))
    assert drive.state.barrier == state.barrier


def test_gateway_restarted_after_its_ack_is_not_waited_for(drive: Drive) -> None:
    drive.open()
    drive.hear(drive.gate(), booted("gateway-0", 2), drive.drained(0), drive.drained(1), drive.offer())
    assert len(drive.emitted(TransferStarted)) == 1


def test_gateway_that_is_away_is_waited_for(serving: Drive) -> None:
    serving.hear(booted("gateway-0", 2), stepped(1, 1))
    serving.open()
    assert serving.one(RefitRequested).gateways == (Member("gateway-0", 2),)
    serving.hear(serving.drained(0), serving.drained(1), serving.offer())
    assert serving.emitted(TransferStarted) == []
    base = serving.state
    serving.hear(serving.gate(boot=2))
    assert len(serving.emitted(TransferStarted)) == 1
    serving.load()
    assert not serving.state.gateways["gateway-0"].open
    serving.state = base
    serving.at(serving.now + 30.0)
    assert "gateway-0 did not close" in serving.one(RefitFailed).reason


def test_gateway_unknown_at_the_request_is_waited_for(drive: Drive) -> None:
    drive.open()
    drive.hear(GatewayReady(gateway="gateway-1", boot=1, url="g"))
    drive.drain()
    assert drive.emitted(TransferStarted) == []
    closed = msgspec.structs.replace(drive.gate(), gateway="gateway-1")
    drive.hear(closed)
    assert len(drive.emitted(TransferStarted)) == 1
    assert drive.hear(msgspec.structs.replace(closed, gateway="gateway-2")) == []


# --- faults in and after the transfer --------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["pause", "join", "receive"])
def test_failure_inside_the_collective_fails_the_epoch_and_leaves_its_author_out(drive: Drive, phase: str) -> None:
    transferring(drive)
    drive.hear(drive.loaded(0), drive.failed(1, phase))
    assert drive.one(EngineQuarantined).engine == "engine-1"
    assert drive.one(RefitFailed).phase == phase
    retry(drive)
    assert drive.one(RefitRequested).engines == (Member("engine-0", 1),)
    drive.drain((0,))
    assert drive.one(TransferStarted).fresh


@pytest.mark.parametrize("phase", ["flush", "verify"])
def test_failure_of_one_engine_alone_leaves_the_others_committed(drive: Drive, phase: str) -> None:
    transferring(drive)
    drive.hear(drive.failed(1, phase))
    assert drive.one(EngineQuarantined).engine == "engine-1"
    drive.hear(drive.sent(), drive.loaded(0))
    assert drive.one(RefitCommitted).engines == (Member("engine-0", 1),)


def test_engine_with_other_weights_is_quarantined(drive: Drive) -> None:
    transferring(drive)
    drive.hear(drive.loaded(0, digest="d2"), drive.sent(), drive.loaded(1, digest=""))
    assert drive.emitted(EngineQuarantined)[0].engine == "engine-0"
    assert "d2" in drive.emitted(EngineQuarantined)[0].reason
    assert drive.one(RefitCommitted).engines == (Member("engine-1", 1),)


def test_digests_are_ignored_when_the_recipe_says_so() -> None:
    drive = Drive(verify="none")
    drive.fleet()
    transferring(drive)
    drive.hear(drive.loaded(0, digest="d2"), drive.sent(), drive.loaded(1, digest=DIGEST))
    assert drive.one(RefitCommitted).engines == BOTH


def test_verification_that_leaves_nobody_fails_the_epoch(drive: Drive) -> None:
    transferring(drive)
    drive.hear(drive.loaded(0, digest="d2"), drive.loaded(1, digest="d3"))
    assert drive.one(RefitFailed).phase == "verify"


def test_engine_that_dies_in_the_collective_fails_the_epoch(drive: Drive) -> None:
    transferring(drive)
    drive.hear(EngineDead(engine="engine-1", boot=1, reason="killed"))
    failed = drive.one(RefitFailed)
    assert (failed.phase, failed.reason) == ("transfer", "engine-1 died: killed")
    assert all(not e.serving for e in drive.state.engines.values())


def test_engine_that_dies_after_it_loaded_takes_nobody_along(drive: Drive) -> None:
    transferring(drive)
    drive.hear(drive.loaded(1), EngineDead(engine="engine-1", boot=1, reason="killed"))
    assert drive.one(EngineQuarantined).engine == "engine-1"
    drive.hear(drive.sent(), drive.loaded(0))
    assert drive.one(RefitCommitted).engines == (Member("engine-0", 1),)


@pytest.mark.parametrize("early", [True, False])
def test_trainer_that_restarts_fails_the_epoch(drive: Drive, early: bool) -> None:
    drive.open()
    if not early:
        drive.drain()
    drive.hear(booted("trainer", 2))
    assert drive.one(RefitFailed).phase == ("drain" if early else "transfer")
    assert "trainer was restarted as boot 2" in drive.one(RefitFailed).reason
    drive.hear(policy_ready(1, 0, boot=2))
    retry(drive)
    assert drive.one(RefitRequested).version == 1


def test_policy_ready_of_the_same_boot_fails_nothing(drive: Drive) -> None:
    transferring(drive)
    drive.hear(policy_ready(0, 0))
    assert drive.emitted(RefitFailed) == []


def test_engines_that_do_not_load_in_time_are_left_behind_when_all_was_sent(drive: Drive) -> None:
    transferring(drive)
    drive.hear(drive.sent(), drive.loaded(0))
    assert drive.core.wake(drive.state) == 1060.0
    drive.wake()
    assert drive.one(EngineQuarantined).engine == "engine-1"
    assert drive.one(RefitCommitted).engines == (Member("engine-0", 1),)


def test_transfer_that_does_not_end_in_time_fails_the_epoch(drive: Drive) -> None:
    transferring(drive)
    drive.hear(drive.loaded(0), drive.loaded(1))
    drive.wake()
    assert drive.one(RefitFailed).phase == "transfer"
    assert drive.emitted(EngineQuarantined) == []


# --- after a failure -------------------------------------------------------------------------------------------------


def broken_transfer(drive: Drive) -> None:
    drive.drain(tuple(int(m.actor[-1]) for m in drive.one(RefitRequested).engines))
    drive.hear(TransferFailed(epoch=drive.epoch, phase="send", error="RuntimeError", reason="closed by peer"))


@pytest.mark.parametrize(
    ("phase", "reason", "told"),
    [
        ("join", "not done in 60 s", "not done in 60 s; no word from engine-1"),
        ("join", "not done in 60 s; never joined: engine-1", "not done in 60 s; never joined: engine-1"),
        ("send", "closed by peer", "closed by peer"),
    ],
)
def test_a_transfer_whose_sender_can_not_tell_who_never_came_names_who_said_nothing(
    drive: Drive, phase: str, reason: str, told: str
) -> None:
    transferring(drive)
    drive.hear(drive.loaded(0))
    drive.hear(TransferFailed(epoch=drive.epoch, phase=phase, error="RuntimeError", reason=reason))
    assert drive.one(RefitFailed).reason == told


def test_a_transfer_that_ends_at_the_epochs_deadline_names_who_said_nothing(drive: Drive) -> None:
    transferring(drive)
    drive.hear(drive.loaded(1))
    drive.wake()
    assert drive.one(RefitFailed).reason.endswith("(refit.deadline_s); no word from engine-0")


def test_epochs_follow_a_failure_after_pauses_that_double() -> None:
    drive = Drive(retry_backoff_s=4.0, failures=20)
    drive.fleet()
    drive.open()
    pauses = []
    for _ in range(5):
        broken_transfer(drive)
        assert drive.one(RefitFailed).phase == "send"
        wake = drive.core.wake(drive.state)
        assert wake is not None
        pauses.append(wake - drive.now)
        drive.at(drive.now + pauses[-1] / 2)
        assert drive.said == []
        retry(drive)
    assert pauses == [4.0, 8.0, 16.0, BACKOFF_MAX_S, BACKOFF_MAX_S]


def test_too_many_failures_in_a_row_end_the_run() -> None:
    drive = Drive(failures=2)
    drive.fleet()
    drive.open()
    broken_transfer(drive)
    assert drive.emitted(ActorFailed) == []
    retry(drive)
    broken_transfer(drive)
    failed = drive.one(ActorFailed)
    assert failed.fatal
    assert "2 refits failed in a row" in failed.message
    assert "closed by peer" in failed.message
    assert drive.core.wake(drive.state) is None
    assert drive.step(Tick()) == []


def test_commit_forgives_failures(drive: Drive) -> None:
    drive.open()
    broken_transfer(drive)
    retry(drive)
    drive.drain()
    drive.load()
    assert drive.state.failures == 0
    assert drive.core.wake(drive.state) is None


def test_second_failure_without_a_culprit_leaves_members_out_in_turn() -> None:
    drive = Drive(engines=3)
    drive.fleet()
    drive.open()
    left_out = []
    for _ in range(3):
        broken_transfer(drive)
        left_out.append([e.engine for e in drive.emitted(EngineQuarantined)])
        retry(drive)
    assert left_out[0] == []
    assert all(len(names) == 1 for names in left_out[1:])
    assert left_out[1] != left_out[2]


def test_only_engine_is_never_left_out() -> None:
    drive = Drive(engines=1)
    drive.fleet()
    drive.open()
    for _ in range(4):
        broken_transfer(drive)
        assert drive.emitted(EngineQuarantined) == []
        retry(drive)
        assert len(drive.one(RefitRequested).engines) == 1


def test_engine_with_faults_takes_part_when_there_is_no_other(drive: Drive) -> None:
    transferring(drive)
    drive.hear(drive.failed(1, "join"), EngineDead(engine="engine-0", boot=1, reason="gone"))
    drive.hear(engine_ready(0, boot=2))
    drive.hear(EngineDead(engine="engine-0", boot=2, reason="gone"))
    drive.state = msgspec.structs.replace(drive.state, gathering=False)
    retry(drive)
    assert drive.one(RefitRequested).engines == (Member("engine-1", 1),)


def test_bad_engine_pauses_the_fleet_ever_more_rarely() -> None:
    drive = Drive(retry_backoff_s=40.0)
    drive.fleet()
    drive.open()
    pauses = []
    for _ in range(6):
        drive.drain()
        drive.hear(drive.failed(1, "verify"), drive.sent(), drive.loaded(0))
        assert drive.one(RefitCommitted).engines == (Member("engine-0", 1),)
        begin = drive.now
        drive.wake()
        drive.open()
        pauses.append(drive.now - begin)
    assert pauses == [40.0, 80.0, 160.0, STRIKE_MAX_S, STRIKE_MAX_S, STRIKE_MAX_S]
    drive.drain()
    drive.load()
    assert drive.state.engines["engine-1"].strikes == 0


def test_engine_that_died_in_a_failed_epoch_is_left_out_as_a_new_boot_too(drive: Drive) -> None:
    drive.open()
    broken_transfer(drive)
    drive.hear(EngineDead(engine="engine-1", boot=1, reason="killed"), engine_ready(1, boot=2))
    retry(drive)
    assert drive.one(RefitRequested).engines == (Member("engine-0", 1),)


def test_engine_that_died_in_idle_time_joins_at_once(serving: Drive) -> None:
    serving.hear(booted("engine-1", 2), engine_ready(1, boot=2))
    serving.open()
    assert len(serving.one(RefitRequested).engines) == 2


# --- restarts and ends -----------------------------------------------------------------------------------------------


def test_restart_while_opening_takes_another_number(drive: Drive) -> None:
    drive.said = drive.step(Booted(2))
    assert drive.said == [FsyncHigh(2)]
    assert drive.step(HighWritten(1)) == []
    drive.open()
    assert drive.raised() == [("epoch", 2)]


@pytest.mark.parametrize("stage", ["draining", "transferring"])
def test_restart_goes_on_with_the_epoch(drive: Drive, stage: str) -> None:
    drive.open()
    if stage == "transferring":
        drive.drain()
    assert drive.step(Booted(2)) == []
    if stage == "draining":
        drive.drain()
    drive.load()
    assert drive.one(RefitCommitted).epoch == 1


def test_high_water_mark_of_nothing_pending_is_ignored(serving: Drive) -> None:
    assert serving.step(HighWritten(1)) == []


def test_run_that_stops_ends_the_epoch_under_way_and_begins_no_other(drive: Drive) -> None:
    drive.open()
    drive.hear(RunStopping(reason="done"))
    assert not drive.core.done(drive.state)
    drive.drain()
    drive.hear(stepped(1, 1))
    drive.load()
    assert drive.one(RefitCommitted).epoch == 1
    assert drive.core.done(drive.state)
    assert drive.core.wake(drive.state) is None


def test_run_that_stops_while_opening_requests_nothing(drive: Drive) -> None:
    drive.hear(RunStopping(reason="done"))
    assert drive.core.wake(drive.state) is None
    drive.open()
    assert drive.emitted(RefitRequested) == []
    assert drive.core.done(drive.state)


def test_resumed_run_waits_anew_for_the_whole_fleet(serving: Drive) -> None:
    serving.hear(RunStopping(reason="stop"))
    serving.now += 10_000
    serving.step(Booted(2))
    assert not serving.core.done(serving.state)
    serving.hear(RunStarted(config_digest="c", resumed=True), booted("trainer", 2), booted("engine-0", 2))
    serving.hear(engine_ready(0, boot=2), booted("engine-1", 2), policy_ready(1, 0, boot=2))
    assert serving.emitted(WaitStarted)[-1].on == "engine-1"
    assert serving.core.wake(serving.state) == serving.now + 100.0
    assert FsyncHigh(2) in serving.hear(engine_ready(1, boot=2))


def test_a_stop_before_the_first_boot_does_not_end_the_run_that_is_resumed() -> None:
    """The process of the resume is the first, and hears of all that was before."""
    drive = Drive()
    drive.hear(RunStarted(config_digest="c"), RunStopping(reason="interrupted"))
    assert drive.core.done(drive.state)
    drive.hear(RunStarted(config_digest="c", resumed=True))
    assert not drive.core.done(drive.state)
    assert drive.fleet()
    drive.committed()
    assert drive.one(RefitCommitted).epoch == 1


def test_restart_renews_the_deadline_of_a_wait_for_the_fleet_and_forgets_that_it_gave_up() -> None:
    drive = Drive()
    drive.at(1100.0)
    assert drive.state.halted
    drive.now = 9000.0
    drive.step(Booted(2))
    assert drive.one(WaitStarted).deadline_at == 9100.0
    assert drive.fleet()
    drive.committed()
    assert drive.one(RefitCommitted).epoch == 1


def test_state_survives_a_snapshot(drive: Drive) -> None:
    transferring(drive)
    packed = msgspec.msgpack.encode(drive.state)
    assert msgspec.msgpack.decode(packed, type=RefitState) == drive.state
    assert drive.core.intake(drive.state) == {}


# --- checksums of the fleet ------------------------------------------------------------------------------------------


def summed(drive: Drive, *fingerprints: str) -> None:
    """Load every engine, each with the fingerprint of what it holds."""
    drive.open()
    drive.drain(tuple(range(len(fingerprints))))
    said = drive.hear(drive.sent())
    for number, fingerprint in enumerate(fingerprints):
        said += drive.hear(msgspec.structs.replace(drive.loaded(number), digest="", fingerprint=fingerprint))
    drive.said = said


@pytest.mark.parametrize("fingerprints", [("a", "a", "a"), ("a", "", "a"), ("", "", ""), ("a", "", "")])
def test_engines_whose_checksums_agree_are_committed(fingerprints: tuple[str, ...]) -> None:
    drive = three()
    summed(drive, *fingerprints)
    assert len(drive.one(RefitCommitted).engines) == 3


def test_an_engine_of_other_checksums_stays_out() -> None:
    drive = three()
    summed(drive, "a", "a", "b")
    cut = drive.one(EngineQuarantined)
    assert cut.engine == "engine-2"
    assert "other checksums than those of 2 engines" in cut.reason
    assert len(drive.one(RefitCommitted).engines) == 2


@pytest.mark.parametrize("fingerprints", [("a", "b", ""), ("a", "b", "c")])
def test_without_a_majority_all_that_differ_stay_out(fingerprints: tuple[str, ...]) -> None:
    drive = three()
    summed(drive, *fingerprints)
    cut = drive.emitted(EngineQuarantined)
    assert [each.engine for each in cut] == [f"engine-{number}" for number, each in enumerate(fingerprints) if each]
    assert "without a majority" in cut[0].reason


# --- the generation probe --------------------------------------------------------------------------------------------


def probed(drive: Drive, *probes: tuple[float, ...]) -> list[Any]:
    """Load every engine, each with what it generated for the probe."""
    drive.open()
    drive.drain(tuple(range(len(probes))))
    said = drive.hear(drive.sent())
    for number, probe in enumerate(probes):
        said += drive.hear(msgspec.structs.replace(drive.loaded(number), probe=probe))
    drive.said = said
    return said


def three() -> Drive:
    drive = Drive(engines=3)
    drive.fleet()
    return drive


def test_engines_that_generate_alike_are_committed() -> None:
    drive = three()
    probed(drive, (-1.0, -2.0), (-1.001, -2.0), (-1.0, -1.999))
    assert len(drive.one(RefitCommitted).engines) == 3


def test_an_engine_that_generates_otherwise_stays_out() -> None:
    drive = three()
    probed(drive, (-1.0, -2.0), (-1.0, -2.5), (-1.0, -2.0))
    cut = drive.one(EngineQuarantined)
    assert (cut.engine, "up to 0.5 off" in cut.reason) == ("engine-1", True)
    assert len(drive.one(RefitCommitted).engines) == 2


def test_an_engine_that_generates_too_little_stays_out() -> None:
    drive = three()
    probed(drive, (-1.0, -2.0), (-1.0, -2.0), (-1.0,))
    assert "generated 1 tokens for the probe, others 2" in drive.one(EngineQuarantined).reason


def test_two_engines_that_disagree_are_both_doubted(drive: Drive) -> None:
    probed(drive, (-1.0,), (-3.0,))
    assert len(drive.emitted(EngineQuarantined)) == 2
    assert drive.one(RefitFailed).phase == "verify"


def test_an_engine_that_was_not_asked_is_not_compared() -> None:
    drive = three()
    probed(drive, (-1.0,), (), (-1.0,))
    assert len(drive.one(RefitCommitted).engines) == 3
