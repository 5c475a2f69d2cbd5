"""The bus's conformance suite on the bundled server, and what only a real server and a real network can do to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis.asyncio as aioredis
from redis.crc import key_slot

from config.schema import BrokerConfig
from pipeline.broker import Broker, choose
from pipeline.broker.choose import find
from pipeline.bus import Bus, BusError, BusUnavailable, Keys, address, link, probe
from tests.contract.bus_conformance import *  # noqa: F403 - the suite
from tests.contract.bus_conformance import GROUP, START, Store, step

ENV = {"PATH": os.environ.get("SLUICE_TEST_SERVERS", "")}
"""Where to look for a server; nowhere, and so the bundled one, unless somebody wants to test another."""
_runs = itertools.count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with choose(ENV, tmp_path_factory.mktemp("store"), BrokerConfig()) as broker:
        yield broker


class Opening:
    """Opens buses and closes them at the end of the test."""

    def __init__(self, url: str, run: str) -> None:
        self.url, self.run = url, run
        self._opened: list[Bus] = []

    async def __call__(self, actor: str, *, url: str | None = None, **options: Any) -> Bus:
        self._opened.append(await Bus.connect(url or self.url, self.run, actor=actor, **options))
        return self._opened[-1]

    async def close(self) -> None:
        for bus in self._opened:
            await bus.close()


@pytest.fixture
async def store(broker: Broker) -> AsyncIterator[Store]:
    run = f"test{next(_runs)}"
    opening = Opening(broker.url, run)
    raw = link.client(address.parse(broker.url), run, "test")
    raw.response_callbacks.clear()
    yield Store(opening, raw, Keys(run).prefix)
    await opening.close()
    await raw.aclose()


async def test_a_store_that_refuses_writes_is_told_from_one_that_takes_them(store: Store) -> None:
    bus = await store.bus("a")
    await bus.check_writable()
    setting = "min-replicas-to-write"  # refuses as a full disk does
    await store.command("CONFIG", "SET", setting, 1)
    try:
        with pytest.raises(BusError, match="NOREPLICAS"):
            await bus.check_writable()
    finally:
        await store.command("CONFIG", "SET", setting, 0)


# --- scripts ---


async def test_scripts_survive_a_flush_of_the_script_cache(store: Store) -> None:
    bus = await store.bus("a")
    boot, _ = await bus.boot()
    await store.command("SCRIPT", "FLUSH")
    assert (await bus.commit(step(boot, 0, adds=[("out", b"x")]))).again is False
    await store.command("SCRIPT", "FLUSH")
    assert await bus.boot() == (boot + 1, 1)


# --- a network that fails ---


class Proxy:
    """Passes bytes to a Unix socket. After `swallow()`, the next reply is kept back and its connection cut."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._swallow = False
        self._connections: set[asyncio.StreamWriter] = set()
        self.swallowed = asyncio.Event()
        self.url = ""

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def swallow(self) -> None:
        self._swallow = True
        self.swallowed.clear()

    def cut(self) -> None:
        for writer in self._connections:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above_reader, above_writer = await asyncio.open_unix_connection(self._target)
        self._connections |= {writer, above_writer}
        up = asyncio.create_task(self._pump(reader, above_writer, None))
        await self._pump(above_reader, writer, above_writer)
        await up

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: asyncio.StreamWriter | None
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if back is not None and self._swallow:
                    self._swallow = False
                    self.swallowed.set()
                    back.close()
                    break
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture
async def proxy(broker: Broker) -> AsyncIterator[Proxy]:
    async with Proxy(address.parse(broker.url).path) as proxy:
        yield proxy


async def test_a_commit_whose_reply_was_lost_is_applied_once(store: Store, proxy: Proxy) -> None:
    bus = await store.bus("a", url=proxy.url)
    boot, _ = await bus.boot()
    await bus.commit(step(boot, 0))
    proxy.swallow()
    done = await bus.commit(step(boot, 1, adds=[("out", b"x")], registers=[("version", 1)]))
    assert proxy.swallowed.is_set()
    assert done.again
    assert [e.entry for e in await bus.read_after({"out": START}, block_ms=None, count=9)] == list(done.entries)
    assert len(await bus.journal()) == 2


@pytest.mark.timeout(30)
async def test_work_whose_delivery_was_lost_comes_at_once(store: Store, proxy: Proxy) -> None:
    bus = await store.bus("a", url=proxy.url)
    await bus.ensure_group("tasks", GROUP)
    await bus.read_work({"tasks": 1}, GROUP, block_ms=None)
    await bus.post("tasks", b"x")
    proxy.swallow()
    found = await bus.read_work({"tasks": 1}, GROUP, block_ms=600_000)
    assert proxy.swallowed.is_set()
    assert [(e.data, e.deliveries) for e in found] == [(b"x", 2)]


