"""Reads a run's log on a thread of its own: the archive first, then what a live run adds."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from actors.recorder import archive
from actors.recorder.ordering import START
from actors.startup import uncollected
from config.schema import RunConfig
from contracts.envelope import BROADCAST_STREAMS, STREAMS, WORK_STREAMS
from pipeline import eventlog
from pipeline.bus import Bus, BusError
from pipeline.bus.model import Depth
from pipeline.errors import Exit, PipelineError
from pipeline.eventlog import Batch
from pipeline.rundir import RunDir
from pipeline.top.board import Board, History, at, spacing
from pipeline.why import load
from pipeline.why.result import Evidence

LOOK_EVERY_S = 2.0
CONNECT_S = 3.0


class Feed:
    """`history` grows while the thread runs; hold `lock` to look at it."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        """Raises `PipelineError` if the archive's index is damaged."""
        self._run = run
        self._config = config
        try:
            segments = archive.read_index(run.events).segments
        except archive.ArchiveError as error:
            raise PipelineError(str(error), Exit.FAILED) from error
        self.expected = sum(segment.records for segment in segments)
        """Events in closed segments: what is to be read at least."""
        self.history = History(spacing(self.expected))
        self.lock = threading.Lock()
        self.live = False
        self._loaded = threading.Event()
        self.end = 0.0
        """The last moment of which the archive tells, once it is read: no event may have come for long before it."""
        self.depths: dict[str, Depth] | None = None
        self.evidence: Evidence | None = None
        """What gateways and collectors are at, in the store or at the archive's end; None: not looked into yet."""
        self.error = ""
        self._last: dict[str, str] = {}
        self._stop = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="top-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    @property
    def loaded(self) -> bool:
        """The archive has been read to its end."""
        return self._loaded.is_set()

    def wait_loaded(self, timeout_s: float) -> bool:
        """Wait until it is; answers whether it is."""
        return self._loaded.wait(timeout_s)

    def at(self, position: int) -> Board:
        """The board of an archived moment, read anew from the nearest mark. Raises `PipelineError`."""
        with self.lock:
            begin = self.history.before(position).position
        behind = dict.fromkeys(STREAMS, begin)
        return at(self.history, position, eventlog.batches(self._run, behind))

    def look(self, position: int | None, wanted: Callable[[], bool] = lambda: True) -> Evidence | None:
        """What gateways and collectors were at, at an archived moment or at the end; None if no longer `wanted`.

        The first look into a long archive takes seconds, later ones find in `replay.index` what it found out.
        """
        with self._looking:
            return load.look_into(self._run, self._config, position) if wanted() else None

    def batches(self, behind: int) -> Iterator[Batch]:
        """The archived events behind a place. Raises `PipelineError`."""
        return eventlog.batches(self._run, dict.fromkeys(STREAMS, behind))

    # --- the thread ---

    def _work(self) -> None:
        try:
            with uncollected():
                self._read()
            self._loaded.set()
            if self.history.board.view.finished is None and archive.has_writer(self._run.events):
                asyncio.run(self._follow())
        except (PipelineError, BusError) as error:
            self.error = str(error)
        finally:
            self._loaded.set()
            self.live = False
        if not self._stop.is_set():
            self._look_back()

    def _look_back(self) -> None:
        """What the archive tells beside its events, now that nobody adds to it."""
        try:
            self.end = load.end_of(self._run, self.history.board.model)
        except PipelineError as error:
            self.error = str(error)
        self.evidence = self.look(None)

    def _read(self) -> None:
        for batch in eventlog.batches(self._run):
            if self._stop.is_set():
                return
            self._extend(batch)

    def _extend(self, batch: Batch) -> None:
        with self.lock:
            self.history.extend(batch)
        self._last.update({entry.stream: entry.entry for entry in batch.entries})

    async def _follow(self) -> None:
        """Until the run has finished, or nobody looks any more."""
        bus = await Bus.connect(load.url_of(self._run), self._run.info().run, actor="top", connect_s=CONNECT_S)
        self.live = True
        looked_at = 0.0
        cursors = {stream: self._last.get(stream, START) for stream in STREAMS}
        try:
            async with contextlib.aclosing(eventlog.pages(self._run, bus, cursors)) as pages:
                async for page in pages:
                    self._extend(eventlog.decoded(page))
                    if self._stop.is_set() or self.history.board.view.finished is not None:
                        return
                    if time.monotonic() - looked_at >= LOOK_EVERY_S:
                        looked_at = time.monotonic()
                        work = await bus.depths(WORK_STREAMS, group="readers")
                        self.depths = work | await bus.depths(BROADCAST_STREAMS)
                        self.evidence = Evidence(states=await load.states(bus, self._config))
        finally:
            await bus.close()
