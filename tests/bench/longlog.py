"""A long log for benchmarks: a simulated run, continued by copies of itself under new numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from actors.recorder.archive import Writer
from config import loading
from config.schema import RunConfig
from contracts.core import Entry
from contracts.envelope import decode, encode
from pipeline.simulate import archive
from pipeline.simulate.run import simulate
from pipeline.simulate.world import World

SHIFTED = ("index", "batch", "version", "parent_version", "step", "epoch", "total", "issued")
"""Numbers that go on from one copy to the next."""


def simulated(steps: int) -> tuple[World, RunConfig]:
    config = loading.load("simulated", [f"steps={steps}", "engine.count=4", "launch.collectors=2"])
    return simulate(config, 1).world, config


def repeated(log: list[Entry], copies: int) -> Iterator[Entry]:
    """`copies` times the log: no number is used twice, and time goes on."""
    decoded = [decode(entry.stream, entry.data) for entry in log]
    last_ns = decoded[-1].wall_ns - decoded[0].wall_ns
    top = {name: max((_top(e.body, name) for e in decoded), default=0) + 1 for name in SHIFTED}
    number = 0
    for copy in range(copies):
        for envelope in decoded:
            number += 1
            body = envelope.body if not copy else _shift(envelope.body, {k: v * copy for k, v in top.items()})
            moved = replace(envelope, wall_ns=envelope.wall_ns + copy * last_ns, mono_ns=0, body=body)
            yield Entry(envelope.stream, f"{number}-0", encode(moved))


def _top(value: Any, name: str) -> int:
    found = getattr(value, name, 0)
    return found if isinstance(found, int) else 0


def _shift(value: Any, by: dict[str, int]) -> Any:
    """Every field of that name, at any depth."""
    if isinstance(value, tuple):
        return tuple(_shift(each, by) for each in value)
    if not isinstance(value, msgspec.Struct):
        return value
    changes: dict[str, Any] = {}
    for field in value.__struct_fields__:
        held = getattr(value, field)
        if field == "tasks" and isinstance(held, tuple):
            changes[field] = tuple(index + by["index"] for index in held)
        elif field in by and isinstance(held, int):
            changes[field] = held + by[field]
        elif isinstance(held, tuple | msgspec.Struct):
            changes[field] = _shift(held, by)
    return replace(value, **changes)


def write(folder: Path, events: int, steps: int = 60) -> Path:
    """A run directory whose log has about `events` events; its journals are those of one copy."""
    world, config = simulated(steps)
    run = archive.write(world, config, folder)
    log = list(world.store.log)
    writer = Writer(run.events, world.now())
    for place, entry in enumerate(repeated(log, max(1, round(events / len(log))))):
        if place >= len(log):
            writer.append(entry.stream, entry.entry, entry.data)
            if writer.waiting() == archive.FRAME:
                writer.flush(world.now())
    writer.close(world.now())
    return folder
