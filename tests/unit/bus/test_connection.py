"""Commands go over the wire as redis-py itself would send them."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio.connection import Connection

from pipeline.bus.connection import LeanTCP


@pytest.mark.parametrize(
    "command",
    [
        ("PING",),
        ("CLUSTER SLOTS",),
        ("CLIENT SETINFO", "LIB-NAME", "redis-py"),
        ("EVALSHA", "0" * 40, 2, b"\x00\xff", "schlüssel", 1.5, 10**20, b"\r\n"),
        (b"GET", b"a b"),
        ("SET", "two words", "x" * 100_000),
    ],
)
def test_a_command_is_packed_as_by_redis_py(command: tuple[Any, ...]) -> None:
    assert b"".join(LeanTCP().pack_command(*command)) == b"".join(Connection().pack_command(*command))
