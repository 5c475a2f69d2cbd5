"""A server with SGLang's native API that does as a test tells it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeServer:
    """`calls` is what came, in order. `hang` names paths that are never answered, `answers` gives other answers, `once`
    such that are given once each, and a call in `cut` loses its connection.

    A request to /generate runs until `finish` is called, or its id is aborted. With `stream` its answer is one: the
    events that a test puts into `events`, until it puts None (the end) or an exception (which cuts the connection).
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.hang: set[str] = set()
        self.answers: dict[str, tuple[int, Any]] = {}
        self.once: dict[str, list[tuple[int, Any]]] = {}
        self.cut: set[str] = set()
        self.running: dict[str, asyncio.Future[str]] = {}
        self.deaf_to_aborts = False
        self.events: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self.version: str | None = "default"
        self.paused = False
        self.receivers: dict[str, list[Any]] = {}
        """What our receivers in its ranks answer, by what they are told to do."""
        self._came = asyncio.Condition()
        self._ended = asyncio.Condition()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def __aenter__(self) -> FakeServer:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    async def came(self, path: str, count: int = 1) -> None:
        """Wait until `path` was called `count` times."""
        async with asyncio.timeout(20), self._came:
            await self._came.wait_for(lambda: self.paths().count(path) >= count)

    def finish(self, rid: str) -> None:
        self.running.pop(rid).set_result("length")

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        path = request.path
        self.calls.append((path, msgspec.json.decode(body) if body else dict(request.query)))
        async with self._came:
            self._came.notify_all()
        if path in self.hang:
            await asyncio.Event().wait()
        if path in self.cut:
            assert request.transport is not None
            request.transport.abort()
        if self.once.get(path) or path in self.answers:
            status, answer = self.once[path].pop(0) if self.once.get(path) else self.answers[path]
            if isinstance(answer, bytes):
                return web.Response(status=status, body=answer, content_type="text/plain")
            return web.json_response(answer, status=status)
        if path == "/generate" and self.calls[-1][1].get("stream"):
            return await self._stream(request, self.calls[-1][1]["rid"])
        known = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
            "/model_info": self._model_info,
        }
        return await known.get(path, self._default)(self.calls[-1][1])

    async def _generate(self, body: Any) -> web.Response:
        done = self.running[body["rid"]] = asyncio.get_running_loop().create_future()
        try:
            reason = await done
        finally:
            self.running.pop(body["rid"], None)
            async with self._ended:
                self._ended.notify_all()
        return web.json_response({"output_ids": [1], "meta_info": {"finish_reason": {"type": reason}}})

    async def _stream(self, request: web.Request, rid: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        aborted = self.running[rid] = asyncio.get_running_loop().create_future()
        while not aborted.done():
            event = asyncio.ensure_future(self.events.get())
            await asyncio.wait((event, aborted), return_when=asyncio.FIRST_COMPLETED)
            if not event.done():
                event.cancel()
                break
            match event.result():
                case None:
                    break
                case bytes(data):
                    await response.write(data)
                case _:
                    assert request.transport is not None
                    request.transport.abort()
                    break
        self.running.pop(rid, None)
        return response

    async def _abort(self, body: Any) -> web.Response:
        if not self.deaf_to_aborts and (body.get("abort_all") or body["rid"] in self.running):
            for rid in [r for r in self.running if body.get("abort_all") or r.startswith(body["rid"])]:
                self.running.pop(rid).set_result("abort")
        return web.Response()

    async def _flush(self, query: Any) -> web.Response:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(query.get("timeout", 0))), self._ended:
                await self._ended.wait_for(lambda: not self.running)
        return web.Response(status=400 if self.running else 200)

    async def _model_info(self, body: Any) -> web.Response:
        return web.json_response({"model_path": "m", "weight_version": self.version})

    async def _default(self, body: Any) -> web.Response:
        path = self.paths()[-1]
        if path == "/update_weights_from_distributed":
            self.version = body["weight_version"]
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        message = ""
        if path == "/update_weights_from_distributed" and body["load_format"].startswith("sluice:"):
            do = msgspec.json.decode(body["load_format"].removeprefix("sluice:"))["do"]
            told = msgspec.json.encode(self.receivers[do]).decode()
            message = f"sluice:{told} Weight version updated to {body['weight_version']}."
        return web.json_response(
            {"success": True, "message": message, "ranks": [{"checksums": dict.fromkeys("abc", "00")}], "tp_size": 2}
        )
