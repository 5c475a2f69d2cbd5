"""`pipeline dead`: what was given up, and what a person does about it. Needs the run's store.

A letter is named `<stream>/<id>`, as `pipeline dead list` prints it. A requeued event gets an id of its own, the
original's with `REQUEUED` and the letter's id behind it, and names the original as its cause.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from contracts.core import Entry
from contracts.envelope import WORK_STREAMS, ContractError, decode, encode
from contracts.events import kind
from pipeline import eventlog
from pipeline.bus import Bus, BusError, BusUnavailable, Letter
from pipeline.errors import Exit, PipelineError
from pipeline.invocation import command
from pipeline.rundir import RunDir
from pipeline.verdict import NORMAL

CONNECT_S = 3.0
REQUEUED = "+dead."
T = TypeVar("T")


def letters(run: RunDir, streams: Sequence[str] = ()) -> list[Letter]:
    """The run's dead letters, by stream and age. Raises `PipelineError` for a stream that has none by nature."""
    unknown = sorted(set(streams) - set(WORK_STREAMS))
    if unknown:
        raise PipelineError(
            f"--stream {unknown[0]!r}: only work streams have dead letters: {', '.join(WORK_STREAMS)}", Exit.USAGE
        )

    async def read(bus: Bus) -> list[Letter]:
        return [letter for stream in streams or WORK_STREAMS for letter in await bus.dead.read(stream)]

    return _with_bus(run, read)


def find(found: Sequence[Letter], names: Sequence[str], *, everything: bool) -> list[Letter]:
    """The letters that a person means. Raises `PipelineError` naming one that isn't there."""
    if everything == bool(names):
        raise PipelineError("name dead letters as `pipeline dead list` prints them, or give --all", Exit.USAGE)
    known = {name(letter): letter for letter in found}
    missing = [each for each in names if each not in known]
    if missing:
        listed = ", ".join(list(known)[:5]) or "none"
        raise PipelineError(f"no dead letter {missing[0]!r} in this run; there are: {listed}", Exit.USAGE)
    return list(found) if everything else [known[each] for each in dict.fromkeys(names)]


def requeue(run: RunDir, chosen: Sequence[Letter]) -> list[tuple[Letter, str]]:
    """Hand letters out as new work; answers them with their new ids.

    Raises `PipelineError` before anything is changed if one of them can't be read: it would be buried again.
    """
    renewed = [(letter, _renewed(letter)) for letter in chosen]

    async def move(bus: Bus) -> list[tuple[Letter, str]]:
        moved = [(letter, await bus.dead.requeue(letter.stream, letter.entry, data)) for letter, data in renewed]
        return [(letter, entry) for letter, entry in moved if entry is not None]

    return _with_bus(run, move)


def drop(run: RunDir, chosen: Sequence[Letter]) -> list[Letter]:
    """Forget letters; answers those that were still there."""

    async def forget(bus: Bus) -> list[Letter]:
        return [letter for letter in chosen if await bus.dead.drop(letter.stream, letter.entry)]

    return _with_bus(run, forget)


def _renewed(letter: Letter) -> bytes:
    try:
        envelope = decode(letter.stream, letter.data)
    except ContractError as error:
        raise PipelineError(
            f"{name(letter)} can't be requeued: {error}; it would be buried again. "
            f"Look at it with `pipeline dead show`, then drop it",
            Exit.FAILED,
        ) from error
    original = envelope.id.partition(REQUEUED)[0]
    fresh = f"{original}{REQUEUED}{letter.entry}"
    return encode(msgspec.structs.replace(envelope, id=fresh, causation_id=original))


# --- output ---


def name(letter: Letter) -> str:
    return f"{letter.stream}/{letter.entry}"


def line(letter: Letter) -> str:
    """One letter for `list`."""
    event = _event(letter)
    what = event["kind"] if event else "unreadable"
    return f"{name(letter)}  {_time(letter.at)}  {what}  {letter.deliveries} deliveries  {letter.reason}"


def as_json(letter: Letter) -> bytes:
    """One letter as a line of JSON. `event` is as `pipeline log` prints it, null if it can't be read."""
    fields: dict[str, Any] = {"letter": name(letter), **msgspec.structs.asdict(letter)}
    fields["at"] = _time(letter.at)
    data = fields.pop("data")
    event = _event(letter)
    fields["event"] = event
    if event is None:
        fields["data"] = data.hex()
    return msgspec.json.encode(fields)


def details(letter: Letter) -> str:
    """One letter for `show`."""
    facts = {
        "letter": name(letter),
        "origin": f"{letter.stream} {letter.origin}",
        "buried at": _time(letter.at),
        "deliveries": str(letter.deliveries),
        "reason": letter.reason,
    }
    head = "\n".join(f"{key:<10}  {value}" for key, value in facts.items())
    event = _event(letter)
    if event is None:
        return f"{head}\n{'event':<10}  unreadable, {len(letter.data)} bytes: {letter.data[:64].hex()}"
    return f"{head}\n{'event':<10}  {msgspec.json.format(msgspec.json.encode(event), indent=2).decode()}"


def _event(letter: Letter) -> dict[str, Any] | None:
    try:
        envelope = decode(letter.stream, letter.data)
    except ContractError:
        return None
    rendered = msgspec.json.decode(eventlog.render(Entry(letter.stream, letter.origin, letter.data), envelope))
    assert rendered["kind"] == kind(envelope.body)
    return rendered


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


# --- store ---


def _elsewhere(run: RunDir, ended: str | None) -> str:
    """Where to look instead."""
    log = f"`{command('log', run.path, '--kind', 'bus.data_lost')}` names what was given up"
    if ended in NORMAL:
        return f"the run has finished ({ended}), its store has ended with it, and nothing is left to be done. {log}"
    resume = command("up", "--resume", run.path)
    return f"look while the run is live (`{resume}`), or set REDIS_URL to its server. {log}"


def _with_bus(run: RunDir, work: Callable[[Bus], Awaitable[T]]) -> T:
    info = run.info()
    given = os.environ.get("REDIS_URL")
    url = given or info.redis_url
    if not url:
        raise PipelineError(f"{run.path} does not say which store it used: set REDIS_URL", Exit.BROKER)

    async def connected() -> T:
        bus = await Bus.connect(url, info.run, actor="dead", connect_s=CONNECT_S, outage_s=CONNECT_S)
        try:
            return await work(bus)
        finally:
            await bus.close()

    try:
        return asyncio.run(connected())
    except BusUnavailable as error:
        if given:
            raise PipelineError(f"dead letters are in the run's store: {error}", Exit.BROKER) from error
        said = f"dead letters are in the run's store, and {url} does not answer"
        raise PipelineError(f"{said}: {_elsewhere(run, info.ended)}", Exit.BROKER) from error
    except BusError as error:
        raise PipelineError(f"dead letters are in the run's store: {error}", Exit.BROKER) from error
