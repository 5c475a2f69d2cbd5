"""A run's events as lines of JSON: from the archive, then live from the store."""

from __future__ import annotations

import base64
import contextlib
import operator
import os
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from actors.recorder import archive
from actors.recorder.ordering import START, advance, number, numbers, settled
from contracts.core import Entry
from contracts.envelope import STREAMS, ContractError, Envelope, decode, decode_all
from contracts.events import Event, RunFinished, TaskIssued
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir
from pipeline.selection import Filter, Selection

if TYPE_CHECKING:
    from pipeline.bus import Bus

PAGE = 512
BATCH = 32
"""Events that are read and folded together: enough to share calls, and so few that they stay in a core's cache."""
BLOCK_MS = 1000
CONNECT_S = 3.0
START_EVERY_S = 0.5
"""How often to look whether a run that starts is recorded yet."""

Item = tuple[Entry, Envelope[Event], int]
"""An event: its entry, decoded, and its place in the log."""


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Events that follow each other, by what their `Item`s hold: folds want columns."""

    entries: Sequence[Entry]
    envelopes: Sequence[Envelope[Any]]
    positions: Sequence[int]

    def __len__(self) -> int:
        return len(self.entries)

    def items(self) -> Iterator[Item]:
        return zip(self.entries, self.envelopes, self.positions, strict=True)

    def within(self, behind: int, upto: int) -> Batch:
        """Those whose place lies behind `behind`, and not behind `upto`."""
        if self.positions and behind < min(self.positions) and max(self.positions) <= upto:
            return self
        return gathered(item for item in self.items() if behind < item[2] <= upto)


def gathered(items: Iterable[Item]) -> Batch:
    """The batch of these events."""
    columns = list(zip(*items, strict=True)) or ((), (), ())
    return Batch(*columns)


def decoded(entries: Sequence[Entry]) -> Batch:
    """The batch of these entries. Raises `ContractError` of the first that can't be read."""
    envelopes = decode_all([entry.stream for entry in entries], [entry.data for entry in entries])
    return Batch(entries, envelopes, numbers(entries))


def readable(entries: Sequence[Entry], behind: int) -> tuple[Batch, list[int]]:
    """The batch of those behind place `behind`, each place once, and the places of those that can't be read."""
    if entries and number(entries[0].entry) > behind:
        with contextlib.suppress(ContractError):
            found = decoded(entries)
            if all(map(operator.lt, found.positions, found.positions[1:])):
                return found, []
    items: list[Item] = []
    bad: list[int] = []
    for entry, position in zip(entries, numbers(entries), strict=True):
        if position <= behind:
            continue
        behind = position
        try:
            items.append((entry, decode(entry.stream, entry.data), position))
        except ContractError:
            bad.append(position)
    return gathered(items), bad


def lines(run: RunDir, chosen: Filter, *, follow: bool) -> Iterator[bytes]:
    """JSON of each event wanted, in the order of commits. Raises `PipelineError` for an unknown stream or event.

    With `follow`, goes on with what is new in the store until the run has finished.
    """
    chosen.check()
    selection = Selection(chosen)
    last: dict[str, str] = {}
    actors: set[str] = set()
    complete = False
    for entry, envelope in archived(run):
        last[entry.stream] = entry.entry
        complete = isinstance(envelope.body, RunFinished)
        actors.add(envelope.actor)
        if selection.takes(entry, envelope):
            yield render(entry, envelope)
        if selection.over:
            return
    if selection.unmet and not follow:
        raise PipelineError(f"no event {min(selection.unmet)!r} in the archive of {run.path}", Exit.USAGE)
    strangers = sorted(set(chosen.actors) - actors)
    if strangers and (complete or not follow):
        known = ", ".join(sorted(actors)) or "none yet"
        raise PipelineError(f"--actor {strangers[0]!r}: no event of the run is of it; there are {known}", Exit.USAGE)
    if follow and not complete:
        for entry, envelope in _added(run, last):
            if selection.takes(entry, envelope):
                yield render(entry, envelope)
            if selection.over:
                return


