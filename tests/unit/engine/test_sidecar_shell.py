"""The shell performs the barrier on a server in SGLang's order, keeps the lease, and gives nothing up half."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from actors.engine import actor as actor_module
from actors.engine import core as core_module
from actors.engine import in_order, operations
from actors.engine import server as server_module
from actors.engine.actor import EngineShell, ServerGone, build
from actors.engine.client import CallError
from actors.engine.server import Launch, Server, ServerError, attach
from actors.engine.state import EngineState, Exit
from config.schema import EngineConfig, GatewayConfig, LaunchConfig, NetworkConfig, RefitConfig, RunConfig
from contracts.core import Fatal
from contracts.events import (
    Bucket,
    EngineDead,
    EngineDrained,
    EngineFailed,
    EngineLoaded,
    EngineReady,
    RefitRequested,
    TensorSpec,
    WaitEnded,
    WaitStarted,
)
from contracts.weights import digest
from tests.unit.engine.driver import Driver
from tests.unit.engine.fake_server import FakeServer
from tests.unit.engine.world import PLAN, committed, failed, offered, quarantined, requested, started

BUCKETS = (
    Bucket((TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (1,))), 12),
    Bucket((TensorSpec("c", "float32", (4,)),), 16),
)
LOAD = ["/init_weights_update_group", "/pause_generation", *2 * ["/update_weights_from_distributed"], "/flush_cache"]


def config(kind: str = "external", lease_s: float = 30.0, **refit: Any) -> RunConfig:
    return RunConfig(
        engine=EngineConfig(kind=kind, lease_s=lease_s),  # type: ignore[arg-type]
        refit=RefitConfig(**({"deadline_s": 60.0, "drain_deadline_s": 40.0} | refit)),  # type: ignore[arg-type]
        gateway=GatewayConfig(request_deadline_s=30.0),
        launch=LaunchConfig(start_deadline_s=5.0),
    )


class Bench:
    """An engine actor on a fake server."""

    def __init__(self, driver: Driver, server: FakeServer, http: aiohttp.ClientSession) -> None:
        self.driver = driver
        self.server = server
        self.http = http

    def request(self, epoch: int, drain: str = "finish", left_s: float | None = None) -> None:
        left_s = self.driver.config.refit.deadline_s if left_s is None else left_s
        event: RefitRequested = requested(epoch, self.driver.boot, drain=drain)
        self.driver.publish(replace(event, deadline_at=time.time() + left_s))

    def start(self, epoch: int, group: str = "g", fresh: bool = True) -> None:
        self.driver.publish(replace(offered(epoch), payload=self.driver.keep(BUCKETS)))
        self.driver.publish(started(epoch, self.driver.boot, group=group, fresh=fresh))

    async def load(self, epoch: int, group: str = "g", fresh: bool = True) -> EngineLoaded:
        self.request(epoch)
        await self.driver.event(EngineDrained, epoch=epoch)
        self.start(epoch, group, fresh)
        return await self.driver.event(EngineLoaded, epoch=epoch)

    async def serve(self, epoch: int, group: str = "g", fresh: bool = True) -> None:
        await self.load(epoch, group, fresh)
        self.driver.publish(committed(epoch, self.driver.boot))
        await self.driver.mode("serving")

    def generate(self, epoch: int, rid: str = "r-1") -> asyncio.Task[tuple[int, Any, Any]]:
        return asyncio.create_task(self._generate(epoch, rid))

    async def _generate(self, epoch: int, rid: str) -> tuple[int, Any, Any]:
        headers = {"x-sluice-epoch": str(epoch), "x-sluice-rids": rid}
        async with self.http.post(f"{self.driver.url}/generate", json={"rid": rid}, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def status(self) -> Any:
        async with self.http.get(f"{self.driver.url}/status") as response:
            return await response.json()


Benches = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def benches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Benches:
    """Make a bench; any kind of engine is the fake server."""

    @asynccontextmanager
    async def bench(settings: RunConfig | None = None, ready: bool = True) -> AsyncIterator[Bench]:
        async with FakeServer() as server, aiohttp.ClientSession() as http:

            async def launch(self: EngineShell, deadline_s: float) -> Server:
                return await attach(server.url, deadline_s)

            monkeypatch.setattr(EngineShell, "_launch", launch)
            async with Driver(settings or config(), tmp_path) as driver:
                if ready:
                    await driver.event(EngineReady)
                    server.calls.clear()
                yield Bench(driver, server, http)

    return bench


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung server is noticed soon."""
    for module in (actor_module, operations):
        monkeypatch.setattr(module, "CALL_S", 0.5)


