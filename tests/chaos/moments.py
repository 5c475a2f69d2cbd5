"""Faults at chosen moments of real refits: what strikes follows the run's own log, and acts at an event.

    python -m tests.chaos.moments                      all of them in one run, one after another
    python -m tests.chaos.moments absent_rank ...      only these

After each the fleet must be whole again and two further steps trained; in the end the run is stopped in order, and
`pipeline verify` must find nothing. A fault that came too late for its moment, as the log shows, is caused once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from actors.recorder.ordering import START, advance, settled
from contracts.envelope import STREAMS, Envelope, decode
from contracts.events import (
    ActorBooted,
    EngineDrained,
    EngineLoaded,
    EngineQuarantined,
    Event,
    GateClosed,
    Member,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    StepFinished,
    TransferFinished,
    TransferOffered,
    TransferStarted,
)
from pipeline.bus import Bus
from pipeline.eventlog import PAGE, archived
from pipeline.rundir import RunDir
from tests.chaos.processes import children, embedded_server, send
from tests.e2e.conftest import TINY, Run

T = TypeVar("T", bound=Event)

SETTINGS = (
    "steps=100000",
    "checkpoint.every=10",
    "refit.deadline_s=12",
    "refit.drain_deadline_s=8",
    "fleet.probe_s=1",
    "fleet.probe_deadline_s=2",
)
"""Of a run in which a deadline that has to pass does not take a minute."""
TRIES = 6
"""Times a fault may miss its moment."""
PATIENCE_S = 240.0
"""Longest wait for an event."""
BLOCK_MS = 500
VICTIM = "engine-1"


class Tour:
    """One live run: its log as far as it was read, and the processes that it names. Use `Tour.of`."""

    def __init__(self, run: Run, bus: Bus) -> None:
        self.run = run
        self._bus = bus
        self._cursors = dict.fromkeys(STREAMS, START)
        self._at = 0
        self._killed: dict[str, int] = {}
        self.log: list[Envelope[Event]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, run: Run) -> AsyncIterator[Tour]:
        info = RunDir.open(run.path).info()
        assert info.redis_url is not None
        bus = await Bus.connect(info.redis_url, info.run, actor="moments")
        tour = cls(run, bus)
        for entry, envelope in archived(RunDir.open(run.path)):
            tour.log.append(envelope)
            tour._cursors[entry.stream] = entry.entry
        try:
            yield tour
        finally:
            await bus.close()

    # --- the log ---

    async def _read(self, block_ms: int | None) -> int:
        found = settled(await self._bus.read_after(self._cursors, count=PAGE, block_ms=block_ms), PAGE)
        self._cursors = advance(self._cursors, found)
        self.log += [decode(entry.stream, entry.data) for entry in found]
        return len(found)

    async def present(self) -> None:
        """Skip to the end of the log."""
        while await self._read(None):
            pass
        self._at = len(self.log)

    async def next(self, wanted: Callable[[Envelope[Event]], bool], what: str) -> Envelope[Event]:
        """The first event behind the one answered before that is wanted."""
        end = time.monotonic() + PATIENCE_S
        while True:
            while self._at < len(self.log):
                self._at += 1
                if wanted(self.log[self._at - 1]):
                    return self.log[self._at - 1]
            assert self.run.process.poll() is None, self.run.tail()
            assert time.monotonic() < end, f"no {what}:\n{self.run.tail()}"
            await self._read(BLOCK_MS)

    async def event(self, kind: type[T], **fields: Any) -> T:
        """The next event of a kind with these fields."""
        found: Any = await self.next(lambda e: _is(e, kind, fields), f"{kind.__name__} {fields}")
        return found.body

    def saw(self, kind: type[Event], **fields: Any) -> bool:
        return any(_is(envelope, kind, fields) for envelope in self.log)

    # --- processes ---

    def _booted(self, actor: str) -> ActorBooted:
        return [e.body for e in self.log if _is(e, ActorBooted, {"actor": actor})][-1]  # type: ignore[return-value]

    def boot(self, actor: str) -> int:
        """The newest, as far as the log was read."""
        return self._booted(actor).boot

    def kill(self, actor: str) -> None:
        booted = self._booted(actor)
        self._killed[actor] = booted.boot
        send(booted.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def stopped(self, actor: str) -> Iterator[None]:
        """The process of an actor takes no step within."""
        with _still([self._booted(actor).pid]):
            yield

    @contextlib.contextmanager
    def silent(self, engine: str) -> Iterator[None]:
        """The server of an engine takes no step within; its sidecar does."""
        with _still(_descendants(self._booted(engine).pid)):
            yield

    # --- recovery ---

    async def rebooted(self) -> None:
        """Whoever was killed has a successor."""
        for actor, boot in self._killed.items():
            while self.boot(actor) <= boot:
                await self.event(ActorBooted, actor=actor)
        self._killed.clear()

    async def whole(self) -> None:
        """The newest boots of both engines are committed, and two further steps trained."""
        await self.rebooted()

        def everybody(envelope: Envelope[Event]) -> bool:
            fleet = {Member(name, self.boot(name)) for name in ("engine-0", "engine-1")}
            return isinstance(envelope.body, RefitCommitted) and set(envelope.body.engines) == fleet

        await self.next(everybody, "commit of the whole fleet")
        for _ in range(2):
            await self.event(StepFinished)


def _is(envelope: Envelope[Event], kind: type[Event], fields: dict[str, Any]) -> bool:
    body = envelope.body
    return isinstance(body, kind) and all(getattr(body, name) == value for name, value in fields.items())


@contextlib.contextmanager
def _still(pids: Sequence[int]) -> Iterator[None]:
    for pid in pids:
        send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            send(pid, signal.SIGCONT)


def _descendants(pid: int) -> list[int]:
    found = children(pid)
    return [*found, *(below for child in found for below in _descendants(child))]


# --- the moments: each answers whether its fault came in time --------------------------------------------------------


async def trainer_mid_broadcast(tour: Tour) -> bool:
    started = await tour.event(TransferStarted)
    tour.kill("trainer")
    await tour.rebooted()
    return not tour.saw(TransferFinished, epoch=started.epoch)


async def engine_draining(tour: Tour) -> bool:
    requested = await tour.event(RefitRequested)
    tour.kill(VICTIM)
    await tour.rebooted()
    return not tour.saw(EngineDrained, epoch=requested.epoch, engine=VICTIM)


async def engine_loading(tour: Tour) -> bool:
    """Its server is held still from the drain on, so that it can't have loaded."""
    with contextlib.ExitStack() as still:
        async with _drained(tour) as requested:
            still.enter_context(tour.silent(VICTIM))
        await tour.event(TransferStarted, epoch=requested.epoch)
        tour.kill(VICTIM)
    return not tour.saw(EngineLoaded, epoch=requested.epoch, engine=VICTIM)


