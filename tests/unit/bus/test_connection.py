"""Commands go over the wire as redis-py itself would send them; what breaks in the middle is not used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError

from pipeline.bus.connection import LeanTCP

RESET = ConnectionResetError("reset by peer")


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


@pytest.fixture
async def open_connection() -> AsyncIterator[LeanTCP]:
    """Connected to a server that accepts and says nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = LeanTCP(host="127.0.0.1", port=server.sockets[0].getsockname()[1], retry_on_error=[])
    await connection._connect()
    yield connection
    await connection.disconnect(nowait=True)
    server.close()


def fails(error: BaseException) -> Any:
    async def failing(*_: Any, **__: Any) -> None:
        raise error

    return failing


@pytest.mark.parametrize("half", ["writing to", "reading from"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [(RESET, RedisConnectionError), (asyncio.CancelledError(), asyncio.CancelledError)],
    ids=["reset", "cancelled"],
)
async def test_a_connection_that_failed_halfway_is_closed(
    open_connection: LeanTCP, monkeypatch: pytest.MonkeyPatch, half: str, error: BaseException, raised: type
) -> None:
    monkeypatch.setattr(open_connection._writer, "drain", fails(error))
    monkeypatch.setattr(open_connection._parser, "read_response", fails(error))
    ping = open_connection.pack_command("PING")
    command = open_connection.send_packed_command(ping) if half == "writing to" else open_connection.read_response()
    with pytest.raises(raised) as caught:
        await command
    assert not open_connection.is_connected
    if error is RESET:
        assert str(caught.value) == f"{half} 127.0.0.1:{open_connection.port}: reset by peer"
