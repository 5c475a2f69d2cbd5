"""Every event of a run in little memory: columns to choose by, and the encoded events in compressed blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatchcase

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest as digest

from contracts.core import Entry
from contracts.envelope import STREAM_OF, Envelope, decode
from contracts.events import Event
from pipeline.eventlog import Batch
from pipeline.selection import KINDS
from pipeline.ui._columns import Columns

BLOCK = 512
"""Events that are compressed together."""
LEVEL = -3
"""Fast: about 500 MB/s, to a tenth of the size."""
KEPT = 8
"""Blocks that stay decompressed."""

NAMES = ("positions", "walls", "kinds", "actors", "ids", "causes", "sizes")
POSITION, WALL, KIND, ACTOR, ID, CAUSE, SIZE = range(7)

Rows = NDArray[np.int64]
STREAMS = {kind.__struct_config__.tag: stream for kind, stream in STREAM_OF.items()}


class Query(msgspec.Struct, frozen=True):
    """Which events are wanted; what is empty or None wants all.

    `kinds` may hold `*`. `text`: characters that the event contains, in any field that is text, in any case. `since`
    and `until`: seconds since the Unix epoch.
    """

    kinds: tuple[str, ...] = ()
    actors: tuple[str, ...] = ()
    text: str = ""
    since: float | None = None
    until: float | None = None


class IndexPart(msgspec.Struct, frozen=True, array_like=True):
    """What `Index.drain` hands on. `actors`: all of them so far; `open`: events of the block that is not full yet."""

    columns: list[bytes]
    actors: list[str]
    blocks: list[bytes]
    open: list[bytes]


class _Numbers(dict[str, int]):
    """Numbers names in the order in which they are met."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number