def everything(run: RunDir, chosen: Filter) -> Iterator[Envelope[Event]]:
    """The archived events, then those that the store of a live run holds beyond them; none of it is waited for."""
    last: dict[str, str] = {}
    for entry, envelope in archived(run):
        last[entry.stream] = entry.entry
        if chosen.accepts(envelope):
            yield envelope
    import asyncio

    for entry in asyncio.run(_present(run, last)):
        envelope = decode(entry.stream, entry.data)
        if chosen.accepts(envelope):
            yield envelope


async def _present(run: RunDir, last: dict[str, str]) -> list[Entry]:
    """What the store holds behind `last`; nothing when it is not to be reached."""
    from pipeline.bus import Bus, BusError

    info = run.info()
    url = os.environ.get("REDIS_URL") or info.redis_url
    if not url:
        return []
    try:
        bus = await Bus.connect(url, info.run, actor="log", connect_s=CONNECT_S)
    except BusError:
        return []
    try:
        cursors, found = {stream: last.get(stream, START) for stream in STREAMS}, []
        while page := await _page(run, bus, cursors, None):
            cursors = advance(cursors, page)
            found += page
        return found
    finally:
        await bus.close()


def archived(run: RunDir, behind: Mapping[str, int] | None = None) -> Iterator[tuple[Entry, Envelope[Event]]]:
    """Every archived event, in the order of commits; of the streams in `behind`, those past that number.

    Raises `PipelineError` if the archive is damaged.
    """
    for batch in batches(run, behind):
        yield from zip(batch.entries, batch.envelopes, strict=True)


def batches(run: RunDir, behind: Mapping[str, int] | None = None, size: int = BATCH) -> Iterator[Batch]:
    """What `archived` answers, `size` events at a time, which costs less: what is folded is folded so.

    Raises `PipelineError` if the archive is damaged.
    """
    known = behind or {}
    try:
        for entries in archive.batches(archive.frames(run.events, behind=behind), size):
            if known:
                entries = [entry for entry in entries if number(entry.entry) > known.get(entry.stream, -1)]
            if entries:
                yield decoded(entries)
    except archive.ArchiveError as error:
        raise PipelineError(str(error), Exit.FAILED) from error
    except ContractError as error:
        message = (
            f"{run.events}: {error}; this log was written by another version, {run.info().written_by}: use that one"
        )
        raise PipelineError(message, Exit.FAILED) from error


def check_kept(run: RunDir) -> None:
    """Raises `PipelineError` if this run was recorded and its events are gone. One that has no event yet is whole."""
    if any(run.events.glob("*.zst")) or (run.events / "index.json").exists() or archive.has_writer(run.events):
        return
    told = [f"{name}/" for name in ("journals", "payloads") if any((run / name).glob("*.zst"))]
    metrics = run / "metrics.jsonl"
    told += ["metrics.jsonl"] if metrics.is_file() and metrics.stat().st_size else []
    if told:
        raise PipelineError(
            f"{run.events} holds no event, although this run has {' and '.join(told)}: its files were removed. Put "
            "them back; `pipeline bundle` takes what is left",
            Exit.FAILED,
        )


def segments(run: RunDir) -> tuple[archive.Segment, ...]:
    """What the index of a run's events says of them. Raises `PipelineError` if it is damaged."""
    try:
        return archive.read_index(run.events).segments
    except archive.ArchiveError as error:
        raise PipelineError(str(error), Exit.FAILED) from error