async def test_a_blocked_read_goes_on_after_its_connection_was_cut(store: Store, proxy: Proxy) -> None:
    bus = await store.bus("a", url=proxy.url)
    reading = asyncio.create_task(bus.read_after({"news": START}, block_ms=10_000, count=9))
    await asyncio.sleep(0.1)
    proxy.cut()
    await (await store.bus("b")).post("news", b"x")
    assert [e.data for e in await reading] == [b"x"]


async def test_a_claim_whose_reply_was_lost_comes_with_the_next_reading(store: Store, proxy: Proxy) -> None:
    owner = await store.bus("b")
    await owner.ensure_group("tasks", GROUP)
    await owner.post("tasks", b"x")
    await owner.read_work({"tasks": 1}, GROUP, block_ms=None)
    bus = await store.bus("a", url=proxy.url, outage_s=2.0)
    assert await bus.read_work({"tasks": 1}, GROUP, block_ms=None) == []
    assert (await bus.claim_idle("tasks", GROUP, 600_000, 1)).entries == []
    proxy.swallow()
    claiming = asyncio.create_task(bus.claim_idle("tasks", GROUP, 0, 1))
    await proxy.swallowed.wait()
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    assert [(e.data, e.deliveries) for e in await bus.read_work({"tasks": 1}, GROUP, block_ms=None)] == [(b"x", 3)]


async def test_an_outage_longer_than_the_deadline_is_unavailable(store: Store, proxy: Proxy) -> None:
    bus = await store.bus("a", url=proxy.url, outage_s=0.3)
    await bus.boot()
    await proxy.__aexit__()
    with pytest.raises(BusUnavailable, match=rf"REDIS_URL={proxy.url} could not be reached for 0.3 s .*Connect.*start"):
        await bus.boot()


async def test_a_server_that_was_killed_comes_back_with_its_data(tmp_path: Path) -> None:
    with choose(ENV, tmp_path, BrokerConfig(appendfsync="always")) as broker:
        bus = await Bus.connect(broker.url, "killed", actor="a")
        boot, _ = await bus.boot()
        await bus.commit(step(boot, 0, adds=[("out", b"before")]))
        info = dict(line.split(b":", 1) for line in (await bus._link.command("INFO")).splitlines() if b":" in line)
        os.kill(int(info[b"process_id"]), signal.SIGKILL)
        await bus.commit(step(boot, 1, adds=[("out", b"after")]))
        found = await bus.read_after({"out": START}, block_ms=None, count=9)
        assert [e.data for e in found] == [b"before", b"after"]
        await bus.close()


async def test_a_store_that_became_read_only_is_waited_for(tmp_path: Path) -> None:
    with choose(ENV, tmp_path, BrokerConfig()) as broker:
        bus = await Bus.connect(broker.url, "replica", actor="a", outage_s=2.0)
        await bus._link.command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(BusUnavailable, match="read only replica"):
            await bus.boot()
        await bus._link.command("REPLICAOF", "NO", "ONE")
        assert await bus.boot() == (1, 0)
        await bus.close()


# --- servers that can't be used, and how they are named ---


