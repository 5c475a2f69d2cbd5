"""Where the page's events come from: the archive, then the store of a live run, then the archive when it is resumed."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import msgspec

from actors.recorder import archive
from actors.recorder.ordering import START, advance, number, settled
from actors.startup import uncollected
from config.schema import RunConfig
from contracts.core import Entry
from contracts.envelope import STREAMS
from pipeline.eventlog import BATCH, readable
from pipeline.rundir import RunDir
from pipeline.ui._ahead import Ended, ahead
from pipeline.ui._data import RunData, Shown, told
from pipeline.ui._drawing import Drawing
from pipeline.why import load
from pipeline.why.result import Evidence, StoreFacts

PAGE = 2000
BLOCK_MS = 1000
CONNECT_S = 2.0
LOOK_S = 2.0
"""Time between two looks into the store and the actors of a live run."""
MANY = 100_000
"""Events from which on a second process helps to fold them: it takes half a second to start."""
TURN = 16
"""Batches that are folded at a stretch."""
IDLE_S = 2.0
"""Time between two looks whether an archive has grown."""

_log = logging.getLogger("pipeline.ui")

State = Literal["loading", "live", "lost", "archived", "stopped"]
"""live: followed in its store; lost: live, but its store does not answer; archived: nobody writes it; stopped: it is
not followed any more, for `problem`."""


def cores() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Source:
    """Keeps `data` up with the run. `version` rises whenever there is something new to show."""

    def __init__(self, run: RunDir, config: RunConfig, clock: Callable[[], float]) -> None:
        self.run = run
        self.config = config
        self.data = RunData(run.info(), config)
        self.state: State = "loading"
        self.version = 0
        self.problem = ""
        """Why the log can't be read on, empty if it can."""
        self.total = 0
        """Events in the closed segments of the archive, for the progress of loading."""
        self._clock = clock
        self._evidence = Evidence()
        self._judged = self._drawn = 0
        """Places of the log up to which it was taken, for the diagnosis and figures, and for what is drawn."""
        self._bad: set[int] = set()
        """Places of events that can't be read."""
        self._helped = False
        """Another process folds what is drawn."""
        self._bus: Any = None
        self._told: tuple[Any, dict[str, Any]] = (None, {})
        self._changed = asyncio.Condition()
        self._looking = asyncio.Lock()
        self._looked: int | None = None
        """Place of the log up to which the actors of an archived run were looked into."""

    async def follow(self) -> None:
        """Read the run until cancelled; whatever can't be read is said in `problem`, and so is a fault of ours."""
        while True:
            try:
                await self._archive()
                if self.data.model.finished is None and archive.has_writer(self.run.events):
                    await self._live()
                else:
                    await self._rest()
            except (archive.ArchiveError, OSError) as error:
                self.problem = str(error)
                await self._tell("archived")
                await asyncio.sleep(IDLE_S)
            except Exception as error:
                _log.exception("the page follows the run no more")
                said = f"{type(error).__name__}: {error}"
                self.problem = f"{said}; this page follows the run no more: start `pipeline ui` again"
                await self._tell("stopped")
                return

    async def change(self, version: int, timeout_s: float) -> None:
        """Wait until `version` is passed, for `timeout_s` at most."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self.version != version)
            except TimeoutError:
                return

    async def _tell(self, state: State | None = None) -> None:
        async with self._changed:
            self.state = state or self.state
            self.version += 1
            self._changed.notify_all()

    # --- reading ---

    async def _archive(self) -> None:
        """What the archive holds behind what is known."""
        self.problem = ""
        self.total = sum(segment.records for segment in archive.read_index(self.run.events).segments)
        if not self._judged:
            await self._tell("loading")
        with uncollected() if self.state == "loading" else nullcontext():
            if not self._judged and not self._drawn and self.total >= MANY and cores() > 1:
                await self._take_together()
            await self._take(self._frames(min(self._judged, self._drawn)))
        await self._tell()

    def _frames(self, behind: int) -> Iterator[list[Entry]]:
        return archive.frames(self.run.events, behind=dict.fromkeys(STREAMS, behind))

    async def _take_together(self) -> None:
        """Fold the archive in two processes. They may read to different ends, while it grows."""
        self._helped = True
        try:
            taken, unread = await asyncio.gather(self._take(self._frames(0)), self._receive(), return_exceptions=True)
        finally:
            self._helped = False
        if isinstance(unread, BaseException):
            raise unread
        if {place for place in self._bad if place <= self._drawn} - unread:  # it looks at less of each event
            self.data.drawing, self._drawn = Drawing(), 0
        if taken is not None:
            raise taken

    async def _take(self, frames: Iterable[list[Entry]]) -> None:
        """Fold what is new; others get their turn after every few batches."""
        for place, batch in enumerate(archive.batches(frames, BATCH), 1):
            self._fold(batch)
            if place % TURN == 0:
                await self._tell()
                await asyncio.sleep(0)

    def _fold(self, entries: Sequence[Entry]) -> None:
        """Fold what is new, but for what another process folds."""
        behind = self._judged if self._helped else min(self._judged, self._drawn)
        batch, bad = readable(entries, behind)
        last = max([behind, *batch.positions[-1:], *bad[-1:]])
        self._bad.update(bad)
        self.data.unreadable = len(self._bad)
        self.data.judge(batch.within(self._judged, last))
        self._judged = max(self._judged, last)
        if not self._helped:
            self.data.drawing.extend(batch.within(self._drawn, last))
            self._drawn = max(self._drawn, last)

    async def _receive(self) -> set[int]:
        """What another process folds of the archive, until it is done; what it leaves out is folded here later.

        Answers the places of the events that it could not read.
        """
        unread: set[int] = set()
        try:
            async with ahead(self.run.events) as parts:
                async for part in parts:
                    self.data.drawing.merge(part)
                    self._drawn = part.position
                    unread.update(part.bad)
                    await self._tell()
        except (Ended, TimeoutError) as error:
            _log.warning("reading %s alone behind event %d: %s", self.run.events, self._drawn, error)
        return unread

    async def _rest(self) -> None:
        """Wait until somebody goes on with an archived run."""
        await self._tell("archived")
        seen = self._signature()
        await self._look_back()
        await self._tell()
        while self._signature() == seen:  # noqa: ASYNC110, the recorder is another process and can't set an event
            await asyncio.sleep(IDLE_S)

    def _signature(self) -> list[tuple[str, int]]:
        return sorted((path.name, path.stat().st_size) for path in self.run.events.glob("*.zst"))

    async def _live(self) -> None:
        """Follow the store until the run has finished or nobody writes its archive any more."""
        from pipeline.bus import Bus, BusError

        while self.data.model.finished is None:
            try:
                url, name = load.url_of(self.run), self.run.info().run
                self._bus = await Bus.connect(url, name, actor="ui", connect_s=CONNECT_S, outage_s=CONNECT_S)
                try:
                    await self._stream()
                finally:
                    bus, self._bus = self._bus, None
                    await bus.close()
            except BusError as error:
                self._evidence = Evidence(store=StoreFacts(error=str(error)))
                await self._archive()
                await self._tell("lost")
                if not archive.has_writer(self.run.events):
                    self._evidence = Evidence()
                    return
                await asyncio.sleep(IDLE_S)

    async def _stream(self) -> None:
        cursors = dict.fromkeys(STREAMS, f"{self._judged}-0" if self._judged else START)
        looked = 0.0
        while self.data.model.finished is None:
            if self._clock() - looked >= LOOK_S:
                looked = self._clock()
                await self._look()
            found = settled(await self._bus.read_after(cursors, count=PAGE, block_ms=BLOCK_MS), PAGE)
            cursors = advance(cursors, found)
            if found and number(found[0].entry) > self._judged + 1:
                await self._archive()
            await self._take((found,))
            await self._tell("live")

    async def _look(self) -> None:
        """What is known beside the events: of the store, the processes and what the actors have in hand."""
        store = await load.store_facts(self._bus)
        states = await load.states(self._bus, self.config)
        self._evidence = Evidence(states=states, store=store, alive=load.alive(self.data.follower.pids))

    # --- what is known ---

    @property
    def live(self) -> bool:
        return self.state in ("live", "lost")

    @property
    def evidence(self) -> Evidence:
        return self._evidence

    def now(self) -> float:
        """The moment that is judged: the present of a live run, else the last that its archive tells of."""
        if self.live or (self.state == "loading" and not self.data.model.events):
            return self._clock()
        if self.state in ("loading", "stopped"):
            return self.data.model.last_at
        return load.end_of(self.run, self.data.model)

    async def why(self) -> dict[str, Any]:
        """The diagnosis of this moment."""
        key = (self.version, round(self._clock())) if self.live else self.version
        if self._told[0] != key:
            self._told = (key, told(await self._judge()))
        return self._told[1]

    async def _judge(self) -> Shown:
        now = self.now()
        shown = self.data.diagnose(now, self._evidence, live=self.live)
        if not shown.diagnosis.stuck or self.live or shown.stopped or self.state in ("loading", "stopped"):
            return shown
        await self._look_back()
        return self.data.diagnose(now, self._evidence, live=False)

    async def _look_back(self) -> None:
        """What the actors of an archived run were at, by their journals. Long ones take seconds once."""
        async with self._looking:
            place = self._judged
            if self._looked == place:
                return
            seen = await asyncio.to_thread(load.look_into, self.run, self.config)
            self._evidence = msgspec.structs.replace(self._evidence, states=seen.states, heard=seen.heard)
            self._looked = place

    async def payload(self, key: str) -> bytes | None:
        """A payload that is still in the store of a live run."""
        from pipeline.bus import BusError

        if self._bus is None:
            return None
        try:
            return (await self._bus.payloads([key]))[0]
        except BusError:
            return None
