"""What the gateway's core does with each input, one rule a test."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.gateway.core import GatewayCore
from actors.gateway.faults import BACKOFF_MAX_S, BACKOFF_S
from actors.gateway.state import (
    PIECE,
    PIECES,
    AbortAll,
    AbortCall,
    Announce,
    Answered,
    Arrived,
    Call,
    CallFailed,
    Left,
    Listening,
    Part,
    Refuse,
    Reply,
    State,
    boot_prefix,
    gate,
    home_of,
    rid,
    rid_prefix,
)
from config.schema import GatewayConfig, RefitConfig
from contracts.core import Booted, Delivered, Emit, Ref, Tick
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import (
    ActorBooted,
    EngineDead,
    EngineQuarantined,
    EngineReady,
    GateClosed,
    GatewayReady,
    Member,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    RunFinished,
    RunStarted,
    RunStopping,
    WaitEnded,
    WaitStarted,
)

REFIT = RefitConfig(deadline_s=60.0, drain_deadline_s=30.0)
ME = "gateway-0"


def delivered(event: Any) -> Delivered:
    stream = STREAM_OF[type(event)]
    envelope = Envelope(
        id="x:1.0", run="r", stream=stream, actor="x", boot=1, epoch=0, wall_ns=0, mono_ns=0, body=event
    )
    return Delivered(Ref(stream, "1-0"), envelope)


def ready(engine: str, boot: int = 1) -> EngineReady:
    return EngineReady(engine=engine, boot=boot, url=f"http://{engine}-{boot}", ranks=1, seconds=0.0)


def requested(epoch: int, drain: Any = "finish", deadline_at: float = 160.0) -> RefitRequested:
    return RefitRequested(
        epoch=epoch, version=10 * epoch, step=epoch, engines=(), gateways=(), drain=drain, deadline_at=deadline_at
    )  # fmt: skip


def committed(epoch: int, *engines: tuple[str, int]) -> RefitCommitted:
    members = tuple(Member(*engine) for engine in engines or (("engine-0", 1), ("engine-1", 1)))
    return RefitCommitted(
        epoch=epoch, version=10 * epoch, step=epoch, engines=members, world_size=3,
        pause_s=0, drain_s=0, transfer_s=0, bytes=0,
    )  # fmt: skip


def done(call: int, *samples: int) -> Answered:
    return Answered(call, tuple(Part(sample, 4, "stop") for sample in samples or (0,)))


def partial(call: int, *samples: int) -> Answered:
    return Answered(call, tuple(Part(sample, 2, "abort") for sample in samples or (0,)))


class Driver:
    """Feeds a core and keeps its state; every answer is the list of commands of that step."""

    def __init__(self, retries: int = 2) -> None:
        self.core = GatewayCore(ME, GatewayConfig(retries=retries), REFIT)
        self.state: State = self.core.initial()
        self.now = 100.0

    def feed(self, input: Any) -> list[Any]:
        if type(input) in STREAM_OF:
            input = delivered(input)
        self.state, commands = self.core.step(self.state, input, self.now)
        return list(commands)

    def all(self, *inputs: Any) -> list[Any]:
        return [command for input in inputs for command in self.feed(input)]

    def at(self, now: float) -> list[Any]:
        self.now = now
        return self.feed(Tick())

    def boot(self, boot: int = 1) -> list[Any]:
        echo = GatewayReady(gateway=ME, boot=boot, url="http://me")
        return self.all(Booted(boot), Listening("http://me"), echo)

    def arrive(self, request: int = 1, n: int = 1, session: str = "", deadline_at: float = 400.0) -> list[Any]:
        return self.feed(Arrived(request, n, session or f"s{request}", deadline_at))


@pytest.fixture
def fresh() -> Driver:
    driver = Driver()
    driver.all(ready("engine-0"), ready("engine-1"))
    driver.boot()
    return driver


@pytest.fixture
def serving(fresh: Driver) -> Driver:
    fresh.all(requested(1), committed(1))
    assert gate(fresh.state) == "open"
    return fresh


def only(commands: list[Any], kind: type) -> Any:
    (found,) = [command for command in commands if isinstance(command, kind)]
    return found


def of(commands: list[Any], kind: type) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


def events(commands: list[Any], kind: type) -> list[Any]:
    return [c.event for c in commands if isinstance(c, Emit) and isinstance(c.event, kind)]


# --- boot ------------------------------------------------------------------------------------------------------------


def test_a_first_boot_announces_itself_and_stays_closed():
    driver = Driver()
    commands = driver.all(Booted(1), Listening("http://me"))
    assert commands == [Announce(), Emit(GatewayReady(gateway=ME, boot=1, url="http://me"))]
    assert gate(driver.state) == "closed"
    assert of(driver.arrive(), Call) == []


def test_a_commit_opens_the_gate_only_after_the_own_announcement_came_back():
    driver = Driver()
    driver.all(ready("engine-0"), Booted(1), requested(1), committed(1, ("engine-0", 1)))
    driver.arrive()
    assert gate(driver.state) == "closed"
    driver.feed(GatewayReady(gateway="gateway-1", boot=1, url="u"))
    driver.feed(GatewayReady(gateway=ME, boot=7, url="u"))
    assert gate(driver.state) == "closed"
    commands = driver.feed(GatewayReady(gateway=ME, boot=1, url="u"))
    assert only(commands, Call).request == 1


def test_a_restart_resumes_at_the_last_commit_when_no_newer_refit_was_requested(serving: Driver):
    serving.boot(2)
    assert gate(serving.state) == "open"
    assert only(serving.arrive(), Call).version == 10


def test_a_restart_in_the_middle_of_a_refit_stays_closed_and_reports_its_own_gate(serving: Driver):
    serving.arrive()
    serving.feed(requested(2))
    commands = serving.boot(2)
    assert gate(serving.state) == "closed"
    closed = events(commands, GateClosed)
    assert [(c.epoch, c.boot) for c in closed] == [(2, 2)]


def test_a_restart_forgets_the_requests_of_its_predecessor_and_aborts_its_calls(serving: Driver):
    serving.arrive(1)
    commands = serving.feed(Booted(2))
    urls = ("http://engine-0-1", "http://engine-1-1")
    assert only(commands, AbortAll) == AbortAll(urls, ("gateway-0-00000001-",))
    assert serving.state.requests == {}
    assert serving.state.calls == {}
    assert only(serving.feed(Booted(3)), AbortAll).prefixes == ("gateway-0-00000001-", "gateway-0-00000002-")
    serving.all(GatewayReady(gateway=ME, boot=3, url="u"), requested(2), committed(2))
    assert only(serving.feed(Booted(4)), AbortAll).prefixes == ("gateway-0-00000003-",)


def test_a_restart_that_knows_no_engine_aborts_nothing():
    driver = Driver()
    assert driver.all(Booted(1), Booted(2)) == [Announce(), Announce()]


def test_waits_of_the_predecessor_end_at_the_boot(fresh: Driver):
    fresh.arrive()
    fresh.now += 5
    assert [(w.on, w.seconds) for w in events(fresh.feed(Booted(2)), WaitEnded)] == [("refit", 5)]


def test_refits_that_ended_before_the_boot_are_not_answered():
    driver = Driver()
    driver.all(Booted(1), ready("engine-0"))
    assert events(driver.all(requested(1), committed(1), requested(2)), GateClosed) == []
    assert [c.epoch for c in events(driver.feed(GatewayReady(gateway=ME, boot=1, url="u")), GateClosed)] == [2]


# --- request ids -----------------------------------------------------------------------------------------------------


def test_a_prefix_names_one_boot_or_call_and_no_other():
    calls = [(g, b, c) for g in ("gateway-1", "gateway-10") for b in (1, 10, 11) for c in (1, 10, 100)]
    ids = {(*key, s): rid(rid_prefix(*key), s) for key in calls for s in (0, 1, 10, 127)}
    assert len(set(ids.values())) == len(ids)
    for key in calls:
        assert {k[:3] for k, value in ids.items() if value.startswith(rid_prefix(*key))} == {key}
        assert {k[:2] for k, value in ids.items() if value.startswith(boot_prefix(*key[:2]))} == {key[:2]}


def test_every_call_has_an_id_of_its_own_also_after_a_restart(serving: Driver):
    ids = [only(serving.arrive(1), Call).rid, only(serving.arrive(2), Call).rid]
    serving.boot(2)
    ids.append(only(serving.arrive(1), Call).rid)
    assert len(set(ids)) == 3
    assert len({len(name) for name in ids}) == 1


# --- routing ---------------------------------------------------------------------------------------------------------


def test_a_call_carries_the_commit_under_which_it_was_dispatched(serving: Driver):
    call = only(serving.arrive(7, n=3), Call)
    assert (call.request, call.samples, call.epoch, call.version, call.boot) == (7, (0, 1, 2), 1, 10, 1)
    assert call.url == f"http://{call.engine}-1"


def test_new_sessions_go_to_the_engine_with_the_fewest_samples_in_flight(serving: Driver):
    first = only(serving.arrive(1, n=8), Call).engine
    others = [only(serving.arrive(k, n=3), Call).engine for k in (2, 3)]
    assert others == [{"engine-0": "engine-1", "engine-1": "engine-0"}[first]] * 2
    assert only(serving.arrive(4, n=1), Call).engine == others[0]


def test_held_requests_are_spread_over_the_engines_by_their_samples(serving: Driver):
    serving.feed(requested(2))
    for k, n in enumerate((9, 2, 2, 2, 2)):
        serving.arrive(k, n=n)
    first, *others = [call.engine for call in of(serving.feed(committed(2)), Call)]
    assert set(others) == {"engine-0", "engine-1"} - {first}


def test_a_session_keeps_its_engine_while_that_serves(serving: Driver):
    first = only(serving.arrive(1, n=8, session="a"), Call)
    assert only(serving.arrive(2, session="a"), Call).engine == first.engine
    serving.feed(EngineDead(engine=first.engine, boot=1, reason="killed"))
    assert only(serving.arrive(3, session="a"), Call).engine != first.engine


def test_remembered_sessions_are_bounded(serving: Driver):
    full = tuple({f"{piece}/{k}": "engine-0" for k in range(PIECE)} for piece in range(PIECES))
    serving.state = msgspec.structs.replace(serving.state, homes=full)
    serving.arrive(1, session="new")
    assert sum(map(len, serving.state.homes)) <= PIECE * PIECES
    assert home_of(serving.state.homes, "new")
    assert home_of(serving.state.homes, "0/0") == "engine-0"
    assert not home_of(serving.state.homes, f"{PIECES - 1}/0"), "the oldest are forgotten"


def test_sessions_are_found_wherever_they_are_remembered(serving: Driver):
    engines = {f"s{k}": only(serving.arrive(k + 1, session=f"s{k}"), Call).engine for k in range(2 * PIECE + 1)}
    assert {session: home_of(serving.state.homes, session) for session in engines} == engines
    again = {s: only(serving.arrive(1000 + k, session=s), Call).engine for k, s in enumerate(engines)}
    assert again == engines


def test_only_members_of_the_commit_with_a_known_address_are_called(fresh: Driver):
    fresh.all(requested(1), committed(1, ("engine-0", 2), ("engine-9", 1)))
    assert gate(fresh.state) == "open"
    assert [w.on for w in events(fresh.arrive(), WaitStarted)] == ["engine"]
    commands = fresh.feed(ready("engine-0", 2))
    assert only(commands, Call).url == "http://engine-0-2"
    assert [w.on for w in events(commands, WaitEnded)] == ["engine"]


def test_a_quarantined_engine_gets_nothing_until_a_commit_lists_it(serving: Driver):
    serving.feed(EngineQuarantined(epoch=1, engine="engine-0", boot=1, reason="digest"))
    assert {only(serving.arrive(k), Call).engine for k in range(6)} == {"engine-1"}
    serving.all(requested(2, "interrupt"), *[partial(call) for call in serving.state.calls], committed(2))
    assert {call.engine for call in serving.state.calls.values()} == {"engine-0", "engine-1"}


# --- the gate --------------------------------------------------------------------------------------------------------


def test_an_idle_gate_closes_at_once(serving: Driver):
    serving.now = 101.0
    closed = events(serving.feed(requested(2)), GateClosed)
    assert closed == [GateClosed(epoch=2, gateway=ME, boot=1, held=0, interrupted=0, seconds=0.0)]
    assert events(serving.feed(Tick()), GateClosed) == []


def test_finish_waits_for_calls_in_flight_and_holds_newcomers(serving: Driver):
    serving.arrive(1)
    commands = serving.feed(requested(2, "finish"))
    assert events(commands, GateClosed) == []
    assert of(commands, AbortCall) == []
    wait = events(commands, WaitStarted)
    assert [(w.on, w.deadline_at) for w in wait] == [("drain", 127.0)]
    assert gate(serving.state) == "closing"
    assert [w.on for w in events(serving.arrive(2), WaitStarted)] == ["refit"]
    serving.now = 103.0
    commands = serving.feed(done(1))
    assert only(commands, Reply) == Reply(1, 0.0)
    closed = events(commands, GateClosed)
    assert closed == [GateClosed(epoch=2, gateway=ME, boot=1, held=1, interrupted=0, seconds=3.0)]
    assert [(w.on, w.seconds) for w in events(commands, WaitEnded)] == [("drain", 3.0)]


def test_finish_aborts_what_outlives_its_share_of_the_drain(serving: Driver):
    serving.arrive(1)
    serving.feed(requested(2, "finish"))
    assert serving.core.wake(serving.state) == 121.0
    assert of(serving.at(120.9), AbortCall) == []
    assert of(serving.at(121.0), AbortCall) == [AbortCall(1, 127.0)]
    assert serving.core.wake(serving.state) == 400.0
    assert of(serving.at(122.0), AbortCall) == []
    closed = events(serving.feed(partial(1)), GateClosed)
    assert [(c.held, c.interrupted) for c in closed] == [(1, 1)]


def test_in_flight_closes_at_once_and_leaves_its_calls_where_they_are(serving: Driver):
    serving.arrive(1)
    serving.arrive(2, deadline_at=300.0)
    commands = serving.feed(requested(2, "in_flight"))
    assert [(c.held, c.running) for c in events(commands, GateClosed)] == [(0, 2)]
    assert events(commands, WaitStarted) == []
    assert serving.core.wake(serving.state) == 300.0
    assert of(serving.at(160.0), AbortCall) == []
    assert of(serving.arrive(3), Call) == []
    commands = serving.feed(committed(2))
    assert of(commands, AbortCall) == []
    assert only(commands, Call).epoch == 2
    assert [(call.engine, call.aborting) for call in serving.state.calls.values()][:2] == [
        ("engine-0", False),
        ("engine-1", False),
    ]
    assert only(serving.feed(done(1)), Reply) == Reply(1, 0.0)


def test_in_flight_ends_calls_on_engines_that_the_commit_leaves_out(serving: Driver):
    serving.arrive(1)
    serving.arrive(2)
    gone = {call.engine: number for number, call in serving.state.calls.items()}
    serving.feed(requested(2, "in_flight"))
    commands = serving.feed(committed(2, ("engine-0", 1), ("engine-1", 2)))
    assert of(commands, AbortCall) == [AbortCall(gone["engine-1"], 100.0)]


def test_in_flight_goes_on_elsewhere_with_what_a_failed_refit_aborted(serving: Driver):
    """The engine ended it, as it must: that counts as nobody's fault."""
    serving.arrive(1)
    serving.all(requested(2, "in_flight"), partial(1))
    assert serving.state.avoided == {}
    assert serving.state.requests[1].failures == 0
    assert only(serving.feed(committed(2)), Call).request == 1


