"""The one way to an engine's server: admits requests under the lease, stamps answers, knows what runs.

Bodies pass through unparsed; what the proxy has to know comes in headers: `x-sluice-epoch`, the commit under which the
request was sent, and `x-sluice-rids`, its request ids, comma-separated. An answer carries `x-sluice-version` and
`x-sluice-boot`. A request counts as running until the server has answered it, whether or not its caller is still there.
Streams pass event by event; the server is never held up by a slow caller, who is cut off in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import msgspec
from aiohttp import web

from actors.engine.client import CallError, HttpEngineClient
from actors.network import address_of

ABORT_EVERY_S = 0.5
"""Aborts are repeated: one that comes before its request is lost."""
ABORT_DEADLINE_S = 5.0
"""How long the server may take to answer an abort."""
GATHER_S = 0.005
"""How long aborts are gathered: a refit brings one for every call, and to the server each id is a call of its own."""
BACKLOG_LIMIT = 64 * 2**20
"""Bytes of a stream that its caller may leave unread before it is cut off."""
_JSON = "application/json"
_STREAM = "text/event-stream"


class Refused(Exception):
    """The engine may not run this request now; the message says why."""


class Grant(msgspec.Struct, frozen=True):
    """Leave to run one request: what its tokens are stamped with."""

    version: int
    boot: int


class ErrorBody(msgspec.Struct, frozen=True):
    type: str
    message: str


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


class _Abort(msgspec.Struct):
    rid: str


class _Reply:
    """An answer on its way from the server to the caller: whole, or as a stream of chunks once `headers` are known."""

    def __init__(self) -> None:
        self.whole: web.Response | None = None
        self.headers: dict[str, str] = {}
        self.status = 0
        self.ended = False
        self.error: str | None = None
        """Why a stream that had begun can't go on."""
        self.cut: Callable[[], None] = lambda: None
        """Cuts the caller off, so that nothing waits for it to read."""
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._news = asyncio.Event()

    def answer(self, response: web.Response) -> None:
        self.whole, self.ended = response, True
        self._news.set()

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        self._news.set()

    def put(self, chunk: bytes) -> None:
        """What the caller of a broken stream will not read is dropped."""
        if self.error is not None:
            return
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._size > BACKLOG_LIMIT:
            self.fail(f"the caller left {self._size} bytes unread")
        self._news.set()

    def fail(self, error: str) -> None:
        self.error = error
        self._chunks.clear()
        self._news.set()
        self.cut()

    def end(self) -> None:
        self.ended = True
        self._news.set()

    def close(self) -> None:
        """The server will say nothing more, whatever became of its answer."""
        if self.ended or self.error is not None:
            return
        if self.headers:
            self.fail("the sidecar ends")
        else:
            self.answer(_refusal(502, "engine_error", "the sidecar ends"))

    async def began(self) -> None:
        """Wait for a whole answer, or the head of a stream."""
        await self._news.wait()

    async def next(self) -> bytes | None:
        """The next chunk; None at the end, or at an error."""
        while not self._chunks:
            if self.ended or self.error is not None:
                return None
            self._news.clear()
            await self._news.wait()
        chunk = self._chunks.popleft()
        self._size -= len(chunk)
        return chunk


