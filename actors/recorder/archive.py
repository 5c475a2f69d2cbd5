"""The archive: append-only segments of zstd frames, each frame one msgpack array of `[stream, entry, data]`.

A frame is written in one go, so a crash can tear the last frame of a segment only; reading stops before it. A restarted
writer begins a new segment behind the last whole frame. `zstd -dc events/*.zst` reads a segment without this module.
`index.json` lists the closed segments: what is in them, and how many of their bytes count.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec
import zstandard

from actors import atomic
from actors.recorder.ordering import number
from contracts.core import Entry

LEVEL = 3
CUT = ".cut.zst"
"""End of the name of a segment that `cut` has rewritten."""
CHUNK = 1 << 17
"""Bytes read from a segment at a time: with each frame, what is left of them is copied."""


REMEDY = "put back a copy of it; `pipeline bundle` packs what can be read without it"


class ArchiveError(Exception):
    """A closed segment is damaged: says which file and where."""


class ArchiveBusy(ArchiveError):
    """Another process writes this archive."""


class Span(msgspec.Struct, frozen=True):
    """The entries of one stream in one segment."""

    first: str
    last: str
    count: int


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A closed segment. `bytes` counts whole frames only; the file may go on with a torn one."""

    file: str
    bytes: int
    records: int
    streams: dict[str, Span]
    opened_at: float
    closed_at: float


class Index(msgspec.Struct, frozen=True):
    """index.json. Files in `void` were replaced by a `cut` and do not count."""

    segments: tuple[Segment, ...] = ()
    void: tuple[str, ...] = ()


_frame_encoder = msgspec.msgpack.Encoder()
_frame_decoder = msgspec.msgpack.Decoder(list[Entry])