# --- the way to serving ----------------------------------------------------------------------------------------------


async def test_a_boot_is_ready_but_serves_nothing(benches: Benches) -> None:
    async with benches() as bench:
        (ready,) = bench.driver.find(EngineReady)
        assert (ready.url, ready.ranks, ready.boot) == (bench.driver.url, 2, 1)
        status, answer, _ = await bench.generate(0)
        assert (status, answer["error"]["message"]) == (409, "engine-0 is uncertain in epoch 0")
        assert bench.server.calls == []


async def test_weights_are_loaded_in_sglangs_order_and_served_after_the_commit(benches: Benches) -> None:
    async with benches() as bench:
        loaded = await bench.load(1)
        assert loaded.digest == ""
        assert bench.server.paths() == ["/flush_cache", *LOAD]
        assert bench.server.paused
        names = [body["names"] for path, body in bench.server.calls if path == "/update_weights_from_distributed"]
        assert names == [["a", "b"], ["c"]]
        assert (await bench.generate(1))[0] == 409
        bench.driver.publish(committed(1, 1))
        await bench.driver.mode("serving")
        assert not bench.server.paused
        request = bench.generate(1)
        await bench.server.came("/generate")
        bench.server.finish("r-1")
        status, _, headers = await request
        assert (status, headers["x-sluice-version"], headers["x-sluice-boot"]) == (200, "10", "1")


async def test_a_server_that_nobody_else_can_reach_is_not_paused(benches: Benches) -> None:
    async with benches(config(kind="torch")) as bench:
        await bench.load(1)
        bench.driver.publish(committed(1, 1))
        await bench.driver.mode("serving")
        assert not {"/pause_generation", "/continue_generation"} & set(bench.server.paths())


async def test_sglangs_cache_is_flushed_by_the_call_that_loads_the_last_bucket(benches: Benches) -> None:
    settings = config(kind="sglang")
    async with benches(replace(settings, refit=replace(settings.refit, receiver="sglang"))) as bench:
        await bench.serve(1)
        update = "/update_weights_from_distributed"
        assert bench.server.paths() == ["/flush_cache", "/init_weights_update_group", update, update]
        assert [body["flush_cache"] for path, body in bench.server.calls if path == update] == [False, True]
        assert not any(body["torch_empty_cache"] for path, body in bench.server.calls if path == update)


