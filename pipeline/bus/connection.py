"""Connections and their pool: redis-py's handshakes, and a short way for what happens on every command.

redis-py's own packing, metrics, locks, retries and timeouts are most of the CPU that a command takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection
from redis.asyncio.connection import UnixDomainSocketConnection as UnixConnection
from redis.asyncio.sentinel import SentinelConnectionPool, SentinelManagedConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError


class Lean(AbstractConnection):
    """Packs in C, and has no deadlines of its own: they are the caller's, who cancels. It is closed then."""

    def pack_command(self, *args: Any) -> list[bytes]:
        """Strings as UTF-8; the client's own commands may come as two words in one string."""
        if isinstance(args[0], str) and " " in args[0]:
            args = (*args[0].split(), *args[1:])
        return [hiredis.pack_command(args)]

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [data for command in commands for data in self.pack_command(*command)]

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        assert self._writer is not None
        assert not isinstance(command, bytes | str)
        try:
            self._writer.writelines(command)
            await self._writer.drain()
        except BaseException as error:
            raise await self._broken("writing to", error) from None

    async def read_response(self, *_: Any, **__: Any) -> Any:
        """One reply. Raises ResponseError for one that says so, which leaves the connection as it was."""
        parser: Any = self._parser
        try:
            reply = await parser.read_response()
        except BaseException as error:
            raise await self._broken("reading from", error) from None
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    async def _broken(self, doing: str, error: BaseException) -> BaseException:
        """Close, for half a command or a reply that nobody awaits is under way; answers what is to be raised."""
        await self.disconnect(nowait=True)
        return RedisConnectionError(f"{doing} {self._host_error()}: {error}") if isinstance(error, OSError) else error


class LeanUnix(Lean, UnixConnection):
    """Over a Unix socket."""


class LeanTCP(Lean, Connection):
    """Over TCP."""


class LeanTLS(Lean, SSLConnection):
    """Over TLS."""


class LeanSentinel(SentinelManagedConnection, Lean):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Over TCP to whichever server the sentinels name; it is left when it is the master no more."""


class Pool(ConnectionPool):
    """Hands out connections without redis-py's metrics; as many as are wanted at once."""

    async def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> AbstractConnection:
        """A connection that is open and in step: no reply of an earlier command is left on it."""
        connection = self.get_available_connection()
        try:
            if not connection.is_connected or await connection.can_read():
                await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        self._in_use_connections.remove(connection)
        self._available_connections.append(connection)


class SentinelPool(Pool, SentinelConnectionPool):
    """Of connections to whichever server the sentinels name."""
