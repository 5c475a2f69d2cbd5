"""Nothing reaches the server but what was admitted, and everything counts as running until the server is done."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from actors.engine import proxy as proxy_module
from actors.engine.client import CallError, HttpEngineClient
from actors.engine.proxy import Grant, Proxy, Refused
from tests.unit.engine.fake_server import FakeServer

HEADERS = {"x-sluice-epoch": "7", "x-sluice-rids": "r-1"}


class Gate:
    """What the proxy asks: `reason` refuses everything."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.grant = Grant(version=42, boot=3)
        self.asked: list[int] = []
        self._news = asyncio.Condition()
        self.status: dict[str, Any] = {"healthy": True, "state": "serving", "epoch": 7}

    async def admit(self, epoch: int) -> Grant:
        self.asked.append(epoch)
        async with self._news:
            self._news.notify_all()
        if self.reason is not None:
            raise Refused(self.reason)
        return self.grant

    async def was_asked(self, times: int) -> None:
        async with asyncio.timeout(20), self._news:
            await self._news.wait_for(lambda: len(self.asked) >= times)


class Bench:
    def __init__(self, server: FakeServer, http: aiohttp.ClientSession) -> None:
        self.server = server
        self.http = http
        self.gate = Gate()
        self.proxy = Proxy(self.gate.admit, lambda: self.gate.status, request_deadline_s=20.0, max_body=1000)

    async def start(self) -> None:
        self.url = await self.proxy.start("127.0.0.1")
        self.client = HttpEngineClient(self.server.url)
        self.proxy.connect(self.client)

    async def post(self, path: str, **kwargs: Any) -> tuple[int, Any, Any]:
        async with self.http.post(self.url + path, **kwargs) as response:
            body = await response.read()
            return response.status, body, response.headers

    def generate(self, rid: str = "r-1") -> asyncio.Task[tuple[int, Any, Any]]:
        headers = {"x-sluice-epoch": "7", "x-sluice-rids": rid}
        return asyncio.create_task(self.post("/generate", json={"rid": rid}, headers=headers))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with FakeServer() as server, aiohttp.ClientSession() as http:
        bench = Bench(server, http)
        await bench.start()
        yield bench
        await bench.proxy.close()
        await bench.client.close()


async def test_bytes_pass_unchanged_and_answers_are_stamped(bench: Bench) -> None:
    bench.server.answers["/generate"] = (422, b"\x00 not JSON")
    status, body, headers = await bench.post("/generate", data=b'{"rid":  "r-1"}', headers=HEADERS)
    assert (status, body) == (422, b"\x00 not JSON")
    assert (headers["x-sluice-version"], headers["x-sluice-boot"]) == ("42", "3")
    assert headers["content-type"].startswith("text/plain")
    assert bench.gate.asked == [7]


async def test_the_stamp_is_that_of_the_admission(bench: Bench) -> None:
    request = bench.generate()
    await bench.server.came("/generate")
    bench.gate.grant = Grant(version=43, boot=3)
    bench.server.finish("r-1")
    assert (await request)[2]["x-sluice-version"] == "42"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-sluice-epoch": "7"},
        {"x-sluice-rids": "r-1"},
        {"x-sluice-epoch": "seven", "x-sluice-rids": "r-1"},
        {"x-sluice-epoch": "7", "x-sluice-rids": "r-1,"},
    ],
)
async def test_a_request_without_epoch_or_ids_is_refused(bench: Bench, headers: dict[str, str]) -> None:
    status, body, _ = await bench.post("/generate", data=b"{}", headers=headers)
    assert status == 400
    assert b'"type":"bad_request"' in body
    assert bench.server.calls == []


async def test_what_is_not_admitted_does_not_reach_the_server(bench: Bench) -> None:
    bench.gate.reason = "engine-0 is draining"
    status, body, _ = await bench.post("/generate", data=b"{}", headers=HEADERS)
    assert (status, body) == (409, b'{"error":{"type":"not_serving","message":"engine-0 is draining"}}')
    assert bench.server.calls == []
    assert bench.proxy.running == 0


