"""With engine.release an engine gives memory back between refits; one that can't is ended, never waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from actors.engine import actor as actor_module
from actors.engine.actor import EngineShell, ServerGone
from actors.engine.server import Server, attach
from actors.engine.state import Abandon, Drain, Exit, Release, Released, ServerDead
from config.schema import EngineConfig, LaunchConfig, RefitConfig, RunConfig
from contracts.events import (
    EngineDead,
    EngineDrained,
    EngineFailed,
    EngineLoaded,
    EngineReady,
    EngineReleased,
    Member,
    ReleaseRequested,
    WaitStarted,
)
from tests.unit.engine.driver import Driver
from tests.unit.engine.fake_server import FakeServer
from tests.unit.engine.test_sidecar_core import BOOT, PATHS, Run
from tests.unit.engine.world import ME, committed, offered, quarantined, requested, started

GIVE, TAKE = "/release_memory_occupation", "/resume_memory_occupation"


def wanted(epoch: int, *boots: int, drain: Any = "finish") -> ReleaseRequested:
    return ReleaseRequested(
        epoch=epoch, step=1, engines=tuple(Member(ME, boot) for boot in boots), drain=drain, deadline_at=60.0
    )


# --- the core --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["uncertain", "drained", "loaded", "serving", "lapsed"])
def test_a_release_ends_admissions_and_gives_memory_back_within_the_drains_deadline(mode: str):
    run = Run(*PATHS[mode])
    assert run.feed(wanted(2, BOOT)) == [Release(2, 24.0, 27.0)]
    assert (run.state.mode, run.state.epoch, run.state.version) == ("releasing", 2, None)
    told = run.feed(Released(2, ("kv_cache",), 0.5, 0.1))
    assert told == [EngineReleased(epoch=2, engine=ME, boot=BOOT, tags=("kv_cache",), seconds=0.5, release_s=0.1)]
    assert (run.state.mode, run.state.part) == ("uncertain", None)
    assert run.feed(requested(3, BOOT)) == [Drain(3, 24.0, 30.0)]


@pytest.mark.parametrize(("mode", "group"), [("draining", None), ("loading", "g"), ("resuming", None)])
def test_what_is_performed_is_given_up_for_a_release(mode: str, group: str | None):
    run = Run(*PATHS[mode])
    assert run.feed(wanted(2, BOOT, drain="interrupt")) == [Abandon(1, group), Release(2, 15.0, 27.0)]
    assert run.feed(requested(3, BOOT)) == [Abandon(2, None), Drain(3, 24.0, 30.0)]


def test_the_wait_over_a_release_is_bounded_by_the_step_not_by_the_drain():
    run = Run(*PATHS["serving"])
    run.feed(wanted(2, BOOT))
    assert (run.waits[-1].on, run.waits[-1].deadline_at) == ("refit", None)
    run.feed(Released(2, ("kv_cache",), 0.5, 0.1))
    run.feed(requested(3, BOOT))
    assert len([wait for wait in run.waits if isinstance(wait, WaitStarted)]) == 2
    other = Run(*PATHS["serving"])
    other.feed(requested(2, BOOT))
    assert other.waits[-1].deadline_at == 60.0


def test_a_release_of_others_is_no_reason_to_go_on_serving():
    run = Run(*PATHS["serving"])
    assert run.feed(wanted(2)) == [Abandon(1, None)]
    assert run.state.mode == "uncertain"
    starting = Run(*PATHS["starting"])
    assert starting.feed(wanted(2, BOOT)) == []
    assert starting.state.epoch == 2


def test_an_old_release_and_an_old_result_change_nothing():
    run = Run(*PATHS["serving"])
    assert run.feed(wanted(1, BOOT), Released(1, (), 0.0, 0.0), Released(0, (), 0.0, 0.0)) == []
    assert run.state.mode == "serving"


def test_a_quarantine_in_a_release_gives_it_up():
    run = Run(*PATHS["serving"], wanted(2, BOOT))
    assert run.feed(quarantined(2, BOOT)) == [Abandon(2, None)]
    assert run.feed(Released(2, (), 0.0, 0.0)) == []


def test_a_server_that_gives_nothing_back_ends_the_boot():
    run = Run(*PATHS["serving"], wanted(2, BOOT))
    assert run.feed(ServerDead("r")) == [EngineDead(engine=ME, boot=BOOT, reason="r"), Exit("r", False)]


# --- the shell -------------------------------------------------------------------------------------------------------


class Process:
    """Stands for the server's process; `killed` is set when somebody ends it."""

    def __init__(self) -> None:
        self.killed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def alive(self) -> bool:
        return not self.killed.is_set()

    def kill(self) -> None:
        self._loop.call_soon_threadsafe(self.killed.set)

    async def ended(self) -> str:
        await self.killed.wait()
        return "the server was ended by signal SIGKILL"

    async def stop(self) -> None:
        self.kill()