def test_ghosts_are_remembered_while_engines_need_not_be_idle(serving: Driver):
    serving.boot(2)
    serving.all(requested(2, "in_flight"), committed(2))
    assert serving.state.ghosts == (1,)
    serving.all(requested(3, "finish"), committed(3))
    assert serving.state.ghosts == ()


def test_interrupt_aborts_at_once_and_continues_the_unfinished_samples_after_the_commit(serving: Driver):
    serving.arrive(1, n=3)
    serving.now = 110.0
    assert of(serving.feed(requested(2, "interrupt")), AbortCall) == [AbortCall(1, 127.0)]
    mixed = Answered(1, (Part(0, 4, "stop"), Part(1, 2, "abort"), Part(2, 0, "abort")))
    commands = serving.feed(mixed)
    assert [c.interrupted for c in events(commands, GateClosed)] == [1]
    serving.now = 112.0
    again = only(serving.feed(committed(2)), Call)
    assert (again.request, again.samples, again.version, again.epoch) == (1, (1, 2), 20, 2)
    assert only(serving.feed(done(again.call, 1, 2)), Reply) == Reply(1, 2.0)


def test_held_and_interrupted_requests_go_out_in_order_of_arrival(serving: Driver):
    serving.all(*[Arrived(k, 1, f"s{k}", 400.0) for k in (1, 2)])
    serving.feed(requested(2, "interrupt"))
    serving.arrive(3)
    serving.all(partial(2), partial(1))
    assert [call.request for call in of(serving.feed(committed(2)), Call)] == [1, 2, 3]