class Index:
    """The events by row, from 0, in log order."""

    def __init__(self) -> None:
        self._actor_numbers = _Numbers()
        self._kind_numbers = {kind: number for number, kind in enumerate(KINDS)}
        self._types = {kind: self._kind_numbers[kind.__struct_config__.tag] for kind in STREAM_OF}
        self._columns = Columns("qqBHQQI")
        self._blocks: list[Future[bytes]] = []
        self._open: list[bytes] = []
        self._pack = zstandard.ZstdCompressor(level=LEVEL)
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="pack")
        """Compresses beside the folds, which hold the interpreter."""
        self._unpack = zstandard.ZstdDecompressor()
        self._unpacked: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._columns)

    def know(self, slim: Mapping[type, type]) -> None:
        """Take events of these types for those of the kinds that they stand in for."""
        self._types |= {each: self._types[kind] for each, kind in slim.items()}

    def extend(self, batch: Batch) -> int:
        """Take the next events; answers the row of the first."""
        first, types, actors, envelopes = len(self._columns), self._types, self._actor_numbers, batch.envelopes
        causes = [envelope.causation_id for envelope in envelopes]
        data = [entry.data for entry in batch.entries]
        self._columns.extend(
            (
                batch.positions,
                [envelope.wall_ns for envelope in envelopes],
                [types[type(envelope.body)] for envelope in envelopes],
                [actors[envelope.actor] for envelope in envelopes],
                [digest(envelope.id.encode()) for envelope in envelopes],
                [0 if cause is None else digest(cause.encode()) for cause in causes],
                map(len, data),
            )
        )
        self._open += data
        while len(self._open) >= BLOCK:
            self._blocks.append(self._packer.submit(self._pack.compress, b"".join(self._open[:BLOCK])))
            del self._open[:BLOCK]
        return first

    def drain(self) -> IndexPart:
        """Let go of what was taken since the last time. What is left can only be extended and drained."""
        blocks = [block.result() for block in self._blocks]
        self._blocks.clear()
        return IndexPart(self._columns.drain(), self.actors, blocks, list(self._open))

    def merge(self, part: IndexPart) -> None:
        """Take what another index, which began where this one ends, was drained of."""
        self._columns.merge(part.columns)
        for name in part.actors:
            self._actor_numbers[name]
        for data in part.blocks:
            block: Future[bytes] = Future()
            block.set_result(data)
            self._blocks.append(block)
        self._open = list(part.open)

    @property
    def actors(self) -> list[str]:
        """Who emitted something, in the order in which they first did."""
        return list(self._actor_numbers)

    # --- one event ---

    def position(self, row: int) -> int:
        return self._columns.column(POSITION)[row]

    def wall(self, row: int) -> float:
        """Seconds since the Unix epoch."""
        return self._columns.column(WALL)[row] / 1e9

    def kind(self, row: int) -> str:
        return KINDS[self._columns.column(KIND)[row]]

    def actor(self, row: int) -> str:
        return self.actors[self._columns.column(ACTOR)[row]]

    def entry(self, row: int) -> Entry:
        """The event as it stands in the log."""
        block, place = divmod(row, BLOCK)
        stream, entry = STREAMS[self.kind(row)], f"{self.position(row)}-0"
        if block == len(self._blocks):
            return Entry(stream, entry, self._open[place])
        sizes = self._columns.column(SIZE)
        data, start = self._block(block), sum(sizes[block * BLOCK : row])
        return Entry(stream, entry, data[start : start + sizes[row]])

    def envelope(self, row: int) -> Envelope[Event]:
        entry = self.entry(row)
        return decode(entry.stream, entry.data)

    def row_at(self, position: int) -> int | None:
        """The row of the `position`-th event of the log."""
        found = np.nonzero(self.column("positions") == position)[0]
        return int(found[0]) if len(found) else None

    def row_of(self, id: str) -> int | None:
        """The row of the event with this id."""
        for row in np.nonzero(self.column("ids") == digest(id.encode()))[0]:
            if self.envelope(int(row)).id == id:
                return int(row)
        return None

    def effects(self, id: str) -> Rows:
        """Rows of the events that were emitted by the steps that consumed this one."""
        return np.nonzero(self.column("causes") == digest(id.encode()))[0]

    def causes(self, rows: Rows) -> Rows:
        """The row of each one's cause, -1 where it has none."""
        wanted = self.column("causes")[rows]
        keys, back = np.unique(wanted, return_inverse=True)
        ids = self.column("ids")
        place = np.minimum(np.searchsorted(keys, ids), max(len(keys) - 1, 0))
        hits = np.nonzero(keys[place] == ids)[0] if len(keys) else np.empty(0, np.int64)
        row = np.full(len(keys), -1, np.int64)
        row[place[hits]] = hits
        found = row[back]
        found[wanted == 0] = -1
        return found

    # --- many ---

    def column(self, name: str) -> NDArray[np.int64]:
        """A copy of the column of that name, see `NAMES`; walls are in nanoseconds."""
        return np.array(self._columns.column(NAMES.index(name)))

    def choose(self, query: Query) -> Rows:
        """Rows that a query wants, by everything but its text."""
        wanted = np.ones(len(self), bool)
        if query.kinds:
            numbers = [n for n, kind in enumerate(KINDS) if any(fnmatchcase(kind, each) for each in query.kinds)]
            wanted &= np.isin(self.column("kinds"), numbers)
        if query.actors:
            numbers = [self._actor_numbers[name] for name in query.actors if name in self._actor_numbers]
            wanted &= np.isin(self.column("actors"), numbers)
        if query.since is not None or query.until is not None:
            walls = self.column("walls")
            if query.since is not None:
                wanted &= walls >= query.since * 1e9
            if query.until is not None:
                wanted &= walls <= query.until * 1e9
        return np.nonzero(wanted)[0]

    def containing(self, rows: Sequence[int] | Rows, text: str) -> Iterator[list[int]]:
        """Those of the ascending `rows` whose events contain `text`, block by block."""
        needle = text.encode().lower()
        rows = np.asarray(rows, np.int64)
        blocks = rows // BLOCK
        for block in np.unique(blocks):
            mine = rows[np.searchsorted(blocks, block) : np.searchsorted(blocks, block, "right")]
            yield self._containing(int(block), mine, needle)

    def _containing(self, block: int, rows: Rows, needle: bytes) -> list[int]:
        closed = block < len(self._blocks)
        data = (self._unpack.decompress(self._blocks[block].result()) if closed else b"".join(self._open)).lower()
        if needle not in data:
            return []
        first = block * BLOCK
        sizes = self._columns.column(SIZE)
        ends = np.cumsum(sizes[first : first + BLOCK]).tolist()
        found = []
        for row in rows.tolist():
            end = ends[row - first]
            if data.find(needle, end - sizes[row], end) >= 0:
                found.append(row)
        return found

    def _block(self, number: int) -> bytes:
        data = self._unpacked.get(number)
        if data is None:
            if len(self._unpacked) >= KEPT:
                del self._unpacked[next(iter(self._unpacked))]
            data = self._unpacked[number] = self._unpack.decompress(self._blocks[number].result())
        return data