class Bench:
    def __init__(self, driver: Driver, server: FakeServer, process: Process) -> None:
        self.driver, self.server, self.process = driver, server, process

    def _deadline(self, left_s: float | None) -> float:
        return time.time() + (self.driver.config.refit.deadline_s if left_s is None else left_s)

    def want(self, epoch: int, left_s: float | None = None) -> None:
        self.driver.registers["epoch"] = epoch
        self.driver.publish(replace(wanted(epoch, 1), deadline_at=self._deadline(left_s)))

    async def load(self, epoch: int) -> EngineLoaded:
        self.driver.publish(replace(requested(epoch, 1), deadline_at=self._deadline(None)))
        await self.driver.event(EngineDrained, epoch=epoch)
        self.driver.publish(offered(epoch))
        self.driver.publish(started(epoch, 1, fresh=epoch == 1))
        return await self.driver.event(EngineLoaded, epoch=epoch)

    async def serve(self, epoch: int) -> None:
        await self.load(epoch)
        self.driver.publish(committed(epoch, 1))
        await self.driver.mode("serving")

    def memory_calls(self) -> list[tuple[str, list[str]]]:
        return [(path, body["tags"]) for path, body in self.server.calls if path in (GIVE, TAKE)]

    async def dies(self) -> str:
        """The reason that it gives; its server is dead before."""
        dead = await self.driver.event(EngineDead)
        assert self.process.killed.is_set()
        assert isinstance(await self.driver.ended(), ServerGone)
        return dead.reason


Benches = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def benches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Benches:
    @asynccontextmanager
    async def bench(release: Any = "all", ready: bool = True) -> AsyncIterator[Bench]:
        async with FakeServer() as server:
            process = Process()

            async def launch(self: EngineShell, deadline_s: float) -> Server:
                return Server((await attach(server.url, deadline_s)).client, process)  # type: ignore[arg-type]

            monkeypatch.setattr(EngineShell, "_launch", launch)
            settings = RunConfig(
                engine=EngineConfig(kind="sglang", release=release, lease_s=30.0),
                refit=RefitConfig(deadline_s=60.0, drain_deadline_s=40.0, receiver="sglang"),
                launch=LaunchConfig(start_deadline_s=20.0),
            )
            async with Driver(settings, tmp_path) as driver:
                made = Bench(driver, server, process)
                if ready:
                    await driver.event(EngineReady)
                yield made

    return bench


async def test_memory_is_given_back_when_it_is_free_and_taken_in_the_order_that_a_refit_needs(benches: Benches):
    async with benches() as bench:
        assert bench.memory_calls() == [(GIVE, ["kv_cache", "weights"])], "before the first refit"
        await bench.serve(1)
        paths = bench.server.paths()
        assert bench.memory_calls()[1:] == [(TAKE, ["weights"]), (TAKE, ["kv_cache"])]
        taken = [place for place, path in enumerate(paths) if path == TAKE]
        update = paths.index("/update_weights_from_distributed")
        assert paths.index("/flush_cache") < taken[0] < paths.index("/init_weights_update_group") < update < taken[1]
        assert [phase.name for phase in bench.driver.find(EngineLoaded)[0].phases][-1] == "retake"
        bench.server.calls.clear()
        bench.want(2)
        told = await bench.driver.event(EngineReleased, epoch=2)
        assert told.tags == ("kv_cache", "weights")
        assert sorted(bench.server.paths()[:-1]) == ["/flush_cache", "/model_info"], "idle, and still the same server"
        assert bench.server.paths()[-1] == GIVE
        await bench.serve(3)
        assert bench.memory_calls() == [(GIVE, ["kv_cache", "weights"]), (TAKE, ["weights"]), (TAKE, ["kv_cache"])]


