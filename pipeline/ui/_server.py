"""`pipeline ui`: serves the page and what it asks for, by default to this machine alone."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from config.schema import RunConfig
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir
from pipeline.ui._answers import ANSWERS, SOURCE, TOKENIZER, Answer, Refused, check, status
from pipeline.ui._source import Source

STATIC = Path(__file__).parent / "static"
PORT = 8686
TICK_S = 1.0
"""Least time between two messages to a page."""
QUIET_S = 2.0
"""Longest time between two messages while a run is live; waits grow older although nothing happens."""
HEARTBEAT_S = 15.0
WRITE_S = 30.0
"""A page that does not take a message for so long is cut off."""
CLOSE_S = 10.0
LISTENERS = 32
"""Pages that may follow at once."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FILES = {
    path.relative_to(STATIC).as_posix(): path for path in sorted(STATIC.rglob("*")) if path.suffix in TYPES
}  # fmt: skip

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TASK = web.AppKey("task", asyncio.Task)
OPEN = web.AppKey("open", set)


def app(run: RunDir, config: RunConfig, host: str, clock: Callable[[], float] = time.time) -> web.Application:
    """The server of one run; it reads the run from its start-up to its clean-up."""
    made = web.Application(middlewares=[_guard(host)])
    made[SOURCE] = Source(run, config, clock)
    made[TOKENIZER] = {}
    made[OPEN] = set()
    made.cleanup_ctx.append(_following)
    made.on_shutdown.append(_hang_up)
    made.router.add_get("/", _page)
    made.router.add_get("/static/{path:.+}", _static)
    made.router.add_get("/favicon.ico", _no_icon)
    for name, answer in ANSWERS.items():
        made.router.add_get(f"/api/{name}", _json(answer))
    made.router.add_get("/api/live", _live)
    return made


async def _following(running: web.Application) -> AsyncIterator[None]:
    running[TASK] = asyncio.create_task(running[SOURCE].follow())
    yield
    running[TASK].cancel()
    await asyncio.wait({running[TASK]}, timeout=CLOSE_S)


async def _hang_up(running: web.Application) -> None:
    for task in list(running[OPEN]):
        task.cancel()


# --- who may ask ---


def _guard(host: str) -> Any:
    """Refuse a name that another site could have pointed at this machine; add the headers that confine the page."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not allowed(request.host, host):
            text = f"this server does not answer to {request.host!r}: use http://127.0.0.1, or start it with --host"
            return web.Response(status=421, text=text, headers=HEADERS)
        try:
            response = await handler(request)
        except Refused as error:
            response = web.json_response({"error": str(error)}, status=400)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=error.reason)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    return guard


def allowed(header: str, host: str) -> bool:
    """Whether a `Host` header is an address, this machine, or the name that the server was started with."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    name = name.strip("[]").lower()
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        own = {"localhost", host.lower()}
        if not is_loopback(host):
            own |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        return name in own


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- files ---


async def _page(request: web.Request) -> web.StreamResponse:
    return _file("index.html")


async def _static(request: web.Request) -> web.StreamResponse:
    if request.match_info["path"] not in FILES:
        raise web.HTTPNotFound
    return _file(request.match_info["path"])


def _file(name: str) -> web.Response:
    path = FILES[name]
    return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")


async def _no_icon(request: web.Request) -> web.StreamResponse:
    return web.Response(status=204)


# --- data ---


def _json(asked: Answer) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        check(request, asked.takes)
        return web.Response(body=msgspec.json.encode(await asked.answer(request)), content_type="application/json")

    return handle


# --- live ---


async def _live(request: web.Request) -> web.StreamResponse:
    """Server-sent events: the status whenever it has changed."""
    check(request, frozenset())
    source, pages = request.app[SOURCE], request.app[OPEN]
    if len(pages) >= LISTENERS:
        raise web.HTTPServiceUnavailable(reason=f"{LISTENERS} pages follow this run already: close some")
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
    async with asyncio.timeout(WRITE_S):
        await response.prepare(request)
    task = asyncio.current_task()
    pages.add(task)
    try:
        version = -1
        while True:
            await source.change(version, QUIET_S if source.live else HEARTBEAT_S)
            version = source.version
            message = b"data: " + msgspec.json.encode(await status(source)) + b"\n\n"
            async with asyncio.timeout(WRITE_S):
                await response.write(message)
            await asyncio.sleep(TICK_S)
    except (ConnectionError, TimeoutError):
        return response
    finally:
        pages.discard(task)


# --- the command ---


def _unless_malformed(record: logging.LogRecord) -> bool:
    """What is no HTTP is answered with 400 and is no fault of ours: no traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_log = logging.getLogger("pipeline.ui")
_log.addFilter(_unless_malformed)


async def serve(run: RunDir, config: RunConfig, host: str, port: int | None, ready: Callable[[str], None]) -> None:
    """Serve until cancelled; `ready` is called with the page's address.

    Without a port, the usual one or else any that is free. Raises `PipelineError` if the address can't be had.
    """
    made = app(run, config, host)
    runner = web.AppRunner(made, access_log=None, logger=_log, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = await _listen(runner, host, port)
        bound = site[1]
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{bound}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int | None) -> tuple[web.TCPSite, int]:
    try:
        site = web.TCPSite(runner, host, PORT if port is None else port)
        await site.start()
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return await _listen(runner, host, 0)
        raise _refusal(host, PORT if port is None else port, error) from error
    return site, runner.addresses[-1][1]


def _refusal(host: str, port: int, error: OSError) -> PipelineError:
    if isinstance(error, socket.gaierror):
        return PipelineError(
            f"--host {host}: {error.strerror}; give an address of this machine, such as 127.0.0.1", Exit.USAGE
        )
    if error.errno == errno.EADDRINUSE:
        return PipelineError(f"--port {port} of {host} is taken: give another, or leave --port out", Exit.MISSING)
    if error.errno in (errno.EACCES, errno.EPERM):
        return PipelineError(f"--port {port} may not be used by this user: give one above 1023", Exit.USAGE)
    text = error.strerror or str(error)
    return PipelineError(f"--host {host} --port {port}: {text}; give an address of this machine", Exit.USAGE)