@contextlib.asynccontextmanager
async def stub(answer: Callable[[bytes], bytes]) -> AsyncIterator[str]:
    """A TCP server that answers each command with `answer(its name)`; yields host:port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                commands.feed(data)
                while command := commands.gets():
                    writer.write(answer(command[0]))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def mute(_: bytes) -> bytes:
    """Answers nothing."""
    return b""


async def free_port() -> int:
    """A port that nobody listens on."""
    async with stub(mute) as where:
        return int(where.rpartition(":")[2])


async def test_an_old_server_is_refused_with_its_version() -> None:
    info = b"# Server\r\nredis_version:6.2.14\r\n"
    async with stub(lambda name: b"$%d\r\n%s\r\n" % (len(info), info) if name == b"INFO" else b"+OK\r\n") as where:
        text = rf"REDIS_URL=redis://me:\*\*\*@{where}: the server is version 6.2.14: use Redis >= 7.0 or Valkey"
        with pytest.raises(BusError, match=text):
            await Bus.connect(f"redis://me:secret@{where}", "run", actor="a")


async def test_a_silent_server_is_given_up_at_the_deadline() -> None:
    async with stub(mute) as where:
        with pytest.raises(BusUnavailable, match=r"no reply within 0\.2 s"):
            await Bus.connect(f"redis://{where}", "run", actor="a", connect_s=0.2)


async def test_a_port_where_nobody_listens_is_named() -> None:
    where = f"127.0.0.1:{await free_port()}"
    with pytest.raises(BusUnavailable) as raised:
        await Bus.connect(f"redis://me:secret@{where}/3", "run", actor="a", connect_s=0.2)
    text = str(raised.value)
    assert text.startswith(f"REDIS_URL=redis://me:***@{where}/3 could not be reached for 0.2 s (")
    assert "start that server or correct REDIS_URL; without REDIS_URL an embedded server is used" in text
    assert "secret" not in text


async def test_a_server_that_evicts_keys_is_refused(store: Store, broker: Broker) -> None:
    await store.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        await store.bus("a")
        await store.command("CONFIG", "SET", "maxmemory", "1gb")
        with pytest.raises(BusError, match="maxmemory-policy allkeys-lru would delete the run's keys: set noeviction"):
            await store.bus("a")
    finally:
        await store.command("CONFIG", "SET", "maxmemory", "0", "maxmemory-policy", "noeviction")


async def test_a_full_store_refuses_a_commit_whole(store: Store) -> None:
    bus = await store.bus("a")
    boot, _ = await bus.boot()
    await store.command("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(BusError, match="raise the store's maxmemory"):
            await bus.commit(step(boot, 0, adds=[("out", b"x")], payloads=[("p", b"x" * 1000)]))
    finally:
        await store.command("CONFIG", "SET", "maxmemory", "0")
    assert await bus.journal() == []
    await bus.commit(step(boot, 0, adds=[("out", b"x")]))


async def test_the_server_is_named_by_its_own_name(broker: Broker) -> None:
    name, _, version = (await probe(broker.url, 5.0)).partition(" ")
    assert f"{name}-server {version}" in broker.describe()


async def test_the_memory_in_use_and_its_limit_are_known(store: Store) -> None:
    used, limit = await (await store.bus("a")).memory()
    assert used > 100_000
    assert limit == 0


# --- ways in ---


@contextlib.asynccontextmanager
async def server(folder: Path, *lines: str, sentinel: bool = False) -> AsyncIterator[int]:
    """A second server, configured by `lines`, on a TCP port, which it yields."""
    os.makedirs(folder, exist_ok=True)
    port = await free_port()
    config = folder / "server.conf"
    config.write_text("\n".join([f"port {port}", f"dir {folder}", "bind 127.0.0.1", *lines]) + "\n")
    command = [str(find(ENV).path), str(config), *(["--sentinel"] if sentinel else [])]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        await process.wait()


async def usable(url: str, **options: Any) -> None:
    bus = await Bus.connect(url, "run", actor="a", **options)
    try:
        boot, seq = await bus.boot()
        await bus.commit(step(boot, seq))
    finally:
        await bus.close()


async def test_users_log_in_by_name_and_password(tmp_path: Path) -> None:
    users = ("user default off", "user me on >p@ss ~sluice:* +@all -@dangerous +info")
    async with server(tmp_path, *users) as port:
        await usable(f"redis://me:p%40ss@127.0.0.1:{port}")
        text = r"REDIS_URL=redis://me:\*\*\*@127.*refused the login.*correct the user"
        with pytest.raises(BusError, match=text) as raised:
            await usable(f"redis://me:mistaken@127.0.0.1:{port}")
        assert "mistaken" not in str(raised.value)


async def test_missing_rights_are_named_with_the_fix(tmp_path: Path) -> None:
    async with server(tmp_path, "user default off", "user me on >p ~other:* +@all") as port:
        with pytest.raises(BusError, match=r"give the user of REDIS_URL the rights `~sluice:\* \+@all"):
            await usable(f"redis://me:p@127.0.0.1:{port}")


async def test_databases_are_kept_apart(tmp_path: Path) -> None:
    async with server(tmp_path) as port:
        await usable(f"redis://127.0.0.1:{port}/3")
        raw = aioredis.Redis(port=port, db=3)
        assert await raw.keys("*") != []
        await raw.select(0)
        await raw.aclose()
        bus = await Bus.connect(f"redis://127.0.0.1:{port}", "run", actor="a")
        assert await bus.boot() == (1, 0)
        await bus.close()


async def _openssl(folder: Path, words: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl makes the test's certificates")
    process = await asyncio.create_subprocess_exec(program, *words.split(), cwd=folder, stderr=subprocess.DEVNULL)
    assert await process.wait() == 0


async def test_a_tls_server_is_checked_against_the_given_authority(tmp_path: Path, broker: Broker) -> None:
    key = "-newkey rsa:2048 -nodes"
    await _openssl(tmp_path, f"req -x509 {key} -days 1 -subj /CN=authority -keyout ca.key -out ca.pem")
    await _openssl(tmp_path, f"req {key} -subj /CN=localhost -keyout key.pem -out request.pem")
    (tmp_path / "names").write_text("subjectAltName=DNS:localhost")
    signed = "x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 -extfile names -out cert.pem"
    await _openssl(tmp_path, signed)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    relay = Proxy(address.parse(broker.url).path)
    listening = await asyncio.start_server(relay._serve, "127.0.0.1", 0, ssl=context)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        files = f"ca={tmp_path}/ca.pem&cert={tmp_path}/cert.pem&key={tmp_path}/key.pem"
        await usable(f"rediss://localhost:{port}?{files}")
        for url, text in (
            (f"rediss://localhost:{port}", "certificate"),
            (f"rediss://127.0.0.1:{port}?{files}", "certificate"),
            (f"rediss://localhost:{port}?ca={tmp_path}/ca.pem", "certificate|closed|reset"),
            (f"rediss://localhost:{port}?ca={tmp_path}/none.pem", "No such file"),
        ):
            with pytest.raises(BusError, match=f"(?i){text}"):
                await usable(url, connect_s=0.3)
        relay.cut()


async def test_sentinels_name_the_master(tmp_path: Path) -> None:
    async with server(tmp_path / "master") as master:
        watching = f"sentinel monitor mine 127.0.0.1 {master} 1"
        async with server(tmp_path / "sentinel", watching, sentinel=True) as port:
            await usable(f"redis+sentinel://127.0.0.1:{port},127.0.0.1:{await free_port()}/mine")
            with pytest.raises(BusUnavailable, match="No master found for 'other'"):
                await usable(f"redis+sentinel://127.0.0.1:{port}/other", connect_s=2.0)
            bus = await Bus.connect(f"redis+sentinel://127.0.0.1:{port}/mine", "run", actor="a", outage_s=2.0)
            await bus._link.command("REPLICAOF", "127.0.0.1", "1")
            with pytest.raises(BusUnavailable, match="previous master is now a slave"):
                await bus.boot()
            await bus.close()


async def test_a_run_on_a_cluster_follows_its_slot(tmp_path: Path) -> None:
    lines = ("cluster-enabled yes", "cluster-node-timeout 2000", "appendonly no", 'save ""')
    async with server(tmp_path / "one", *lines) as one, server(tmp_path / "two", *lines) as two:
        nodes = [aioredis.Redis(port=port, protocol=2) for port in (one, two)]
        for node in nodes:
            node.response_callbacks.clear()
        ids = [(await _answer(node, "CLUSTER", "MYID")).decode() for node in nodes]
        slot = key_slot(b"run")
        await nodes[0].execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await nodes[1].execute_command("CLUSTER", "MEET", "127.0.0.1", one)
        for node in nodes:
            await _until(node, "CLUSTER", "INFO", holds=b"cluster_state:ok")
            await _until(node, "CLUSTER", "INFO", holds=b"cluster_known_nodes:2")
        url = f"redis+cluster://127.0.0.1:{await free_port()},127.0.0.1:{two}"
        bus = await Bus.connect(url, "run", actor="a")
        boot, _ = await bus.boot()
        await bus.commit(step(boot, 0, adds=[("out", b"before")], payloads=[("p", b"x")]))
        reading = asyncio.create_task(bus.read_after({"news": START}, block_ms=20_000, count=9))
        await _move(nodes, ids, slot, two)
        await bus.commit(step(boot, 1, adds=[("out", b"after")], releases=["p"]))
        found = await bus.read_after({"out": START}, block_ms=None, count=9)
        assert [entry.data for entry in found] == [b"before", b"after"]
        held: Any = await nodes[1].execute_command("CLUSTER", "COUNTKEYSINSLOT", slot)
        assert held > 5
        await bus.post("news", b"x")
        assert [entry.data for entry in await reading] == [b"x"]
        await bus.close()
        with pytest.raises(BusError, match=r"node of a cluster: write redis\+cluster://"):
            await usable(f"redis://127.0.0.1:{two}")
        for node in nodes:
            await node.aclose()


async def test_a_single_server_is_no_cluster(tmp_path: Path) -> None:
    async with server(tmp_path) as port:
        with pytest.raises(BusError, match="it is a single server: write redis://"):
            await usable(f"redis+cluster://127.0.0.1:{port}")


async def _answer(node: aioredis.Redis, *words: Any) -> Any:
    """The answer of a server that may still be starting."""
    for _ in range(200):
        try:
            return await node.execute_command(*words)
        except aioredis.ConnectionError:
            await asyncio.sleep(0.05)
    raise AssertionError(f"no answer to {words}")


async def _until(node: aioredis.Redis, *words: Any, holds: bytes) -> None:
    for _ in range(600):
        answer: Any = await node.execute_command(*words)
        if holds in answer:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{words} never held {holds}")


async def _move(nodes: list[aioredis.Redis], ids: list[str], slot: int, target: int) -> None:
    """Move a slot and its keys from the first node to the second, as an operator does."""
    await nodes[1].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    await nodes[0].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    while keys := await nodes[0].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
        await nodes[0].execute_command("MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *keys)
    for node in reversed(nodes):
        await node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
