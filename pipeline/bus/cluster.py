"""A run on a cluster: all its keys share one slot, so one connection to that slot's master serves all of them.

A connection asks the known nodes for the master when it opens. When the slot has moved, or its master is gone, it is
closed, and the next try asks again.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio.connection import Connection, SSLConnection
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, RedisError

from pipeline.bus.address import Address
from pipeline.bus.connection import Lean, LeanTCP, LeanTLS
from pipeline.bus.keys import Keys


class _Routed(Lean):
    """Connects to the master of `slot`, as `nodes` know it. `plain`: arguments of a connection to one node."""

    def __init__(self, nodes: tuple[tuple[str, int], ...], slot: int, **plain: Any) -> None:
        self._nodes, self._slot, self._plain = nodes, slot, plain
        super().__init__(**plain)

    async def connect(self) -> None:
        if not self.is_connected:
            self.host, self.port = await self._master()
            await super().connect()

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)
        except MovedError as error:
            await self.disconnect()
            raise RedisConnectionError(f"the run's slot has moved: {error}") from error

    async def _master(self) -> tuple[str, int]:
        """Ask one node after another. Raises what the last of them answered."""
        failure: RedisError = RedisConnectionError("no node of the cluster is known")
        for host, port in self._nodes:
            kind = SSLConnection if isinstance(self, SSLConnection) else Connection
            asked = kind(**{**self._plain, "host": host, "port": port})
            try:
                await asked.connect()
                await asked.send_command("CLUSTER", "SLOTS")
                return self._owner(host, await asked.read_response())
            except RedisError as error:
                failure = error
            finally:
                await asked.disconnect()
        raise failure

    def _owner(self, host: str, rows: Any) -> tuple[str, int]:
        for first, last, master, *_ in rows:
            if first <= self._slot <= last:
                name = master[0]
                return (name.decode() if isinstance(name, bytes) else name) or host, master[1]
        raise RedisConnectionError(f"no node of the cluster serves slot {self._slot}")


class RoutedConnection(_Routed, LeanTCP):
    """Over TCP."""


class RoutedSSLConnection(_Routed, LeanTLS):
    """Over TLS; certificates are checked against the names that the nodes announce."""


def routing(address: Address, run: str) -> dict[str, Any]:
    """Arguments of a connection pool for `run` on the cluster at `address`."""
    return {
        "connection_class": RoutedSSLConnection if address.tls else RoutedConnection,
        "nodes": address.hosts,
        "slot": key_slot(Keys(run).prefix.encode()),
    }
