"""The driver's loop: follows the log, shows it, and ends the run in order."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from actors import registry
from actors.recorder.metrics import Row
from actors.recorder.ordering import START, advance, number, settled
from config.schema import RunConfig
from contracts.core import Clock, Entry
from contracts.envelope import STREAM_OF, STREAMS, Envelope, decode, encode
from contracts.events import (
    ActorBooted,
    ActorFailed,
    EngineHealth,
    Event,
    FleetScaled,
    RunFinished,
    RunStarted,
    RunStopping,
)
from pipeline.bus import Bus, BusError, BusUnavailable
from pipeline.errors import Exit
from pipeline.host import Left
from pipeline.inject import Process
from pipeline.verdict import Verdict, judge
from pipeline.view import View

PAGE = 512
BLOCK_MS = 500
LINGER_S = 0.1
"""Pause between readings, so that a reading takes many events at once."""
LOOK_S = 0.25
"""Time between two looks at whether the run has ended."""
RECORDER_S = 20.0
"""Least time that the recorder gets to finish, whatever the others used up."""
FRESH_S = 5.0
"""Age up to which an event that was read can't have been trimmed."""
WRITES_EVERY_S = 5.0
"""Time between two looks at whether the store takes writes: actors that can't write can't say so either."""
ABSENT_S = 3.0
"""Time that an actor without a process gets to come back and leave in order: what it held is in the store."""
RECORDER = "recorder"


class Reporter(Protocol):
    """What shows the run to a person."""

    def step(self, row: Row, view: View, now: float) -> None: ...

    def update(self, view: View, now: float) -> None: ...

    def note(self, message: str, **fields: object) -> None: ...

    def error(self, message: str, **fields: object) -> None: ...


class Processes(Protocol):
    """The actors' processes, as the driver sees them: `Cluster` or `Outside`."""

    def launch(self, names: Sequence[str], url: str, run: str) -> None: ...

    def left(self) -> dict[str, Left]: ...

    def restart(self, name: str, process: Process | None) -> str: ...

    async def wait(self, names: Sequence[str], timeout: float) -> list[str]: ...