class Writer:
    """Appends to the archive in `folder`, as its only writer: raises `ArchiveBusy` while another one lives.

    Opening it closes what an earlier writer left open. `last` maps each stream to its last archived entry: records up
    to it are not taken again, so nothing is archived twice.
    """

    def __init__(self, folder: Path, now: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        self._folder = folder
        self._index = read_index(folder)
        self._recover(now)
        self.last: dict[str, str] = {}
        for segment in self._index.segments:
            for stream, span in segment.streams.items():
                self.last[stream] = span.last
        self._pending: list[Entry] = []
        self._writing = threading.Lock()
        self._file: int | None = None
        self._name = ""
        self._bytes = 0
        self._opened_at = now
        self._spans: dict[str, Span] = {}

    def append(self, stream: str, entry: str, data: bytes) -> bool:
        """Take one record, in memory until `flush`; False if it is archived already."""
        if stream in self.last and number(entry) <= number(self.last[stream]):
            return False
        self.last[stream] = entry
        self._pending.append(Entry(stream, entry, data))
        return True

    def waiting(self) -> int:
        """How many records are in memory."""
        return len(self._pending)

    def flush(self, now: float, count: int | None = None) -> int:
        """Write what was taken, or its first `count`, as one frame and make it durable; answers its bytes.

        Safe beside `append`.
        """
        with self._writing:
            return self._write(now, count)

    def _write(self, now: float, count: int | None) -> int:
        pending = self._pending[:count]
        del self._pending[: len(pending)]
        if not pending:
            return 0
        if self._file is None:
            self._file = self._open(now)
        frame = _frame(pending)
        view = memoryview(frame)
        while view:
            view = view[os.write(self._file, view) :]
        os.fsync(self._file)
        self._bytes += len(frame)
        _count(self._spans, pending)
        return len(frame)

    def rotate(self, now: float, count: int | None = None) -> int:
        """Flush and close the segment; the next flush begins another. Answers the bytes flushed."""
        with self._writing:
            size = self._write(now, count)
            if self._file is not None:
                os.close(self._file)
                self._file = None
                self._add(self._name, self._bytes, self._spans, self._opened_at, now)
        return size

    def close(self, now: float) -> None:
        """Rotate and let go of the archive."""
        self.rotate(now)
        os.close(self._lock)

    # --- segments ---

    def _open(self, now: float) -> int:
        number = len(self._index.segments) + 1
        self._name = f"{number:06d}.zst"
        self._bytes, self._spans, self._opened_at = 0, {}, now
        return os.open(self._folder / self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def _recover(self, now: float) -> None:
        """Close segments that are not in the index: all but their torn ends counts."""
        for path in _unlisted(self._folder, self._index):
            spans: dict[str, Span] = {}
            size = 0
            for records, end in _frames(path, None):
                _count(spans, records)
                size = end
            self._add(path.name, size, spans, path.stat().st_mtime, now)

    def _add(self, name: str, size: int, spans: dict[str, Span], opened_at: float, closed_at: float) -> None:
        segment = Segment(
            file=name,
            bytes=size,
            records=sum(span.count for span in spans.values()),
            streams=spans,
            opened_at=opened_at,
            closed_at=closed_at,
        )
        self._index = Index((*self._index.segments, segment), self._index.void)
        _write_index(self._folder, self._index)


def _lock(folder: Path) -> int:
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ArchiveBusy(f"{folder} is written by another process: a run has one recorder") from error
    return handle


def has_writer(folder: Path) -> bool:
    """Whether a recorder holds this archive open, here or wherever locks on the file system reach."""
    if not folder.is_dir():
        return False
    try:
        os.close(_lock(folder))
    except ArchiveBusy:
        return True
    return False


def read(
    folder: Path, streams: Collection[str] | None = None, behind: Mapping[str, int] | None = None
) -> Iterator[Entry]:
    """Archived records in the order in which they were archived, of `streams` or of all.

    `behind` maps streams to a number up to which the caller needs no record: closed segments that hold nothing else are
    skipped. May run beside a writer: it then ends at the last whole frame. Raises `ArchiveError` for a damaged closed
    segment.
    """
    for records in frames(folder, streams, behind):
        yield from records


def frames(
    folder: Path, streams: Collection[str] | None = None, behind: Mapping[str, int] | None = None
) -> Iterator[list[Entry]]:
    """What `read` answers, frame by frame: a record costs half as much."""
    index = read_index(folder)
    for segment in index.segments:
        if _wanted(segment, streams, behind or {}):
            yield from (_picked(records, streams) for records, _ in _closed(folder, segment))
    for path in _unlisted(folder, index):
        yield from (_picked(records, streams) for records, _ in _frames(path, None))


class Part(msgspec.Struct, frozen=True):
    """One file of an archive. `bytes` of it count; None: it is being written, or was when its writer died."""

    path: Path
    bytes: int | None
    frames: Callable[[], Iterator[tuple[list[Entry], int]]]
    """Its frames, each with the place where it ends. Raises `ArchiveError` if the file is closed and damaged."""


def parts(folder: Path) -> list[Part]:
    """The files of an archive in the order in which they were written. Raises `ArchiveError` as `read` does."""
    index = read_index(folder)
    closed = [Part(folder / each.file, each.bytes, partial(_closed, folder, each)) for each in index.segments]
    return closed + [Part(path, None, partial(_frames, path, None)) for path in _unlisted(folder, index)]


def between(path: Path, start: int, end: int) -> Iterator[Entry]:
    """The records of the frames from byte `start` to byte `end` of a file, which begin and end there."""
    for records, _ in _frames(path, end, start):
        yield from records


def batches(frames: Iterable[list[Entry]], size: int) -> Iterator[list[Entry]]:
    """The records of `frames`, `size` at a time."""
    held: list[Entry] = []
    for records in frames:
        held += records
        whole = len(held) - len(held) % size
        for start in range(0, whole, size):
            yield held[start : start + size]
        del held[:whole]
    if held:
        yield held


def salvage(folder: Path, damage: Callable[[str], None]) -> Iterator[Entry]:
    """What of `read` can be read. `damage` is told of each file that is damaged; what it holds in front counts."""
    try:
        index = read_index(folder)
    except ArchiveError as error:
        damage(str(error))
        index = Index()
    files = [_closed(folder, segment) for segment in index.segments]
    files += [_frames(path, None) for path in _unlisted(folder, index)]
    for file in files:
        try:
            yield from chain.from_iterable(records for records, _ in file)
        except (ArchiveError, msgspec.DecodeError, OSError) as error:
            damage(str(error))


def _wanted(segment: Segment, streams: Collection[str] | None, behind: Mapping[str, int]) -> bool:
    return any(
        (streams is None or stream in streams) and number(span.last) > behind.get(stream, -1)
        for stream, span in segment.streams.items()
    )


def read_index(folder: Path) -> Index:
    """The closed segments; empty if there are none. Raises `ArchiveError` if index.json is damaged."""
    path = folder / "index.json"
    if not path.exists():
        return Index()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Index)
    except msgspec.DecodeError as error:
        raise ArchiveError(f"{path} is damaged: {error}; delete it, it is made anew from the segments") from error


def _write_index(folder: Path, index: Index) -> None:
    atomic.write(folder / "index.json", msgspec.json.encode(index), durable=True)


def cut(folder: Path, upto: Mapping[str, int]) -> int:
    """Take records above `upto[stream]` out of closed segments; answers how many.

    For whoever holds the archive as its writer, without open segment. A crash leaves either the old archive or the new.
    """
    index = read_index(folder)
    segments: list[Segment] = []
    void: list[str] = []
    removed = 0
    for segment in index.segments:
        if all(number(span.last) <= upto.get(stream, number(span.last)) for stream, span in segment.streams.items()):
            segments.append(segment)
            continue
        records = chain.from_iterable(records for records, _ in _closed(folder, segment))
        kept = [r for r in records if number(r.entry) <= upto.get(r.stream, number(r.entry))]
        removed += segment.records - len(kept)
        void.append(segment.file)
        segments.append(_rewritten(folder, segment, kept))
    if void:
        _write_index(folder, Index(tuple(segments), (*index.void, *void)))
        for file in void:
            (folder / file).unlink()
    return removed


def _rewritten(folder: Path, segment: Segment, kept: list[Entry]) -> Segment:
    frame = _frame(kept) if kept else b""
    file = f"{segment.file.removesuffix('.zst')}{CUT}"
    atomic.write(folder / file, frame, durable=True)
    spans: dict[str, Span] = {}
    _count(spans, kept)
    return msgspec.structs.replace(segment, file=file, bytes=len(frame), records=len(kept), streams=spans)


def _frame(records: list[Entry]) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(_frame_encoder.encode(records))


def _closed(folder: Path, segment: Segment) -> Iterator[tuple[list[Entry], int]]:
    path, found = folder / segment.file, 0
    if not path.exists():
        raise ArchiveError(f"{path} is missing: index.json lists {segment.records} records in it; {REMEDY}")
    try:
        for records, end in _frames(path, segment.bytes):
            found += len(records)
            yield records, end
    except (msgspec.DecodeError, OSError) as error:
        raise ArchiveError(f"{path} is damaged: {error}; {REMEDY}") from error
    if found != segment.records:
        raise ArchiveError(f"{path} is damaged: {found} of {segment.records} records can be read; {REMEDY}")


def _picked(records: list[Entry], streams: Collection[str] | None) -> list[Entry]:
    return records if streams is None else [record for record in records if record.stream in streams]


def _unlisted(folder: Path, index: Index) -> list[Path]:
    known = {*index.void, *(segment.file for segment in index.segments)}
    found = (path for path in sorted(folder.glob("*.zst")) if not path.name.endswith(CUT))
    return [path for path in found if path.name not in known]


def _frames(path: Path, size: int | None, start: int = 0) -> Iterator[tuple[list[Entry], int]]:
    """The records of each whole frame from `start` on within the first `size` bytes, and where it ends.

    Stops at the first torn one.
    """
    context = zstandard.ZstdDecompressor()
    with path.open("rb") as file:
        file.seek(start)
        end, parts, frame = start, [], context.decompressobj()
        left = (os.fstat(file.fileno()).st_size if size is None else size) - start
        while left and (chunk := file.read(min(CHUNK, left))):
            left -= len(chunk)
            while chunk:
                taken = len(chunk)
                try:
                    parts.append(frame.decompress(chunk))
                except zstandard.ZstdError:
                    return
                chunk = frame.unused_data if frame.eof else b""
                end += taken - len(chunk)
                if frame.eof:
                    yield _frame_decoder.decode(b"".join(parts)), end
                    parts, frame = [], context.decompressobj()


def _count(spans: dict[str, Span], records: list[Entry]) -> None:
    for record in records:
        span = spans.get(record.stream, Span(record.entry, record.entry, 0))
        spans[record.stream] = Span(span.first, record.entry, span.count + 1)
