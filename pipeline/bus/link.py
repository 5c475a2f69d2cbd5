"""The connection: commands that wait out an outage of the store, up to a deadline."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis.asyncio as aioredis
import structlog
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.utils import HIREDIS_AVAILABLE

from pipeline.bus import address, cluster
from pipeline.bus.address import Address
from pipeline.bus.connection import LeanSentinel, LeanTCP, LeanTLS, LeanUnix, Pool, SentinelPool
from pipeline.bus.errors import BusError, BusUnavailable
from pipeline.bus.lua import Call

T = TypeVar("T")
R = TypeVar("R")

REPLY_S = 15.0
"""Longest wait for a reply, beyond the time a read may block; then the connection counts as lost."""
CONNECTIONS = 32
"""Commands in flight at once, blocking reads apart; more wait for their turn."""
MIN_VERSION = (7, 0)
_TRANSIENT = (
    RedisConnectionError,
    RedisTimeoutError,
    ReadOnlyError,
    MasterDownError,
    AskError,
    TryAgainError,
    ClusterDownError,
)
_FIXES = {
    "permissions": "give the user of REDIS_URL the rights `~sluice:* +@all -@dangerous +info`",
    "used memory > 'maxmemory'": "raise the store's maxmemory, or let fewer rollouts wait (buffer.groups)",
    "NOGROUP": "the stream or its group is gone, so the store was emptied under the run: start a new run",
    "WRONGTYPE": "something else uses this run's keys: choose another run name or database",
    "cluster support disabled": "it is a single server: write redis:// or rediss://",
    "MISCONF": "the store can't write its files: make room on its disk, and see its log",
}
"""What an error's text says -> what helps."""


class Link:
    """Runs commands and scripts on one client; `outage_s` bounds how long it waits for a store that went away."""

    def __init__(self, client: aioredis.Redis, address: Address, outage_s: float) -> None:
        self.server = ""
        """Name and version, once checked."""
        self._client = client
        self._address = address
        self._outage_s = outage_s
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self._log = structlog.get_logger().bind(store=str(address))
        self._opened = False
        self._lost_at: float | None = None
        """Since when nothing has been answered; the first of the commands that wait says so."""

    @classmethod
    async def open(cls, url: str, run: str, actor: str, outage_s: float, connect_s: float) -> Link:
        """Connect and check the server. Raises BusError, or BusUnavailable if it didn't answer within `connect_s`."""
        if not HIREDIS_AVAILABLE:
            raise BusError("the package hiredis is missing: pip install 'redis[hiredis]'")
        parsed = address.parse(url)
        link = cls(client(parsed, run, actor), parsed, connect_s)
        try:
            link.server = check(await link.command("INFO"), str(parsed), cluster=parsed.kind == "cluster")
        except BaseException:
            await link.close()
            raise
        link._outage_s, link._opened = outage_s, True
        return link

    async def close(self) -> None:
        pool = self._client.connection_pool
        if isinstance(pool, SentinelConnectionPool):
            for sentinel in pool.sentinel_manager.sentinels:
                await sentinel.aclose()
        await self._client.aclose()

    async def command(self, *args: Any, block_ms: int = 0) -> Any:
        """One command; its raw reply."""
        return (await self.run(lambda: self.once(args), block_ms))[0]

    async def call(self, call: Call[R]) -> R:
        """One script; its raw reply."""
        return await self.run(lambda: self.evaluate(call))

    async def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Several commands in one round trip, in order but not as one transaction; their raw replies."""
        return await self.run(lambda: self.once(*commands))

    async def once(self, *commands: Sequence[Any]) -> list[Any]:
        """One try of commands that are sent together, for `run`; their raw replies. Raises the first error of them."""
        pool = self._client.connection_pool
        connection = await pool.get_connection()
        try:
            await connection.send_packed_command(connection.pack_commands(commands))
            replies = [await _reply(connection) for _ in commands]
        finally:
            await pool.release(connection)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
        return replies

    async def evaluate(self, call: Call[Any]) -> Any:
        """One try of a script, for `run`. Its source is sent only if the store doesn't have it."""
        rest = (len(call.keys), *call.keys, *call.args)
        try:
            (reply,) = await self.once(("EVALSHA", call.sha, *rest))
        except NoScriptError:
            (reply,) = await self.once(("EVAL", call.source, *rest))
        return reply

    async def run(self, attempt: Callable[[], Awaitable[T]], block_ms: int = 0) -> T:
        """Try until it works. Raises BusUnavailable after an outage of `outage_s`, BusError if trying won't help."""
        reply_s = min(REPLY_S, self._outage_s) + block_ms / 1000
        try:
            if block_ms:
                return await self._persist(attempt, reply_s)
            async with self._slots:
                return await self._persist(attempt, reply_s)
        except (AuthenticationError, AuthorizationError) as error:
            fix = "correct the user and password in it"
            raise BusError(f"REDIS_URL={self._address}: the store refused the login ({error}): {fix}") from error
        except RedisError as error:
            fixes = (f"; {fix}" for sign, fix in _FIXES.items() if sign in str(error))
            raise BusError(f"REDIS_URL={self._address}: {error}{next(fixes, '')}") from error

    async def _persist(self, attempt: Callable[[], Awaitable[T]], reply_s: float) -> T:
        """Try, and over an outage try again. A reply that doesn't come within `reply_s` is one."""
        lost_at: float | None = None
        tries = 0
        while True:
            tries += 1
            try:
                async with asyncio.timeout(reply_s):
                    result = await attempt()
            except (AuthenticationError, AuthorizationError):
                raise
            except (*_TRANSIENT, TimeoutError) as error:
                now = time.monotonic()
                why = f"no reply within {reply_s:g} s" if isinstance(error, TimeoutError) else str(error)
                if lost_at is None:
                    self._lost(now, why)
                    lost_at = now
                elif now - lost_at >= self._outage_s:
                    raise BusUnavailable(self._unreachable(why)) from error
                await asyncio.sleep(_pause(tries))
            else:
                self._found()
                return result

    def _lost(self, now: float, why: str) -> None:
        """Say that the store is waited for. Whoever opens a link, or logs nothing, tells of a failure himself."""
        if self._lost_at is None and self._opened and structlog.is_configured():
            self._lost_at = now
            limit = round(self._outage_s, 3)
            self._log.warning("the store does not answer: waiting for it", at_most_s=limit, error=why)

    def _found(self) -> None:
        if self._lost_at is not None:
            self._log.info("store back", outage_s=round(time.monotonic() - self._lost_at, 3))
            self._lost_at = None

    def _unreachable(self, error: str) -> str:
        return (
            f"REDIS_URL={self._address} could not be reached for {self._outage_s:g} s ({error}): "
            "start that server or correct REDIS_URL; without REDIS_URL an embedded server is used"
        )


