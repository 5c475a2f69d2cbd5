"""The server answers this machine's browser and nobody else's, and refuses what makes no sense in words."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner
from msgspec.structs import replace

from actors.recorder.archive import Writer
from config.schema import ModelConfig, RunConfig
from contracts import events as ev
from pipeline import cli
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir
from pipeline.simulate import archive
from pipeline.ui import _server, _source, _trajectory
from pipeline.ui._source import Source
from pipeline.why.look import Look
from pipeline.why.result import Evidence
from tests.stalls.gallery import PATIENT, long_tail_in_drain
from tests.stalls.scene import BASE, Scene
from tests.unit.ui.shown import EVIL

PATIENCE_S = 60.0


async def until(source: Source, reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not reached():
            await source.change(source.version, 1.0)


@pytest.fixture
async def client(run: RunDir, config: RunConfig) -> AsyncIterator[TestClient[Any, Any]]:
    app = _server.app(run, config, "127.0.0.1")
    async with TestClient(TestServer(app)) as client:
        await until(app[_server.SOURCE], lambda: app[_server.SOURCE].state == "archived")
        yield client


async def get(client: TestClient[Any, Any], path: str) -> Any:
    async with client.get(path) as response:
        assert response.status == 200, await response.text()
        return await response.json()


# --- the archive ---


async def test_an_archive_is_shown_whole(client: TestClient[Any, Any], scene: Scene):
    status = await get(client, "/api/status")
    assert (status["state"], status["events"]) == ("archived", len(scene.world.store.log))
    assert status["why"]["lines"][0].startswith(("Nothing is stuck", "Stuck"))
    assert (await get(client, "/api/plots"))[0]["name"] == "reward"
    window = await get(client, "/api/timeline?from=0&to=1&width=800")
    assert (window["begin"], window["end"]) == (0, 1)
    assert {"refit.committed", "step.finished"} <= set((await get(client, "/api/choices"))["kinds"])
    found = await get(client, "/api/events?kind=refit.*&limit=5&since=0.5&until=%2B30")
    assert all(event["kind"].startswith("refit.") for event in found["events"])
    event = await get(client, f"/api/event?row={found['events'][0]['row']}")
    assert event["event"]["body"]["epoch"] >= 1


async def test_an_archive_tells_what_was_in_flight_also_when_nothing_is_stuck(
    client: TestClient[Any, Any], scene: Scene, run: RunDir, config: RunConfig
):
    source = client.app[_server.SOURCE]  # type: ignore[index]
    await until(source, lambda: bool(source.evidence.states))
    status = await get(client, "/api/status")
    assert status["why"]["stuck"] is False
    states = {name: actor.state for name, actor in scene.world.actors.items()}
    wanted = Look(scene.model(), config, scene.world.now(), Evidence(states=states), 15.0).requests()
    assert wanted is not None
    assert {each["name"]: each["in_flight"] for each in status["engines"]} == {
        name: wanted[name] for name in ("engine-0", "engine-1")
    }
    assert wanted.total() > 0


async def test_a_sample_is_shown_token_by_token(client: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch):
    class Letters:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(map(chr, ids))

    monkeypatch.setattr(_trajectory, "load_tokenizer", lambda source, params: Letters())
    listed = (await get(client, "/api/samples?order=lowest&limit=200"))["samples"]
    held = next(sample for sample in listed if sample["sample"] == 0)
    found = await get(client, f"/api/sample?row={held['row']}")
    (sequence,) = found["trajectory"]["sequences"]
    assert "".join(sequence["tokens"]) == "ask:<b>!"
    assert sequence["logprobs"] == [None] * 4 + [-0.5, -1.0, -2.0, -4.0]
    assert [span["policy_version"] for span in sequence["spans"]] == [-1, 3, 4]
    assert sequence["mask"] == [0, 0, 0, 0, 1, 1, 1, 0]
    assert found["trajectory"]["info"] == {"answer": EVIL}
    lost = next(sample for sample in listed if sample["sample"] == 1)
    missing = await get(client, f"/api/sample?row={lost['row']}")
    assert missing["trajectory"] is None
    assert "not in the archive" in missing["note"]


async def test_without_a_tokenizer_tokens_are_ids(run: RunDir, tmp_path: Path):
    config = replace(BASE, model=ModelConfig(source=str(tmp_path / "nowhere")))
    app = _server.app(run, config, "127.0.0.1")
    async with TestClient(TestServer(app)) as client:
        await until(app[_server.SOURCE], lambda: app[_server.SOURCE].state == "archived")
        listed = (await get(client, "/api/samples?limit=200"))["samples"]
        held = next(sample for sample in listed if sample["sample"] == 0)
        found = await get(client, f"/api/sample?row={held['row']}")
        assert found["trajectory"]["sequences"][0]["tokens"][0] == str(ord("a"))
        assert "tokenizer can't be loaded" in found["note"]


def test_characters_of_several_tokens_come_with_the_last():
    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode(errors="replace")

    assert _trajectory.texts(list("aé!€".encode()), Bytes()) == ["a", "", "é", "!", "", "", "€"]


async def test_a_stopped_run_is_judged_as_it_was_before(tmp_path: Path):
    scene = Scene(PATIENT)
    long_tail_in_drain(scene)
    scene.start()
    scene.run(60.0)
    scene.world.post(ev.RunStopping(reason="interrupted"), "stop")
    source = Source(archive.write(scene.world, PATIENT, tmp_path / "run"), PATIENT, lambda: 0.0)
    following = asyncio.create_task(source.follow())
    try:
        await until(source, lambda: source.state == "archived")
        why = await source.why()
        assert (why["stuck"], why["cause"]["code"]) == (True, "drain_tail")
        assert "when the run was stopped (interrupted)" in why["lines"][0].lower()
    finally:
        following.cancel()


async def test_an_archive_that_grows_is_read_on(tmp_path: Path, scene: Scene, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_source, "IDLE_S", 0.01)
    run = archive.write(scene.world, BASE, tmp_path / "run")
    log = list(scene.world.store.log)
    for path in run.events.glob("*"):
        path.unlink()
    first = Writer(run.events, 0.0)
    for entry in log[:100]:
        first.append(entry.stream, entry.entry, entry.data)
    first.append("fleet", "101-0", b"nonsense")
    first.close(0.0)
    source = Source(run, BASE, lambda: 0.0)
    following = asyncio.create_task(source.follow())
    try:
        await until(source, lambda: source.state == "archived")
        assert (len(source.data.index), source.data.unreadable) == (100, 1)
        second = Writer(run.events, 0.0)
        for entry in log[101:]:
            second.append(entry.stream, entry.entry, entry.data)
        second.close(0.0)
        await until(source, lambda: len(source.data.index) == len(log) - 1)
    finally:
        following.cancel()


async def test_a_damaged_archive_is_named(tmp_path: Path, scene: Scene):
    run = archive.write(scene.world, BASE, tmp_path / "run")
    next(run.events.glob("*.zst")).unlink()
    app = _server.app(run, BASE, "127.0.0.1")
    async with TestClient(TestServer(app)) as client:
        await until(app[_server.SOURCE], lambda: bool(app[_server.SOURCE].problem))
        assert "is missing" in (await get(client, "/api/status"))["problem"]


async def test_a_fault_of_ours_is_told_as_the_end_of_following(
    tmp_path: Path, scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    run = archive.write(scene.world, BASE, tmp_path / "run")

    def fails(*_: object) -> None:
        raise KeyError("a case that nobody thought of")

    monkeypatch.setattr("pipeline.ui._data.RunData.judge", fails)
    app = _server.app(run, BASE, "127.0.0.1")
    async with TestClient(TestServer(app)) as client:
        source = app[_server.SOURCE]
        await until(source, lambda: bool(source.problem))
        status = await get(client, "/api/status")
        assert "KeyError: 'a case that nobody thought of'; this page follows the run no more" in status["problem"]
        assert status["state"] == "stopped"


# --- who may ask ---


@pytest.mark.parametrize(
    ("header", "host", "answered"),
    [
        ("127.0.0.1:8686", "127.0.0.1", True),
        ("localhost:8686", "127.0.0.1", True),
        ("[::1]:8686", "::1", True),
        ("localhost", "127.0.0.1", True),
        ("evil.example:8686", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("", "127.0.0.1", False),
        (f"{socket.gethostname()}:80", "0.0.0.0", True),
        ("evil.example", "0.0.0.0", False),
        ("10.1.2.3:80", "0.0.0.0", True),
        ("box.lan:80", "box.lan", True),
    ],
)
def test_names_that_others_could_point_here_are_not_answered(header: str, host: str, answered: bool):
    assert _server.allowed(header, host) is answered


async def test_a_foreign_host_gets_nothing(client: TestClient[Any, Any]):
    for path in ("/", "/api/status", "/api/live", "/static/app.js"):
        async with client.get(path, headers={"Host": "evil.example"}) as response:
            assert response.status == 421
            assert "sim" not in await response.text()


async def test_every_answer_confines_the_page(client: TestClient[Any, Any]):
    for path in ("/", "/static/app.js", "/api/status", "/nothing", "/api/events?limit=x", "/favicon.ico"):
        async with client.get(path) as response:
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"


async def test_only_what_is_shipped_is_served(client: TestClient[Any, Any]):
    async with client.get("/static/vendor/uPlot.iife.min.js") as response:
        assert response.content_type == "text/javascript"
    for path in ("/static/../_server.py", "/static/%2e%2e/_server.py", "/static/nothing.js", "/static/", "/run.json"):
        async with client.get(path) as response:
            assert response.status == 404, path


def test_the_page_asks_nobody_else():
    own = [path for path in _server.FILES.values() if "vendor" not in path.parts]
    assert len(own) >= 8
    for path in own:
        text = path.read_text()
        assert "http:" not in text, path
        assert "https:" not in text, path
        for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert name not in text, f"{path} uses {name}"


# --- bad questions ---


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("events?limit=0", "limit='0'"),
        ("events?limit=1e3", "limit='1e3'"),
        ("events?offset=-1", "offset='-1'"),
        ("events?kind=refit.comitted", "refit.committed"),
        ("events?order=random", "order='random' is unknown: give newest or oldest"),
        ("events?limits=5", "limits='5' is no parameter here: it takes actor, kind, limit"),
        ("events?limit=5&limit=6", "limit=['5', '6'] is given more than once"),
        ("events?limit=-1", "limit='-1' is no whole number from 1 to 500"),
        ("events?offset=" + "9" * 5000, "offset='999"),
        ("events?since=%2B9&until=%2B8", "until='+8' lies before since='+9'"),
        ("event?row=-1", "row='-1'"),
        ("status?verbose=1", "verbose='1' is no parameter here: leave it out"),
        ("live?from=1", "from='1' is no parameter here"),
        ("plots?from=nan", "from='nan' is no number from -1000000000 to 1000000000"),
        ("plots?from=9&to=8", "to=8 lies before from=9"),
        ("timeline?from=3&to=3", "to=3 is from=3: give a later one"),
        ("timeline?from=-1e308&to=1e308", "from='-1e308'"),
        ("timeline?to=inf", "to='inf'"),
        ("timeline?width=-5", "width='-5' is no whole number from 50 to 8000"),
        ("timeline?width=1e9", "width='1e9'"),
        ("samples?index=99999999999999999999", "index='99999999999999999999' is no whole number"),
        ("samples?version=1.5", "version='1.5'"),
        ("samples?split=test", "split='test' is unknown: give train or eval"),
        ("events?since=yesterday", "since: 'yesterday' names no moment"),
        ("events?since=%C2%B2", "since: '²' names no moment"),
        ("events?limit=%D9%A3", "limit='٣'"),
        ("events?since=trainer:1.0", "since: a time is needed here"),
        ("events?text=" + "x" * 201, "text has 201 characters"),
        ("timeline?from=5&to=4", "to=4 lies before from=5"),
        ("timeline?from=nan", "from='nan'"),
        ("timeline?width=9999999", "width='9999999'"),
        ("samples?index=first", "index='first'"),
        ("samples?order=best", "order='best' is unknown: give newest, lowest, highest or longest"),
        ("sample?row=0", "samples are trajectory.finished"),
    ],
)
async def test_a_bad_question_is_refused_by_name(client: TestClient[Any, Any], path: str, named: str):
    async with client.get(f"/api/{path}") as response:
        assert response.status == 400
        assert named in (await response.json())["error"]


async def test_what_is_not_there_is_not_found(client: TestClient[Any, Any]):
    for path in ("/api/event?row=99999999", "/api/sample?row=99999999", "/api/nothing"):
        async with client.get(path) as response:
            assert response.status == 404


# --- live ---


async def test_status_is_pushed_when_something_changes(client: TestClient[Any, Any]):
    source: Source = client.app[_server.SOURCE]  # type: ignore[index]
    async with client.get("/api/live") as response:
        assert response.content_type == "text/event-stream"
        first = json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))
        await source._tell()
        second = json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))
        assert second["version"] > first["version"]


async def test_there_is_an_end_to_pages_that_follow(client: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_server, "LISTENERS", 1)
    async with client.get("/api/live") as first:
        await first.content.readuntil(b"\n\n")
        async with client.get("/api/live") as second:
            assert second.status == 503


# --- the command ---


async def test_a_port_that_is_taken_is_named(run: RunDir, config: RunConfig):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PipelineError, match=f"--port {port} of 127.0.0.1 is taken") as refused:
            await _server.serve(run, config, "127.0.0.1", port, lambda address: None)
        assert refused.value.code == Exit.MISSING


async def test_without_a_port_any_free_one_is_taken(run: RunDir, config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(_server, "PORT", taken.getsockname()[1])
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(_server.serve(run, config, "127.0.0.1", None, ready.set_result))
        async with asyncio.timeout(PATIENCE_S):
            address = await ready
        assert str(_server.PORT) not in address
        assert address.startswith("http://127.0.0.1:")
        serving.cancel()


async def test_what_is_no_http_is_answered_without_a_traceback(
    run: RunDir, config: RunConfig, caplog: pytest.LogCaptureFixture
):
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(_server.serve(run, config, "127.0.0.1", None, ready.set_result))
    async with asyncio.timeout(PATIENCE_S):
        port = int((await ready).rstrip("/").rpartition(":")[2])
        for asked in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET /?x=\xc2\xb2 HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"hello\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked)
            assert (await reader.readline()).split()[1] == b"400", asked
            writer.close()
    serving.cancel()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "0"], "0 is not in the range 1<=x<=65535"),
        (["--port", "http"], "'http' is not a valid integer"),
        (["--host", "203.0.113.7", "--port", "18687"], "--host 203.0.113.7"),
        (["--host", ""], "is no address"),
        (["--host", "http://localhost"], "is no address"),
    ],
)
def test_bad_addresses_are_refused(run: RunDir, words: list[str], said: str):
    result = CliRunner().invoke(cli.main, ["ui", str(run.path), *words])
    assert result.exit_code == Exit.USAGE, result.output
    assert said in result.output