def test_a_call_that_failed_before_the_drain_was_not_interrupted(serving: Driver):
    serving.arrive()
    serving.feed(CallFailed(1, "infra", "reset"))
    serving.feed(requested(2))
    assert [c.interrupted for c in events(serving.feed(done(2)), GateClosed)] == [0]


def test_a_failed_refit_keeps_the_gate_closed_until_the_next_commit(serving: Driver):
    serving.feed(requested(2))
    serving.feed(RefitFailed(epoch=2, version=20, phase="transfer", reason="x"))
    assert of(serving.arrive(), Call) == []
    assert [c.epoch for c in events(serving.feed(requested(3)), GateClosed)] == [3]
    assert only(serving.feed(committed(3)), Call).version == 30


def test_a_newer_request_takes_over_a_drain_and_only_it_is_reported(serving: Driver):
    serving.arrive()
    serving.all(requested(2), requested(3))
    assert [c.epoch for c in events(serving.feed(done(1)), GateClosed)] == [3]


def test_stale_requests_and_commits_change_nothing(serving: Driver):
    serving.all(requested(5), committed(5))
    before = serving.state
    assert serving.all(requested(5), requested(4), committed(5), committed(4)) == []
    assert serving.state == before


def test_a_commit_older_than_the_newest_request_does_not_open(serving: Driver):
    serving.all(requested(2), requested(3), committed(2))
    assert gate(serving.state) == "closed"
    assert serving.state.drain is not None
    assert of(serving.arrive(), Call) == []
    assert only(serving.feed(committed(3)), Call).version == 30


