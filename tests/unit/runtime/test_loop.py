"""The loop of an actor, on a real server: order of inputs, leases, entries that are lost, and cursors that protect."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

import msgspec
import pytest
import structlog

from config.schema import BrokerConfig, RunConfig
from contracts.core import Ack, Booted, Delivered, Fatal, LeaseLost, Ref
from contracts.envelope import STREAM_OF, Envelope, decode, encode
from contracts.events import DataLost, RunStarted, RunStopping, TaskIssued
from pipeline import broker
from pipeline.bus import Bus, Fenced, Limits
from pipeline.runtime import context, loop, machine
from pipeline.runtime.clock import WallClock
from pipeline.runtime.loop import Runtime
from pipeline.runtime.machine import GROUP

ACTOR = "collector-0"
_runs = itertools.count()


class Story(msgspec.Struct, frozen=True):
    """What the core was fed, in order."""

    lines: tuple[str, ...] = ()
    stopping: bool = False


class Diary:
    """A core that writes down its inputs; it acks tasks whose producer is `acked`, and ignores `run.started`."""

    state_type = Story
    local_type = None
    work = ("tasks",)
    watch = ("control",)

    def initial(self) -> Story:
        return Story()

    def step(self, state: Story, input: Any, now: float) -> tuple[Story, tuple[Any, ...]]:
        commands: tuple[Any, ...] = ()
        match input:
            case Booted():
                line = f"boot {input.boot}"
            case LeaseLost():
                line = "lost " + " ".join(ref.entry for ref in input.refs)
            case Delivered(envelope=Envelope(body=TaskIssued() as task)):
                line = f"task {task.task} {input.deliveries}"
                commands = (Ack(input.ref),) if task.producer == "acked" else ()
            case Delivered(envelope=Envelope(body=RunStopping() as stopping)):
                state = msgspec.structs.replace(state, stopping=stopping.reason == "end")
                line = stopping.reason
            case _:
                return state, ()
        return msgspec.structs.replace(state, lines=(*state.lines, line)), commands

    def wake(self, state: Story) -> float | None:
        return None

    def intake(self, state: Story) -> dict[str, int]:
        return {"tasks": 8}

    def done(self, state: Story) -> bool:
        return state.stopping


class Said(msgspec.Struct, frozen=True, tag="said"):
    """An input of the actor's own."""

    line: str


class Paced(Diary):
    """Local inputs are committed a minute apart at least."""

    local_type = Said
    pace_s = 60.0

    def step(self, state: Story, input: Any, now: float) -> tuple[Story, tuple[Any, ...]]:
        if isinstance(input, Said):
            return msgspec.structs.replace(state, lines=(*state.lines, input.line)), ()
        return super().step(state, input, now)


class Keeper(Diary):
    """Keeps what it takes, over its boots."""

    def holds(self, state: Story, ref: Ref) -> bool:
        return any(line.startswith("task kept") for line in state.lines)


class Shell:
    """Does nothing, but looks at the store before the actor announces its boot."""

    def __init__(self, bus: Bus, core: Diary) -> None:
        self.core: Any = core
        self._bus = bus
        self.cursors: dict[str, str] = {}
        self.booted: list[Any] = []

    async def start(self, context: Any) -> None:
        self.cursors = await self._bus.cursors()
        self.booted = await self._bus.read_after({"fleet": "0-0"}, block_ms=None, count=9)

    async def perform(self, command: Any) -> None:
        raise TypeError(command)

    def payload(self, handle: str) -> bytes:
        raise KeyError(handle)

    async def close(self) -> None:
        pass


