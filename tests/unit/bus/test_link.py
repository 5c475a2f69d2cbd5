"""What the connection decides without a server."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from redis.exceptions import ConnectionError as RedisConnectionError

from pipeline.bus import Bus, BusError, address, link


async def test_without_hiredis_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HIREDIS_AVAILABLE", False)
    with pytest.raises(BusError, match=r"pip install 'redis\[hiredis\]'"):
        await Bus.connect("redis://localhost", "run", actor="a")


@pytest.mark.parametrize(
    ("info", "server"),
    [
        (b"redis_version:7.0.0\r\n", "redis 7.0.0"),
        (b"redis_version:8.2\r\nmaxmemory:0\r\nmaxmemory_policy:allkeys-lru", "redis 8.2"),
        (b"server_name:valkey\r\nredis_version:7.2.4\r\nvalkey_version:9.1.2\r\n", "valkey 9.1.2"),
    ],
)
def test_a_good_server_is_named(info: bytes, server: str) -> None:
    assert link.check(info, "where") == server


@pytest.mark.parametrize("version", [b"6.2.14", b"5", b"6.9"])
def test_an_old_server_is_refused(version: bytes) -> None:
    with pytest.raises(BusError, match=r"use Redis >= 7\.0 or Valkey"):
        link.check(b"redis_version:" + version, "where")


def test_a_node_of_a_cluster_is_refused_as_a_single_server() -> None:
    info = b"redis_version:7.2.4\r\ncluster_enabled:1\r\n"
    with pytest.raises(BusError, match=r"a node of a cluster: write redis\+cluster://"):
        link.check(info, "where")
    assert link.check(info, "where", cluster=True) == "redis 7.2.4"


def test_a_server_that_names_no_version_is_refused() -> None:
    with pytest.raises(BusError, match="version 0"):
        link.check(b"", "where")


class Patchy:
    """A store that does not answer the first `misses` tries."""

    def __init__(self, misses: int) -> None:
        self.misses = misses

    async def __call__(self) -> str:
        self.misses -= 1
        if self.misses >= 0:
            raise RedisConnectionError("Error 111")
        return "reply"


@pytest.mark.parametrize(("opened", "configured"), [(True, True), (True, False), (False, True)])
async def test_an_outage_is_told_once_by_a_link_that_is_open_to_those_who_log(
    opened: bool, configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = link.Link(None, address.parse("redis://localhost"), 60.0)  # pyright: ignore[reportArgumentType]
    made._opened = opened
    monkeypatch.setattr(structlog, "is_configured", lambda: configured)
    with structlog.testing.capture_logs() as logged:
        made._log = structlog.get_logger()
        assert await asyncio.gather(*(made.run(Patchy(misses)) for misses in (2, 3, 0))) == ["reply"] * 3
    told = [entry["event"] for entry in logged]
    assert told == (["the store does not answer: waiting for it", "store back"] if opened and configured else [])