def test_a_call_still_open_at_a_commit_is_cut_off_and_its_request_goes_out_again(serving: Driver):
    serving.arrive()
    assert of(serving.feed(committed(2)), AbortCall) == [AbortCall(1, 100.0)]
    again = only(serving.feed(CallFailed(1, "infra", "cut off")), Call)
    assert (again.request, again.epoch, again.version) == (1, 2, 20)
    assert serving.state.requests[1].failures == 0


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_failed_call_goes_to_another_engine(serving: Driver):
    first = only(serving.arrive(n=2), Call)
    second = only(serving.feed(CallFailed(first.call, "infra", "reset")), Call)
    assert second.engine != first.engine
    assert second.samples == (0, 1)
    assert {only(serving.arrive(k), Call).engine for k in (5, 6, 7)} == {second.engine}


def test_retries_are_bounded_and_the_last_reason_is_named(serving: Driver):
    serving.arrive()
    reasons = []
    for attempt in range(3):
        commands = serving.feed(CallFailed(attempt + 1, "infra", f"reset {attempt}"))
        reasons += of(commands, Refuse)
        serving.at(serving.now + BACKOFF_MAX_S)
    assert [(r.kind, r.reason[10:]) for r in reasons] == [("infra", "3 calls failed, the last one so: reset 2")]
    assert serving.state.requests == {}