async def _reply(connection: AbstractConnection) -> Any:
    """The next reply; an error that leaves the connection usable is one."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _pause(tries: int) -> float:
    """Seconds before the next try: up to 1, drawn so that the actors of a run don't come all at once."""
    return min(1.0, random.random() * 0.02 * 2 ** min(tries, 10))


def client(address: Address, run: str, actor: str) -> aioredis.Redis:
    """A client whose retries and deadlines are left to `Link`; on a cluster, for the keys of `run` alone."""
    common: dict[str, Any] = {
        "db": address.db,
        "username": address.username,
        "password": address.password,
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": 5.0,
        "retry": Retry(NoBackoff(), 0),
        "client_name": f"sluice:{run}:{actor}",
        "max_connections": 1 << 20,
    }
    if address.kind == "unix":
        return aioredis.Redis.from_pool(Pool(connection_class=LeanUnix, path=address.path, **common))
    common |= {"socket_keepalive": True, "connection_class": LeanTLS if address.tls else LeanTCP}
    if address.kind == "sentinel":
        login = {
            "username": address.options.get("sentinel_user"),
            "password": address.options.get("sentinel_password"),
            "socket_connect_timeout": 5.0,
            "socket_timeout": 5.0,
        }
        common |= {"connection_class": LeanSentinel, "connection_pool_class": SentinelPool}
        return Sentinel(list(address.hosts), sentinel_kwargs=login).master_for(address.master, **common)
    if address.tls:
        names = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
        common |= {names[option]: value for option, value in address.options.items()}
    if address.kind == "cluster":
        common |= cluster.routing(address, run)
    else:
        ((common["host"], common["port"]),) = address.hosts
    return aioredis.Redis.from_pool(Pool(**common))


async def probe(url: str, connect_s: float) -> str:
    """Name and version of the server at `url`, such as "valkey 8.1.3". Raises as `Bus.connect` does."""
    link = await Link.open(url, "probe", "probe", connect_s, connect_s)
    await link.close()
    return link.server


def check(info: bytes, where: str, *, cluster: bool = False) -> str:
    """Name and version of the server that sent this reply to INFO.

    Raises BusError if a run can't be trusted to it: a version below 7.0, or a policy that evicts the run's keys.
    """
    pairs = (line.partition(b":") for line in info.splitlines())
    facts = {key.decode(): value.decode() for key, _, value in pairs}
    version = facts.get("redis_version", "0")
    major, minor = (int(part) for part in f"{version}.0".split(".")[:2])
    if (major, minor) < MIN_VERSION:
        fix = "use Redis >= 7.0 or Valkey, or unset REDIS_URL for an embedded server"
        raise BusError(f"REDIS_URL={where}: the server is version {version}: {fix}")
    if facts.get("cluster_enabled") == "1" and not cluster:
        raise BusError(f"REDIS_URL={where}: the server is a node of a cluster: write redis+cluster://host:port")
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy.startswith("allkeys") and facts.get("maxmemory", "0") != "0":
        raise BusError(f"REDIS_URL={where}: maxmemory-policy {policy} would delete the run's keys: set noeviction")
    return f"{facts.get('server_name', 'redis')} {facts.get('valkey_version', version)}"
