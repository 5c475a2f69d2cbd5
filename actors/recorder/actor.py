"""Performs what the recorder's core decides: reads the whole log, appends it to the archive, writes the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors import atomic, registry
from actors.recorder.archive import ArchiveBusy, Writer, read
from actors.recorder.core import OWN_JOURNAL, Appended, Flush, Flushed, Follow, RecorderCore, Recovered, Trim
from actors.recorder.files import Table, TensorBoard
from actors.recorder.metrics import Memory, Steps
from actors.recorder.ordering import START, advance, number, settled
from config.schema import RunConfig
from contracts.core import Context, Entry, Fatal, PayloadGone
from contracts.envelope import STREAMS, ContractError, Envelope, decode
from contracts.events import ActorBooted, CheckpointSaved, Event, RunFinished, RunStarted, TrajectoryFinished

PAGE = 512
"""Entries of one stream taken by one reading."""
BLOCK_MS = 1000
LINGER_S = 0.2
"""Pause between readings, so that a reading takes many entries at once."""
PREDECESSOR_S = 20.0
"""Longest wait for a fenced recorder to let go of the archive."""
PAYLOADS = "payload"
"""Stream name of archived payloads; their entry is the id of the `trajectory.finished` that names them."""


KEPT = "metrics.state"
"""File of the run directory: what the metrics remembered when the last segment was closed."""


class Kept(msgspec.Struct, frozen=True):
    """`seen`: stream -> the last entry that was folded into `memory`; `complete`: the log had ended."""

    seen: dict[str, str]
    memory: Memory
    complete: bool


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """An archived payload; `data` is None if it was released before the recorder came to it."""

    key: str
    data: bytes | None


class RecorderShell:
    """`contracts.core.Shell`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config.recorder
        names = registry.names(config)
        self.core = RecorderCore(config.recorder, names)
        self._journals = [name for name in (f"journal:{actor}" for actor in names) if name != OWN_JOURNAL]
        self._writers: list[Writer] = []
        self._steps = Steps()
        self._seen: dict[str, str] = {}
        self._complete = False
        self._table: Table | None = None
        self._board: TensorBoard | None = None

    async def start(self, context: Context) -> None:
        self._context = context
        root = Path(context.run_dir)
        self._payloads = await self._open(root / "payloads")
        self._history = await self._open(root / "journals")
        self._events = await self._open(root / "events")
        self._table = Table(root / "metrics.jsonl")
        self._board = TensorBoard(root / "tensorboard") if self._config.tensorboard else None
        await asyncio.to_thread(self._catch_up, root / "events")

    async def perform(self, command: Any) -> Any | None:
        match command:
            case Follow():
                return await self._follow()
            case Flush():
                return await self._flush(command)
            case Trim():
                return await self._trim(command)
        raise TypeError(f"the recorder can't perform {command!r}")

    def payload(self, handle: str) -> bytes:
        raise KeyError(handle)

    async def close(self) -> None:
        for writer in self._writers:
            writer.close(self._context.clock.now())
        if self._table is not None:
            self._table.close()
        if self._board is not None:
            self._board.close()

    # --- start ---

    async def _open(self, folder: Path) -> Writer:
        """The archive in `folder`, once a predecessor that is on its way out has let go of it."""
        deadline = self._context.clock.now() + PREDECESSOR_S
        while True:
            try:
                writer = await asyncio.to_thread(Writer, folder, self._context.clock.now())
            except ArchiveBusy:
                if self._context.clock.now() >= deadline:
                    raise
                await asyncio.sleep(LINGER_S)
            except OSError as error:
                raise self._unwritable(error) from error
            else:
                self._writers.append(writer)
                return writer

    def _catch_up(self, folder: Path) -> None:
        """Fold what was archived since the metrics were kept, so that they go on where they ended."""
        kept = self._recall(folder.parent / KEPT)
        behind = {stream: number(entry) for stream, entry in kept.items()}
        for entry in read(folder, behind=behind):
            if number(entry.entry) > behind.get(entry.stream, -1):
                self._digest(entry)

    def _recall(self, path: Path) -> dict[str, str]:
        """How far the kept metrics reach; nothing if there are none, or they reach beyond this archive."""
        try:
            kept = msgspec.msgpack.decode(path.read_bytes(), type=Kept)
        except (FileNotFoundError, msgspec.DecodeError):
            return {}
        last = self._events.last
        if any(number(entry) > number(last.get(stream, START)) for stream, entry in kept.seen.items()):
            return {}
        self._steps.recall(kept.memory)
        self._seen, self._complete = dict(kept.seen), kept.complete
        return kept.seen

    def _keep(self) -> bytes | None:
        """The metrics as of the last entry taken into the archive; None while one is folded and not taken yet."""
        if self._seen != self._events.last:
            return None
        return msgspec.msgpack.encode(Kept(dict(self._seen), self._steps.memory(), self._complete))

    # --- following ---

    async def _follow(self) -> None:
        deliver = self._context.deliver
        deliver(Recovered({**self._events.last, **self._history.last}))
        events = {stream: self._events.last.get(stream, START) for stream in STREAMS}
        journals = {stream: self._history.last.get(stream, START) for stream in self._journals}
        while True:
            block_ms = 0 if self._complete else BLOCK_MS
            found = settled(await self._context.store.read_after(events, PAGE, block_ms), PAGE)
            records = await self._context.store.read_after(journals, PAGE, 0)
            events, journals = advance(events, found), advance(journals, records)
            size, bodies = await self._archive(found, records)
            finished = self._complete and not found and not records
            if size or finished:
                booted = tuple(body.actor for body in bodies if isinstance(body, ActorBooted))
                saved = max((body.version for body in bodies if isinstance(body, CheckpointSaved)), default=0)
                deliver(Appended(size, booted, finished, saved))
            if finished:
                return
            await asyncio.sleep(LINGER_S)

    async def _archive(self, found: Sequence[Entry], records: Sequence[Entry]) -> tuple[int, list[Event]]:
        """Take entries into memory, payloads first; answers their bytes, and the events that can be read."""
        decoded = [self._digest(entry) for entry in found]
        size = await self._take_payloads(found, decoded) if self._config.payloads else 0
        for entry in records:
            size += self._history.append(entry.stream, entry.entry, entry.data) and len(entry.data)
        for entry in found:
            size += self._events.append(entry.stream, entry.entry, entry.data) and len(entry.data)
        return size, [envelope.body for envelope in decoded if envelope is not None]

    def _digest(self, entry: Entry) -> Envelope[Event] | None:
        """Decode an event and fold it into the metrics. One that can't be read is archived all the same."""
        self._seen[entry.stream] = entry.entry
        try:
            envelope = decode(entry.stream, entry.data)
        except ContractError as error:
            self._context.log.warning("unreadable event", stream=entry.stream, entry=entry.entry, error=str(error))
            return None
        if isinstance(envelope.body, RunStarted | RunFinished):
            self._complete = isinstance(envelope.body, RunFinished)
        row = self._steps.apply(envelope)
        if row is not None and self._table is not None and self._table.write(row) and self._board is not None:
            self._board.write(row)
        return envelope

    async def _take_payloads(self, found: Sequence[Entry], decoded: Sequence[Envelope[Event] | None]) -> int:
        wanted = {
            entry.entry: envelope.body.payload.key
            for entry, envelope in zip(found, decoded, strict=True)
            if envelope is not None and isinstance(envelope.body, TrajectoryFinished)
        }
        payloads = await self._fetch(list(wanted.values()))
        size = 0
        for entry, key in wanted.items():
            data = msgspec.msgpack.encode(Payload(key, payloads[key]))
            size += self._payloads.append(PAYLOADS, entry, data) and len(data)
        return size

    async def _fetch(self, keys: Sequence[str]) -> Mapping[str, bytes | None]:
        """Payloads by key; None for one that is gone."""
        if not keys:
            return {}
        try:
            return dict(zip(keys, await self._context.payloads(keys), strict=True))
        except PayloadGone:
            if len(keys) == 1:
                return {keys[0]: None}
        half = len(keys) // 2
        return {**await self._fetch(keys[:half]), **await self._fetch(keys[half:])}

    # --- keeping ---

    async def _flush(self, command: Flush) -> Flushed:
        """Payloads become durable before the events that name them, and journals before what they emitted."""
        cursors = {**self._events.last, **self._history.last}
        counts = [(writer, writer.waiting()) for writer in self._writers]
        kept = self._keep() if command.rotate else None
        now = self._context.clock.now()

        def write() -> int:
            size = sum(w.rotate(now, n) if command.rotate else w.flush(now, n) for w, n in counts)
            if kept is not None:
                self._store(kept)
            return size

        try:
            size = await asyncio.to_thread(write)
        except OSError as error:
            raise self._unwritable(error) from error
        if self._board is not None:
            self._board.flush()
        return Flushed(cursors, size, command.rotate)

    def _store(self, kept: bytes) -> None:
        atomic.write(Path(self._context.run_dir) / KEPT, kept)

    async def _trim(self, command: Trim) -> None:
        store = self._context.store
        removed = {stream: await store.trim(stream, floor) for stream, floor in command.floors.items()}
        removed["payloads"] = await store.discard(command.archived)
        self._context.log.info("trimmed", **{stream: count for stream, count in removed.items() if count})

    def _unwritable(self, error: OSError) -> Fatal:
        return Fatal(
            f"the run directory {self._context.run_dir} can't be written: {error.strerror} ({error.filename}); "
            "free space there or choose another run_dir, then resume"
        )


def build(config: RunConfig, actor: str) -> RecorderShell:
    return RecorderShell(config)


def payloads(folder: Path) -> Mapping[str, bytes | None]:
    """Archived payloads by key. Reads all of them into memory."""
    decoder = msgspec.msgpack.Decoder(Payload)
    found = (decoder.decode(entry.data) for entry in read(folder, {PAYLOADS}))
    return {payload.key: payload.data for payload in found}