def test_a_refusal_for_want_of_a_lease_costs_no_retry(serving: Driver):
    serving.arrive(deadline_at=1e6)
    for call in range(1, 10):
        assert of(serving.feed(CallFailed(call, "not_serving", "409")), Refuse) == []
        serving.at(serving.now + BACKOFF_MAX_S)
    assert serving.state.requests[1].failures == 0


def test_bad_data_is_refused_without_a_retry_and_without_blame(serving: Driver):
    serving.arrive()
    commands = serving.feed(CallFailed(1, "data", "too long"))
    assert only(commands, Refuse).kind == "data"
    assert serving.state.avoided == {}


def test_with_no_engine_left_a_request_is_held_and_tried_again_after_a_pause(serving: Driver):
    serving.arrive()
    serving.feed(CallFailed(1, "not_serving", "409"))
    commands = serving.feed(CallFailed(2, "not_serving", "409"))
    assert of(commands, Call) == []
    assert [w.on for w in events(commands, WaitStarted)] == ["engine"]
    assert serving.core.wake(serving.state) == 100.0 + BACKOFF_S
    commands = serving.at(100.0 + BACKOFF_S)
    assert only(commands, Call).request == 1
    assert [w.on for w in events(commands, WaitEnded)] == ["engine"]


def test_the_pause_doubles_with_each_failure_in_a_row_up_to_a_bound(serving: Driver):
    serving.feed(EngineDead(engine="engine-1", boot=1, reason="x"))
    serving.arrive(deadline_at=1e6)
    pauses = []
    for call in range(1, 9):
        serving.feed(CallFailed(call, "not_serving", "409"))
        wake = serving.core.wake(serving.state)
        assert wake is not None
        pauses.append(wake - serving.now)
        serving.at(wake)
    assert pauses == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0])
    serving.feed(done(9))
    assert serving.state.avoided == {}