def follow(run: RunDir) -> Iterator[tuple[Entry, Envelope[Event]]]:
    """Every event: the archived ones, then, while the run is driven or recorded, what is new until it has finished.

    Raises `PipelineError` if the archive is damaged, or the store of a live run is not to be reached.
    """
    last: dict[str, str] = {}
    complete = False
    for entry, envelope in archived(run):
        last[entry.stream] = entry.entry
        complete = isinstance(envelope.body, RunFinished)
        yield entry, envelope
    while not complete and not archive.has_writer(run.events):
        if not run.driven():
            return
        time.sleep(START_EVERY_S)  # the driver lives, and ends by itself when its actors do not start
    if complete:
        return
    yield from _added(run, last)


def _added(run: RunDir, last: dict[str, str]) -> Iterator[tuple[Entry, Envelope[Event]]]:
    """What a live run adds behind `last`, until it has finished. Raises `PipelineError` if it is not live."""
    for entry in _iterate(_live(run, last)):
        envelope = decode(entry.stream, entry.data)
        yield entry, envelope
        if isinstance(envelope.body, RunFinished):
            return


def render(entry: Entry, envelope: Envelope[Event]) -> bytes:
    """One event as JSON: where it is, when it was, its kind, then the envelope."""
    fields: dict[str, Any] = msgspec.to_builtins(envelope, builtin_types=(bytes,), str_keys=True)
    body = fields.pop("body")
    if isinstance(envelope.body, TaskIssued):
        body["payload"] = _readable(envelope.body.payload)
    at = datetime.fromtimestamp(envelope.wall_ns / 1e9, UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode(
        {"entry": entry.entry, "at": at, "kind": body.pop("kind"), **fields, "body": body}, enc_hook=_readable
    )


def _readable(data: Any) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return base64.b64encode(data).decode()


async def _live(run: RunDir, last: dict[str, str]) -> AsyncGenerator[Entry]:
    from pipeline.bus import Bus, BusError

    info = run.info()
    url = os.environ.get("REDIS_URL") or info.redis_url
    if not url:
        raise PipelineError(f"{run.path} does not say which store it used: set REDIS_URL", Exit.BROKER)
    try:
        bus = await Bus.connect(url, info.run, actor="log", connect_s=CONNECT_S)
    except BusError as error:
        raise PipelineError(f"the run is not live: {error}", Exit.BROKER) from error
    try:
        async for page in pages(run, bus, {stream: last.get(stream, START) for stream in STREAMS}):
            for entry in page:
                yield entry
    finally:
        await bus.close()


async def pages(run: RunDir, bus: Bus, cursors: Mapping[str, str]) -> AsyncGenerator[list[Entry]]:
    """What a live run adds behind `cursors`, in the order of commits, for ever; an empty page every `BLOCK_MS`."""
    while True:
        found = await _page(run, bus, cursors, BLOCK_MS)
        cursors = advance(cursors, found)
        yield found


async def _page(run: RunDir, bus: Bus, cursors: Mapping[str, str], block_ms: int | None) -> list[Entry]:
    """One reading of the store. Numbers that it lacks were trimmed before they were read: they are archived by then."""
    found = settled(await bus.read_after(cursors, count=PAGE, block_ms=block_ms), PAGE)
    last = max(map(number, cursors.values()))
    end = number(found[-1].entry) if found else max(map(number, (await bus.tails(list(cursors))).values()))
    missing = set(range(last + 1, end + 1)).difference(number(entry.entry) for entry in found)
    if not missing:
        return found
    archived = archive.read(run.events, behind=dict.fromkeys(cursors, last))
    trimmed = [entry for entry in archived if number(entry.entry) in missing]
    return sorted([*trimmed, *found], key=lambda entry: number(entry.entry))


def _iterate(source: AsyncGenerator[Entry]) -> Iterator[Entry]:
    """Read an asynchronous source from ordinary code."""
    import asyncio

    async def take() -> Entry | None:
        return await anext(source, None)

    with asyncio.Runner() as runner:
        try:
            while (entry := runner.run(take())) is not None:
                yield entry
        finally:
            runner.run(source.aclose())
