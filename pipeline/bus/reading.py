"""Reading: work entries and broadcast entries."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from actors.recorder.ordering import number
from contracts.core import Entry
from pipeline.bus import scripts
from pipeline.bus.keys import Keys
from pipeline.bus.link import Link
from pipeline.bus.lua import Call, Key
from pipeline.bus.model import Claimed, Followed, Gap, Received, WorkEntry

PAGE = 512
"""Entries of each broadcast stream in one reply at most, when all are asked for."""
FIRST = 16
"""Of them in the first reply, whose bytes nothing bounds: as a rule that is all there is."""
ROOM = 16 << 20
"""Bytes of each reply behind it, shared out among the streams; each may go beyond its part by one entry."""
_LOST: Any = object()

Rows = dict[str, list[Any]]
"""Stream -> (id, fields) of its entries, in order."""
Evaluate = Callable[[Call[Any]], Awaitable[Any]]


class Reader:
    """One actor's readings.

    It remembers which work entries it handed out. A delivery whose reply may have been lost (first reading of a boot, a
    cut connection, a cancelled read) leaves an entry that the store counts as ours but we never saw: the next reading
    asks for those again, so nothing waits for a lease to run out.
    """

    def __init__(self, link: Link, keys: Keys, actor: str) -> None:
        self._link = link
        self._keys = keys
        self._actor = actor
        self._held: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self._certain: set[tuple[str, str]] = set()

    def release(self, stream: str, group: str, entries: Iterable[str]) -> None:
        """These entries are no longer in our hands."""
        self._held[stream, group].difference_update(entries)

    # --- work ---

    async def work(self, counts: Mapping[str, int], group: str, cursors: Mapping[str, str], block_ms: int) -> Received:
        """See `Bus.receive`. Both are read by one request: the store answers the second when the first is over.

        What did not fit into that answer is read on, before the work is handed out.
        """
        wanted = {stream: count for stream, count in counts.items() if count > 0}
        if not wanted:
            return Received([], Followed([], []))
        deadline = time.monotonic() + block_ms / 1000
        while True:
            if found := await self._again(wanted, group):
                return Received(found, await self.behind(cursors))
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            commands = [self._group_read(wanted, group, min(wanted.values()), left_ms)]
            if cursors:
                commands.append(self._read(cursors, 0, min(FIRST, PAGE)))
            found = await self._sure(wanted, group, lambda commands=commands: self._both(commands, cursors), left_ms)
            if found is not _LOST:
                work, rows = found
                return Received(self._delivered(work, group), self._events(rows, cursors))

    async def _both(self, commands: Sequence[Sequence[Any]], cursors: Mapping[str, str]) -> tuple[Any, Rows]:
        """One try: the reply of the first command, and all that the second begins to read."""
        work, *news = await self._link.once(*commands)
        rows = self._rows(news[0] if news else None)
        await self._complete(rows, cursors, self._link.evaluate)
        return work, rows

    async def _again(self, wanted: Mapping[str, int], group: str) -> list[WorkEntry]:
        """Own entries that were never handed out by this process."""
        found: list[WorkEntry] = []
        for stream, count in wanted.items():
            pair = (stream, group)
            if pair in self._certain:
                continue
            held = sorted(self._held[pair])
            key = Key(self._keys.stream(stream))
            rows = await self._link.call(scripts.redeliver(key, group, self._actor, held, count))
            found += self._hold(pair, rows)
            if len(rows) < count:
                self._certain.add(pair)
        return found

    def _group_read(self, streams: Iterable[str], group: str, count: int, block_ms: int) -> list[Any]:
        streams = list(streams)
        block = ["BLOCK", block_ms] if block_ms else []
        keys = [self._keys.stream(stream) for stream in streams]
        return ["XREADGROUP", "GROUP", group, self._actor, "COUNT", count, *block, "STREAMS", *keys, *">" * len(keys)]

    async def _sure(
        self, streams: Iterable[str], group: str, attempt: Callable[[], Awaitable[Any]], block_ms: int = 0
    ) -> Any:
        """A reading of the group, or _LOST: a reply didn't arrive, so `_again` has to look for what it delivered."""
        pairs = {(stream, group) for stream in streams}

        async def once() -> Any:
            if not pairs <= self._certain:
                return _LOST
            try:
                return await attempt()
            except BaseException:
                self._certain -= pairs
                raise

        return await self._link.run(once, block_ms)

    def _delivered(self, reply: Any, group: str) -> list[WorkEntry]:
        found: list[WorkEntry] = []
        for key, rows in reply or ():
            pair = (self._name(key), group)
            found += self._hold(pair, [[id, fields[1], 1] for id, fields in rows])
        return found

    def _hold(self, pair: tuple[str, str], rows: Iterable[Sequence[Any]]) -> list[WorkEntry]:
        entries = [WorkEntry(pair[0], id.decode(), data, deliveries) for id, data, deliveries in rows]
        self._held[pair].update(entry.entry for entry in entries)
        return entries

    def _name(self, key: bytes) -> str:
        return key.decode().removeprefix(self._keys.prefix)

    async def claim(self, stream: str, group: str, min_idle_ms: int, count: int) -> Claimed:
        """See `Bus.claim_idle`."""
        key = Key(self._keys.stream(stream))
        call = scripts.claim(key, group, self._actor, min_idle_ms, count)
        pair = (stream, group)
        try:
            rows, deleted = await self._link.call(call)
        except BaseException:
            self._certain.discard(pair)
            raise
        gone = [id.decode() for id in deleted]
        self.release(stream, group, gone)
        rows = [row for row in rows if row[0].decode() not in self._held[pair]]
        return Claimed(self._hold(pair, rows), gone)

    # --- broadcast ---

    async def after(self, cursors: Mapping[str, str], block_ms: int, count: int) -> Followed:
        """See `Bus.follow`."""
        if not cursors:
            return Followed([], [])
        first = min(FIRST, count)
        rows = self._rows(await self._link.command(*self._read(cursors, block_ms, first), block_ms=block_ms))
        if first < count and _full(rows, first):
            left = {stream: count - len(rows.get(stream, ())) for stream in cursors}
            more = await self._page(rows, cursors, left, self._link.call)
            _settle(rows, [stream for stream in more if len(rows[stream]) < count])
        return self._events(rows, cursors)

    async def behind(self, cursors: Mapping[str, str]) -> Followed:
        """See `Bus.catch_up`."""
        if not cursors:
            return Followed([], [])
        rows = self._rows(await self._link.command(*self._read(cursors, 0, min(FIRST, PAGE))))
        await self._complete(rows, cursors, self._link.call)
        return self._events(rows, cursors)

    async def _complete(self, rows: Rows, cursors: Mapping[str, str], call: Evaluate) -> None:
        """Read on while there may be more: all is there that was in the store at the first reading."""
        more = _full(rows, min(FIRST, PAGE))
        while more:
            more = await self._page(rows, cursors, dict.fromkeys(cursors, PAGE), call)

    async def _page(self, rows: Rows, cursors: Mapping[str, str], most: Mapping[str, int], call: Evaluate) -> set[str]:
        """Read on, so many rows of each stream; answers the streams of which there may be more.

        Of all streams at one moment: else of one there would be events behind some of another that came in between.
        """
        places = [
            (Key(self._keys.stream(stream)), _end(rows, stream, cursor), most[stream])
            for stream, cursor in cursors.items()
        ]
        replies = await call(scripts.page(places, ROOM // len(places)))
        for stream, (found, _) in zip(cursors, replies, strict=True):
            if found:
                rows[stream] = rows.get(stream, []) + found
        return {stream for stream, (_, more) in zip(cursors, replies, strict=True) if more}

    def _read(self, cursors: Mapping[str, str], block_ms: int, count: int) -> list[Any]:
        block = ["BLOCK", block_ms] if block_ms else []
        keys = [self._keys.stream(stream) for stream in cursors]
        return ["XREAD", "COUNT", count, *block, "STREAMS", *keys, *cursors.values()]

    def _rows(self, reply: Any) -> Rows:
        return {self._name(key): list(rows) for key, rows in reply or ()}

    def _events(self, found: Rows, cursors: Mapping[str, str]) -> Followed:
        """Entries in the order of commits, and what is missing between them and the cursors."""
        entries: list[Entry] = []
        gaps: list[Gap] = []
        for name, rows in found.items():
            cursor = behind = cursors[name]
            missing = None
            for id, fields in rows:
                previous = predecessor(fields)
                if previous != behind and number(previous) > number(behind):
                    missing = previous
                behind = id.decode()
                entries.append(Entry(name, behind, fields[1]))
            if missing is not None:
                gaps.append(Gap(name, cursor, missing))
        entries.sort(key=lambda entry: number(entry.entry))
        return Followed(entries, gaps)


def _full(rows: Rows, count: int) -> set[str]:
    return {stream for stream, found in rows.items() if len(found) == count}


def _end(rows: Rows, stream: str, cursor: str) -> str:
    """The last entry read of a stream; `cursor` if there is none."""
    return rows[stream][-1][0].decode() if stream in rows else cursor


def _settle(rows: Rows, cut: Iterable[str]) -> None:
    """Where a stream was cut the whole reading ends, for it has events in the order of commits. Each has got further.

    A journal's numbers are its own.
    """
    ends = [number(rows[stream][-1][0].decode()) for stream in cut if not stream.startswith("journal:")]
    if ends:
        for stream, found in rows.items():
            rows[stream] = [row for row in found if number(row[0].decode()) <= min(ends)]


def predecessor(fields: Sequence[bytes]) -> str:
    """The id of the entry before the one with these fields, in its stream; `0-0` for none, or if it doesn't say."""
    return fields[3].decode() if len(fields) > 3 else "0-0"
