"""The driver's loop: nothing of an earlier session is judged, and a run is stopped in order, the recorder last."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from story import (  # pyright: ignore[reportMissingImports] - pytest puts its folder on the path
    ACTORS,
    Story,
    booted,
    committed,
    failed,
    stepped,
    trained,
)

from actors.recorder.metrics import Row
from actors.recorder.ordering import number
from config.schema import LaunchConfig, RunConfig
from contracts import events
from contracts.core import Entry
from contracts.envelope import decode, encode
from contracts.events import Event
from pipeline import driver as module
from pipeline.bus import BusError, BusUnavailable
from pipeline.driver import Driver
from pipeline.errors import Exit
from pipeline.host import Left
from pipeline.verdict import Verdict
from pipeline.view import View

CONFIG = RunConfig(launch=LaunchConfig(stop_deadline_s=5.0, start_deadline_s=60.0))


class Clock:
    def __init__(self) -> None:
        self.time = 2000.0

    def now(self) -> float:
        return self.time

    def monotonic_ns(self) -> int:
        return 0


class Log:
    """The bus as the driver uses it, and the log behind it."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.on_post: Callable[[Event], None] = lambda event: None
        self.broken: Exception | None = None
        self.unwritable: Exception | None = None

    def put(self, story: Story, start: int = 0) -> None:
        for envelope in story.log[start:]:
            self._append(envelope.stream, encode(envelope))

    def _append(self, stream: str, data: bytes) -> str:
        self.entries.append(Entry(stream, f"{len(self.entries) + 1}-0", data))
        return self.entries[-1].entry

    async def post(self, stream: str, data: bytes) -> str:
        entry = self._append(stream, data)
        self.on_post(decode(stream, data).body)
        return entry

    async def check_writable(self) -> None:
        if self.unwritable is not None:
            raise self.unwritable

    async def read_after(self, cursors: Mapping[str, str], *, count: int, block_ms: int) -> list[Entry]:
        await asyncio.sleep(0)
        if self.broken is not None:
            raise self.broken
        return [e for e in self.entries if e.stream in cursors and number(e.entry) > number(cursors[e.stream])]

    def posted(self) -> list[str]:
        bodies = [decode(e.stream, e.data) for e in self.entries]
        return [events.kind(envelope.body) for envelope in bodies if envelope.actor == "driver"]