def test_failures_of_many_calls_at_once_count_as_one(serving: Driver):
    serving.feed(EngineDead(engine="engine-1", boot=1, reason="x"))
    for k in range(1, 9):
        serving.arrive(k)
    serving.all(*[CallFailed(k, "infra", "reset") for k in range(1, 9)])
    assert serving.core.wake(serving.state) == 100.0 + BACKOFF_S


@pytest.mark.parametrize("cure", [ready("engine-0"), committed(2)])
def test_an_engine_that_failed_is_trusted_again_after_a_commit_or_its_readiness(serving: Driver, cure: Any):
    serving.feed(EngineDead(engine="engine-1", boot=1, reason="x"))
    serving.arrive()
    serving.feed(CallFailed(1, "infra", "reset"))
    assert only(serving.feed(cure), Call).engine in ("engine-0", "engine-1")


def test_an_abort_that_nobody_asked_for_is_continued_elsewhere(serving: Driver):
    first = only(serving.arrive(n=2), Call)
    again = only(serving.feed(Answered(1, (Part(0, 4, "stop"), Part(1, 1, "abort")))), Call)
    assert again.engine != first.engine
    assert again.samples == (1,)
    assert serving.state.requests[1].failures == 0


def test_an_abort_that_nobody_asked_for_and_that_yields_nothing_costs_a_retry(serving: Driver):
    serving.arrive(deadline_at=1e6)
    refused = []
    for call in (1, 2, 3):
        refused += of(serving.feed(Answered(call, (Part(0, 0, "abort"),))), Refuse)
        serving.at(serving.now + BACKOFF_MAX_S)
    assert [r.kind for r in refused] == ["infra"]


