"""`pipeline ui`: serves the page and what it asks for, by default to this machine alone."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from actors.models import ModelError
from actors.recorder.archive import ArchiveError
from config.schema import RunConfig
from contracts import events as ev
from contracts.trajectory import TrajectoryError
from pipeline.errors import Exit, PipelineError
from pipeline.moments import parse
from pipeline.rundir import RunDir
from pipeline.selection import Filter
from pipeline.ui import _samples, _trajectory
from pipeline.ui._index import Query
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
TEXT = 200
"""Longest text that may be searched for."""
WIDTH = 8000
"""Widest timeline in pixels."""
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
SOURCE = web.AppKey("source", Source)
TASK = web.AppKey("task", asyncio.Task)
TOKENIZER = web.AppKey("tokenizer", dict)
OPEN = web.AppKey("open", set)


class Refused(Exception):
    """A request asks for what makes no sense: the message says which parameter, and what it may be."""


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


def _json(answer: Callable[[web.Request], Awaitable[Any]]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=msgspec.json.encode(await answer(request)), content_type="application/json")

    return handle


async def status(source: Source) -> dict[str, Any]:
    """What every page shows all the time."""
    found = source.data.status(source.state, source.now(), await source.why(), source.evidence)
    return found | {"version": source.version, "problem": source.problem, "total": source.total}


async def _status(request: web.Request) -> Any:
    return await status(request.app[SOURCE])


async def _choices(request: web.Request) -> Any:
    return request.app[SOURCE].data.choices()


async def _plots(request: web.Request) -> Any:
    return request.app[SOURCE].data.charts(_number(request, "from"), _number(request, "to"))


async def _timeline(request: web.Request) -> Any:
    width = _whole(request, "width", 1200, 50, WIDTH)
    begin, end = _number(request, "from"), _number(request, "to")
    if begin is not None and end is not None and end <= begin:
        raise Refused(f"to={end:g} lies before from={begin:g}")
    return request.app[SOURCE].data.window(begin, end, width)


async def _events(request: web.Request) -> Any:
    given = request.query
    data = request.app[SOURCE].data
    text = given.get("text", "").strip()
    if len(text) > TEXT:
        raise Refused(f"text has {len(text)} characters, {TEXT} at most")
    kinds, actors = tuple(filter(None, given.getall("kind", []))), tuple(filter(None, given.getall("actor", [])))
    try:
        Filter(kinds=kinds).check()
    except PipelineError as error:
        raise Refused(str(error).replace("--kind", "kind")) from error
    since, until = (_moment(request, name) for name in ("since", "until"))
    order = given.get("order", "newest")
    if order not in ("newest", "oldest"):
        raise Refused(f"order={order!r}: newest or oldest")
    offset, limit = _whole(request, "offset", 0, 0, 2**40), _whole(request, "limit", 100, 1, 500)
    return await data.search(Query(kinds, actors, text, since, until), offset, limit, newest=order == "newest")


async def _event(request: web.Request) -> Any:
    data = request.app[SOURCE].data
    try:
        return data.event(_whole(request, "row", 0, 0, 2**40))
    except IndexError as error:
        raise web.HTTPNotFound from error


async def _list(request: web.Request) -> Any:
    data = request.app[SOURCE].data
    given = {name: request.query[name] for name in ("index", "version", "split", "order") if request.query.get(name)}
    try:
        wanted = msgspec.convert(given, _samples.Wanted, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(str(error)) from error
    offset, limit = _whole(request, "offset", 0, 0, 2**40), _whole(request, "limit", 50, 1, _samples.PAGE)
    total, rows = data.samples.page(wanted, offset, limit)
    return {"total": total, "offset": offset, "samples": [_sample_line(data, row) for row in rows]}


def _sample_line(data: Any, row: int) -> dict[str, Any]:
    envelope = data.index.envelope(row)
    return _samples.line(row, envelope.body, envelope.wall_ns / 1e9, envelope.actor)


async def _sample(request: web.Request) -> Any:
    """One trajectory with its tokens, or why they can't be shown."""
    source = request.app[SOURCE]
    data, row = source.data, _whole(request, "row", 0, 0, 2**40)
    if row >= len(data.index):
        raise web.HTTPNotFound
    event = data.index.envelope(row).body
    if not isinstance(event, ev.TrajectoryFinished):
        raise Refused(f"row={row} is a {data.index.kind(row)}; samples are trajectory.finished")
    found: dict[str, Any] = {"event": _sample_line(data, row), "trajectory": None, "note": ""}
    try:
        payload = await asyncio.to_thread(_trajectory.archived, source.run / "payloads", data.index.position(row))
        if payload is None:
            payload = await source.payload(event.payload.key)
        if payload is None:
            found["note"] = "Its tokens are not in the archive: recorder.payloads was off, or the run was simulated."
            return found
        tokenizer, found["note"] = await _tokenizer(request.app, source.config)
        found["trajectory"] = await asyncio.to_thread(_trajectory.shown, payload, tokenizer)
    except (ArchiveError, TrajectoryError) as error:
        found["note"] = f"Its tokens can't be read: {error}"
    return found


async def _tokenizer(running: web.Application, config: RunConfig) -> tuple[Any, str]:
    """The run's tokenizer, loaded once; or None, and why there is none."""
    held = running[TOKENIZER]
    if "made" not in held:
        try:
            made = await asyncio.to_thread(_trajectory.load_tokenizer, config.model.source, config.model.params)
            held["made"] = (made, "")
        except (ModelError, OSError, ValueError) as error:
            held["made"] = (None, f"Tokens are shown as ids, for the tokenizer can't be loaded: {error}")
    return held["made"]


# --- live ---


async def _live(request: web.Request) -> web.StreamResponse:
    """Server-sent events: the status whenever it has changed."""
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


# --- parameters ---


def _whole(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or not least <= int(text) <= most:
        raise Refused(f"{name}={text!r} is no whole number from {least} to {most}")
    return int(text)


def _number(request: web.Request, name: str) -> float | None:
    text = request.query.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value or abs(value) == float("inf"):
        raise Refused(f"{name}={text!r} is no number")
    return value


def _moment(request: web.Request, name: str) -> float | None:
    """A time as a person writes it: `2026-11-29T14:03:10Z`, or `+SECONDS` since the start."""
    text = request.query.get(name, "").strip()
    if not text:
        return None
    data = request.app[SOURCE].data
    try:
        return parse(f"+{text}" if text.replace(".", "", 1).isdecimal() else text).time(data.timeline.zero())
    except PipelineError as error:
        raise Refused(f"{name}: {error}") from error


ANSWERS: dict[str, Callable[[web.Request], Awaitable[Any]]] = {
    "status": _status,
    "choices": _choices,
    "plots": _plots,
    "timeline": _timeline,
    "events": _events,
    "event": _event,
    "samples": _list,
    "sample": _sample,
}

# --- the command ---


async def serve(run: RunDir, config: RunConfig, host: str, port: int | None, ready: Callable[[str], None]) -> None:
    """Serve until cancelled; `ready` is called with the page's address.

    Without a port, the usual one or else any that is free. Raises `PipelineError` if the address can't be had.
    """
    runner = web.AppRunner(app(run, config, host), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
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