async def engine_loaded(tour: Tour) -> bool:
    """The coordinator is held still until the engine is dead, so that it can't have committed."""
    started = await tour.event(TransferStarted)
    with tour.stopped("refit"):
        await tour.event(EngineLoaded, epoch=started.epoch, engine=VICTIM)
        tour.kill(VICTIM)
        await tour.present()
        return not tour.saw(RefitCommitted, epoch=started.epoch)


async def engine_stopped(tour: Tour) -> bool:
    """Its sidecar is held still from the beginning of a transfer until the epoch is over without it."""
    started = await tour.event(TransferStarted)
    with tour.stopped(VICTIM):
        await tour.next(lambda e: _ends(e, started.epoch), f"end of epoch {started.epoch} for {VICTIM}")
    return not tour.saw(EngineLoaded, epoch=started.epoch, engine=VICTIM)


async def coordinator_killed(tour: Tour) -> bool:
    closed = await tour.event(GateClosed)
    tour.kill("refit")
    await tour.rebooted()
    first = tour.boot("refit")
    over = [e for e in tour.log if _is(e, RefitCommitted, {"epoch": closed.epoch}) and e.boot < first]
    return not over


async def two_coordinators(tour: Tour) -> bool:
    """A second one takes over in a barrier while the first is still there; the driver's own then takes over again."""
    info = RunDir.open(tour.run.path).info()
    code = (
        "import sys\nfrom pathlib import Path\nfrom pipeline.runtime import run_actor\nimport actors.refit.actor\n"
        "print('ready', flush=True)\nsys.stdin.readline()\n"
        f"print(run_actor('refit', {info.redis_url!r}, {info.run!r}, Path({str(tour.run.path)!r})))"
    )
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=pipe, stdout=pipe, stderr=nowhere)
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert await other.stdout.readline() == b"ready\n"
        await tour.present()
        requested = await tour.event(RefitRequested)
        first = tour.boot("refit")
        with tour.stopped("refit"):
            other.stdin.write(b"go\n")
            await tour.event(ActorBooted, actor="refit", boot=first + 1)
            await tour.next(
                lambda e: (e.actor, e.boot) == ("refit", first + 1) and getattr(e.body, "epoch", 0) >= requested.epoch,
                "an event of the second",
            )
        await tour.event(ActorBooted, actor="refit", boot=first + 2)
        async with asyncio.timeout(PATIENCE_S):
            answer, _ = await other.communicate()
        assert answer == b"fenced\n", answer
        return not any(_is(e, RefitCommitted, {"epoch": requested.epoch}) and e.boot == first for e in tour.log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            other.kill()
        await other.wait()


async def store_restarted(tour: Tour) -> bool:
    started = await tour.event(TransferStarted)
    send(embedded_server(tour.run), signal.SIGKILL)
    at = time.time_ns()
    await tour.next(lambda e: _ends(e, started.epoch), f"end of epoch {started.epoch}")
    return tour.log[tour._at - 1].wall_ns > at


async def absent_rank(tour: Tour) -> bool:
    """A new member makes a new group; its server never comes to the meeting."""
    tour.kill(VICTIM)
    await tour.rebooted()
    fresh = Member(VICTIM, tour.boot(VICTIM))
    with contextlib.ExitStack() as still:
        async with _drained(tour, fresh) as requested:
            still.enter_context(tour.silent(VICTIM))
        started = await tour.event(TransferStarted, epoch=requested.epoch)
        assert started.fresh
        await tour.next(lambda e: _ends(e, started.epoch), f"end of epoch {started.epoch} for {VICTIM}")
    return not tour.saw(EngineLoaded, epoch=started.epoch, engine=VICTIM)


def _ends(envelope: Envelope[Event], epoch: int) -> bool:
    return any(_is(envelope, kind, {"epoch": epoch}) for kind in (RefitCommitted, RefitFailed, EngineQuarantined))


@contextlib.asynccontextmanager
async def _drained(tour: Tour, member: Member | None = None) -> AsyncIterator[RefitRequested]:
    """An epoch (of `member`) that is ready for its transfer; the coordinator, held still within, can't begin it."""
    asked: Any = await tour.next(
        lambda e: isinstance(e.body, RefitRequested) and (member is None or member in e.body.engines), "refit"
    )
    epoch = asked.body.epoch
    with tour.stopped("refit"):
        wanted = {(EngineDrained, member.actor) for member in asked.body.engines} | {(TransferOffered, "trainer")}
        while wanted:
            found = await tour.next(lambda e: getattr(e.body, "epoch", None) == epoch, f"answers in epoch {epoch}")
            wanted.discard((type(found.body), found.actor))
        yield asked.body


Moment = Callable[[Tour], Awaitable[bool]]
MOMENTS: tuple[Moment, ...] = (
    trainer_mid_broadcast,
    engine_draining,
    engine_loading,
    engine_loaded,
    engine_stopped,
    coordinator_killed,
    two_coordinators,
    store_restarted,
    absent_rank,
)


async def suffer(tour: Tour, moment: Moment) -> None:
    """Cause one fault, again if it came too late, and wait until the run has got over it."""
    for _ in range(TRIES):
        await tour.present()
        in_time = await moment(tour)
        await tour.whole()
        if in_time:
            return
    raise AssertionError(f"{TRIES} times too late for {moment.__name__}")  # type: ignore[attr-defined]


def strike(run: Run, moment: Moment) -> None:
    """`suffer` in a run that trains."""

    async def once() -> None:
        async with Tour.of(run) as tour:
            await suffer(tour, moment)

    asyncio.run(once())


async def _tour(run: Run, moments: Sequence[Moment]) -> None:
    async with Tour.of(run) as tour:
        for moment in moments:
            begun = time.monotonic()
            await suffer(tour, moment)
            print(f"{moment.__name__}: got over it in {time.monotonic() - begun:.0f} s", flush=True)  # type: ignore[attr-defined]
        await tour.present()


def main(names: Sequence[str]) -> int:
    known = {moment.__name__: moment for moment in MOMENTS}  # type: ignore[attr-defined]
    if unknown := [name for name in names if name not in known]:
        print(f"no moment {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = [known[name] for name in names] or list(MOMENTS)
    folder = Path(tempfile.mkdtemp(prefix="moments-"))
    run = Run(folder / "run", str(TINY), f"run_dir={folder / 'run'}", *SETTINGS)
    begun = time.monotonic()
    try:
        run.wait_for(lambda log: any(event["kind"] == "step.finished" for event in log))
        print(f"training after {time.monotonic() - begun:.0f} s", flush=True)
        asyncio.run(_tour(run, chosen))
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130, run.tail()
        print(f"moments={len(chosen)} in {time.monotonic() - begun:.0f} s, {run.verify()}", flush=True)
    except AssertionError as error:
        print(f"{error}\n  kept: {folder}", file=sys.stderr)
        return 1
    finally:
        run.kill()
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