async def test_admission_is_asked_when_the_body_is_complete(bench: Bench) -> None:
    began, uploaded = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        began.set()
        await uploaded.wait()
        yield b"}"

    request = asyncio.create_task(bench.post("/generate", data=slow(), headers=HEADERS))
    await began.wait()
    async with bench.http.get(f"{bench.url}/status"):  # by now the headers are in
        assert bench.gate.asked == []
    bench.gate.reason = "draining by now"
    uploaded.set()
    assert (await request)[0] == 409


async def test_a_large_body_is_refused(bench: Bench) -> None:
    status, body, _ = await bench.post("/generate", data=b"x" * 1001, headers=HEADERS)
    assert status == 413
    assert b"bad_request" in body
    assert bench.server.calls == []


async def test_sequences_run_until_they_are_answered(bench: Bench) -> None:
    one, two = bench.generate("r-1"), bench.generate("r-2")
    await bench.server.came("/generate", 2)
    assert bench.proxy.running == 2
    idle = asyncio.create_task(bench.proxy.idle())
    bench.server.finish("r-1")
    await one
    assert bench.proxy.running == 1
    assert not idle.done()
    bench.server.finish("r-2")
    await two
    await asyncio.wait_for(idle, 5)
    assert bench.proxy.running == 0


async def test_a_caller_that_leaves_has_its_request_aborted(bench: Bench) -> None:
    request = bench.generate()
    await bench.server.came("/generate")
    request.cancel()
    await bench.server.came("/abort_request")
    assert ("/abort_request", {"rid": "r-1"}) in bench.server.calls
    await asyncio.wait_for(bench.proxy.idle(), 5)


async def test_a_request_whose_caller_left_runs_until_the_server_is_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort can come before its request: it is repeated."""
    monkeypatch.setattr(proxy_module, "ABORT_EVERY_S", 0.01)
    bench.server.deaf_to_aborts = True
    request = bench.generate()
    await bench.server.came("/generate")
    request.cancel()
    await bench.server.came("/abort_request", 3)
    assert bench.proxy.running == 1
    bench.server.deaf_to_aborts = False
    await asyncio.wait_for(bench.proxy.idle(), 5)


async def test_an_abort_by_prefix_goes_to_the_server_when_something_runs_under_it(bench: Bench) -> None:
    request = bench.generate("g-1-0000")
    await bench.server.came("/generate")
    assert (await bench.post("/abort_request", json={"rid": "g-2-"}))[0] == 200
    assert "/abort_request" not in bench.server.paths()
    assert (await bench.post("/abort_request", json={"rid": "g-1-"}))[0] == 200
    status, body, _ = await request
    assert (status, b'"abort"' in body) == (200, True)


async def test_aborts_of_all_that_runs_are_one_call(bench: Bench) -> None:
    """To the server each id is a call of its own, and a refit that interrupts has hundreds of them."""
    requests = [bench.generate(f"g-{number}-0000") for number in range(40)]
    await bench.server.came("/generate", 40)
    aborts = [bench.post("/abort_request", json={"rid": f"g-{number}-"}) for number in range(40)]
    assert {status for status, _, _ in await asyncio.gather(*aborts)} == {200}
    assert all(b'"abort"' in body for _, body, _ in await asyncio.gather(*requests))
    asked = [body for path, body in bench.server.calls if path == "/abort_request"]
    assert asked[-1] == {"rid": "", "abort_all": True}
    assert len(asked) < 40


async def test_aborts_of_some_leave_the_others_alone(bench: Bench) -> None:
    doomed, spared = [bench.generate("g-1-0000"), bench.generate("g-1-0001")], bench.generate("g-2-0000")
    await bench.server.came("/generate", 3)
    assert (await bench.post("/abort_request", json={"rid": "g-1-"}))[0] == 200
    assert all(b'"abort"' in body for _, body, _ in await asyncio.gather(*doomed))
    assert bench.proxy.running == 1
    bench.server.finish("g-2-0000")
    assert b'"length"' in (await spared)[1]


async def test_nothing_is_admitted_while_the_server_aborts_all(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would abort that too, which nobody asked it to."""
    requests = [bench.generate("g-1-0000"), bench.generate("g-1-0001")]
    await bench.server.came("/generate", 2)
    begun, answered = asyncio.Event(), asyncio.Event()

    async def abort_all(timeout: float) -> None:
        begun.set()
        await answered.wait()

    monkeypatch.setattr(bench.client, "abort_all", abort_all)
    aborting = asyncio.create_task(bench.post("/abort_request", json={"rid": "g-1-"}))
    await begun.wait()
    late = bench.generate("g-2-0000")
    await bench.gate.was_asked(3)
    assert bench.proxy.running == 2
    bench.gate.reason = "draining by now"  # which is asked again
    answered.set()
    assert (await late)[0] == 409
    assert (await aborting)[0] == 200
    bench.server.finish("g-1-0000")
    bench.server.finish("g-1-0001")
    await asyncio.gather(*requests)