async def test_only_the_cache_is_given_back_with_kv(benches: Benches):
    async with benches("kv") as bench:
        await bench.serve(1)
        bench.want(2)
        assert (await bench.driver.event(EngineReleased, epoch=2)).tags == ("kv_cache",)
        tags = ["kv_cache"]
        assert bench.memory_calls() == [(GIVE, tags), (TAKE, tags), (GIVE, tags)]


async def test_a_second_release_in_a_row_asks_for_nothing_that_is_gone(benches: Benches):
    async with benches() as bench:
        await bench.serve(1)
        for epoch in (2, 3):
            bench.want(epoch)
            await bench.driver.event(EngineReleased, epoch=epoch)
        assert [path for path, _ in bench.memory_calls()].count(GIVE) == 2, "at the start and once since"


@pytest.mark.parametrize("answer", [(500, b"out of order"), (400, {"error": {"message": "no"}})])
async def test_a_server_that_refuses_to_give_memory_back_is_killed(benches: Benches, answer: Any):
    async with benches() as bench:
        await bench.serve(1)
        bench.server.answers[GIVE] = answer
        bench.want(2)
        assert f"it did not give memory back: {GIVE}: {answer[0]}" in await bench.dies()
        assert bench.driver.find(EngineReleased) == []


async def test_a_server_that_hangs_as_it_gives_memory_back_is_killed_at_the_deadline(benches: Benches):
    async with benches() as bench:
        await bench.serve(1)
        bench.server.hang.add(GIVE)
        bench.want(2, left_s=60.0 - 0.9 * 40.0 + 1.0)
        assert "it did not give memory back" in await bench.dies()


async def test_requests_that_do_not_end_cost_the_server(benches: Benches):
    async with benches() as bench:
        await bench.serve(1)
        bench.server.deaf_to_aborts = True
        bench.server.running["lost"] = asyncio.get_running_loop().create_future()
        bench.want(2, left_s=60.0 - 0.9 * 40.0 + 1.0)
        assert "it did not give memory back in time (0 requests known to run" in await bench.dies()
        assert [path for path, _ in bench.memory_calls()].count(GIVE) == 1, "it was not asked to"


@pytest.mark.parametrize("answer", [(500, b"no memory"), None])
async def test_a_server_that_does_not_take_its_weights_again_is_killed_before_the_transfer(
    benches: Benches, answer: Any, monkeypatch: pytest.MonkeyPatch
):
    async with benches() as bench:
        if answer is None:
            bench.server.hang.add(TAKE)
        else:
            bench.server.answers[TAKE] = answer
        event = replace(requested(1, 1), deadline_at=time.time() + 60.0 - 40.0 + 1.0)
        bench.driver.publish(event)
        assert "it did not take its memory again" in await bench.dies()
        assert bench.driver.find(EngineDrained) == bench.driver.find(EngineFailed) == []


async def test_a_server_that_does_not_take_its_cache_again_fails_alone_and_is_killed(benches: Benches):
    async with benches("kv") as bench:
        bench.server.answers[TAKE] = (500, b"no memory")
        bench.driver.publish(replace(requested(1, 1), deadline_at=time.time() + 60.0))
        await bench.driver.event(EngineDrained, epoch=1)
        bench.driver.publish(offered(1))
        bench.driver.publish(started(1, 1))
        failed = await bench.driver.event(EngineFailed, epoch=1)
        assert (failed.phase, failed.error) == ("retake", "CallError")
        assert "nobody knows what memory it holds" in await bench.dies()


async def test_a_release_that_is_given_up_half_way_costs_the_server(benches: Benches):
    async with benches() as bench:
        await bench.serve(1)
        bench.server.hang.add(GIVE)
        bench.want(2)
        await bench.server.came(GIVE, 2)
        bench.driver.publish(quarantined(2, 1))
        assert "nobody knows what memory it holds after epoch 2 was given up" in await bench.dies()


async def test_a_server_that_is_killed_while_its_memory_is_released_ends_the_boot(benches: Benches):
    async with benches() as bench:
        await bench.serve(1)
        bench.want(2)
        await bench.driver.event(EngineReleased, epoch=2)
        bench.process.kill()
        assert "SIGKILL" in await bench.dies()


async def test_a_server_that_gives_nothing_back_at_its_start_is_not_ready(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(actor_module, "MEMORY_S", 0.5)
    async with benches(ready=False) as bench:
        bench.server.hang.add(GIVE)
        dead = await bench.driver.event(EngineDead)
        assert GIVE in dead.reason
        assert bench.driver.find(EngineReady) == []