class Stage:
    """A run with one actor, and a hand that puts things into its streams."""

    def __init__(self, url: str, run: str) -> None:
        self.url, self.run = url, run
        self._count = itertools.count()
        self._buses: list[Bus] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def bus(self, actor: str) -> Bus:
        self._buses.append(await Bus.connect(self.url, self.run, actor=actor))
        return self._buses[-1]

    async def open(self) -> None:
        self.hand = await self.bus("hand")
        await self.hand.ensure_group("tasks", GROUP)

    async def actor(self, name: str = ACTOR, core: Diary | None = None) -> Runtime:
        """Start an actor; it runs until the test ends."""
        bus = await self.bus(name)
        shell = Shell(bus, core or Diary())
        runtime = Runtime(shell, bus, self.run, name, RunConfig(), "", WallClock(), structlog.get_logger())
        self._tasks.append(asyncio.create_task(runtime.run()))
        return runtime

    def ended(self) -> asyncio.Task[None]:
        return self._tasks[0]

    async def put(self, event: Any) -> str:
        stream = STREAM_OF[type(event)]
        envelope = Envelope(
            id=f"hand:{next(self._count)}.0",
            run=self.run,
            stream=stream,
            actor="hand",
            boot=1,
            epoch=0,
            wall_ns=0,
            mono_ns=0,
            body=event,
        )
        return await self.hand.post(stream, encode(envelope))

    async def task(self, name: str, *, acked: bool = False) -> str:
        producer = "acked" if acked else "kept"
        return await self.put(TaskIssued(task=name, index=0, samples=2, payload=b"", producer=producer, seed=0))

    async def raw(self, *words: Any) -> Any:
        keys = {f"{{{stream}}}": self.hand.keys.stream(stream) for stream in ("tasks", "control")}
        return await self.hand._link.command(*(keys.get(word, word) for word in words))

    async def bring_to_a_stop(self, runtime: Runtime) -> None:
        """End an actor once it has stored its cursors."""

        async def stored() -> bool:
            return await self.hand.cursors(ACTOR) == runtime.machine.cursors

        await until(stored)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def left_behind(self, name: str, idle_ms: int = 60_000) -> str:
        """A task in the hands of a reader that has gone silent."""
        entry = await self.task(name)
        await self.raw("XREADGROUP", "GROUP", GROUP, "silent", "STREAMS", "{tasks}", ">")
        await self.raw("XCLAIM", "{tasks}", GROUP, "silent", 0, entry, "IDLE", idle_ms, "JUSTID")
        return entry

    async def lost(self) -> list[DataLost]:
        found = await self.hand.read_after({"control": "0-0"}, block_ms=None, count=99)
        return [body for e in found if isinstance(body := decode("control", e.data).body, DataLost)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for bus in self._buses:
            await bus.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with broker.choose({}, tmp_path_factory.mktemp("store"), BrokerConfig()) as server:
        yield server.url


@pytest.fixture
async def stage(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(loop, "LEASE_S", 0.2)
    stage = Stage(url, f"loop{next(_runs)}")
    await stage.open()
    yield stage
    await stage.close()


async def until(condition: Callable[[], Awaitable[Any] | Any]) -> Any:
    """Wait for `condition` to hold; answers what it answered."""
    async with asyncio.timeout(20):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.01)


def lines(runtime: Runtime) -> tuple[str, ...]:
    return runtime.machine.state.lines if hasattr(runtime, "machine") else ()


async def test_events_stored_before_a_work_entry_are_fed_before_it(stage: Stage) -> None:
    early = []
    for number in range(3):
        await stage.put(RunStopping(reason=f"early {number}"))
        await stage.task(f"early-{number}", acked=True)
        early += [f"early {number}"]
    runtime = await stage.actor()
    await until(lambda: "task early-2 1" in lines(runtime))
    for number in range(40):
        await stage.put(RunStopping(reason=f"news {number}"))
        await stage.task(f"{number}", acked=True)
    await until(lambda: "task 39 1" in lines(runtime))
    told = lines(runtime)
    assert told[0] == "boot 1"
    for number in range(3):
        assert told.index(f"early {number}") < told.index(f"task early-{number} 1")
    for number in range(40):
        assert told.index(f"news {number}") < told.index(f"task {number} 1")


async def test_own_inputs_wait_for_others_but_no_event_waits_for_them(stage: Stage) -> None:
    runtime = await stage.actor(core=Paced())
    await until(lambda: lines(runtime))
    commits = []
    commit = runtime.bus.commit

    async def counted(data: Any) -> None:
        commits.append(len(lines(runtime)))
        await commit(data)

    runtime.bus.commit = counted  # pyright: ignore[reportAttributeAccessIssue]
    for line in ("a", "b", "c"):
        runtime.push([Said(line)])
        await asyncio.sleep(0.01)
    assert lines(runtime) == ("boot 1",)
    await stage.put(RunStopping(reason="news"))
    await until(lambda: "news" in lines(runtime))
    assert lines(runtime) == ("boot 1", "a", "b", "c", "news")
    assert commits == [1]
    runtime.push([Said(str(number)) for number in range(loop.BATCH)])
    await until(lambda: len(lines(runtime)) == 5 + loop.BATCH)


async def test_cursors_protect_what_is_unread_before_the_boot_is_announced(stage: Stage) -> None:
    await stage.put(RunStarted(config_digest=""))
    runtime = await stage.actor()
    await until(lambda: lines(runtime))
    shell: Any = runtime.shell
    assert (shell.cursors, shell.booted) == ({"control": "0-0"}, [])


async def test_cursors_move_on_over_what_is_ignored(stage: Stage) -> None:
    entry = await stage.put(RunStarted(config_digest=""))
    runtime = await stage.actor()
    await until(lambda: lines(runtime))

    async def stored() -> bool:
        return await stage.hand.cursors(ACTOR) == {"control": entry}

    await until(stored)


async def test_a_lease_is_renewed_while_work_is_in_hand(stage: Stage) -> None:
    entry = await stage.task("long")
    runtime = await stage.actor()
    await until(lambda: "task long 1" in lines(runtime))
    await stage.raw("XCLAIM", "{tasks}", GROUP, ACTOR, 0, entry, "IDLE", 60_000, "JUSTID")

    async def renewed() -> bool:
        ((_, owner, idle, _),) = await stage.raw("XPENDING", "{tasks}", GROUP, entry, entry, 1)
        return owner.decode() == ACTOR and idle < 30_000

    await until(renewed)


async def test_a_lease_that_was_taken_away_is_told_to_the_core(stage: Stage) -> None:
    entry = await stage.task("long")
    runtime = await stage.actor()
    await until(lambda: "task long 1" in lines(runtime))
    await stage.raw("XCLAIM", "{tasks}", GROUP, "other", 0, entry, "JUSTID")
    await until(lambda: f"lost {entry}" in lines(runtime))


async def test_work_that_a_silent_reader_left_is_taken_over(stage: Stage) -> None:
    await stage.left_behind("orphan")
    runtime = await stage.actor()
    await until(lambda: "task orphan 2" in lines(runtime))


async def test_an_entry_deleted_while_owed_is_announced(stage: Stage) -> None:
    entry = await stage.left_behind("orphan")
    await stage.raw("XDEL", "{tasks}", entry)
    await stage.actor()
    (event,) = await until(stage.lost)
    assert (event.stream, event.entries) == ("tasks", (entry,))
    assert "deleted from the stream" in event.reason


async def test_a_broadcast_event_deleted_before_it_was_read_is_announced_once(stage: Stage) -> None:
    runtime = await stage.actor()
    await until(lambda: lines(runtime))
    await stage.bring_to_a_stop(runtime)
    gone = [await stage.put(RunStopping(reason=f"gone {n}")) for n in range(2)]
    await stage.raw("XDEL", "{control}", *gone)
    await stage.put(RunStopping(reason="left"))
    second = await stage.actor()
    await until(lambda: lines(second)[-1:] == ("left",))
    (event,) = await until(stage.lost)
    assert (event.stream, event.entries) == ("control", (gone[1],))
    assert "before it was read" in event.reason
    assert "gone 1" not in lines(second)


async def test_the_last_broadcast_event_is_missed_too(stage: Stage) -> None:
    runtime = await stage.actor()
    await until(lambda: lines(runtime))
    await stage.bring_to_a_stop(runtime)
    gone = await stage.put(RunStopping(reason="gone"))
    await stage.raw("XTRIM", "{control}", "MAXLEN", 0)
    second = await stage.actor()
    (event,) = await until(stage.lost)
    assert (event.stream, event.entries) == ("control", (gone,))
    later = await stage.put(RunStopping(reason="later"))
    await until(lambda: lines(second)[-1:] == ("later",))
    stored = stage.hand.cursors

    async def moved_on() -> bool:
        return (await stored(ACTOR))["control"] == later

    await until(moved_on)
    assert await stage.lost() == [event]


async def test_what_was_trimmed_before_an_actors_first_boot_is_not_missed(stage: Stage) -> None:
    old = await stage.put(RunStopping(reason="old"))
    await stage.raw("XDEL", "{control}", old)
    runtime = await stage.actor()
    await stage.put(RunStopping(reason="new"))
    await until(lambda: lines(runtime)[-1:] == ("new",))
    assert await stage.lost() == []
    shell: Any = runtime.shell
    assert shell.cursors == {"control": old}


async def test_the_recorders_reading_announces_what_it_will_never_archive(stage: Stage) -> None:
    runtime = await stage.actor()
    await until(lambda: lines(runtime))
    entries = [await stage.task(f"{n}") for n in range(3)]
    await stage.raw("XDEL", "{tasks}", entries[1])
    store = context.BusStore(runtime, [ACTOR])
    for _ in range(2):
        assert [e.entry for e in await store.read_after({"tasks": entries[0]}, 9, 0)] == entries[2:]
    (event,) = await stage.lost()
    assert (event.stream, event.entries) == ("tasks", (entries[1],))


async def test_unreadable_work_is_buried_and_announced(stage: Stage) -> None:
    entry = await stage.hand.post("tasks", b"\xc1 no event")
    await stage.actor()
    (event,) = await until(stage.lost)
    assert (event.stream, event.entries) == ("tasks", (entry,))
    (letter,) = await stage.hand.dead.read("tasks")
    assert (letter.origin, letter.data) == (entry, b"\xc1 no event")
    assert letter.reason == event.reason


async def test_work_delivered_too_often_is_buried_and_announced(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "DELIVERIES", 1)
    entry = await stage.left_behind("poison")
    await stage.actor()
    (event,) = await until(stage.lost)
    assert (event.entries, event.reason) == ((entry,), "delivered 2 times without an ack")
    assert [letter.origin for letter in await stage.hand.dead.read("tasks")] == [entry]


async def test_work_that_an_earlier_boot_took_is_not_given_up_for_its_deliveries(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "DELIVERIES", 1)
    first = await stage.actor(core=Keeper())
    await stage.task("kept")
    await until(lambda: "task kept 1" in lines(first))
    await stage.bring_to_a_stop(first)
    second = await stage.actor(core=Keeper())
    await until(lambda: "task kept 2" in lines(second))
    assert await stage.lost() == []
    assert await stage.hand.dead.read("tasks") == []


async def test_a_successor_goes_on_where_the_last_boot_ended_and_fences_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "SNAPSHOT_EVERY", 3)
    first = await stage.actor()
    for number in range(8):
        await stage.task(f"{number}", acked=True)
    await until(lambda: "task 7 1" in lines(first))
    second = await stage.actor()
    await until(lambda: lines(second)[-1:] == ("boot 2",))
    assert lines(second)[:-1] == lines(first)
    assert second.machine.snapshot_seq >= 3
    await stage.put(RunStopping(reason="end"))
    with pytest.raises(Fenced), contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stage.ended(), 20)


async def test_what_does_not_fit_into_the_store_ends_the_run_and_is_named(stage: Stage) -> None:
    actor = await stage.actor()
    await until(lambda: "boot 1" in lines(actor))
    actor.bus.limits = Limits(entry=256)
    await stage.task("long" * 100)
    with pytest.raises(
        Fatal, match=r"collector-0 can't commit what came of task\.issued: a journal record has .* limit"
    ):
        await asyncio.wait_for(stage.ended(), 20)


def test_a_snapshot_is_due_by_inputs_or_by_bytes() -> None:
    clock = WallClock()
    identity = machine.Identity("run", ACTOR, 1, "host", 1)
    made = machine.Machine(cast(Any, Diary()), identity, clock, lambda handle: b"", 0, Story())
    mib = b"x" * (1 << 20)
    assert not made.snapshot_due(machine.SNAPSHOT_EVERY - 1, [b"small"])
    assert made.snapshot_due(machine.SNAPSHOT_EVERY, [b"small"])
    assert made.snapshot_due(1, [mib])
    made.restored((5, b"s" * (1 << 19)), [mib])
    assert not made.snapshot_due(6, [b"small"]), "a large state is not written for every little record"
    assert made.snapshot_due(6, [mib])
