"""A server of HTTP/1.1 for services of our own, at a third of what a web framework costs.

A request is handed to its handler once all of it is there, and one connection's requests one after another. A handler
is cancelled when its caller hangs up. A caller that leaves what it is sent unread, or does not finish what it sends,
is cut off. Requests are parsed by httptools (llhttp).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from urllib.parse import unquote

import httptools
import structlog

IDLE_S = 75.0
"""How long a connection may be idle between requests."""
ARRIVE_S = 60.0
"""How long a request may take to arrive."""
SWEEP_S = 5.0
"""How often is looked for connections that are idle or arrive for too long."""
HEAD_LIMIT = 65_536
"""Bytes that the head of a request may have."""
AHEAD = 16
"""Requests that a caller may send before it has the answer to the first; then its connection is read no more."""
CLOSE_S = 1.0
"""How long handlers have to end when the server closes."""
BACKLOG = 1024
"""Connections that may wait to be accepted."""
JSON = "application/json"


class CutOff(ConnectionError):
    """The caller is gone, or did not read and was cut off."""


class Request:
    """One request, all of it, and the way to answer it: `answer`, or `begin`, `write`... and `end`.

    `path`: its parts without their escapes. `headers`: names in lower case.
    """

    __slots__ = ("_connection", "_http10", "begun", "body", "headers", "keep", "method", "path")

    def __init__(self, connection: _Connection, method: str, path: list[str], headers: dict[str, str]) -> None:
        self._connection = connection
        self._http10 = False
        self.method, self.path, self.headers = method, path, headers
        self.body = b""
        self.keep = True
        self.begun = False
        """The head of the answer was sent."""

    def answer(self, status: int, body: bytes, content_type: str = JSON) -> None:
        """Send a whole answer."""
        head = self._head(status, content_type, f"content-length: {len(body)}\r\n")
        self._connection.send(head if self.method == "HEAD" else head + body)

    def begin(self, status: int, content_type: str) -> None:
        """Begin an answer whose length isn't known."""
        more = "cache-control: no-cache\r\n" + ("" if self._http10 else "transfer-encoding: chunked\r\n")
        self._connection.send(self._head(status, content_type, more))

    async def write(self, piece: bytes) -> None:
        """Send a piece, and wait until the caller has read enough of what came before. Raises `CutOff`."""
        if piece:
            self._connection.send(piece if self._http10 else b"%x\r\n%b\r\n" % (len(piece), piece))
        await self._connection.drained()

    async def end(self) -> None:
        """Nothing follows. Raises `CutOff`."""
        if not self._http10:
            self._connection.send(b"0\r\n\r\n")
        await self._connection.drained()

    def cut(self) -> None:
        """Close the connection at once."""
        self._connection.transport.abort()

    def _head(self, status: int, content_type: str, more: str) -> bytes:
        self.begun = True
        close = "" if self.keep else "connection: close\r\n"
        return f"{_line(status)}content-type: {content_type}\r\n{more}{close}\r\n".encode("latin-1")


Handler = Callable[[Request], Awaitable[None]]


class Answering:
    """Hands requests to `handler`, with bodies up to `max_body` bytes; `refuse(status, reason)` makes error bodies.

    A caller is cut off after `unread_s()` seconds in which it did not read.
    """

    def __init__(
        self,
        handler: Handler,
        max_body: int,
        refuse: Callable[[int, str], bytes],
        unread_s: Callable[[], float],
    ) -> None:
        self.handler = handler
        self.max_body = max_body
        self.refuse = refuse
        self.unread_s = unread_s
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, address: str, port: int) -> int:
        """Listen; answers the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), address, port, backlog=BACKLOG)
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Take no more, let handlers end for `CLOSE_S`, and cut off who is still there then."""
        if self._server is not None:
            self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        tasks = [task for connection in list(self.connections) if (task := connection.leave()) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        for connection in list(self.connections):
            connection.cut()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self.connections):
            connection.sweep(now)
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)