@pytest.mark.parametrize(
    "news",
    [
        EngineDead(engine="engine-0", boot=1, reason="killed"),
        EngineQuarantined(epoch=1, engine="engine-0", boot=1, reason="hung"),
        ActorBooted(actor="engine-0", boot=2, pid=1, host="h"),
    ],
)
def test_calls_on_a_lost_engine_are_cut_off_and_go_elsewhere_uncharged(serving: Driver, news: Any):
    calls = [only(serving.arrive(k), Call) for k in (1, 2)]
    lost = next(call for call in calls if call.engine == "engine-0")
    assert of(serving.feed(news), AbortCall) == [AbortCall(lost.call, 100.0)]
    again = only(serving.feed(CallFailed(lost.call, "infra", "cut off")), Call)
    assert again.engine == "engine-1"
    assert serving.state.requests[lost.request].failures == 0


@pytest.mark.parametrize(
    "news",
    [
        EngineDead(engine="engine-0", boot=0, reason="old"),
        ActorBooted(actor="engine-0", boot=1, pid=1, host="h"),
        ActorBooted(actor="trainer", boot=9, pid=1, host="h"),
    ],
)
def test_the_end_of_an_older_boot_changes_nothing(serving: Driver, news: Any):
    serving.all(Arrived(1, 1, "a", 400.0), Arrived(2, 1, "b", 400.0))
    before = serving.state
    assert serving.feed(news) == []
    assert serving.state == before


def test_an_engine_that_died_before_its_commit_was_heard_is_not_called(fresh: Driver):
    fresh.all(requested(1), EngineDead(engine="engine-0", boot=1, reason="x"), committed(1))
    assert {only(fresh.arrive(k), Call).engine for k in range(4)} == {"engine-1"}


# --- deadlines and leaving -------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_held_request(fresh: Driver):
    fresh.arrive(deadline_at=110.0)
    assert fresh.core.wake(fresh.state) == 110.0
    commands = fresh.at(110.0)
    assert only(commands, Refuse) == Refuse(1, "timeout", "the deadline passed while no refit is committed yet")
    assert [w.on for w in events(commands, WaitEnded)] == ["refit"]
    assert fresh.core.wake(fresh.state) is None


def test_a_deadline_during_a_refit_names_its_epoch(serving: Driver):
    serving.feed(requested(2))
    serving.arrive(deadline_at=110.0)
    assert "epoch 2" in only(serving.at(110.0), Refuse).reason


def test_a_deadline_without_an_engine_says_so(serving: Driver):
    serving.all(*[EngineDead(engine=f"engine-{k}", boot=1, reason="x") for k in (0, 1)])
    serving.arrive(deadline_at=110.0)
    assert "no engine" in only(serving.at(110.0), Refuse).reason


def test_a_deadline_aborts_a_call_which_counts_as_in_flight_until_it_ends(serving: Driver):
    serving.arrive(deadline_at=110.0)
    commands = serving.at(110.0)
    assert "engine-" in only(commands, Refuse).reason
    assert only(commands, AbortCall) == AbortCall(1, 115.0)
    assert events(serving.feed(requested(2, "interrupt", 170.0)), GateClosed) == []
    assert [c.interrupted for c in events(serving.feed(partial(1)), GateClosed)] == [0]


