"""What the page asks for, as plain data: `ANSWERS` maps the name of each question to what answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
from aiohttp import web

from actors.models import ModelError
from actors.recorder.archive import ArchiveError
from config.schema import RunConfig
from contracts import events as ev
from contracts.trajectory import TrajectoryError
from pipeline.errors import PipelineError
from pipeline.moments import parse
from pipeline.selection import Filter
from pipeline.ui import _samples, _trajectory
from pipeline.ui._index import Query
from pipeline.ui._source import Source

TEXT = 200
"""Longest text that may be searched for."""
DIGITS = 15
WIDTH = 8000
"""Widest timeline in pixels."""
FAR = 1e9
"""Seconds, or steps, beyond which nothing lies."""
SOURCE = web.AppKey("source", Source)
TOKENIZER = web.AppKey("tokenizer", dict)


class Refused(Exception):
    """A request asks for what makes no sense: the message says which parameter, and what it may be."""


async def status(source: Source) -> dict[str, Any]:
    """What every page shows all the time."""
    found = source.data.status(source.state, source.now(), await source.why(), source.evidence)
    return found | {"version": source.version, "problem": source.problem, "total": source.total}


async def _status(request: web.Request) -> Any:
    return await status(request.app[SOURCE])


async def _choices(request: web.Request) -> Any:
    return request.app[SOURCE].data.choices()


async def _plots(request: web.Request) -> Any:
    return request.app[SOURCE].data.charts(*_range(request))


async def _timeline(request: web.Request) -> Any:
    width = _whole(request, "width", 1200, 50, WIDTH)
    begin, end = _range(request)
    if begin is not None and begin == end:
        raise Refused(f"to={end:g} is from={begin:g}: give a later one")
    return request.app[SOURCE].data.window(begin, end, width)


async def _events(request: web.Request) -> Any:
    given = request.query
    data = request.app[SOURCE].data
    text = given.get("text", "").strip()
    if len(text) > TEXT:
        raise Refused(f"text has {len(text)} characters: give {TEXT} at most")
    kinds, actors = tuple(filter(None, given.getall("kind", []))), tuple(filter(None, given.getall("actor", [])))
    try:
        Filter(kinds=kinds).check()
    except PipelineError as error:
        raise Refused(str(error).replace("--kind", "kind")) from error
    since, until = (_moment(request, name) for name in ("since", "until"))
    if since is not None and until is not None and until < since:
        raise Refused(f"until={given['until']!r} lies before since={given['since']!r}: give a later one")
    order = _choice(request, "order", ("newest", "oldest")) or "newest"
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
    given = {
        name: _whole(request, name, 0, -(2**40), 2**40) for name in ("index", "version") if request.query.get(name)
    }
    given |= {name: _choice(request, name, values) for name, values in SAMPLES.items() if request.query.get(name)}
    wanted = msgspec.convert(given, _samples.Wanted)
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


# --- parameters ---


def check(request: web.Request, takes: frozenset[str]) -> None:
    """Raises `Refused` for a parameter that the question does not take, or takes once and was given again."""
    for name in request.query:
        if name not in takes:
            raise Refused(f"{name}={request.query[name]!r} is no parameter here: {_listed(sorted(takes))}")
        if name not in MANY and len(request.query.getall(name)) > 1:
            raise Refused(f"{name}={request.query.getall(name)} is given more than once: give it once")


def _listed(names: Sequence[str]) -> str:
    return "leave it out" if not names else f"it takes {', '.join(names)}"


def _whole(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query.get(name, "")
    if not text:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= DIGITS) or not least <= int(text) <= most:
        raise Refused(f"{name}={_short(text)} is no whole number from {least} to {most}: give one")
    return int(text)


def _short(text: str) -> str:
    return repr(text if len(text) <= TEXT else f"{text[:TEXT]}...")


def _choice(request: web.Request, name: str, values: Sequence[str]) -> str:
    text = request.query.get(name, "")
    if text and text not in values:
        raise Refused(f"{name}={_short(text)} is unknown: give {', '.join(values[:-1])} or {values[-1]}")
    return text


def _range(request: web.Request) -> tuple[float | None, float | None]:
    begin, end = _number(request, "from"), _number(request, "to")
    if begin is not None and end is not None and end < begin:
        raise Refused(f"to={end:g} lies before from={begin:g}: give a later one")
    return begin, end


def _number(request: web.Request, name: str) -> float | None:
    text = request.query.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not -FAR <= value <= FAR:
        raise Refused(f"{name}={_short(text)} is no number from {-FAR:.0f} to {FAR:.0f}: give one")
    return value


def _moment(request: web.Request, name: str) -> float | None:
    """A time as a person writes it: `2026-11-29T14:03:10Z`, or `+SECONDS` since the start."""
    text = request.query.get(name, "").strip()
    if not text:
        return None
    data = request.app[SOURCE].data
    try:
        return parse(f"+{text}" if text.isascii() and text.replace(".", "", 1).isdecimal() else text).time(
            data.timeline.zero()
        )
    except PipelineError as error:
        raise Refused(f"{name}: {error}") from error


class Answer(NamedTuple):
    """What answers a question, and the parameters that it takes."""

    answer: Callable[[web.Request], Awaitable[Any]]
    takes: frozenset[str]


def _takes(answer: Callable[[web.Request], Awaitable[Any]], *names: str) -> Answer:
    return Answer(answer, frozenset(names))


SAMPLES = {"split": get_args(ev.Split), "order": get_args(_samples.Order)}
MANY = frozenset(("kind", "actor"))
"""Parameters that may be given more than once."""
ANSWERS: dict[str, Answer] = {
    "status": _takes(_status),
    "choices": _takes(_choices),
    "plots": _takes(_plots, "from", "to"),
    "timeline": _takes(_timeline, "from", "to", "width"),
    "events": _takes(_events, *MANY, "text", "since", "until", "order", "offset", "limit"),
    "event": _takes(_event, "row"),
    "samples": _takes(_list, "index", "version", *SAMPLES, "offset", "limit"),
    "sample": _takes(_sample, "row"),
}