class _Connection(asyncio.Protocol):
    """`since`: when the request that arrives began to, or when the connection became idle; 0 while one is handled."""

    def __init__(self, server: Answering) -> None:
        self._server = server
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._arriving = self._headed = False
        self._head_size = self._size = 0
        self._url = b""
        self._headers: dict[str, str] = {}
        self._chunks: list[bytes] = []
        self._paused = False
        self._leaving = False
        self._writable: asyncio.Future[None] | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._since = asyncio.get_running_loop().time()

    # --- for requests and the server ---

    def send(self, data: bytes) -> None:
        if not self._leaving:
            self.transport.write(data)

    async def drained(self) -> None:
        """Wait while the caller does not read. Raises `CutOff`."""
        while self._unread is not None and not self.transport.is_closing():
            if self._writable is None:
                self._writable = asyncio.get_running_loop().create_future()
            await self._writable
        if self.transport.is_closing():
            raise CutOff("the caller is gone")

    def leave(self) -> asyncio.Task[None] | None:
        """Take no further request; answers the handler that still runs."""
        self._waiting.clear()
        if self._task is None:
            self.transport.close()
        return self._task

    def cut(self) -> None:
        self.transport.abort()
        if self._task is not None:
            self._task.cancel()

    def sweep(self, now: float) -> None:
        limit = ARRIVE_S if self._arriving else IDLE_S
        if self._task is None and now - self._since > limit:
            self.transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._waiting.clear()
        if self._unread is not None:
            self._unread.cancel()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        if self._unread is None:
            self._unread = asyncio.get_running_loop().call_later(self._server.unread_s(), self._cut_off)

    def resume_writing(self) -> None:
        if self._unread is not None and not self._leaving:
            self._unread.cancel()
            self._unread = None
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def data_received(self, data: bytes) -> None:
        while data and not self._leaving:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                # Another protocol is offered, which need not be taken: read the request as one without the offer.
                data = self._plain() + data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError as error:
                self._refuse(400, f"the request is no HTTP: {error}")
        if self._arriving and not self._headed and not self._leaving:
            self._head_size += len(data)
            if self._head_size > HEAD_LIMIT:
                self._refuse(431, f"the head of the request exceeds {HEAD_LIMIT} bytes")

    # --- what httptools finds ---

    def on_message_begin(self) -> None:
        self._arriving, self._headed = True, False
        self._head_size = self._size = 0
        self._url = b""
        self._headers, self._chunks = {}, []
        self._since = asyncio.get_running_loop().time()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headed = True
        length = self._headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._server.max_body:
            self._too_large()
        elif self._headers.get("expect", "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._server.max_body:
            self._too_large()
        elif not self._leaving:
            self._chunks.append(body)

    def on_message_complete(self) -> None:
        if self._leaving or (self._parser.should_upgrade() and self._offered()):
            return
        self._arriving = False
        try:
            path = (httptools.parse_url(self._url).path or b"").decode("latin-1")
        except httptools.HttpParserInvalidURLError:
            path = ""
        if not path.startswith("/"):
            self._refuse(400, f"{self._url[:200]!r} is no path")
            return
        request = Request(self, self._parser.get_method().decode(), path.split("/"), self._headers)
        if "%" in path:
            request.path = [unquote(part) for part in request.path]
        request.body = b"".join(self._chunks) if len(self._chunks) != 1 else self._chunks[0]
        request._http10 = self._parser.get_http_version() == "1.0"
        request.keep = self._parser.should_keep_alive() and not request._http10
        self._chunks = []
        self._waiting.append(request)
        if self._task is None:
            self._next()
        elif not self._paused and (len(self._waiting) >= AHEAD or self._ahead() > self._server.max_body):
            self._paused = True
            self.transport.pause_reading()

    # --- parts ---

    def _offered(self) -> bool:
        """Whether the other protocol is but an offer, and not what the request is about."""
        if self._parser.get_method() != b"CONNECT":
            return True
        self._refuse(400, "this is no proxy")
        return False

    def _plain(self) -> bytes:
        """The head of the request without its offer of another protocol."""
        headers = "".join(f"{k}: {v}\r\n" for k, v in self._headers.items() if k not in ("connection", "upgrade"))
        return self._parser.get_method() + b" " + self._url + f" HTTP/1.1\r\n{headers}\r\n".encode("latin-1")

    def _ahead(self) -> int:
        return sum(len(request.body) for request in self._waiting)

    def _next(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._handle(self._waiting.popleft()))

    async def _handle(self, request: Request) -> None:
        try:
            await self._server.handler(request)
            if self._unread is not None:
                await self.drained()
        except CutOff:
            pass
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        except Exception:
            structlog.get_logger().exception("handler failed", path="/".join(request.path))
            if request.begun:
                self.transport.abort()
            else:
                request.answer(500, self._server.refuse(500, "internal error"))
        finally:
            self._task = None
        self._after(request)

    def _after(self, request: Request) -> None:
        if self.transport.is_closing():
            return
        if not request.keep:
            self._leave()
        elif self._waiting:
            self._next()
        else:
            self._since = asyncio.get_running_loop().time()
            if self._paused:
                self._paused = False
                self.transport.resume_reading()

    def _too_large(self) -> None:
        self._refuse(413, f"the body exceeds {self._server.max_body} bytes")

    def _refuse(self, status: int, reason: str) -> None:
        """Answer what can't be read on, and leave. Answers that are still due before it are dropped.

        What still comes is read and thrown away: closing at once would reset the connection under the answer.
        """
        if self._leaving:
            return
        body = self._server.refuse(status, reason)
        head = f"{_line(status)}content-type: {JSON}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.send(head.encode("latin-1") + body)
        self._leaving = True
        if self._task is not None:
            self._task.cancel()
        elif self.transport.can_write_eof():
            self.transport.write_eof()
        self._end_in_time()

    def _leave(self) -> None:
        """Close once all is sent, and in the end in any case."""
        self._leaving = True
        self.transport.close()
        self._end_in_time()

    def _end_in_time(self) -> None:
        if self._unread is None:
            self._unread = asyncio.get_running_loop().call_later(self._server.unread_s(), self.transport.abort)

    def _cut_off(self) -> None:
        structlog.get_logger().warning("caller cut off", reason="it does not read its answer")
        self.transport.abort()


_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


def _line(status: int) -> str:
    return _LINES[status]