async def test_an_abort_goes_on_when_one_of_those_who_asked_for_it_leaves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [bench.generate(f"g-{number}-0000") for number in range(3)]
    await bench.server.came("/generate", 3)
    abort, under_way, answered = bench.client.abort, [], asyncio.Event()
    both = asyncio.Event()

    async def slow(rid: str, timeout: float) -> None:
        under_way.append(rid)
        if len(under_way) == 2:
            both.set()
        await answered.wait()
        await abort(rid, timeout)

    monkeypatch.setattr(bench.client, "abort", slow)
    first, second = (asyncio.create_task(bench.proxy.end([f"g-{number}-0000"])) for number in range(2))
    async with asyncio.timeout(20):
        await both.wait()
        first.cancel()
        await asyncio.wait({first})
        answered.set()
        await second
        assert all([b'"abort"' in (await each)[1] for each in requests[:2]])
    bench.server.finish("g-2-0000")
    await requests[2]


async def test_an_abort_that_fails_has_failed_for_all_who_asked_for_it(bench: Bench) -> None:
    requests = [bench.generate(f"g-{number}-0000") for number in range(3)]
    await bench.server.came("/generate", 3)
    bench.server.answers["/abort_request"] = (500, b"no")
    ends = [bench.proxy.end([f"g-{number}-0000"]) for number in range(2)]
    found = await asyncio.gather(*ends, return_exceptions=True)
    assert [type(error) for error in found] == [CallError, CallError]
    for number, request in enumerate(requests):
        bench.server.finish(f"g-{number}-0000")
        await request


@pytest.mark.parametrize("body", [b"{}", b"nonsense", b'{"rid": ""}', b'{"rid": 3}', b'{"abort_all": true}'])
async def test_an_abort_of_no_or_all_ids_is_refused(bench: Bench, body: bytes) -> None:
    assert (await bench.post("/abort_request", data=body))[0] == 400
    assert bench.server.calls == []


async def test_a_server_that_does_not_answer_is_an_engine_error(bench: Bench) -> None:
    request = bench.generate()
    await bench.server.came("/generate")
    bench.server.answers["/abort_request"] = (500, b"no")
    status, body, _ = await bench.post("/abort_request", json={"rid": "r-1"})
    assert (status, b"engine_error" in body) == (502, True)
    await bench.server.__aexit__()
    status, body, headers = await request
    assert (status, b"engine_error" in body) == (502, True)
    assert "x-sluice-version" not in headers
    await asyncio.wait_for(bench.proxy.idle(), 5)


