"""The journals in a run's archive: what each core took in, in order, and the hash of what it answered."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from actors.recorder import archive
from actors.recorder.ordering import number
from contracts.core import Booted, Core, Delivered, Entry, LeaseLost, Tick
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir
from pipeline.runtime.journal import Record

JOURNAL = "journal:"
SNAPSHOT = "snapshot:"

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


def read(run: RunDir, streams: Collection[str] | None) -> Iterator[Entry]:
    """Archived records of the journals. Raises `PipelineError` if they are damaged or missing."""
    if not (run / "journals").is_dir():
        raise PipelineError(
            f"{run.path} holds no journals, so nothing can be replayed: put its folder journals/ back", Exit.USAGE
        )
    try:
        yield from archive.read(run / "journals", streams)
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


def latest(run: RunDir, cores: Mapping[str, Core[Any]]) -> dict[str, tuple[Any, float]]:
    """Actor -> (its state at the end of the archive, when it took its last input), from the newest snapshot on."""
    readers = {name: Reader(core) for name, core in cores.items()}
    base: dict[str, tuple[int, Any]] = {name: (0, core.initial()) for name, core in cores.items()}
    for entry in _last_snapshots(run, cores):
        name = entry.stream.removeprefix(SNAPSHOT)
        state = readers[name].state(entry.data)
        if state is not None:
            base[name] = (number(entry.entry), state)
    heard: dict[str, float] = {}
    behind = {JOURNAL + name: seq for name, (seq, _) in base.items()}
    for entry in archive.read(run / "journals", set(behind), behind=behind):
        name = entry.stream.removeprefix(JOURNAL)
        seq, state = base[name]
        if number(entry.entry) <= seq:
            continue
        record = _records.decode(entry.data)
        base[name] = (record.seq, cores[name].step(state, readers[name].input(record), record.now)[0])
        heard[name] = record.now
    return {name: (state, heard.get(name, 0.0)) for name, (seq, state) in base.items() if seq}


def _last_snapshots(run: RunDir, names: Collection[str]) -> list[Entry]:
    """The newest snapshot of each actor."""
    newest: dict[str, str] = {}
    for segment in archive.read_index(run / "journals").segments:
        for stream, span in segment.streams.items():
            if stream.startswith(SNAPSHOT) and stream.removeprefix(SNAPSHOT) in names:
                newest[stream] = span.last
    behind = {stream: number(last) - 1 for stream, last in newest.items()}
    found = {entry.stream: entry for entry in archive.read(run / "journals", set(newest), behind=behind)}
    return list(found.values())