async def test_buckets_are_called_for_ahead_once_all_of_them_fitted_and_never_through_a_server_of_others(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    post = in_order.post

    async def noted(*given: Any) -> None:
        asked.append(given[3])
        await post(*given)

    monkeypatch.setattr(in_order, "post", noted)
    for kind, ahead in (("sglang", [0, 1, 0]), ("external", [])):
        settings = config(kind=kind, receiver="sglang")
        async with benches(settings) as bench:
            for epoch, group in enumerate("aab", 1):
                await bench.serve(epoch, group, fresh=epoch != 2)
            calls = [body for path, body in bench.server.calls if path == "/update_weights_from_distributed"]
            assert [call["names"] for call in calls] == 3 * [["a", "b"], ["c"]]
            assert [call["flush_cache"] for call in calls] == 3 * [False, kind == "sglang"]
        assert asked == ahead
        asked.clear()


@pytest.mark.parametrize("theirs", ["0", "1"])
async def test_nccl_settings_are_told_and_a_join_that_fails_names_those_that_differ(
    benches: Benches, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    async with benches(config(kind="torch", transport="nccl")) as bench:
        (ready,) = bench.driver.find(EngineReady)
        assert "NCCL_CUMEM_ENABLE=0" in ready.nccl
        own = tuple(line for line in ready.nccl if "CUMEM" not in line)
        bench.server.answers["/init_weights_update_group"] = (400, {"success": False, "message": "no luck"})
        bench.request(1)
        await bench.driver.event(EngineDrained, epoch=1)
        settings = (*own, f"NCCL_CUMEM_ENABLE={theirs}")
        bench.driver.publish(replace(offered(1), payload=bench.driver.keep(BUCKETS), nccl=settings))
        bench.driver.publish(started(1, 1))
        told = await bench.driver.event(EngineFailed, epoch=1)
        assert told.phase == "join"
        assert "no luck" in told.reason
        assert ("NCCL_CUMEM_ENABLE is 0 here and 1 at the trainer" in told.reason) == (theirs == "1")


async def test_our_own_server_tells_its_digest(benches: Benches) -> None:
    async with benches(config(kind="torch")) as bench:
        assert (await bench.load(1)).digest == digest(dict.fromkeys("abc", "00"))
        assert bench.server.paths()[-1] == "/weights_checker"


@pytest.mark.parametrize(("verify", "asked"), [("fleet", True), ("digest", False), ("none", False)])
async def test_sglangs_checksums_are_a_fingerprint_of_all_ranks(benches: Benches, verify: Any, asked: bool) -> None:
    told = {
        "success": True,
        "message": "Success.",
        "ranks": [
            {"checksums": {"lm_head.weight": "00000000000000ab"}, "per_gpu_checksum": "0", "parallelism_info": {}},
            {"checksums": {"lm_head.weight": "00000000000000cd"}, "per_gpu_checksum": "1", "parallelism_info": {}},
        ],
    }
    async with benches(config(verify=verify)) as bench:
        bench.server.answers["/weights_checker"] = (200, told)
        loaded = await bench.load(1)
        of_both = digest({"0/lm_head.weight": "00000000000000ab", "1/lm_head.weight": "00000000000000cd"})
        assert (loaded.digest, loaded.fingerprint) == ("", of_both if asked else "")
        assert ("/weights_checker" in bench.server.paths()) == asked


async def test_a_server_that_can_not_make_checksums_fails_the_load_alone(benches: Benches) -> None:
    async with benches(config(verify="fleet")) as bench:
        bench.server.answers["/weights_checker"] = (400, {"success": False, "message": "no"})
        bench.request(1)
        await bench.driver.event(EngineDrained, epoch=1)
        bench.start(1)
        told = await bench.driver.event(EngineFailed, epoch=1)
        assert (told.phase, told.error) == ("verify", "CallError")


async def test_without_sglangs_checksums_there_is_no_fingerprint(benches: Benches) -> None:
    async with benches(config(verify="fleet")) as bench:
        bench.server.answers["/weights_checker"] = (404, {})
        assert (await bench.load(1)).fingerprint == ""


async def test_a_server_without_checksums_has_no_digest(benches: Benches) -> None:
    async with benches(config(kind="torch")) as bench:
        bench.server.answers["/weights_checker"] = (404, {})
        assert (await bench.load(1)).digest == ""


async def test_a_group_is_used_again_and_left_for_a_fresh_one(benches: Benches) -> None:
    async with benches() as bench:
        await bench.serve(1, "g1")
        await bench.serve(2, "g1", fresh=False)
        assert bench.server.paths().count("/init_weights_update_group") == 1
        bench.server.answers["/destroy_weights_update_group"] = (400, {"success": False, "message": "broken"})
        await bench.serve(3, "g3")
        paths = bench.server.paths()
        left = paths.index("/destroy_weights_update_group")
        assert bench.server.calls[left][1] == {"group_name": "g1"}
        assert paths[left + 1] == "/init_weights_update_group"


# --- the drain -------------------------------------------------------------------------------------------------------


async def test_a_drain_admits_nothing_and_waits_for_what_runs(benches: Benches) -> None:
    async with benches() as bench:
        await bench.serve(1)
        request = bench.generate(1)
        await bench.server.came("/generate")
        bench.server.calls.clear()
        bench.request(2)
        await bench.driver.mode("draining")
        assert (await bench.generate(1, "r-2"))[0] == 409
        assert bench.server.calls == []  # nothing is proved while something is known to run
        bench.server.finish("r-1")
        assert (await request)[0] == 200
        await bench.driver.event(EngineDrained, epoch=2)
        assert bench.server.paths()[0] == "/flush_cache"
        assert "/abort_request" not in bench.server.paths()


async def test_a_request_that_comes_before_its_commit_waits_for_it(benches: Benches) -> None:
    """Gateways may hear of a commit first; what they send then is not refused."""
    async with benches() as bench:
        await bench.load(1)
        request = bench.generate(1)
        await asyncio.sleep(0.02)
        assert not request.done()
        assert "/generate" not in bench.server.paths()
        bench.driver.publish(committed(1, bench.driver.boot))
        await bench.server.came("/generate")
        bench.server.finish("r-1")
        assert (await request)[0] == 200


async def test_a_request_whose_commit_does_not_come_is_refused(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with benches() as bench:
        await bench.load(1)
        request = bench.generate(1)
        bench.driver.publish(failed(1))
        assert (await request)[0] == 409
        await bench.load(2)
        monkeypatch.setattr(core_module, "COMMIT_S", 0.01)
        assert (await bench.generate(2))[0] == 409
        assert "/generate" not in bench.server.paths()


@pytest.mark.parametrize(("drain", "share"), [("interrupt", 0.5), ("finish", 0.8)])
async def test_a_drain_aborts_what_gateways_left(benches: Benches, drain: str, share: float) -> None:
    async with benches() as bench:
        await bench.serve(1)
        request = bench.generate(1)
        await bench.server.came("/generate")
        # the drain began so long ago that its share is nearly over
        bench.request(2, drain, left_s=60.0 - share * 40.0 + 0.3)
        status, answer, _ = await request
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        await bench.driver.event(EngineDrained, epoch=2)


async def test_requests_that_only_the_server_knows_are_aborted_too(benches: Benches) -> None:
    async with benches() as bench:
        await bench.serve(1)
        bench.server.running["lost"] = asyncio.get_running_loop().create_future()
        bench.request(2, "interrupt", left_s=60.0 - 0.5 * 40.0)
        await bench.driver.event(EngineDrained, epoch=2)
        assert ("/abort_request", {"rid": "", "abort_all": True}) in bench.server.calls


async def test_a_drain_ends_at_its_deadline(benches: Benches) -> None:
    async with benches() as bench:
        await bench.serve(1)
        bench.server.deaf_to_aborts = True
        request = bench.generate(1)
        await bench.server.came("/generate")
        bench.request(2, left_s=60.0 - 40.0 + 0.5)
        told = await bench.driver.event(EngineFailed, epoch=2)
        assert (told.phase, told.error) == ("drain", "Deadline")
        assert "1 requests known to run" in told.reason
        assert bench.driver.state().mode == "uncertain"
        request.cancel()


async def test_a_server_that_can_not_flush_fails_the_drain(benches: Benches) -> None:
    async with benches() as bench:
        bench.server.answers["/flush_cache"] = (500, b"no")
        bench.request(1)
        told = await bench.driver.event(EngineFailed, epoch=1)
        assert (told.phase, told.error) == ("drain", "CallError")


# --- faults of the transfer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "phase"),
    [
        ("/init_weights_update_group", "join"),
        ("/update_weights_from_distributed", "receive"),
        ("/weights_checker", "verify"),
    ],
)
async def test_a_refused_step_is_told_and_the_next_epoch_starts_clean(benches: Benches, path: str, phase: str) -> None:
    async with benches(config(kind="torch")) as bench:
        bench.server.answers[path] = (400, {"success": False, "message": "partially updated"})
        bench.request(1)
        await bench.driver.event(EngineDrained, epoch=1)
        bench.start(1)
        told = await bench.driver.event(EngineFailed, epoch=1)
        assert (told.phase, told.error) == (phase, "CallError")
        assert "partially updated" in told.reason
        await bench.server.came("/destroy_weights_update_group")
        del bench.server.answers[path]
        await bench.serve(2, "g2")
        paths = bench.server.paths()
        joined = len(paths) - 1 - paths[::-1].index("/init_weights_update_group")
        assert "/continue_generation" not in paths[:joined]


async def test_a_pause_that_is_refused_is_told_and_one_that_was_made_is_lifted_first(benches: Benches) -> None:
    async with benches() as bench:
        for epoch, (path, phase) in enumerate({"/pause_generation": "pause", "/flush_cache": "flush"}.items(), 1):
            bench.request(epoch)
            await bench.driver.event(EngineDrained, epoch=epoch)
            bench.server.answers[path] = (500, {"success": False, "message": "no"})
            bench.start(epoch, f"g{epoch}")
            assert (await bench.driver.event(EngineFailed, epoch=epoch)).phase == phase
            del bench.server.answers[path]
        await bench.serve(3, "g3")
        paths = bench.server.paths()
        joined = len(paths) - 1 - paths[::-1].index("/init_weights_update_group")
        assert "/continue_generation" in paths[:joined]


async def test_a_plan_is_fetched_once_for_all_transfers_that_have_it(benches: Benches) -> None:
    async with benches() as bench:
        await bench.serve(1, "g")
        await bench.serve(2, "g", fresh=False)
        first = bench.driver.keep(BUCKETS)
        assert bench.driver.fetched == [first.key]
        bench.request(3)
        await bench.driver.event(EngineDrained, epoch=3)
        bench.driver.publish(offered(3))
        bench.driver.publish(started(3, 1, fresh=False))
        await bench.driver.event(EngineLoaded, epoch=3)
        assert bench.driver.fetched == [first.key, PLAN.key]
        assert [body["names"] for path, body in bench.server.calls if path == LOAD[2]][-1] == ["w"]


@pytest.mark.parametrize(
    ("data", "error", "reason"),
    [
        (None, "PayloadMissing", "payload plan:1:1 is not in the store"),
        (b"\x91", "ValueError", "no plan of a transfer: Input data was truncated"),
        (b"\x91\x00", "ValueError", "no plan of a transfer: Expected `object`, got `int`"),
    ],
)
async def test_a_plan_that_can_not_be_had_is_told_and_the_next_one_is_taken(
    benches: Benches, data: bytes | None, error: str, reason: str
) -> None:
    async with benches() as bench:
        bench.driver.kept = {} if data is None else {PLAN.key: data}
        bench.request(1)
        await bench.driver.event(EngineDrained, epoch=1)
        bench.driver.publish(offered(1))
        bench.driver.publish(started(1, 1))
        told = await bench.driver.event(EngineFailed, epoch=1)
        assert (told.phase, told.error) == ("plan", error)
        assert told.reason.startswith(reason)
        await bench.serve(2, "g2")


async def test_a_store_that_does_not_give_the_plan_ends_the_transfer_at_its_deadline(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def payloads(keys: Any) -> Any:
        await asyncio.Event().wait()

    async with benches() as bench:
        monkeypatch.setattr(bench.driver, "payloads", payloads)
        bench.request(1)
        await bench.driver.event(EngineDrained, epoch=1)
        monkeypatch.setattr(bench.driver.clock, "now", lambda: time.time() + 100.0)
        bench.start(1)
        told = await bench.driver.event(EngineFailed, epoch=1)
        assert (told.phase, told.error) == ("plan", "Deadline")


async def test_a_load_with_requests_held_is_not_complete(benches: Benches) -> None:
    async with benches() as bench:
        bench.request(1)
        await bench.driver.event(EngineDrained, epoch=1)
        bench.server.running["lost"] = asyncio.get_running_loop().create_future()
        bench.start(1)
        told = await bench.driver.event(EngineFailed, epoch=1)
        assert (told.phase, told.error) == ("flush", "Busy")


async def test_a_transfer_ends_at_the_deadline_of_the_refit(benches: Benches) -> None:
    async with benches(config(drain_deadline_s=60.0)) as bench:
        bench.server.hang.add("/update_weights_from_distributed")
        bench.request(1, left_s=1.5)
        await bench.driver.event(EngineDrained, epoch=1)
        bench.start(1)
        told = await bench.driver.event(EngineFailed, epoch=1)
        assert told.phase == "receive"
        assert "deadline" in told.reason


@pytest.mark.parametrize("end", [failed(1), quarantined(1, 1), committed(1)])
async def test_a_stuck_receive_is_given_up_and_does_not_block_the_next_epoch(benches: Benches, end: Any) -> None:
    async with benches() as bench:
        bench.request(1)
        await bench.driver.event(EngineDrained, epoch=1)
        bench.server.hang.add("/update_weights_from_distributed")
        bench.start(1)
        await bench.server.came("/update_weights_from_distributed")
        bench.driver.publish(end)
        await bench.driver.mode("uncertain")
        await bench.server.came("/destroy_weights_update_group")
        bench.server.hang.clear()
        await bench.serve(2, "g2")
        assert bench.driver.find(EngineFailed) == []


async def test_a_newer_request_gives_up_a_stuck_receive_before_it_drains(benches: Benches) -> None:
    async with benches() as bench:
        bench.request(1)
        await bench.driver.event(EngineDrained, epoch=1)
        bench.server.hang.add("/update_weights_from_distributed")
        bench.start(1)
        await bench.server.came("/update_weights_from_distributed")
        bench.server.calls.clear()
        bench.request(2)
        await bench.driver.event(EngineDrained, epoch=2)
        given_up = ["/abort_request", "/destroy_weights_update_group", "/flush_cache"]
        thawed = ["/abort_request", "/continue_generation", "/flush_cache"]
        assert bench.server.paths() == given_up + thawed


@pytest.mark.usefixtures("quick")
async def test_a_server_that_hangs_in_a_collective_is_replaced(benches: Benches) -> None:
    async with benches() as bench:
        bench.request(1)
        await bench.driver.event(EngineDrained, epoch=1)
        bench.server.hang |= {"/update_weights_from_distributed", "/destroy_weights_update_group"}
        bench.start(1)
        await bench.server.came("/update_weights_from_distributed")
        bench.driver.publish(failed(1))
        dead = await bench.driver.event(EngineDead, boot=1)
        assert "the server hangs after epoch 1 was given up" in dead.reason
        assert isinstance(await bench.driver.ended(), ServerGone)


async def test_a_server_that_does_not_go_on_after_a_commit_is_replaced(benches: Benches) -> None:
    async with benches() as bench:
        await bench.load(1)
        bench.server.answers["/continue_generation"] = (500, b"no")
        bench.driver.publish(committed(1, 1))
        dead = await bench.driver.event(EngineDead)
        assert "does not go on after the commit of epoch 1" in dead.reason
        await bench.driver.ended()


# --- the lease -------------------------------------------------------------------------------------------------------


async def test_a_newer_epoch_in_the_store_ends_admissions_before_its_event_arrives(benches: Benches) -> None:
    async with benches(config(lease_s=2.0)) as bench:
        await bench.serve(1)
        bench.driver.registers["epoch"] = 2
        await bench.driver.shell._lease.renew()
        status, answer, _ = await bench.generate(1)
        assert (status, "2 was the newest" in answer["error"]["message"]) == (409, True)
        assert bench.driver.state().mode == "serving"
        await bench.driver.mode("lapsed")  # its event is overdue


async def test_an_outage_of_the_store_ends_serving_and_its_end_renews_the_lease(benches: Benches) -> None:
    async with benches(config(lease_s=1.0)) as bench:
        await bench.serve(1)
        request = bench.generate(1)
        await bench.server.came("/generate")
        bench.driver.store_up.clear()
        status, answer, _ = await request
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        status, answer, _ = await bench.generate(1, "r-2")
        assert (status, "engine.lease_s" in answer["error"]["message"]) == (409, True)
        bench.driver.store_up.set()
        waits = lambda: [(type(w), w.on) for w in bench.driver.find(WaitStarted) + bench.driver.find(WaitEnded)]  # noqa: E731
        await bench.driver.until(lambda: (WaitEnded, "store") in waits(), "end of the wait for the store")
        assert (WaitStarted, "store") in waits()
        assert bench.driver.state().mode == "serving"
        await bench.driver.shell._lease.renew()
        request = bench.generate(1, "r-3")
        await bench.server.came("/generate", 2)
        bench.server.finish("r-3")
        assert (await request)[0] == 200


async def test_a_commit_that_the_store_does_not_confirm_is_not_served(benches: Benches) -> None:
    async with benches(config(lease_s=1.0)) as bench:
        for epoch in (1, 2):
            await bench.load(epoch, f"g{epoch}")
            bench.driver.publish(committed(epoch, 1))
            bench.driver.registers["committed"] = 0
            await bench.driver.mode("lapsed")
            assert (await bench.generate(epoch))[0] == 409


# --- the server's life -----------------------------------------------------------------------------------------------


async def test_a_server_that_misses_three_probes_is_dead(benches: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "PROBE_S", 0.02)
    async with benches() as bench:
        bench.server.answers["/model_info"] = (503, b"no")
        dead = await bench.driver.event(EngineDead)
        assert "did not answer 3 probes in a row: /model_info: 503" in dead.reason
        assert "3 probes" in str(await bench.driver.ended())
        assert not (await bench.status())["healthy"]


async def test_probes_leave_a_barrier_alone(benches: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "PROBE_S", 0.0)
    async with benches() as bench:
        await bench.load(1)
        bench.server.calls.clear()
        bench.server.answers["/model_info"] = (503, b"no")
        looks = iter(range(20))
        state = bench.driver.state
        done = asyncio.Event()

        def counted() -> EngineState:
            if next(looks, None) is None:
                done.set()
            return state()

        monkeypatch.setattr(bench.driver, "state", counted)
        await asyncio.wait_for(done.wait(), 10)
        assert bench.server.calls == []
        assert state().mode == "loaded"


async def test_a_server_that_is_silent_in_a_drain_is_named_and_left_to_its_deadline(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "PROBE_S", 0.02)
    async with benches() as bench:
        await bench.serve(1)
        request = bench.generate(1)
        await bench.server.came("/generate")
        bench.request(2)
        await bench.driver.mode("draining")
        bench.server.answers["/model_info"] = (503, b"no")
        wait = await bench.driver.event(WaitStarted, on="server")
        assert wait.cause.startswith("no answer to a probe: /model_info: 503")
        assert wait.deadline_at is not None
        await bench.server.came("/model_info", bench.server.paths().count("/model_info") + 4)
        assert bench.driver.state().mode == "draining"
        assert not (await bench.status())["healthy"]
        del bench.server.answers["/model_info"]
        assert (await bench.driver.event(WaitEnded, on="server")).seconds >= 0.0
        bench.server.finish("r-1")
        assert (await request)[0] == 200
        await bench.driver.event(EngineDrained, epoch=2)
        assert bench.driver.find(EngineDead) == []


async def test_a_slow_answer_is_told_before_it_is_a_missed_one(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "PROBE_S", 0.02)
    monkeypatch.setattr(actor_module, "SLOW_S", 0.0)
    async with benches(ready=False) as bench:
        answer = asyncio.Event()

        async def slow(timeout: float) -> None:
            await asyncio.wait_for(answer.wait(), 20)

        monkeypatch.setattr(operations.Operations, "stranger", lambda self, timeout: slow(timeout))
        await bench.driver.event(EngineReady)
        assert (await bench.driver.event(WaitStarted, on="server")).cause == "no answer to a probe: none in 0 s"
        monkeypatch.setattr(actor_module, "SLOW_S", 20.0)
        answer.set()
        await bench.driver.event(WaitEnded, on="server")
        assert (await bench.status())["healthy"]


async def test_a_probe_that_a_transfer_overtakes_tells_nothing(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "PROBE_S", 0.02)
    async with benches() as bench:
        bench.request(1)
        await bench.driver.event(EngineDrained, epoch=1)
        told = asyncio.Event()

        async def overtaken(timeout: float) -> None:
            if told.is_set():
                return
            bench.start(1)
            await bench.driver.event(EngineLoaded, epoch=1)
            told.set()
            raise CallError("/model_info", None, f"no answer in {timeout:g} s")

        monkeypatch.setattr(bench.driver.shell._operations, "stranger", overtaken)
        await asyncio.wait_for(told.wait(), 20)
        bench.driver.publish(failed(1))
        await bench.driver.mode("uncertain")
        assert bench.driver.find(WaitStarted, on="server") == []


async def test_a_call_that_fails_with_the_server_says_how_that_ended(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with benches() as bench:
        await bench.load(1)
        bench.server.answers["/continue_generation"] = (500, b"no")

        async def ended(self: Server) -> str:
            return "the server was ended by signal SIGKILL"

        monkeypatch.setattr(Server, "ended", ended)
        bench.driver.publish(committed(1, 1))
        assert (await bench.driver.event(EngineDead)).reason == "the server was ended by signal SIGKILL"
        await bench.driver.ended()


@pytest.mark.parametrize("found_by", ["probe", "drain"])
async def test_a_server_that_was_restarted_behind_the_sidecar_is_dead(
    benches: Benches, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    async with benches() as bench:
        await bench.serve(1)
        monkeypatch.setattr(actor_module, "PROBE_S", 0.02 if found_by == "probe" else 600.0)
        bench.server.version = "default"
        if found_by == "drain":
            bench.request(2)
        dead = await bench.driver.event(EngineDead)
        assert "holds weights 'default', but '10' were loaded" in dead.reason
        assert bench.driver.find(EngineDrained, epoch=2) == []
        await bench.driver.ended()


async def test_a_server_that_does_not_start_ends_the_boot(tmp_path: Path) -> None:
    settings = RunConfig(
        engine=EngineConfig(kind="external", urls=("http://127.0.0.1:1",)), launch=LaunchConfig(start_deadline_s=0.2)
    )
    async with Driver(settings, tmp_path) as driver:
        assert "did not answer" in (await driver.event(EngineDead)).reason
        assert isinstance(await driver.ended(), ServerGone)


async def test_a_server_that_can_not_tell_its_ranks_ends_the_boot(benches: Benches) -> None:
    async with benches(ready=False) as bench:
        bench.server.answers["/server_info"] = (500, b"no")
        assert "/server_info: 500" in (await bench.driver.event(EngineDead)).reason
        await bench.driver.ended()


async def test_settings_that_can_not_work_are_fatal(tmp_path: Path) -> None:
    few = replace(config(), engine=EngineConfig(kind="external", count=2, urls=("http://127.0.0.1:1",)))
    async with Driver(few, tmp_path, actor="engine-1") as driver:
        failure = await driver.ended()
        assert isinstance(failure, Fatal)
        assert "engine.urls names 1 servers, engine.count is 2" in str(failure)
    shell = build(replace(config(), network=NetworkConfig(host="203.0.113.1")), "engine-0")
    with pytest.raises(Fatal, match=r"network.host='203.0.113.1'"):
        await shell.start(None)  # type: ignore[arg-type]
    await shell.close()
    with pytest.raises(Fatal, match="too many"):
        await shell.perform(Exit("too many", fatal=True))


@pytest.mark.parametrize(("kind", "module"), [("torch", "actors.engine.torch_server"), ("sglang", "inside/launch.py")])
async def test_a_server_is_launched_for_the_model_with_a_log_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    launched: list[tuple[Launch, Path | None, float]] = []

    async def start(launch: Launch, log: Path | None, deadline_s: float) -> Server:
        launched.append((launch, log, deadline_s))
        raise ServerError("as far as this test goes")

    monkeypatch.setattr(server_module, "start", start)
    settings = config(kind=kind)
    settings = replace(settings, model=replace(settings.model, source=str(tmp_path)))
    async with Driver(settings, tmp_path / "run") as driver:
        await driver.event(EngineDead, reason="as far as this test goes")
    ((launch, log, deadline_s),) = launched
    assert any(part.endswith(module) for part in launch.command)
    assert str(tmp_path) in launch.command
    assert (log, deadline_s) == (tmp_path / "run" / "logs" / "engine-0.server.log", 5.0)


async def test_an_unknown_model_is_fatal(tmp_path: Path) -> None:
    settings = replace(config(kind="torch"), model=replace(config().model, source="/no/such/model"))
    async with Driver(settings, tmp_path) as driver:
        failure = await driver.ended()
        assert isinstance(failure, Fatal)
        assert "/no/such/model" in str(failure)


async def test_status_tells_what_it_does(benches: Benches) -> None:
    async with benches() as bench:
        await bench.serve(1)
        status = await bench.status()
        age = status.pop("lease_age_s")
        assert 0 <= age < 30
        assert status == {
            "engine": "engine-0",
            "boot": 1,
            "state": "serving",
            "epoch": 1,
            "version": 10,
            "running": 0,
            "healthy": True,
        }


async def test_what_it_can_not_perform_is_an_error() -> None:
    shell = build(config(), "engine-0")
    with pytest.raises(TypeError, match="can't perform"):
        await shell.perform(object())
    with pytest.raises(KeyError):
        shell.payload("p")


async def test_a_parameter_that_the_server_does_not_hold_fails_the_load_by_name(benches: Benches) -> None:
    async with benches(config(kind="torch")) as bench:
        bench.server.answers["/weights_checker"] = (200, {"ranks": [{"checksums": dict.fromkeys("ab", "00")}]})
        bench.request(1)
        await bench.driver.event(EngineDrained, epoch=1)
        bench.start(1)
        told = await bench.driver.event(EngineFailed, epoch=1)
        assert (told.phase, told.error, "first 'c'" in told.reason) == ("verify", "ManifestMismatch", True)