class Driver:
    """One session of a run, from `run.started` to `run.finished`.

    Nothing is judged before the log shows this session's start: what lies before it belongs to an earlier one.
    """

    def __init__(
        self, config: RunConfig, run: str, bus: Bus, processes: Processes, reporter: Reporter, clock: Clock, view: View
    ) -> None:
        self._config = config
        self._run = run
        self._bus = bus
        self._processes = processes
        self._reporter = reporter
        self._clock = clock
        self.view = view
        self._processes_of: dict[str, tuple[int, Process]] = {}
        self._url = ""
        self._started = clock.now()
        self._posted = 0
        self._start = ""
        self._begun = False
        self._superseded = False
        self._last: tuple[Entry, float] | None = None
        self._asked_at = self._started
        self._unwritable_since: float | None = None
        self._interrupted = asyncio.Event()
        self._names = registry.names(config)
        self.late: list[str] = []

    def interrupt(self) -> None:
        """Stop in order, as Ctrl-C does."""
        self._interrupted.set()

    async def run(self, url: str, digest: str, cursors: dict[str, str], *, resumed: bool) -> Verdict:
        """Start the actors and stay until they have left. `cursors`: how far `view` has read the log already."""
        self.view.begin()
        self._url = url
        self._start = await self._post(RunStarted(config_digest=digest, resumed=resumed))
        self._processes.launch(self._names, url, self._run)
        following = asyncio.create_task(self._follow(cursors))
        try:
            verdict = await self._watch(following)
            await self._stop(verdict)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return verdict

    # --- watching ---

    async def _follow(self, cursors: dict[str, str]) -> None:
        cursors = {stream: cursors.get(stream, START) for stream in STREAMS}
        while True:
            found = settled(await self._bus.read_after(cursors, count=PAGE, block_ms=BLOCK_MS), PAGE)
            cursors = advance(cursors, found)
            if found:
                self._last = found[-1], self._clock.now()
            for entry in found:
                await self._take(decode(entry.stream, entry.data))
            await asyncio.sleep(LINGER_S)

    async def _take(self, envelope: Envelope[Event]) -> None:
        row = self.view.apply(envelope)
        self._begun = self._begun or envelope.id == self._start
        if row is not None:
            self._reporter.step(row, self.view, self._clock.now())
        if not self._begun:
            return
        match envelope.body:
            case ActorBooted() as event:
                process = Process(event.pid, event.host, envelope.wall_ns / 1e9)
                self._processes_of[event.actor] = (event.boot, process)
                await self._booted(event)
            case ActorFailed(fatal=False) as event:
                self._reporter.error(f"{event.actor}: {event.message}", error=event.error)
            case EngineHealth(ordered=True) as event:
                self._restart(event)
            case FleetScaled(engines=engines):
                self._scale(engines)
            case RunStarted():
                self._superseded = envelope.id != self._start

    def _restart(self, event: EngineHealth) -> None:
        """End the boot that the coordinator gave up, unless a later one runs already."""
        boot, process = self._processes_of.get(event.engine, (event.boot, None))
        if boot <= event.boot:
            outcome = self._processes.restart(event.engine, process)
            self._reporter.note("engine restart", engine=event.engine, boot=boot, outcome=outcome, why=event.reason)

    def _scale(self, engines: int) -> None:
        """Start the engines that are new; those that are too many leave by themselves."""
        before = set(self._names)
        engine = msgspec.structs.replace(self._config.engine, count=engines)
        self._config = msgspec.structs.replace(self._config, engine=engine)
        self._names = registry.names(self._config)
        fresh = [name for name in self._names if name not in before]
        self._reporter.note("scaled", engines=engines, started=fresh)
        if fresh and self.view.stopping is None:
            self._processes.launch(fresh, self._url, self._run)

    async def _booted(self, event: ActorBooted) -> None:
        if len(self.view.boots[event.actor]) > 1:
            self._reporter.note("actor restarted", actor=event.actor, boot=event.boot, pid=event.pid)
        if self.view.stopping is not None and event.actor != RECORDER:
            await self._post(RunStopping(reason=self.view.stopping))

    async def _watch(self, following: asyncio.Task[None]) -> Verdict:
        while not following.done():
            now = self._clock.now()
            self._reporter.update(self.view, now)
            if self._interrupted.is_set():
                return Verdict(Exit.INTERRUPTED, "interrupted", "interrupted; the run can be resumed")
            left = self._left()
            verdict = judge(self._config, self.view, left, now, self._started) if self._begun else None
            if verdict is None and not following.done():
                verdict = await self._gone_back() or await self._unwritable(now)
            if verdict is not None:
                return verdict
            await asyncio.wait([following], timeout=LOOK_S)
        error = following.exception()
        assert error is not None
        raise error

    def _left(self) -> dict[str, Left]:
        """Who left for good. Another start of one actor alone (not of the run) is fenced off by our own next boot."""
        left = {name: how for name, how in self._processes.left().items() if name in self._names}
        fenced = [name for name, how in left.items() if how.how == "fenced" and not self._superseded]
        if fenced:
            self._reporter.note("started elsewhere too, takes over again", actors=fenced)
            self._processes.launch(fenced, self._url, self._run)
        return {name: how for name, how in left.items() if name not in fenced}

    async def _gone_back(self) -> Verdict | None:
        """Whether the store lost what was read from it: another file was loaded, or it synced too late."""
        if self._last is None:
            return None
        last, seen_at = self._last
        before = f"{number(last.entry) - 1}-0"
        found = await self._bus.read_after({last.stream: before}, count=1, block_ms=0)
        same = bool(found) and found[0].entry == last.entry
        lost = found[0].data != last.data if same else self._clock.now() - seen_at < FRESH_S
        if not lost:
            return None
        message = (
            f"the store went back: event {last.entry} of {last.stream} was read from it and is gone. "
            "Resume the run: it is rebuilt from its archive"
        )
        return Verdict(Exit.BROKER, "store went back", message)

    async def _unwritable(self, now: float) -> Verdict | None:
        """Whether the store has refused writes for longer than actors wait out an outage."""
        if now - self._asked_at < WRITES_EVERY_S:
            return None
        self._asked_at = now
        try:
            await self._bus.check_writable()
        except BusUnavailable:
            raise
        except BusError as error:
            if self._unwritable_since is None:
                self._unwritable_since = now
                self._reporter.error(f"the store takes no writes: {error}")
            limit = self._config.broker.outage_s
            if now - self._unwritable_since < limit:
                return None
            message = f"the store has taken no writes for {limit:g} s (broker.outage_s): {error}. Then resume the run"
            return Verdict(Exit.BROKER, "store takes no writes", message)
        if self._unwritable_since is not None:
            self._reporter.note("the store takes writes again", seconds=round(now - self._unwritable_since, 1))
            self._unwritable_since = None
        return None

    # --- stopping ---

    async def _stop(self, verdict: Verdict) -> None:
        """Actors finish what is in hand; the recorder leaves last, with the log complete."""
        self._reporter.note("stopping", reason=verdict.reason)
        if self._unwritable_since is not None:  # nobody could be told
            return
        deadline = self._clock.now() + self._config.launch.stop_deadline_s
        await self._post(RunStopping(reason=verdict.reason))
        others = [name for name in self._names if name != RECORDER]
        self.late = await self._wait(others, deadline, absent=self._clock.now() + ABSENT_S)
        if self.late and self._clock.now() < deadline:
            self._reporter.note("not up, and not waited for", actors=self.late)
        elif self.late:
            self._reporter.note("not left in time", actors=self.late, launch_stop_deadline_s=self._stop_s)
        await self._post(RunFinished(reason=verdict.reason))
        self.late += await self._wait([RECORDER], max(deadline, self._clock.now() + RECORDER_S))

    @property
    def _stop_s(self) -> float:
        return self._config.launch.stop_deadline_s

    async def _wait(self, names: list[str], deadline: float, absent: float | None = None) -> list[str]:
        """Those that have not left at `deadline`, or at `absent` if none of them has a process any more."""
        while True:
            now = self._clock.now()
            late = await self._processes.wait(names, min(LOOK_S, deadline - now))
            self._reporter.update(self.view, self._clock.now())
            if not late or now >= deadline:
                return late
            if absent is not None and now >= absent and not any(map(self._lives, late)):
                return late

    def _lives(self, name: str) -> bool:
        """Whether an actor has a process, as far as this host can tell."""
        if name not in self._processes_of:
            return False
        process = self._processes_of[name][1]
        return not process.here or process.lives

    async def _post(self, event: Event) -> str:
        """Append a driver's event; answers its id."""
        self._posted += 1
        stream = STREAM_OF[type(event)]
        envelope = Envelope(
            id=f"post:driver.{os.getpid()}.{self._posted}",
            run=self._run,
            stream=stream,
            actor="driver",
            boot=0,
            epoch=0,
            wall_ns=time.time_ns(),
            mono_ns=time.monotonic_ns(),
            body=event,
        )
        await self._bus.post(stream, encode(envelope))
        return envelope.id