class Proxy:
    """Serves callers at `url`.

    `admit(epoch)` grants or raises `Refused`, without waiting for long. `status()` is what /status answers; its
    `healthy` decides the status code of /health. `request_deadline_s` bounds every request, `max_body` (bytes) every
    body.
    """

    def __init__(
        self,
        admit: Callable[[int], Awaitable[Grant]],
        status: Callable[[], Mapping[str, Any]],
        request_deadline_s: float,
        max_body: int,
    ) -> None:
        self._admit = admit
        self._status = status
        self._deadline_s = request_deadline_s
        self._client: HttpEngineClient | None = None
        self._running: dict[asyncio.Task[None], tuple[str, ...]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._doomed: set[str] = set()
        self._gathering: asyncio.Task[None] | None = None
        """Will abort what is in `_doomed`."""
        self._abort_turn = asyncio.Lock()
        self._unswept = asyncio.Event()
        """Clear while the server is told to abort all: it would take what is admitted meanwhile for a part of that."""
        self._unswept.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.doubt = False
        """Whether some request ended without the server's whole answer, so that it may still run there."""
        app = web.Application(client_max_size=max_body)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort_request),
                web.get("/health", self._health),
                web.get("/status", self._report),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)

    async def start(self, host: str) -> str:
        """Listen at a free port of `host` (`auto`: this node's address); answers the URL. Raises OSError."""
        await self._runner.setup()
        address = address_of(host)
        await web.TCPSite(self._runner, address, 0, backlog=1024).start()
        return f"http://{address}:{self._runner.addresses[0][1]}"

    def connect(self, client: HttpEngineClient) -> None:
        """From now on requests can go to the server behind `client`."""
        self._client = client

    async def close(self) -> None:
        """Cut everything off."""
        for task in (*self._running, *self._background):
            task.cancel()
        await self._runner.cleanup()

    @property
    def running(self) -> int:
        """Sequences that the server has not answered."""
        return sum(len(rids) for rids in self._running.values())

    async def idle(self) -> None:
        """Wait until nothing runs."""
        await self._idle.wait()

    async def abort_running(self) -> None:
        """Abort whatever runs, again and again until nothing does. Bound it by a deadline of yours."""
        while self._running and self._client is not None:
            with contextlib.suppress(CallError):
                await self._client.abort_all(ABORT_DEADLINE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), ABORT_EVERY_S)

    async def end(self, rids: Collection[str]) -> None:
        """Have the server abort these, with what else is to be aborted by then. Raises `CallError`.

        A caller that leaves takes nothing with it: the others' are aborted all the same.
        """
        if not rids:
            return
        self._doomed.update(rids)
        if self._gathering is None:
            self._gathering = self._spawn(self._end_doomed())
        await asyncio.shield(self._gathering)

    # --- routes ------------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            epoch = int(request.headers["x-sluice-epoch"])
            rids = tuple(request.headers["x-sluice-rids"].split(","))
        except (KeyError, ValueError):
            return _refusal(400, "bad_request", "headers x-sluice-epoch (a number) and x-sluice-rids are required")
        if not all(rids):
            return _refusal(400, "bad_request", f"header x-sluice-rids has an empty id: {','.join(rids)!r}")
        try:
            body = await request.read()
            grant = await self._admit(epoch)
            while not self._unswept.is_set():
                await self._unswept.wait()
                grant = await self._admit(epoch)
        except web.HTTPRequestEntityTooLarge as error:
            return _refusal(413, "bad_request", error.text or "the body is too large")
        except Refused as refused:
            return _refusal(409, "not_serving", str(refused))
        reply = _Reply()
        task = asyncio.create_task(self._run(body, grant, reply))
        self._running[task] = rids
        self._idle.clear()
        task.add_done_callback(self._ran)
        task.add_done_callback(lambda _: reply.close())
        try:
            await reply.began()
            return reply.whole or await self._stream(request, reply)
        finally:  # a caller that left, and nobody else, wanted its tokens
            if not reply.ended:
                self._spawn(self._abort(task, rids))

    async def _run(self, body: bytes, grant: Grant, reply: _Reply) -> None:
        assert self._client is not None
        headers = {"x-sluice-version": str(grant.version), "x-sluice-boot": str(grant.boot)}
        try:
            async with self._client.forward("/generate", body, self._deadline_s) as answer:
                headers["content-type"] = answer.content_type
                if answer.content_type == _STREAM:
                    reply.begin(answer.status, headers)
                    async for chunk in answer.chunks():
                        reply.put(chunk)
                    reply.end()
                else:
                    whole = await answer.read()
                    reply.answer(web.Response(status=whole.status, body=whole.body, headers=headers))
        except CallError as error:
            self.doubt = True
            if reply.headers:
                reply.fail(str(error))
            else:
                reply.answer(_refusal(502, "engine_error", str(error)))

    async def _stream(self, request: web.Request, reply: _Reply) -> web.StreamResponse:
        """Pass chunks on. A stream that breaks is cut, so that it can't be taken for a whole one."""
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        await response.prepare(request)
        if request.transport is not None:
            reply.cut = request.transport.abort
        while (chunk := await reply.next()) is not None:
            await response.write(chunk)
        if reply.error is None:
            await response.write_eof()
        else:
            reply.cut()
        return response

    def _ran(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not self._running:
            self._idle.set()
        if not task.cancelled():
            task.exception()

    async def _abort(self, task: asyncio.Task[None], rids: tuple[str, ...]) -> None:
        """Abort one request until it ends, which it does at its deadline at the latest."""
        while not task.done():
            with contextlib.suppress(CallError):
                await self.end(rids)
            await asyncio.wait((task,), timeout=ABORT_EVERY_S)

    async def _end_doomed(self) -> None:
        assert self._client is not None
        async with self._abort_turn:
            await asyncio.sleep(GATHER_S)
            doomed = {rid for rids in self._running.values() for rid in rids if rid in self._doomed}
            self._doomed, self._gathering = set(), None
            if not 1 < len(doomed) == self.running:
                await asyncio.gather(*(self._client.abort(rid, ABORT_DEADLINE_S) for rid in doomed))
                return
            self._unswept.clear()
            try:
                await self._client.abort_all(ABORT_DEADLINE_S)
            finally:
                self._unswept.set()

    async def _abort_request(self, request: web.Request) -> web.Response:
        """Abort what runs under the prefix `rid`; like the server, 200 when nothing does."""
        try:
            prefix = msgspec.json.decode(await request.read(), type=_Abort).rid
        except msgspec.DecodeError as error:
            return _refusal(400, "bad_request", str(error))
        if not prefix:
            return _refusal(400, "bad_request", "rid is empty")
        if self._client is None:
            return web.Response()
        # the server knows whole ids only: of a prefix that is no id itself it takes no notice
        hit = [rid for rids in self._running.values() for rid in rids if rid.startswith(prefix)]
        try:
            await self.end(hit)
        except CallError as error:
            return _refusal(502, "engine_error", str(error))
        return web.Response()

    async def _health(self, request: web.Request) -> web.Response:
        status = self._status()
        return _json({key: status[key] for key in ("healthy", "state")}, 200 if status["healthy"] else 503)

    async def _report(self, request: web.Request) -> web.Response:
        return _json(self._status())

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type=_JSON)


def _refusal(status: int, kind: str, message: str) -> web.Response:
    return _json(ErrorReply(ErrorBody(kind, message)), status)