def test_an_abort_after_a_deadline_is_shorter_than_a_short_drain():
    core = GatewayCore(ME, GatewayConfig(), RefitConfig(drain_deadline_s=2.0))
    driver = Driver()
    driver.core = core
    driver.all(ready("engine-0"))
    driver.boot()
    driver.all(requested(1), committed(1, ("engine-0", 1)))
    driver.arrive(deadline_at=110.0)
    assert only(driver.at(110.0), AbortCall).deadline_at == pytest.approx(110.4)


def test_an_answer_that_comes_with_the_deadline_is_still_given(serving: Driver):
    serving.arrive(deadline_at=110.0)
    serving.now = 110.0
    assert only(serving.feed(done(1)), Reply).request == 1


def test_a_caller_that_leaves_takes_its_call_along(serving: Driver):
    serving.arrive(1)
    assert serving.feed(Left(1)) == [AbortCall(1, 105.0)]
    assert serving.feed(partial(1)) == []
    assert serving.state.calls == {}
    assert serving.feed(Left(1)) == []


def test_a_failure_after_the_caller_left_needs_no_answer(serving: Driver):
    serving.arrive(1)
    serving.feed(Left(1))
    assert serving.feed(CallFailed(1, "infra", "cut off")) == []
    assert serving.state.calls == {}


def test_a_held_caller_that_leaves_is_forgotten(fresh: Driver):
    fresh.arrive(1)
    fresh.feed(Left(1))
    assert fresh.state.requests == {}
    assert of(fresh.all(requested(1), committed(1)), Call) == []


def test_results_of_unknown_calls_are_ignored(serving: Driver):
    before = serving.state
    assert serving.all(done(9), CallFailed(9, "infra", "x")) == []
    assert serving.state == before


# --- the end ---------------------------------------------------------------------------------------------------------


def test_it_leaves_once_stopped_and_empty_handed(serving: Driver):
    serving.arrive(1)
    assert not serving.core.done(serving.state)
    serving.feed(RunStopping(reason="x"))
    assert not serving.core.done(serving.state)
    serving.feed(Left(1))
    assert not serving.core.done(serving.state)
    serving.feed(partial(1))
    assert serving.core.done(serving.state)


@pytest.mark.parametrize("news", [Booted(2), RunStarted(config_digest="d", resumed=True)])
def test_a_run_that_goes_on_after_a_stop_is_served_again(serving: Driver, news: Any):
    serving.feed(RunStopping(reason="x"))
    assert serving.core.done(serving.state)
    serving.feed(news)
    assert not serving.core.done(serving.state)


def test_it_takes_no_work_entries_and_ignores_what_it_does_not_know(serving: Driver):
    assert serving.core.intake(serving.state) == {}
    before = serving.state
    assert serving.feed(RunFinished(reason="x")) == []
    assert serving.state == before


def test_state_and_inputs_survive_the_journal(serving: Driver):
    serving.arrive(1, n=2)
    serving.feed(CallFailed(1, "infra", "reset"))
    serving.all(Arrived(2, 1, "b", 400.0), requested(2, "interrupt"))
    data = msgspec.msgpack.encode(serving.state)
    assert msgspec.msgpack.decode(data, type=State) == serving.state
    for input in (done(1), CallFailed(1, "infra", "x"), Arrived(1, 2, "s", 3.0), Left(1), Listening("u")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(input), type=GatewayCore.local_type) == input


def test_a_deadline_ends_the_requests_that_it_is_of(fresh: Driver) -> None:
    fresh.arrive(1, deadline_at=110.0)
    fresh.arrive(2, deadline_at=200.0)
    assert only(fresh.at(110.0), Refuse).request == 1
    assert fresh.state.requests.keys() == {2}


def test_what_becomes_of_the_call_of_a_caller_that_left_is_told_nobody(serving: Driver) -> None:
    call = only(serving.arrive(1), Call).call
    serving.feed(Left(1))
    assert serving.feed(CallFailed(call, "data", "no tokens")) == []
    assert not serving.state.calls
