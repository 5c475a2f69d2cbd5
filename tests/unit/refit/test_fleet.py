"""Engines that are watched, lost, restarted, added and taken away, and gateways that fall silent."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest
from aiohttp import web

from actors.refit.fleet import NEXT, SELF_S, Happening
from actors.refit.probes import Prober
from actors.refit.state import Heard, Missed, Watch
from config.schema import FleetConfig
from contracts.core import Booted
from contracts.events import (
    ActorFailed,
    EngineDead,
    EngineQuarantined,
    FleetScaled,
    GatewayReady,
    Health,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    RunStarted,
    RunStopping,
    TransferStarted,
)
from tests.unit.refit.drive import Drive, booted, engine_ready, stepped

STATES: tuple[Health, ...] = get_args(Health)


@pytest.fixture
def drive() -> Drive:
    """Two engines serve epoch 1."""
    made = Drive()
    made.fleet()
    made.committed()
    made.health.clear()
    return made


def lose(drive: Drive, name: str = "engine-1", boot: int = 1) -> list[Any]:
    said: list[Any] = []
    for misses in (1, 2, 3):
        said += drive.step(Missed(name, boot, misses, "no answer"))
    drive.said = said
    return said


def health(drive: Drive, name: str = "engine-1") -> str:
    return drive.state.engines[name].health


def story(drive: Drive) -> list[tuple[str, str, str]]:
    return [(e.engine, e.was, e.health) for e in drive.health]


# --- the table -------------------------------------------------------------------------------------------------------


def test_only_a_commit_makes_an_engine_healthy() -> None:
    assert {what for (state, what), after in NEXT.items() if after == "healthy" and state != "healthy"} == {"committed"}


def test_an_engine_without_a_process_is_committed_by_nothing() -> None:
    assert not [s for s in ("dead", "restarting", "retired") if (s, "committed") in NEXT]


def test_retired_is_left_only_by_another_start() -> None:
    assert {what for (state, what) in NEXT if state == "retired"} == {"ready"}


def test_every_state_can_be_reached_and_every_happening_matters() -> None:
    reached, rest = {"uncertain"}, ["uncertain"]
    while rest:
        state = rest.pop()
        for (before, _), after in NEXT.items():
            if before == state and after not in reached:
                reached.add(after)
                rest.append(after)
    assert reached == set(STATES)
    assert {what for _, what in NEXT} == set(get_args(Happening))


# --- probes ----------------------------------------------------------------------------------------------------------


def test_all_members_are_watched_from_their_readiness_and_after_a_restart_of_the_coordinator() -> None:
    drive = Drive()
    drive.fleet()
    members = [Watch("gateway-0", 1, "g"), Watch("engine-0", 1, "u"), Watch("engine-1", 1, "u")]
    assert drive.watched == members
    drive.watched.clear()
    drive.step(Booted(2))
    assert sorted(w.name for w in drive.watched) == sorted(w.name for w in members)


def test_a_missed_probe_makes_suspect_and_an_answer_restores(drive: Drive) -> None:
    assert drive.step(Missed("engine-1", 1, 1, "no answer")) == []
    assert drive.step(Heard("engine-1", 1)) == []
    assert story(drive) == [("engine-1", "healthy", "suspect"), ("engine-1", "suspect", "healthy")]


def test_probes_of_an_older_boot_or_of_strangers_count_for_nothing(drive: Drive) -> None:
    for name, boot in (("engine-1", 0), ("gateway-0", 0), ("engine-9", 1)):
        drive.step(Missed(name, boot, 3, "no answer"))
        drive.step(Heard(name, boot))
    assert story(drive) == []
    assert not drive.state.gateways["gateway-0"].silent


def test_an_engine_that_answers_no_probe_is_dead_and_out_of_the_commit(drive: Drive) -> None:
    lose(drive)
    assert story(drive) == [("engine-1", "healthy", "suspect"), ("engine-1", "suspect", "dead")]
    cut = drive.one(EngineQuarantined)
    assert (cut.epoch, cut.engine, cut.boot) == (1, "engine-1", 1)
    assert drive.state.phase == "idle", "the other engine goes on"
    assert drive.step(Missed("engine-1", 1, 4, "no answer")) == []


def test_an_engine_that_was_lost_and_answers_again_is_loaded_anew_before_it_serves(drive: Drive) -> None:
    lose(drive)
    drive.step(Heard("engine-1", 1))
    assert health(drive) == "uncertain"
    assert drive.state.phase == "opening"
    drive.committed()
    assert health(drive) == "healthy"


def test_a_lost_engine_leaves_the_drain_at_once(drive: Drive) -> None:
    drive.hear(stepped(1, 1))
    drive.open()
    drive.hear(drive.gate(), drive.drained(0), drive.offer())
    lose(drive)
    assert [m.engine for m in drive.one(TransferStarted).members] == ["engine-0"]
    assert health(drive) == "dead"


def test_an_engine_that_is_lost_in_the_transfer_fails_the_epoch_at_once(drive: Drive) -> None:
    drive.hear(stepped(1, 1))
    drive.open()
    drive.drain()
    lose(drive)
    assert drive.one(RefitFailed).phase == "transfer"
    assert drive.one(EngineQuarantined).engine == "engine-1"


# --- restarts --------------------------------------------------------------------------------------------------------


def test_a_dead_engine_is_restarted_after_a_pause(drive: Drive) -> None:
    lose(drive)
    drive.health.clear()
    drive.wake()
    assert drive.now == 1001.0
    (order,) = drive.health
    assert (order.health, order.ordered, order.boot) == ("restarting", True, 1)


def test_restarts_back_off_and_end_in_retirement(drive: Drive) -> None:
    at, pauses = drive.now, []
    lose(drive)
    while health(drive) != "retired":
        drive.wake()
        if drive.health[-1].ordered:
            pauses.append(drive.now - at)
        if health(drive) == "dead":
            at = drive.now
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    failure = drive.one(ActorFailed)
    assert (failure.actor, failure.fatal) == ("engine-1", False)
    assert drive.watched[-1] == Watch("engine-1", 1, None)
    assert drive.core.wake(drive.state) is None


def test_the_run_ends_when_its_last_engine_is_retired() -> None:
    drive = Drive(engines=1)
    drive.fleet()
    drive.committed((0,))
    lose(drive, "engine-0")
    failures: list[ActorFailed] = []
    while health(drive, "engine-0") != "retired":
        drive.wake()
        failures += drive.emitted(ActorFailed)
    assert [f.fatal for f in failures if f.actor == "engine-0"] == [True]


def test_a_commit_gives_the_budget_back(drive: Drive) -> None:
    lose(drive)
    drive.wake()
    assert drive.state.engines["engine-1"].restarts == 1
    drive.hear(booted("engine-1", 2), engine_ready(1, 2), boot=2)
    drive.committed()
    assert drive.state.engines["engine-1"].restarts == 0
    assert story(drive)[-3:] == [
        ("engine-1", "dead", "restarting"),
        ("engine-1", "restarting", "uncertain"),
        ("engine-1", "uncertain", "healthy"),
    ]


def test_a_process_that_ended_by_itself_is_left_to_come_back(drive: Drive) -> None:
    drive.hear(EngineDead(engine="engine-1", boot=1, reason="killed"))
    assert health(drive) == "dead"
    assert drive.core.wake(drive.state) == drive.now + SELF_S
    drive.hear(booted("engine-1", 2))
    assert health(drive) == "restarting"
    drive.wake()
    assert health(drive) == "dead", "it was not ready in launch.start_deadline_s"


def test_nothing_is_restarted_while_the_run_stops(drive: Drive) -> None:
    lose(drive)
    drive.hear(RunStopping(reason="done"))
    drive.at(drive.now + 1000)
    assert health(drive) == "dead"


# --- gateways --------------------------------------------------------------------------------------------------------


def test_a_silent_gateway_holds_no_refit_up(drive: Drive) -> None:
    drive.hear(stepped(1, 1))
    drive.open()
    drive.hear(drive.drained(0), drive.drained(1), drive.offer())
    assert drive.emitted(TransferStarted) == []
    lose(drive, "gateway-0")
    assert drive.one(TransferStarted).epoch == 2
    drive.load()
    assert drive.one(RefitCommitted).epoch == 2


def test_a_gateway_that_was_silent_before_is_not_waited_for_until_it_answers(drive: Drive) -> None:
    lose(drive, "gateway-0")
    for epoch in (2, 3):
        drive.hear(stepped(epoch, epoch))
        drive.open()
        assert [m.actor for m in drive.one(RefitRequested).gateways] == ["gateway-0"]
        drive.hear(drive.drained(0), drive.drained(1), drive.offer())
        assert bool(drive.emitted(TransferStarted)) == (epoch == 2)
        if epoch == 3:
            drive.hear(drive.gate())
        drive.load()
        drive.step(Heard("gateway-0", 1))


def test_a_gateway_that_is_restarted_is_watched_as_its_new_boot(drive: Drive) -> None:
    lose(drive, "gateway-0")
    drive.hear(booted("gateway-0", 2), GatewayReady(gateway="gateway-0", boot=2, url="h"))
    assert drive.watched[-1] == Watch("gateway-0", 2, "h")
    assert not drive.state.gateways["gateway-0"].silent


# --- scaling ---------------------------------------------------------------------------------------------------------


def test_an_added_engine_joins_with_a_complete_load(drive: Drive) -> None:
    drive.hear(FleetScaled(engines=3))
    assert drive.state.phase == "idle", "nothing waits for it"
    drive.hear(engine_ready(2))
    drive.open()
    drive.drain((0, 1, 2))
    started = drive.one(TransferStarted)
    assert (started.world_size, started.fresh) == (4, True)
    drive.load((0, 1, 2))
    assert len(drive.one(RefitCommitted).engines) == 3


def test_a_removed_engine_serves_until_a_commit_without_it(drive: Drive) -> None:
    drive.hear(FleetScaled(engines=1))
    assert health(drive) == "retired"
    assert drive.state.engines["engine-1"].serving
    drive.open()
    assert [m.actor for m in drive.one(RefitRequested).engines] == ["engine-0"]
    drive.drain((0,))
    assert (drive.one(TransferStarted).world_size, drive.one(TransferStarted).fresh) == (2, True)
    drive.load((0,))
    assert [m.actor for m in drive.one(RefitCommitted).engines] == ["engine-0"]
    assert drive.core.wake(drive.state) is None
    drive.watched.clear()
    drive.step(Booted(2))
    assert [w.name for w in drive.watched] == ["engine-0", "gateway-0"]


def test_removing_an_engine_that_the_group_is_without_keeps_the_group(drive: Drive) -> None:
    drive.hear(FleetScaled(engines=3), engine_ready(2))
    drive.open()
    drive.hear(EngineDead(engine="engine-2", boot=1, reason="killed"))
    drive.drain()
    drive.load()
    group = drive.state.group
    assert group is not None
    drive.hear(FleetScaled(engines=2))
    assert health(drive, "engine-2") == "retired"
    assert drive.state.group == group


def test_an_engine_is_removed_after_the_epoch_that_runs(drive: Drive) -> None:
    drive.hear(stepped(1, 1))
    drive.open()
    drive.hear(FleetScaled(engines=1))
    drive.drain()
    drive.load()
    assert len(drive.one(RefitCommitted).engines) == 2
    assert drive.state.phase == "opening"


def test_a_removed_engine_that_starts_by_itself_stays_out_until_the_run_grows_again(drive: Drive) -> None:
    drive.hear(FleetScaled(engines=1))
    drive.committed((0,))
    drive.hear(engine_ready(1, 2))
    assert health(drive) == "retired"
    drive.hear(FleetScaled(engines=2), engine_ready(1, 3), boot=3)
    assert health(drive) == "uncertain"
    drive.committed()
    assert health(drive) == "healthy"


def test_a_resumed_run_has_as_many_engines_as_configured(drive: Drive) -> None:
    drive.hear(FleetScaled(engines=1), RunStarted(config_digest="d"))
    assert drive.state.size == 1
    drive.hear(RunStarted(config_digest="d", resumed=True))
    assert drive.state.size is None


# --- the shell -------------------------------------------------------------------------------------------------------

QUICK = FleetConfig(probe_s=0.01, probe_deadline_s=0.5, misses=2)


async def serve(handler: Any, port: int = 0) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.add_routes([web.get("/health", handler)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_misses_are_counted_up_to_the_limit_and_an_answer_ends_them() -> None:
    said: asyncio.Queue[Missed | Heard] = asyncio.Queue()

    async def busy(request: web.Request) -> web.Response:
        return web.Response(status=503)

    runner, url = await serve(busy)
    port = runner.addresses[0][1]
    prober = Prober(QUICK, said.put_nowait)
    prober.watch(Watch("engine-0", 1, url))
    await runner.cleanup()
    first, second = await said.get(), await said.get()
    assert isinstance(first, Missed)
    assert isinstance(second, Missed)
    assert (first.misses, second.misses) == (1, 2)
    runner, _ = await serve(busy, port)
    assert await said.get() == Heard("engine-0", 1), "503 is an answer, as during a barrier"
    prober.watch(Watch("engine-0", 1, None))
    await prober.close()
    await runner.cleanup()


async def test_an_answer_that_does_not_come_is_a_miss_that_names_the_setting() -> None:
    said: asyncio.Queue[Missed | Heard] = asyncio.Queue()

    async def never(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    runner, url = await serve(never)
    prober = Prober(FleetConfig(probe_s=0.01, probe_deadline_s=0.05, misses=1), said.put_nowait)
    prober.watch(Watch("engine-0", 1, url))
    missed = await said.get()
    assert isinstance(missed, Missed)
    assert "fleet.probe_deadline_s" in missed.reason
    await prober.close()
    await runner.cleanup()
