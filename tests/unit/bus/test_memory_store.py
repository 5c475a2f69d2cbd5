"""The simulator's store does what the bus does: the conformance suite of commits, without a server or a client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from actors.recorder.ordering import number
from contracts.core import Entry
from pipeline.bus import Commit, Committed, Depth, Limits, PayloadMissing, WorkEntry
from pipeline.simulate.store import MemoryStore
from tests.contract.commit_conformance import *  # noqa: F403 - the suite


class MemoryBus:
    """What the suite calls of a bus, for one actor; each call lets others run, as one that travels would."""

    def __init__(self, store: MemoryStore, actor: str) -> None:
        self._store, self._actor = store, actor

    async def boot(self) -> tuple[int, int]:
        await asyncio.sleep(0)
        return self._store.boot(self._actor)

    async def commit(self, commit: Commit) -> Committed:
        await asyncio.sleep(0)
        return self._store.commit(self._actor, commit)

    async def post(self, stream: str, data: bytes) -> str:
        return self._store.add(stream, data)

    async def ensure_group(self, stream: str, group: str) -> None:
        """Its streams have one group each."""

    async def read_work(self, counts: Mapping[str, int], group: str, *, block_ms: int | None) -> list[WorkEntry]:
        return [entry for stream, n in counts.items() for entry in self._store.read_new(stream, self._actor, n)]

    async def read_after(self, cursors: Mapping[str, str], *, block_ms: int | None, count: int) -> list[Entry]:
        return self._store.read_after(cursors)

    async def payloads(self, keys: Sequence[str]) -> list[bytes]:
        missing = [key for key in keys if key not in self._store.payloads]
        if missing:
            raise PayloadMissing(missing[0])
        return [self._store.payloads[key] for key in keys]

    async def discard(self, upto: str) -> None:
        """What is released is gone at once: nobody may count on the recorder's being slow."""

    async def register(self, name: str) -> int:
        return self._store.registers.get(name, 0)

    async def cursors(self) -> dict[str, str]:
        return dict(self._store.cursors[self._actor])

    async def snapshot(self) -> tuple[int, bytes] | None:
        return self._store.snapshots.get(self._actor)

    async def journal(self) -> list[bytes]:
        return list(self._store.journals[self._actor])

    async def depths(self, streams: Sequence[str], group: str) -> dict[str, Depth]:
        held = {stream: self._store.streams[stream] for stream in streams}
        return {
            name: Depth(length=len(each.entries), pending=len(each.pending), lag=self._store.waiting(name))
            for name, each in held.items()
        }


class MemoryRun:
    """A run in memory; raw commands are what the suite does behind the back of a bus."""

    def __init__(self) -> None:
        self._store = MemoryStore()

    async def bus(self, actor: str, limits: Limits | None = None) -> MemoryBus:
        self._store.limits = limits or self._store.limits
        return MemoryBus(self._store, actor)

    async def command(self, *words: Any) -> None:
        match words:
            case ("DEL", "{fences}"):
                self._store.boots.clear()
                self._store.seqs.clear()
                self._store.replies.clear()
            case ("XCLAIM", stream, _, consumer, 0, entry):
                self._store.hand_over(stream.strip("{}"), number(entry), consumer)
            case ("XACK", stream, _, entry):
                del self._store.streams[stream.strip("{}")].pending[number(entry)]
            case _:
                raise NotImplementedError(words)

    async def keys(self) -> dict[str, Any]:
        """Everything in it, as it is now."""
        kept = {name: value for name, value in vars(self._store).items() if name != "streams"}
        streams = {
            name: (list(each.entries), each.next_new, {n: vars(held).copy() for n, held in each.pending.items()})
            for name, each in self._store.streams.items()
        }
        return {name: repr(value) for name, value in (kept | {"streams": streams}).items()}


@pytest.fixture
async def store() -> MemoryRun:
    return MemoryRun()