async def test_abort_running_repeats_until_nothing_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "ABORT_EVERY_S", 0.01)
    bench.server.deaf_to_aborts = True
    request = bench.generate()
    await bench.server.came("/generate")
    aborting = asyncio.create_task(bench.proxy.abort_running())
    await bench.server.came("/abort_request", 3)
    assert not aborting.done()
    bench.server.deaf_to_aborts = False
    await asyncio.wait_for(aborting, 5)
    assert (await request)[0] == 200


async def test_abort_running_asks_nothing_of_an_idle_server(bench: Bench) -> None:
    await bench.proxy.abort_running()
    assert bench.server.calls == []


# --- streams ---------------------------------------------------------------------------------------------------------


def streaming(bench: Bench) -> Any:
    return bench.http.post(f"{bench.url}/generate", json={"rid": "r-1", "stream": True}, headers=HEADERS)


async def test_events_of_a_stream_pass_while_it_runs(bench: Bench) -> None:
    bench.server.events.put_nowait(b"data: 1\n\n")
    async with streaming(bench) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        assert response.headers["x-sluice-version"] == "42"
        assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
        assert bench.proxy.running == 1
        bench.server.events.put_nowait(b"data: [DONE]\n\n")
        bench.server.events.put_nowait(None)
        assert await response.read() == b"data: [DONE]\n\n"
    assert bench.proxy.running == 0
    assert "/abort_request" not in bench.server.paths()


async def test_a_stream_that_breaks_is_cut(bench: Bench) -> None:
    bench.server.events.put_nowait(b"data: 1\n\n")
    async with streaming(bench) as response:
        await response.content.readuntil(b"\n\n")
        bench.server.events.put_nowait(ConnectionError())
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    await asyncio.wait_for(bench.proxy.idle(), 5)


async def test_a_caller_that_leaves_a_stream_has_its_request_aborted(bench: Bench) -> None:
    bench.server.events.put_nowait(b"data: 1\n\n")
    async with streaming(bench) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await bench.server.came("/abort_request")
    await asyncio.wait_for(bench.proxy.idle(), 5)


@pytest.fixture
async def small_receiver() -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose kernel takes little, so that what it does not read soon blocks the sender."""

    def small(info: aiohttp.AddrInfoType) -> socket.socket:
        made = socket.socket(*info[:3])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return made

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=small)) as http:
        yield http


async def test_a_caller_that_does_not_read_holds_up_nobody_and_is_cut_off(
    bench: Bench, small_receiver: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "BACKLOG_LIMIT", 2**24)
    bench.http = small_receiver
    async with streaming(bench) as response:
        for _ in range(128):
            bench.server.events.put_nowait(b"x" * 2**18)
        await bench.server.came("/abort_request")
        await asyncio.wait_for(bench.proxy.idle(), 5)
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_health_and_status(bench: Bench) -> None:
    for healthy, status in ((True, 200), (False, 503)):
        bench.gate.status["healthy"] = healthy
        async with bench.http.get(f"{bench.url}/health") as response:
            assert (response.status, await response.json()) == (status, {"healthy": healthy, "state": "serving"})
    async with bench.http.get(f"{bench.url}/status") as response:
        assert (response.status, await response.json()) == (200, bench.gate.status)


async def test_other_calls_do_not_reach_the_server(bench: Bench) -> None:
    for path in ("/update_weights_from_distributed", "/pause_generation", "/flush_cache", "/model_info"):
        assert (await bench.post(path, json={}))[0] == 404
    assert bench.server.calls == []


async def test_closing_ends_requests_and_cuts_streams(bench: Bench) -> None:
    request = bench.generate("r-2")
    bench.server.events.put_nowait(b"data: 1\n\n")
    async with streaming(bench) as response:
        await bench.server.came("/generate", 2)
        await bench.proxy.close()
        status, body, _ = await request
        assert (status, b"the sidecar ends" in body) == (502, True)
        with pytest.raises(aiohttp.ClientError):
            await response.read()