class Processes:
    """Stands in for `Cluster`: actors leave when told to."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.launched: list[str] = []
        self.gone: dict[str, Left] = {}
        self.waited: list[list[str]] = []
        self.on_launch: Callable[[], None] = lambda: None

    def launch(self, names: Sequence[str], url: str, run: str) -> None:
        self.launched = list(names)
        self.on_launch()

    def left(self) -> dict[str, Left]:
        return dict(self.gone)

    def restart(self, name: str, process: object) -> str:
        raise AssertionError(f"{name} was not to be restarted")

    async def wait(self, names: Sequence[str], timeout: float) -> list[str]:
        self.waited.append(list(names))
        await asyncio.sleep(0)
        self.clock.time += max(timeout, 0.01)
        return [name for name in names if name not in self.gone]


class Screen:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[int] = []

    def step(self, row: Row, view: View, now: float) -> None:
        self.steps.append(row.step)

    def update(self, view: View, now: float) -> None:
        pass

    def note(self, message: str, **fields: object) -> None:
        self.notes.append(message)

    def error(self, message: str, **fields: object) -> None:
        self.notes.append(f"error: {message}")


class Scene:
    def __init__(self, config: RunConfig = CONFIG, view: View | None = None) -> None:
        self.clock, self.log, self.screen = Clock(), Log(), Screen()
        self.processes = Processes(self.clock)
        self.view = view or View()
        self.driver = Driver(
            config,
            "r",
            self.log,  # pyright: ignore[reportArgumentType]
            self.processes,  # pyright: ignore[reportArgumentType]
            self.screen,
            self.clock,
            self.view,
        )
        self.log.on_post = self.obey

    def obey(self, event: Event) -> None:
        """Actors leave when the run stops, the recorder when it has finished."""
        if isinstance(event, events.RunStopping):
            self.processes.gone.update({name: Left("done") for name in ACTORS if name != "recorder"})
        if isinstance(event, events.RunFinished):
            self.processes.gone["recorder"] = Left("done")

    async def run(self, cursors: dict[str, str] | None = None, *, resumed: bool = False) -> Verdict:
        return await asyncio.wait_for(self.driver.run("url", "digest", cursors or {}, resumed=resumed), 10)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.0)
    monkeypatch.setattr(module, "LOOK_S", 0.01)


def finished(steps: int) -> Story:
    story = trained(steps)
    story.add(events.TrainingFinished(version=steps, step=steps))
    return story


async def test_a_run_is_started_watched_and_stopped_with_the_recorder_last() -> None:
    scene = Scene()
    scene.processes.on_launch = lambda: scene.log.put(finished(3), start=1)
    verdict = await scene.run()
    assert verdict == Verdict(Exit.DONE, "trained", "trained 3 steps")
    assert scene.screen.steps == [1, 2, 3]
    assert set(scene.processes.launched) == set(ACTORS)
    assert scene.log.posted() == ["run.started", "run.stopping", "run.finished"]
    assert scene.processes.waited[-1] == ["recorder"]
    assert "recorder" not in scene.processes.waited[0]
    assert scene.driver.late == []


@pytest.mark.parametrize("again", [False, True], ids=["one actor", "the run"])
async def test_another_start_of_one_actor_is_fenced_off_and_one_of_the_run_ends_this_session(again: bool) -> None:
    scene = Scene()
    launches: list[list[str]] = []

    def launched() -> None:
        launches.append(scene.processes.launched)
        if len(launches) == 1:
            scene.log.put(trained(2), start=1)
            if again:
                other = Story()
                other.add(events.RunStarted(config_digest="digest", resumed=True))
                scene.log.put(other)
            asyncio.get_running_loop().call_later(0.05, lambda: scene.processes.gone.update({"refit": Left("fenced")}))
        else:
            scene.processes.gone.clear()
            asyncio.get_running_loop().call_later(0.05, scene.driver.interrupt)

    scene.processes.on_launch = launched
    verdict = await scene.run()
    if again:
        assert (verdict.code, len(launches)) == (Exit.FAILED, 1)
        assert "refit: left the run (fenced)" in verdict.message
    else:
        assert (verdict.code, launches[1:]) == (Exit.INTERRUPTED, [["refit"]])


@pytest.mark.parametrize("how", ["shorter", "another", "overtaken"])
async def test_a_store_that_lost_what_was_read_from_it_ends_the_run(how: str) -> None:
    scene = Scene()
    story = trained(2)
    scene.processes.on_launch = lambda: scene.log.put(story)

    def lose(row: Row, view: View, now: float) -> None:
        del scene.log.entries[-4:]
        if how != "shorter":
            last = scene.log.entries[-1]
            scene.log.put(trained(1), start=-1 if how == "another" else -6)
            assert scene.log.entries[-1] != last

    scene.screen.step = lose  # type: ignore[method-assign]
    verdict = await scene.run()
    assert (verdict.code, verdict.reason) == (Exit.BROKER, "store went back")
    assert "is rebuilt from its archive" in verdict.message


async def test_a_store_that_takes_no_writes_is_told_at_once_and_ends_the_run_after_an_outage() -> None:
    scene = Scene()
    scene.log.unwritable = BusError("MISCONF: the store can't write its files: make room on its disk")

    def fail() -> None:
        scene.log.put(trained(1))
        scene.clock.time += module.WRITES_EVERY_S

    scene.processes.on_launch = fail
    error = scene.screen.error

    def told(message: str, **fields: object) -> None:
        error(message)
        scene.clock.time += 60.0

    scene.screen.error = told  # type: ignore[method-assign]
    verdict = await scene.run()
    assert scene.screen.notes[0].startswith("error: the store takes no writes: MISCONF")
    assert (verdict.code, verdict.reason) == (Exit.BROKER, "store takes no writes")
    assert (
        "for 60 s (broker.outage_s): MISCONF: the store can't write its files: make room on its disk" in verdict.message
    )


async def test_a_store_that_takes_writes_again_is_told_and_one_that_is_lost_is_raised() -> None:
    scene = Scene()
    scene.log.unwritable = BusError("MISCONF")

    def fail() -> None:
        scene.log.put(trained(1))
        scene.clock.time += module.WRITES_EVERY_S

    def told(message: str, **fields: object) -> None:
        scene.log.unwritable = None
        scene.clock.time += module.WRITES_EVERY_S

    def noted(message: str, **fields: object) -> None:
        if message == "the store takes writes again":
            scene.log.unwritable = BusUnavailable("gone")
            scene.clock.time += module.WRITES_EVERY_S

    scene.processes.on_launch = fail
    scene.screen.error, scene.screen.note = told, noted  # type: ignore[method-assign]
    with pytest.raises(BusUnavailable, match="gone"):
        await scene.run()


async def test_an_event_that_was_trimmed_is_not_missed() -> None:
    scene = Scene()

    def trim() -> None:
        scene.log.put(trained(1))
        asyncio.get_running_loop().call_later(0.1, gone)

    def gone() -> None:
        scene.clock.time += module.FRESH_S
        scene.log.entries = [Entry("control", "1-0", e.data) for e in scene.log.entries[:1]]
        asyncio.get_running_loop().call_later(0.1, scene.driver.interrupt)

    scene.processes.on_launch = trim
    verdict = await scene.run()
    assert verdict.code is Exit.INTERRUPTED


async def test_an_interrupt_stops_in_order() -> None:
    scene = Scene()
    scene.processes.on_launch = scene.driver.interrupt
    verdict = await scene.run()
    assert verdict.code is Exit.INTERRUPTED
    assert scene.log.posted() == ["run.started", "run.stopping", "run.finished"]


async def test_what_an_earlier_session_left_in_the_log_is_not_judged() -> None:
    before = finished(2)
    before.add(failed("trainer", fatal=True))
    before.add(events.RunFinished(reason="trainer failed"))
    scene = Scene(view=View().apply_all(before.log[:-3]))
    scene.log.put(before)
    cursors = {e.stream: e.entry for e in scene.log.entries[:-3]}

    def go_on() -> None:
        after = Story()
        for actor in ACTORS:
            after.add(booted(actor, 2))
        after.add(committed(9, 2))
        after.add(stepped(3))
        after.add(events.TrainingFinished(version=3, step=3))
        scene.log.put(after)

    scene.processes.on_launch = go_on
    verdict = await scene.run(cursors, resumed=True)
    assert verdict.message == "trained 3 steps"
    assert scene.screen.notes == ["stopping"]


async def test_a_restart_is_noted_and_an_actor_that_restarts_while_stopping_is_told_again() -> None:
    scene = Scene()
    stops = 0

    def obey(event: Event) -> None:
        nonlocal stops
        if isinstance(event, events.RunStopping):
            stops += 1
            if stops == 1:
                late = Story()
                late.add(booted("buffer", 2))
                scene.log.put(late)
            else:
                scene.obey(event)
        if isinstance(event, events.RunFinished):
            scene.obey(event)

    scene.log.on_post = obey
    scene.processes.on_launch = lambda: scene.log.put(finished(1), start=1)
    await scene.run()
    assert stops == 2
    assert "actor restarted" in scene.screen.notes


async def test_what_went_wrong_is_told_at_once_though_the_run_goes_on() -> None:
    scene = Scene()
    story = Story()
    story.add(failed("trainer", fatal=False, message="checkpoint damaged; going on from the one before"))

    def launched() -> None:
        scene.log.put(story)
        scene.log.put(finished(1))

    scene.processes.on_launch = launched
    await scene.run()
    assert scene.screen.notes[0] == "error: trainer: checkpoint damaged; going on from the one before"


async def test_actors_that_do_not_leave_are_named_after_the_deadline() -> None:
    scene = Scene()
    scene.log.on_post = lambda event: None
    scene.processes.on_launch = lambda: scene.log.put(finished(1), start=1)
    started = scene.clock.time
    verdict = await scene.run()
    assert verdict.code is Exit.DONE
    assert set(scene.driver.late) == set(ACTORS)
    assert scene.driver.late[-1] == "recorder"
    assert scene.clock.time - started < CONFIG.launch.stop_deadline_s + module.RECORDER_S + 2
    assert "not left in time" in scene.screen.notes


@pytest.mark.parametrize("comes_back", [False, True])
async def test_an_actor_without_a_process_holds_the_end_up_for_a_moment_only(comes_back: bool) -> None:
    """Its predecessor ended, and Ray has not started another yet, or can't; or it has never been up."""
    scene = Scene()

    def start() -> None:
        story = Story()
        for actor in ACTORS[:-2]:
            gone = events.ActorBooted(actor=actor, boot=1, pid=2**22 + 1, host=socket.gethostname())
            story.add(gone if actor == "engine-0" else booted(actor))
        scene.log.put(story)
        scene.driver.interrupt()

    def obey(event: Event) -> None:
        scene.obey(event)
        if isinstance(event, events.RunStopping) and not comes_back:
            for name in ("engine-0", "engine-1"):
                del scene.processes.gone[name]

    scene.processes.on_launch = start
    scene.log.on_post = obey
    started = scene.clock.time
    verdict = await scene.run()
    assert verdict.code is Exit.INTERRUPTED
    assert scene.driver.late == ([] if comes_back else ["engine-0", "engine-1"])
    assert ("not up, and not waited for" in scene.screen.notes) is not comes_back
    assert "not left in time" not in scene.screen.notes
    assert scene.clock.time - started < module.ABSENT_S + 1.0 < CONFIG.launch.stop_deadline_s
    assert scene.log.posted()[-1] == "run.finished"


async def test_a_failure_of_an_actor_ends_the_run() -> None:
    scene = Scene()
    scene.processes.gone["engine-1"] = Left("foreign", "config resolves to /x/config.py")
    verdict = await scene.run()
    assert (verdict.code, verdict.reason) == (Exit.MISSING, "engine-1 failed")


async def test_a_lost_store_is_raised() -> None:
    scene = Scene()
    scene.log.broken = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        await scene.run()


async def test_a_session_that_never_serves_ends_at_its_deadline() -> None:
    scene = Scene()

    def late() -> None:
        scene.clock.time += 61.0

    scene.processes.on_launch = late
    assert (await scene.run()).code is Exit.START


def test_the_story_is_complete() -> None:
    """The fakes above know every actor of the default run."""
    from actors import registry

    names: Any = registry.names(CONFIG)
    assert set(names) == set(ACTORS)
