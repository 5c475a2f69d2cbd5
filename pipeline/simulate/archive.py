"""A simulated run as a run directory, so that every tool that reads one reads it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from actors.recorder.archive import Writer
from config import loading
from config.schema import RunConfig
from contracts.core import Entry
from pipeline import rundir
from pipeline.rundir import RunDir
from pipeline.runtime.journal import Record
from pipeline.simulate.world import World

FRAME = 8192
"""Records of one frame: who reads the archive need not hold all of it."""
SEGMENT = 16 << 20
"""Bytes of a segment at least, as the recorder has it."""

_record = msgspec.msgpack.Decoder(Record)


def write(world: World, config: RunConfig, out: Path) -> RunDir:
    """Log, journals and configuration of `world` in `out`. Raises `PipelineError` if `out` holds something else."""
    info = rundir.describe("simulated", config, loading.digest(config))
    directory = RunDir.create(out, info, loading.dump(config))
    events, journals = Writer(directory.events, world.now()), Writer(directory / "journals", world.now())
    try:
        fill(events, world.store.log, world.now())
        fill(journals, by_time(world.store.journals), world.now())
        directory.update(run=world.run_id, ended="simulated")
    finally:
        events.close(world.now())
        journals.close(world.now())
        directory.unlock()
    return directory


def fill(writer: Writer, entries: Iterable[Entry], now: float) -> None:
    """Write entries in frames and segments such as a recorder makes."""
    size = 0
    for entry in entries:
        writer.append(entry.stream, entry.entry, entry.data)
        if writer.waiting() == FRAME:
            size += writer.flush(now)
            if size >= SEGMENT:
                writer.rotate(now)
                size = 0


def by_time(journals: Mapping[str, Sequence[bytes]]) -> Iterator[Entry]:
    """The records of all actors as a recorder meets them."""
    tracks = [
        [(_record.decode(data).now, Entry(f"journal:{actor}", f"{seq}-0", data)) for seq, data in enumerate(records, 1)]
        for actor, records in journals.items()
    ]
    return (entry for _, entry in heapq.merge(*tracks, key=lambda item: item[0]))
