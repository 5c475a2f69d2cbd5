"""What the engine's core does with each input."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from actors.engine.core import EngineCore
from actors.engine.state import (
    Abandon,
    Drain,
    Drained,
    DrainFailed,
    EngineState,
    Exit,
    Lease,
    LeaseLapsed,
    LeaseRenewed,
    Loaded,
    LoadFailed,
    Receive,
    Resume,
    Resumed,
    ServerDead,
    ServerHeard,
    ServerReady,
    ServerSilent,
    StartServer,
    Watch,
)
from config.schema import EngineConfig, RefitConfig
from contracts.core import Booted, Emit, Tick
from contracts.events import (
    EngineDead,
    EngineDrained,
    EngineFailed,
    EngineLoaded,
    EngineReady,
    FleetScaled,
    Record,
    RunStarted,
    RunStopping,
    TransferFinished,
    WaitEnded,
    WaitStarted,
)
from pipeline.runtime.journal import Journal
from tests.unit.engine.world import (
    ME,
    PLAN,
    committed,
    core,
    delivered,
    failed,
    offered,
    quarantined,
    requested,
    started,
)

BOOT = 3
TO_UNCERTAIN = (Booted(BOOT), ServerReady("http://e", 2, 1.5))
TO_DRAINING = (*TO_UNCERTAIN, requested(1, BOOT))
TO_DRAINED = (*TO_DRAINING, offered(1), Drained(1, 0.5))
TO_LOADING = (*TO_DRAINED, started(1, BOOT))
TO_LOADED = (*TO_LOADING, Loaded(1, "d", 2.0))
TO_RESUMING = (*TO_LOADED, committed(1, BOOT))
TO_SERVING = (*TO_RESUMING, Resumed(1))
TO_LAPSED = (*TO_SERVING, LeaseLapsed(1))
TO_DEAD = (*TO_SERVING, ServerDead("r"))
PATHS = {
    "starting": TO_UNCERTAIN[:1],
    "uncertain": TO_UNCERTAIN,
    "draining": TO_DRAINING,
    "drained": TO_DRAINED,
    "loading": TO_LOADING,
    "loaded": TO_LOADED,
    "resuming": TO_RESUMING,
    "serving": TO_SERVING,
    "lapsed": TO_LAPSED,
    "dead": TO_DEAD,
}
CONFIRMED = Lease(1, 1, 100.0)


class Run:
    """A core and its state. `feed` answers events and commands, `waits` collects the announcements of waits."""

    def __init__(self, *inputs: Any, using: EngineCore | None = None) -> None:
        self.core = using or core()
        self.state: EngineState = self.core.initial()
        self.waits: list[Any] = []
        self.feed(*inputs)

    def feed(self, *inputs: Any, now: float = 0.0) -> list[Any]:
        done = []
        for input in inputs:
            taken = delivered(input) if isinstance(input, Record) else input
            self.state, commands = self.core.step(self.state, taken, now)
            for command in commands:
                event = command.event if isinstance(command, Emit) else None
                (self.waits if isinstance(event, WaitStarted | WaitEnded) else done).append(event or command)
        return done


@pytest.mark.parametrize("mode", PATHS)
def test_paths_lead_to_their_modes(mode: str) -> None:
    assert Run(*PATHS[mode]).state.mode == mode


# --- boots -----------------------------------------------------------------------------------------------------------


def test_a_boot_starts_a_server_that_is_uncertain_when_ready() -> None:
    run = Run()
    assert run.feed(Booted(BOOT)) == [StartServer(0.0)]
    own = ("NCCL_CUMEM_ENABLE=0",)
    ready = EngineReady(engine=ME, boot=BOOT, url="http://e", ranks=2, seconds=1.5, nccl=own)
    assert run.feed(ServerReady("http://e", 2, 1.5, own)) == [ready, Watch()]
    assert run.feed(ServerReady("http://e", 2, 1.5)) == []
    assert run.state.mode == "uncertain"


@pytest.mark.parametrize("mode", PATHS)
def test_every_restart_is_uncertain_and_keeps_the_epoch_alone(mode: str) -> None:
    run = Run(*PATHS[mode])
    epoch = run.state.epoch
    (start,) = run.feed(Booted(BOOT + 1))
    assert isinstance(start, StartServer)
    assert (run.state.mode, run.state.boot, run.state.epoch) == ("starting", BOOT + 1, epoch)
    assert (run.state.version, run.state.part, run.state.group) == (None, None, None)
    assert run.feed(requested(1, BOOT, BOOT + 1), Drained(1, 0.0), Loaded(1, "d", 0.0), Resumed(1)) == []


@pytest.mark.parametrize("mode", [mode for mode in PATHS if mode != "dead"])
def test_a_dead_server_ends_the_boot(mode: str) -> None:
    run = Run(*PATHS[mode])
    assert run.feed(ServerDead("exit 1")) == [EngineDead(engine=ME, boot=BOOT, reason="exit 1"), Exit("exit 1", False)]
    assert run.feed(ServerDead("again"), requested(9, BOOT), RunStopping(reason="r"), Tick()) == []


def test_servers_that_never_serve_are_started_ever_later_and_then_not_at_all() -> None:
    run = Run(using=EngineCore(ME, EngineConfig(restarts=8, restart_backoff_s=0.5), RefitConfig()))
    delays = [run.feed(Booted(boot))[0].delay_s for boot in range(1, 10)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    (exit,) = run.feed(Booted(10))
    assert exit.fatal
    assert "9 servers of engine-0 in a row" in exit.reason
    assert "engine.restarts=8" in exit.reason
    assert run.feed(Booted(11)) == [StartServer(0.0)]  # the next run has its own budget


def test_a_boot_that_served_is_not_held_against_the_next() -> None:
    run = Run(using=EngineCore(ME, EngineConfig(restarts=0), RefitConfig()))
    run.feed(*TO_DEAD)
    assert run.feed(Booted(BOOT + 1)) == [StartServer(0.0)]


def test_a_restart_folds_the_journal_to_the_same_state() -> None:
    run = Run()
    core: Any = run.core
    journal = Journal(core)
    records = []
    second = (requested(2, BOOT), offered(2), DrainFailed(2, "e", "r"))
    third = (requested(3, BOOT), offered(3), Drained(3, 0.0), started(3, BOOT), LoadFailed(3, "join", "e", "r"))
    for seq, input in enumerate((*TO_LAPSED, LeaseRenewed(1), *second, *third, ServerDead("r")), start=1):
        taken = delivered(input) if isinstance(input, Record) else input
        run.state, commands = run.core.step(run.state, taken, float(seq))
        records.append(journal.record(seq, float(seq), taken, commands))
    assert journal.fold(None, records) == (len(records), run.state)
    snapshot = journal.snapshot(run.state)
    assert journal.fold((len(records), snapshot), records) == (len(records), run.state)


# --- the drain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drain", "abort_at"), [("finish", 24.0), ("interrupt", 15.0)])
@pytest.mark.parametrize("mode", ["uncertain", "drained", "loaded", "serving", "lapsed"])
def test_a_newer_request_drains_at_once(mode: str, drain: str, abort_at: float) -> None:
    run = Run(*PATHS[mode])
    assert run.feed(requested(2, BOOT, drain=drain)) == [Drain(2, abort_at, 30.0)]
    assert (run.state.mode, run.state.epoch, run.state.version) == ("draining", 2, None)


@pytest.mark.parametrize(("mode", "group"), [("draining", None), ("loading", "g"), ("resuming", None)])
def test_a_newer_request_first_gives_up_what_is_performed(mode: str, group: str | None) -> None:
    run = Run(*PATHS[mode])
    assert run.feed(requested(2, BOOT)) == [Abandon(1, group), Drain(2, 24.0, 30.0)]


HELD = (*TO_SERVING, requested(2, BOOT, drain="in_flight"))


def test_in_flight_holds_what_runs_over_the_load_and_lets_it_go_on_after_the_commit() -> None:
    run = Run(*TO_SERVING)
    assert run.feed(requested(2, BOOT, drain="in_flight")) == [Drain(2, 0.0, 30.0, hold=True)]
    told = EngineDrained(epoch=2, engine=ME, boot=BOOT, seconds=0.5, held=3)
    assert run.feed(Drained(2, 0.5, 3)) == [told]
    (receive,) = run.feed(offered(2), started(2, BOOT))
    assert isinstance(receive, Receive)
    assert receive.hold
    run.feed(Loaded(2, "d", 1.0))
    assert run.feed(committed(2, BOOT))[0] == Resume(2)


@pytest.mark.parametrize("mode", ["uncertain", "lapsed"])
def test_in_flight_holds_nothing_where_nothing_is_served(mode: str) -> None:
    """What still runs there belongs to an epoch that is over, or to a lease that is."""
    assert Run(*PATHS[mode]).feed(requested(2, BOOT, drain="in_flight")) == [Drain(2, 0.0, 30.0)]


@pytest.mark.parametrize(
    "path",
    [
        HELD,
        (*HELD, Drained(2, 0.5, 3)),
        (*HELD, offered(2), Drained(2, 0.5, 3), started(2, BOOT), Loaded(2, "d", 1.0)),
    ],
    ids=["draining", "drained", "loaded"],
)
def test_what_is_held_is_given_up_with_its_epoch(path: Any) -> None:
    """Nothing goes on from weights that no commit made whole."""
    run = Run(*path)
    assert run.feed(failed(2)) == [Abandon(2, None)]
    assert run.state.mode == "uncertain"
    assert run.feed(requested(3, BOOT, drain="in_flight")) == [Drain(3, 0.0, 30.0)]


@pytest.mark.parametrize("boots", [(), (BOOT - 1,), (BOOT + 1,)])
def test_a_request_that_does_not_count_on_this_boot_ends_serving(boots: tuple[int, ...]) -> None:
    run = Run(*TO_SERVING)
    assert run.feed(requested(2, *boots)) == [Abandon(1, None)]
    assert (run.state.mode, run.state.epoch) == ("uncertain", 2)


@pytest.mark.parametrize("mode", [mode for mode in PATHS if mode not in ("starting", "uncertain", "dead")])
def test_a_request_of_an_older_or_the_same_epoch_changes_nothing(mode: str) -> None:
    run = Run(*PATHS[mode])
    before = run.state
    assert run.feed(requested(1, BOOT), requested(0, BOOT)) == []
    assert run.state == before


def test_a_short_refit_has_a_short_drain() -> None:
    short = EngineCore(ME, EngineConfig(), RefitConfig(deadline_s=10.0, drain_deadline_s=30.0))
    assert short.lease_s == 10.0
    drain = Run(*TO_UNCERTAIN, using=short).feed(requested(1, BOOT))[0]
    assert drain == Drain(1, 58.0, 60.0)


def test_the_proof_of_a_drain_is_told_once() -> None:
    run = Run(*TO_DRAINING)
    drained = EngineDrained(epoch=1, engine=ME, boot=BOOT, seconds=0.5)
    assert run.feed(Drained(1, 0.5)) == [drained]
    assert run.feed(Drained(1, 0.5)) == []


def test_a_failed_drain_is_told_and_given_up() -> None:
    run = Run(*TO_DRAINING)
    told = EngineFailed(epoch=1, engine=ME, boot=BOOT, phase="drain", error="Deadline", reason="busy")
    assert run.feed(DrainFailed(1, "Deadline", "busy")) == [told, Abandon(1, None)]
    assert run.state.mode == "uncertain"
    assert run.feed(DrainFailed(1, "Deadline", "busy"), started(1, BOOT)) == []


# --- the transfer ----------------------------------------------------------------------------------------------------


def test_a_transfer_is_received_as_offered() -> None:
    run = Run(*TO_DRAINED)
    expected = Receive(
        epoch=1,
        version=10,
        group="g",
        fresh=True,
        leave=None,
        offset=1,
        world_size=2,
        address="127.0.0.1",
        port=5000,
        plan=PLAN.key,
        deadline_at=60.0,
    )
    assert run.feed(started(1, BOOT)) == [expected]
    assert run.feed(started(1, BOOT)) == []


def test_a_fresh_group_leaves_the_older_one_and_the_same_group_is_kept() -> None:
    second = (requested(2, BOOT), offered(2), Drained(2, 0.0))
    (fresh,) = Run(*TO_SERVING, *second).feed(started(2, BOOT, group="h"))
    (kept,) = Run(*TO_SERVING, *second).feed(started(2, BOOT, group="g", fresh=False))
    assert (fresh.group, fresh.fresh, fresh.leave) == ("h", True, "g")
    assert (kept.group, kept.fresh, kept.leave) == ("g", False, None)


def test_the_offer_of_the_newest_trainer_counts() -> None:
    offers = (
        offered(1, trainer_boot=2, port=2),
        offered(1, trainer_boot=3, port=3),
        offered(1, trainer_boot=1, port=1),
    )
    (receive,) = Run(*TO_DRAINING, *offers, offered(2, port=4), Drained(1, 0.0)).feed(started(1, BOOT))
    assert receive.port == 3


@pytest.mark.parametrize(
    ("before", "event", "error", "reason"),
    [
        (TO_DRAINING, started(1, BOOT), "NotDrained", "while engine-0 was draining"),
        ((*TO_DRAINING, Drained(1, 0.0)), started(1, BOOT), "NoOffer", "nothing was offered"),
        ((*TO_DRAINING, offered(1, version=9), Drained(1, 0.0)), started(1, BOOT), "NoOffer", "version 9 was offered"),
        (TO_DRAINED, started(1, BOOT, fresh=False), "UnknownGroup", "the server is in None"),
    ],
)
def test_a_transfer_that_can_not_be_received_is_refused(before: Any, event: Any, error: str, reason: str) -> None:
    run = Run(*before)
    told, *rest = run.feed(event)
    assert (told.phase, told.error) == ("join", error)
    assert reason in told.reason
    assert rest == ([Abandon(1, None)] if error == "NotDrained" else [])
    assert run.state.mode == "uncertain"


def test_a_transfer_without_this_boot_is_no_business_of_ours() -> None:
    run = Run(*TO_DRAINED)
    assert run.feed(started(1, BOOT - 1)) == []
    assert run.state.mode == "uncertain"


def test_a_complete_load_is_told_with_its_digest() -> None:
    run = Run(*TO_LOADING)
    loaded = EngineLoaded(epoch=1, engine=ME, boot=BOOT, digest="d", seconds=2.0)
    assert run.feed(Loaded(1, "d", 2.0)) == [loaded]


def test_a_failed_load_is_told_and_its_group_is_left() -> None:
    run = Run(*TO_LOADING)
    told = EngineFailed(epoch=1, engine=ME, boot=BOOT, phase="receive", error="E", reason="r")
    assert run.feed(LoadFailed(1, "receive", "E", "r")) == [told, Abandon(1, "g")]
    assert (run.state.mode, run.state.group) == ("uncertain", None)


@pytest.mark.parametrize("late", [Drained(1, 0.0), DrainFailed(1, "e", "r"), Loaded(1, "d", 0.0), Resumed(1)])
@pytest.mark.parametrize("mode", ["draining", "drained", "loading", "loaded", "resuming"])
def test_results_of_older_epochs_change_nothing(late: Any, mode: str) -> None:
    second = (
        requested(2, BOOT),
        offered(2),
        Drained(2, 0.0),
        started(2, BOOT),
        Loaded(2, "d", 0.0),
        committed(2, BOOT),
    )
    count = {"draining": 1, "drained": 3, "loading": 4, "loaded": 5, "resuming": 6}[mode]
    run = Run(*TO_SERVING, *second[:count])
    before = run.state
    assert before.mode == mode
    assert run.feed(late, LoadFailed(1, "receive", "e", "r"), LeaseLapsed(1), LeaseRenewed(1)) == []
    assert run.state == before


@pytest.mark.parametrize("mode", PATHS)
def test_results_that_the_mode_does_not_wait_for_change_nothing(mode: str) -> None:
    run = Run(*PATHS[mode])
    before = run.state
    results = [
        ("draining", Drained(1, 0.0)),
        ("draining", DrainFailed(1, "e", "r")),
        ("loading", Loaded(1, "d", 0.0)),
        ("loading", LoadFailed(1, "receive", "e", "r")),
        ("resuming", Resumed(1)),
        ("serving", LeaseLapsed(1)),
        ("lapsed", LeaseRenewed(1)),
    ]
    for awaited_in, result in results:
        if awaited_in != mode:
            assert run.feed(result) == []
    assert run.state == before


# --- the end of an epoch ---------------------------------------------------------------------------------------------


def test_a_commit_of_what_was_loaded_leads_to_serving() -> None:
    run = Run(*TO_LOADED)
    assert run.feed(committed(1, BOOT)) == [Resume(1)]
    assert run.feed(committed(1, BOOT)) == []
    assert run.feed(Resumed(1)) == []
    assert (run.state.mode, run.state.version, run.state.part) == ("serving", 10, None)
    assert run.feed(committed(1, BOOT)) == []
    assert run.state.mode == "serving"


@pytest.mark.parametrize(
    "mode", [mode for mode in PATHS if mode not in ("loaded", "resuming", "serving", "lapsed", "dead")]
)
def test_a_boot_that_is_counted_on_without_a_load_ends(mode: str) -> None:
    run = Run(*PATHS[mode])
    dead, exit = run.feed(committed(1, BOOT))
    assert (dead.boot, exit.fatal) == (BOOT, False)
    assert f"while it was {mode}" in dead.reason


@pytest.mark.parametrize("event", [committed(1, BOOT, version=11), committed(2, BOOT)])
@pytest.mark.parametrize("mode", ["loaded", "serving"])
def test_a_commit_of_something_else_than_was_loaded_ends_the_boot(mode: str, event: Any) -> None:
    assert isinstance(Run(*PATHS[mode]).feed(event)[0], EngineDead)


OVER = [failed(1), quarantined(1, BOOT), committed(1), committed(1, BOOT - 1), failed(2), quarantined(2, BOOT)]
GIVEN_UP = {
    "starting": [],
    "uncertain": [],
    "draining": [Abandon(1, None)],
    "drained": [],
    "loading": [Abandon(1, "g")],
    "loaded": [],
    "resuming": [Abandon(1, None)],
    "serving": [Abandon(1, None)],
    "lapsed": [Abandon(1, None)],
}


@pytest.mark.parametrize("event", OVER, ids=lambda event: f"{type(event).__name__}-{event.epoch}")
@pytest.mark.parametrize("mode", GIVEN_UP)
def test_every_other_end_of_an_epoch_is_uncertain(mode: str, event: Any) -> None:
    run = Run(*PATHS[mode], *((requested(1),) if mode in ("starting", "uncertain") else ()))
    assert run.feed(event) == GIVEN_UP[mode]
    assert run.state.mode == ("starting" if mode == "starting" else "uncertain")
    assert run.state.epoch == event.epoch


def test_events_of_older_epochs_and_of_others_change_nothing() -> None:
    run = Run(*TO_SERVING, requested(2, BOOT), offered(2), Drained(2, 0.0), started(2, BOOT), Loaded(2, "d", 0.0))
    before = run.state
    finished = TransferFinished(epoch=2, version=20, seconds=1.0, bytes=8)
    events = (failed(1), quarantined(1, BOOT), quarantined(2, BOOT - 1), quarantined(2, BOOT, "engine-1"))
    assert run.feed(*events, committed(1, BOOT), started(1, BOOT), offered(1), finished) == []
    assert run.state == before


# --- the lease -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", PATHS)
def test_only_serving_admits(mode: str) -> None:
    run = Run(*PATHS[mode])
    assert run.core.admits(run.state, 1, CONFIRMED, 100.0) == (mode == "serving")


@pytest.mark.parametrize("mode", PATHS)
def test_a_request_waits_for_the_commit_that_an_engine_waits_for(mode: str) -> None:
    run = Run(*PATHS[mode])
    epoch = run.state.epoch
    assert run.core.about_to_serve(run.state, epoch, 0.5) == (mode in ("loaded", "resuming"))
    assert not run.core.about_to_serve(run.state, epoch, 1.0)
    assert not run.core.about_to_serve(run.state, epoch - 1, 0.0)
    assert not run.core.about_to_serve(run.state, epoch + 1, 0.0)


@pytest.mark.parametrize(
    ("epoch", "lease", "now", "why"),
    [
        (2, CONFIRMED, 100.0, "the request was sent under epoch 2"),
        (0, CONFIRMED, 100.0, "the request was sent under epoch 0"),
        (1, Lease(1, 2, 100.0), 100.0, "2 was the newest"),
        (1, Lease(2, 2, 100.0), 100.0, "epoch 2 was committed"),
        (1, Lease(0, 1, 100.0), 100.0, "epoch 0 was committed"),
        (1, CONFIRMED, 110.0, "10.0 s ago"),
    ],
)
def test_an_admission_needs_the_served_epoch_committed_newest_and_fresh(
    epoch: int, lease: Lease, now: float, why: str
) -> None:
    run = Run(*TO_SERVING)
    assert run.core.admits(run.state, 1, CONFIRMED, 109.9)
    assert not run.core.admits(run.state, epoch, lease, now)
    assert why in run.core.refusal(run.state, epoch, lease, now)


def test_a_refusal_names_the_mode() -> None:
    run = Run(*TO_DRAINING)
    assert run.core.refusal(run.state, 1, CONFIRMED, 100.0) == "engine-0 is draining in epoch 1"


def test_a_lapsed_lease_is_renewed_when_nothing_has_begun_since() -> None:
    run = Run(*TO_SERVING)
    assert run.feed(LeaseLapsed(1)) == []
    assert (run.state.mode, run.state.version) == ("lapsed", 10)
    assert run.feed(LeaseRenewed(1)) == []
    assert (run.state.mode, run.state.version) == ("serving", 10)


def test_no_lease_outlasts_a_drain() -> None:
    assert EngineCore(ME, EngineConfig(lease_s=10.0), RefitConfig(drain_deadline_s=4.0)).lease_s == 4.0


# --- waits and the end -----------------------------------------------------------------------------------------------


def test_waits_are_announced_once_and_ended() -> None:
    run = Run(*TO_UNCERTAIN)
    assert [(type(w), w.on) for w in run.waits] == [(WaitStarted, "refit")]
    run.feed(*TO_SERVING[len(TO_UNCERTAIN) :], now=7.0)
    assert [(type(w), w.on) for w in run.waits[1:]] == [(WaitEnded, "refit")]
    assert run.waits[-1].seconds == 7.0
    run.feed(requested(2, BOOT))
    assert (run.waits[-1].on, run.waits[-1].deadline_at) == ("refit", 60.0)


def test_a_lapse_waits_for_the_store_and_then_for_a_refit() -> None:
    run = Run(*TO_LAPSED)
    assert (type(run.waits[-1]), run.waits[-1].on) == (WaitStarted, "store")
    run.feed(requested(2, BOOT))
    assert [(type(w), w.on) for w in run.waits[-2:]] == [(WaitEnded, "store"), (WaitStarted, "refit")]


def test_a_wait_ends_with_its_boot() -> None:
    run = Run(*TO_UNCERTAIN)
    run.feed(Booted(BOOT + 1), now=9.0)
    assert (type(run.waits[-1]), run.waits[-1].seconds) == (WaitEnded, 9.0)


SILENT = ServerSilent("/model_info: no answer in 5 s")


@pytest.mark.parametrize("mode", [mode for mode in PATHS if mode not in ("starting", "dead")])
def test_a_server_that_does_not_answer_is_waited_for_until_it_does(mode: str) -> None:
    run = Run(*PATHS[mode])
    before = run.state
    assert run.feed(SILENT, ServerSilent("again"), now=3.0) == []
    (wait,) = (w for w in run.waits if w.on == "server")
    assert wait.cause == "no answer to a probe: /model_info: no answer in 5 s"
    assert (wait.deadline_at is None) == (before.part is None)
    assert run.feed(ServerHeard(), ServerHeard(), now=5.0) == []
    assert run.waits[-1] == WaitEnded(actor=ME, on="server", seconds=2.0)
    assert run.state == before


@pytest.mark.parametrize("end", [Booted(BOOT + 1), ServerDead("r")])
def test_nobody_waits_for_a_server_that_has_ended(end: Any) -> None:
    run = Run(*TO_DRAINING, SILENT)
    run.feed(end, now=9.0)
    assert [w.seconds for w in run.waits if isinstance(w, WaitEnded) and w.on == "server"] == [9.0]
    assert run.state.unanswered is None


@pytest.mark.parametrize("mode", PATHS)
def test_a_stopping_engine_leaves_when_no_epoch_needs_it(mode: str) -> None:
    run = Run(*PATHS[mode])
    assert not run.core.done(run.state)
    run.state = replace(run.state, stopping=True)
    assert run.core.done(run.state) == (mode not in ("draining", "drained", "loading", "loaded", "resuming"))


def test_a_resumed_run_is_not_stopping() -> None:
    run = Run(*TO_SERVING, RunStopping(reason="r"))
    assert run.core.done(run.state)
    run.feed(RunStarted(config_digest="d", resumed=True))
    assert not run.core.done(run.state)


def test_it_takes_no_work_and_needs_no_clock() -> None:
    run = Run(*TO_DRAINING)
    assert (run.core.intake(run.state), run.core.wake(run.state)) == ({}, None)
    assert run.core.step(run.state, Tick(), 1.0) == (run.state, ())


@pytest.mark.parametrize("mode", PATHS)
def test_an_engine_that_the_run_is_scaled_down_by_leaves_once_it_serves_no_more(mode: str) -> None:
    run = Run(*PATHS[mode], FleetScaled(engines=1))
    assert not run.core.done(run.state), "engine-0 stays"
    run.feed(FleetScaled(engines=0))
    assert run.core.done(run.state) == (mode in ("starting", "uncertain"))
    run.feed(FleetScaled(engines=1))
    assert not run.core.done(run.state)
