"""POST over kept-alive HTTP/1.1 connections to services of our own, at a quarter of what a general client costs.

Plain HTTP only: no redirects, cookies, proxies or compression. Answers are parsed by httptools (llhttp); one without a
length is taken for broken, because it could have been cut anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import lru_cache
from urllib.parse import quote, urlsplit

import httptools

KEEPALIVE_S = 15.0
"""Idle connections are closed after that, before a server would: a request must not meet its closing."""
HEAD_LIMIT = 65_536
"""Bytes that the head of an answer may have."""
_SAFE = "/?&=%:@!$'()*+,;~"
BACKLOG = 2**20
"""Bytes of an answer that may wait for their reader before the connection is read no more."""


class Disconnected(ConnectionError):
    """The connection ended, or what came was no HTTP, before the end of the answer."""


class TooLong(Exception):
    """An answer is longer than its reader will have; the message says than what."""


class Reply:
    """An answer whose head is in; its body is read once, by `whole` or `chunks`. `headers`: names in lower case."""

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._connection = connection
        self._chunks: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def whole(self, limit: int) -> bytes:
        """All of the body. Raises `TooLong`, `Disconnected`."""
        while self._size <= limit:
            if self._ended:
                return b"".join(self._chunks)
            await self._news(paused=False)
        raise TooLong(f"the answer exceeds {limit} bytes")

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `Disconnected` behind what came before."""
        while True:
            if self._chunks:
                chunk = b"".join(self._chunks)
                self._chunks.clear()
                self._size = 0
                self._connection.resume()
                yield chunk
            elif self._ended:
                return
            else:
                await self._news(paused=True)

    async def head(self) -> None:
        """Wait for the head. Raises `Disconnected`."""
        while not self.status:
            await self._news(paused=True)

    async def _news(self, paused: bool) -> None:
        """Wait until something has changed. Not `paused`: the reader wants it all, however much waits."""
        if self._error is not None:
            raise self._error
        if not paused:
            self._connection.resume()
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def drop(self) -> None:
        """Nobody will read on: if the answer has not ended, its connection does."""
        self._connection.drop(self)

    # --- what the connection tells ---

    def began(self, status: int) -> None:
        self.status = status
        self._wake()

    def grew(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if self._size > BACKLOG:
            self._connection.pause()
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection, with one request in flight at most. It is idle again only once an answer was read to its end."""

    def __init__(self, idle: dict[_Connection, float]) -> None:
        self._idle = idle
        self._reply: Reply | None = None
        self._head_size = 0
        self._paused = False
        self._parser = httptools.HttpResponseParser(self)

    def ask(self, request: bytes) -> Reply:
        self._reply = reply = Reply(self)
        self._head_size = 0
        self.transport.write(request)
        return reply

    def drop(self, reply: Reply) -> None:
        """Nobody reads this answer any more: if it has not ended, the connection does."""
        if self._reply is reply:
            self._reply = None
            self.transport.abort()

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._reply is None:
            self.transport.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._broken(f"the answer is no HTTP: {error}")
            return
        if self._reply is not None and not self._reply.status:
            self._head_size += len(data)
            if self._head_size > HEAD_LIMIT:
                self._broken(f"the head of the answer exceeds {HEAD_LIMIT} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._broken(f"the connection was closed before the end of the answer{f': {exc}' if exc else ''}")

    def _broken(self, reason: str) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.fail(Disconnected(reason))
        self.transport.abort()

    # --- what httptools finds ---

    def on_message_begin(self) -> None:
        if self._reply is None:  # what nobody asked for would be taken for the answer to the next request
            self._idle.pop(self, None)
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reply is not None:
            self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._reply is not None and status >= 200:
            if not self._reply.headers.keys() & {"content-length", "transfer-encoding"}:
                self._broken("the answer has no length")
            else:
                self._reply.began(status)

    def on_body(self, body: bytes) -> None:
        if self._reply is not None:
            self._reply.grew(body)

    def on_message_complete(self) -> None:
        reply = self._reply
        if reply is None:
            return
        if not reply.status:  # 100 Continue and the like
            reply.headers.clear()
            return
        self._reply = None
        if self._parser.should_keep_alive():
            self._idle[self] = asyncio.get_running_loop().time()
            self.resume()
        else:
            self.transport.close()
        reply.end()


class Poster:
    """Posts to any number of servers, over as many connections as there are requests at a time."""

    def __init__(self, connect_s: float) -> None:
        """`connect_s`: longest wait for a new connection. Deadlines of whole requests are the caller's."""
        self._connect_s = connect_s
        self._idle: dict[str, dict[_Connection, float]] = {}

    @contextlib.asynccontextmanager
    async def post(
        self, base: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Reply]:
        """Post JSON to `path` of the server at `base`. An answer that the block does not read to its end is cut off.

        Raises OSError if there is no connection, and `Disconnected`, which is one too.
        """
        reply = await self._ask(base, path, body, headers or {})
        try:
            yield reply
        finally:
            reply.drop()

    def close(self) -> None:
        """Close the idle connections; those in use end with their requests."""
        for idle in self._idle.values():
            for connection in list(idle):
                connection.transport.abort()

    async def _ask(self, base: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        origin, host, port = _parts(base)
        lines = [f"POST {quote(path, safe=_SAFE)} HTTP/1.1\r\nhost: {origin}\r\ncontent-type: application/json\r\n"]
        lines += [f"{name}: {_clean(value)}\r\n" for name, value in headers.items()]
        lines.append(f"content-length: {len(body)}\r\n\r\n")
        connection = self._spare(origin)
        if connection is None:
            idle = self._idle.setdefault(origin, {})
            try:
                async with asyncio.timeout(self._connect_s):
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(lambda: _Connection(idle), host, port)
            except TimeoutError as error:
                raise Disconnected(f"{origin} accepts no connection within {self._connect_s:g} s") from error
        reply = connection.ask("".join(lines).encode("latin-1") + body)
        try:
            await reply.head()
        except BaseException:
            reply.drop()
            raise
        return reply

    def _spare(self, origin: str) -> _Connection | None:
        """The connection that became idle last, if it still can be used; those idle for too long are closed."""
        idle = self._idle.get(origin, {})
        for connection in _stale(idle, asyncio.get_running_loop().time() - KEEPALIVE_S):
            del idle[connection]
            connection.transport.abort()
        while idle:
            connection, _ = idle.popitem()
            if not connection.transport.is_closing():
                return connection
        return None


def _stale(idle: dict[_Connection, float], before: float) -> list[_Connection]:
    """Connections stand in the order in which they became idle."""

    def old() -> Iterator[_Connection]:
        for connection, since in idle.items():
            if since > before:
                return
            yield connection

    return list(old())


@lru_cache(256)
def _parts(base: str) -> tuple[str, str, int]:
    """What names a server, its host and port. Raises ValueError for any URL but http://HOST:PORT."""
    parts = urlsplit(base)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"{base!r}: http://HOST:PORT is due")
    return _clean(parts.netloc), parts.hostname, parts.port or 80


def _clean(text: str) -> str:
    """`text`, which may not break out of its line."""
    if not text.isascii() or any(c in text for c in "\r\n\0"):
        raise ValueError(f"{text!r} can't stand in the head of a request")
    return text
