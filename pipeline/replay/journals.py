"""The journals in a run's archive: what each core took in, in order, and the hash of what it answered."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder import archive
from contracts.core import Booted, Core, Delivered, Entry, LeaseLost, Tick
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir
from pipeline.runtime.journal import Record

JOURNAL = "journal:"

_records = msgspec.msgpack.Decoder(Record)


class Reader:
    """Decodes the journal of one core."""

    def __init__(self, core: Core[Any]) -> None:
        self._inputs = msgspec.msgpack.Decoder(Delivered | Booted | Tick | LeaseLost | core.local_type)
        self._states = msgspec.msgpack.Decoder(core.state_type)

    def input(self, record: Record) -> Any:
        """The input of a record. Raises `PipelineError` if this version can't read it."""
        try:
            return self._inputs.decode(record.input)
        except msgspec.ValidationError as error:
            raise PipelineError(
                f"journal record {record.seq} is no input of this version's core: {error}; "
                "replay with the version that wrote it (versions in run.json)",
                Exit.FAILED,
            ) from error

    def state(self, data: bytes) -> Any | None:
        """The state of a snapshot; None if this version has another form of it."""
        try:
            return self._states.decode(data)
        except msgspec.DecodeError:
            return None


def actors(run: RunDir) -> tuple[str, ...]:
    """Actors whose journals are archived, by name."""
    index = archive.read_index(run / "journals")
    names = {stream for segment in index.segments for stream in segment.streams if stream.startswith(JOURNAL)}
    if not index.segments:
        names = {entry.stream for entry in read(run, None) if entry.stream.startswith(JOURNAL)}
    return tuple(sorted(name.removeprefix(JOURNAL) for name in names))


def folder(run: RunDir) -> Path:
    """Where the journals are. Raises `PipelineError` if they are missing."""
    if not (run / "journals").is_dir():
        raise PipelineError(
            f"{run.path} holds no journals, so nothing can be replayed: put its folder journals/ back", Exit.USAGE
        )
    return run / "journals"


def read(run: RunDir, streams: Collection[str] | None) -> Iterator[Entry]:
    """Archived records of the journals. Raises `PipelineError` if they are damaged or missing."""
    try:
        yield from archive.read(folder(run), streams)
    except archive.ArchiveError as error:
        raise PipelineError(str(error), Exit.FAILED) from error


def grouped(run: RunDir, names: Collection[str] | None = None) -> dict[str, list[Record]]:
    """Actor -> its records in order, of `names` or of all. One pass over the archive."""
    return group(read(run, None if names is None else {JOURNAL + name for name in names}))


def group(entries: Iterable[Entry]) -> dict[str, list[Record]]:
    """Actor -> its records in order, of what an archive of journals holds."""
    found: dict[str, list[Record]] = {}
    for entry in entries:
        if entry.stream.startswith(JOURNAL):
            found.setdefault(entry.stream.removeprefix(JOURNAL), []).append(_records.decode(entry.data))
    return found
