"""A log in memory that stands in for the store, and events to put into it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog

from actors.recorder.ordering import number
from contracts.core import Entry, PayloadGone
from contracts.envelope import STREAM_OF, Envelope, encode
from contracts.events import Event


class Gone(PayloadGone):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic_ns(self) -> int:
        return int(self.time * 1e9)


class Log:
    """Streams, journals and payloads of a run; `contracts.core.Store` and `contracts.core.Context` at once."""

    def __init__(self, run_dir: Path) -> None:
        self.run, self.actor, self.boot = "test", "recorder", 1
        self.run_dir = str(run_dir)
        self.clock = Clock()
        self.log = structlog.get_logger()
        self.config: Any = None
        self.streams: defaultdict[str, list[Entry]] = defaultdict(list)
        self.blobs: dict[str, bytes] = {}
        self.trimmed: dict[str, str] = {}
        self.discarded: list[str] = []
        self.inputs: list[Any] = []
        self.got_input = asyncio.Event()
        self._count = 0

    def add(self, event: Event, actor: str = "test", wall: float | None = None) -> Entry:
        self._count += 1
        stream = STREAM_OF[type(event)]
        envelope = Envelope(
            id=f"{actor}:{self._count}.0",
            run=self.run,
            stream=stream,
            actor=actor,
            boot=1,
            epoch=0,
            wall_ns=int((self._count if wall is None else wall) * 1e9),
            mono_ns=0,
            body=event,
        )
        entry = Entry(stream, f"{self._count}-0", encode(envelope))
        self.streams[stream].append(entry)
        return entry

    def record(self, actor: str, data: bytes) -> Entry:
        stream = f"journal:{actor}"
        entry = Entry(stream, f"{len(self.streams[stream]) + 1}-0", data)
        self.streams[stream].append(entry)
        return entry

    def events(self) -> list[Entry]:
        found = [e for name, stream in self.streams.items() if not name.startswith("journal:") for e in stream]
        return sorted(found, key=lambda e: number(e.entry))

    # --- store ---

    @property
    def store(self) -> Log:
        return self

    async def read_after(self, cursors: Mapping[str, str], count: int, block_ms: int) -> list[Entry]:
        await asyncio.sleep(0)
        found: list[Entry] = []
        for stream, cursor in cursors.items():
            found += [e for e in self.streams[stream] if number(e.entry) > number(cursor)][:count]
        return found

    async def trim(self, stream: str, floor: str) -> int:
        self.trimmed[stream] = floor
        before = len(self.streams[stream])
        self.streams[stream] = [e for e in self.streams[stream] if number(e.entry) >= number(floor)]
        return before - len(self.streams[stream])

    async def discard(self, upto: str) -> int:
        self.discarded.append(upto)
        return 1

    # --- context ---

    def deliver(self, input: Any) -> None:
        self.inputs.append(input)
        self.got_input.set()

    def state(self) -> Any:
        return None

    async def payloads(self, keys: Sequence[str]) -> list[bytes]:
        for key in keys:
            if key not in self.blobs:
                raise Gone(key)
        return [self.blobs[key] for key in keys]

    async def register(self, name: str) -> int:
        return 0


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)
