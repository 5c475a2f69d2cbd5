"""`pipeline top`: the board of any moment is the fold of the events up to it, on the terminal too."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from click.testing import CliRunner
from story import (  # pyright: ignore[reportMissingImports] - pytest puts its folder on the path
    Story,
    batch,
    booted,
    committed,
    issued,
    requested,
    rolled,
    trained,
)
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Label, Static, TabbedContent

from config import loading
from config.schema import BrokerConfig
from contracts import events
from contracts.core import Entry
from contracts.envelope import encode
from pipeline import broker
from pipeline.bus import Bus
from pipeline.cli import main
from pipeline.errors import Exit, PipelineError
from pipeline.eventlog import Batch, Item, gathered
from pipeline.moments import Moment
from pipeline.replay.recorded import Recorded
from pipeline.rundir import RunDir
from pipeline.simulate import archive
from pipeline.top import board as boards
from pipeline.top import tables
from pipeline.top.app import STRIDE, Top
from pipeline.top.board import MARKS, RECENT, Board, History, at, spacing
from pipeline.top.feed import Feed
from pipeline.top.search import Search, holds
from pipeline.why.look import Look
from pipeline.why.result import Evidence
from tests.stalls.gallery import PATIENT, long_tail_in_drain
from tests.stalls.scene import Scene

CONFIG = loading.load("quickstart", ())


def items(story: Story) -> list[Item]:
    return [(Entry(e.stream, f"{n}-0", encode(e)), e, n) for n, e in enumerate(story.log, 1)]


def folded(log: list[Item]) -> Board:
    board = Board()
    board.extend(gathered(log))
    return board


def batches(log: list[Item], size: int = 3) -> list[Batch]:
    return [gathered(log[start : start + size]) for start in range(0, len(log), size)]


def remembered(log: list[Item], every: int) -> History:
    history = History(every)
    for part in batches(log):
        history.extend(part)
    return history


def facts(board: Board) -> object:
    return board.position, board.at, board.view.step, dict(board.streams), list(board.recent), board.model.waits.keys()


def test_the_board_of_a_moment_is_the_fold_of_the_events_up_to_it() -> None:
    log = items(trained(8))
    history = remembered(log, every=7)
    for position in range(1, len(log) + 1):
        assert facts(at(history, position, batches(log))) == facts(folded(log[:position]))


def test_looking_at_a_moment_changes_no_other() -> None:
    log = items(trained(4))
    history = remembered(log, every=5)
    before = facts(history.board)
    at(history, len(log), batches(log))
    first = facts(at(history, 12, batches(log)))
    at(history, 20, batches(log))
    assert (facts(history.board), facts(at(history, 12, batches(log)))) == (before, first)


def test_marks_stay_few_however_long_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "MARKS", 3)
    log = items(trained(4))
    history = remembered(log, every=1)
    assert len(log) > 18
    assert len(history._marks) <= 6
    assert facts(at(history, 10, batches(log))) == facts(folded(log[:10]))


def test_marks_of_a_short_log_cost_nothing() -> None:
    assert spacing(100) == 2000
    assert spacing(1_000_000) == 1_000_000 // MARKS


def test_a_table_names_who_waits_for_whom_and_who_never_started() -> None:
    story = Story()
    story.add(booted("buffer"), actor="buffer")
    story.add(events.WaitStarted(actor="buffer", on="collector", cause="no group yet"))
    rows = {row[0]: row for row in tables.actors(CONFIG, folded(items(story)), story.now + 4)}
    assert rows["buffer"] == ("buffer", "waits", "1", "5.0 s ago", "collector", "4.0 s", "no group yet")
    assert rows["trainer"][1] == "not started"


def test_the_buffer_is_shown_by_what_groups_are_and_by_age() -> None:
    story = Story()
    for index in (0, 1, 2):
        story.add(issued(index))
    for sample in (0, 1):
        story.add(rolled(0, sample))
    story.add(rolled(1, 0))
    rows = {name: (count, oldest) for name, count, oldest in tables.buffer(folded(items(story)), story.now)}
    assert (rows["complete"][0], rows["begun"][0], rows["untouched"][0]) == ("1", "1", "1")
    assert rows["age 0-9 s"] == ("3", "")
    story.add(batch(0, [1.0]))
    rows = {name: (count, oldest) for name, count, oldest in tables.buffer(folded(items(story)), story.now)}
    assert rows["in batches not trained"] == ("1", "0.0 s ago")


def test_engines_have_a_version_and_what_nobody_knows_of_them_is_said() -> None:
    story = Story()
    story.add(booted("engine-0"))
    story.add(requested(1, 1))
    story.add(committed(1, 1, "engine-0", "engine-1"))
    rows = tables.engines(CONFIG, folded(items(story)), story.now, Evidence())
    assert [(row[0], row[1], row[2], row[3]) for row in rows] == [
        (name, "serving", "1", "?") for name in ("engine-0", "engine-1")
    ]
    assert "no gateway has a journal that can be read" in tables.titles(Evidence(), live=True)["engines"]
    assert "reading the gateways' journals" in tables.titles(None, live=False)["engines"]
    rows = {row[0]: row[2:5] for row in tables.streams(folded(items(story)), story.now, None, Evidence())}
    assert (rows["tasks"], rows["control"]) == (("?", "?", "?"), ("?", "", ""))
    assert "known while the run lives" in tables.titles(Evidence(), live=False)["streams"]
    assert tables.titles(Evidence(), live=True)["streams"] == "streams"


def test_an_archive_is_open_before_its_actors_are_looked_into(
    make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, going = Event(), Event()

    def look_into(*_: object) -> Evidence:
        begun.set()
        assert going.wait(60)
        return Evidence()

    monkeypatch.setattr("pipeline.top.feed.load.look_into", look_into)
    feed = Feed(make_run(trained(1)), CONFIG)
    feed.start()
    assert begun.wait(60)
    assert feed.wait_loaded(60)
    assert feed.evidence is None
    going.set()
    feed._thread.join(60)
    assert feed.evidence is not None


def test_a_search_finds_what_is_listed_of_the_whole_log_and_says_how_far_it_is() -> None:
    log = items(trained(30))
    assert len(log) > RECENT
    text = "refit"
    rows = [row for row in tables.events([(entry, envelope) for entry, envelope, _ in log], 0.0) if holds(row, text)]
    search = Search(text, len(log) - 5, 0.0)
    assert "searching: 0 of" in search.line()
    for part in batches(log):
        if not search.done:
            search.take(part)
    wanted = [row for row in rows if int(row[0][:-2]) <= len(log) - 5]
    assert (search.done, search.count, list(search.found)) == (True, len(wanted), wanted[:RECENT])
    search.go_on(len(log))
    search.take(gathered(log[search.seen :]))
    assert (search.done, list(search.found)) == (True, rows[:RECENT])
    assert search.line() == f"searched all {len(log)} events up to this moment: {len(rows)} hold 'refit'"
    cut = Search(text, 2 * len(log), 0.0)
    cut.take(gathered(log))
    assert not cut.done
    cut.end()
    assert f"searched all {len(log)} events" in cut.line()


def test_in_a_pipe_it_says_what_to_use_instead(make_run: Callable[..., RunDir]) -> None:
    run = make_run(trained(1))
    done = CliRunner().invoke(main, ["top", str(run.path)])
    assert done.exit_code == Exit.USAGE
    assert "pipeline log --follow" in done.output


def test_a_damaged_index_is_named(make_run: Callable[..., RunDir]) -> None:
    run = make_run(trained(1))
    (run.events / "index.json").write_text("{")
    with pytest.raises(PipelineError, match=r"index\.json is damaged"):
        Feed(run, CONFIG)


# --- on a terminal ---


async def until(pilot: Pilot[None], true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await pilot.pause(0.05)


def shown(app: Top, name: str) -> list[list[str]]:
    table = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(number)] for number in range(table.row_count)]


def head(app: Top) -> str:
    return str(app.query_one("#head", Static).content)


async def test_keys_move_through_the_time_of_an_archive(make_run: Callable[..., RunDir]) -> None:
    story = trained(6)
    app = Top(Feed(make_run(story), CONFIG), CONFIG)
    async with app.run_test(size=(140, 45)) as pilot:
        end = len(story.log)
        await until(pilot, lambda: f"{end} of {end}" in str(app.query_one("#slider", Static).content))
        assert shown(app, "events")[0][0] == f"{end}-0"
        await pilot.press("shift+left", "shift+left")
        await until(pilot, lambda: shown(app, "events")[0][0] == f"{end - 2}-0")
        await pilot.press("home")
        await until(pilot, lambda: [row[0] for row in shown(app, "events")] == ["1-0"])
        await pilot.press("right")
        await until(pilot, lambda: len(shown(app, "events")) == 1 + max(1, end // 50))
        await pilot.press("end")
        await until(pilot, lambda: shown(app, "events")[0][0] == f"{end}-0")


async def test_events_are_searched_and_their_text_is_no_markup(make_run: Callable[..., RunDir]) -> None:
    story = trained(1)
    story.add(events.ActorFailed(actor="source", error="KeyError", message="[red]boom[/red]", fatal=False))
    app = Top(Feed(make_run(story), CONFIG), CONFIG)
    async with app.run_test(size=(140, 45)) as pilot:
        await until(pilot, lambda: bool(shown(app, "events")))
        await pilot.press("slash")
        assert app.query_one(TabbedContent).active == "events-pane"
        await pilot.press(*"boom")
        assert app.query_one("#search", Input).value == "boom"
        await until(pilot, lambda: len(shown(app, "events")) == 1)
        assert "[red]boom[/red]" in shown(app, "events")[0][-1]
        await pilot.press("escape", "4")
        assert app.query_one(TabbedContent).active == "why-pane"


async def test_enter_searches_the_whole_log_up_to_the_moment(make_run: Callable[..., RunDir]) -> None:
    story = trained(1)
    place = len(story.log) + 1
    story.add(events.ActorFailed(actor="source", error="KeyError", message="needle", fatal=False))
    while len(story.log) < 3 * RECENT:
        story.add(events.CreditGranted(total=len(story.log)))
    end = len(story.log) + 1
    story.add(events.ActorFailed(actor="source", error="KeyError", message="needle again", fatal=False))
    app = Top(Feed(make_run(story), CONFIG), CONFIG)
    async with app.run_test(size=(140, 45)) as pilot:
        await until(pilot, lambda: f"{end} of {end}" in str(app.query_one("#slider", Static).content))
        await pilot.press("slash", *"needle")
        assert (
            "filters the newest 200 events; enter searches the whole log" in app.query_one("#search", Input).placeholder
        )
        await until(pilot, lambda: [row[0] for row in shown(app, "events")] == [f"{end}-0"])
        await pilot.press("enter")
        await until(pilot, lambda: [row[0] for row in shown(app, "events")] == [f"{end}-0", f"{place}-0"])
        assert "2 hold 'needle'" in str(app.query_one("#searched", Label).content)
        await pilot.press("shift+left")
        await until(pilot, lambda: [row[0] for row in shown(app, "events")] == [f"{place}-0"])
        await until(pilot, lambda: "1 hold 'needle'" in str(app.query_one("#searched", Label).content))


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scene, RunDir]:
    """A run with requests that hang."""
    scene = Scene(PATIENT)
    long_tail_in_drain(scene)
    scene.start()
    scene.run(30.0)
    return scene, archive.write(scene.world, PATIENT, tmp_path_factory.mktemp("runs") / "stalled")


def in_flight(scene: Scene, states: dict[str, Any]) -> list[str]:
    """Requests at each engine, as the gateways have them."""
    look = Look(scene.model(), PATIENT, scene.world.now(), Evidence(states=states), 15.0)
    found = look.requests()
    assert found is not None
    return [str(found[name]) for name in ("engine-0", "engine-1")]


async def test_an_archive_tells_what_is_in_flight_at_any_moment(stalled: tuple[Scene, RunDir]) -> None:
    scene, run = stalled
    wanted = in_flight(scene, {name: actor.state for name, actor in scene.world.actors.items()})
    assert wanted != ["0", "0"]
    end = len(scene.world.store.log)
    back = Recorded.read(run, PATIENT)

    def then(place: int) -> list[str]:
        at = back.log.place(Moment(position=place))
        return in_flight(scene, {name: track.state_at(at) for name, track in back.tracks.items()})

    lefts = next(n for n in range(1, STRIDE) if then(end - n * (end // STRIDE)) not in (wanted, ["0", "0"]))
    earlier = end - lefts * (end // STRIDE)
    app = Top(Feed(run, PATIENT), PATIENT)
    async with app.run_test(size=(140, 45)) as pilot:
        await until(pilot, lambda: [row[3] for row in shown(app, "engines")] == wanted)
        assert [row[4] for row in shown(app, "streams") if row[0] == "tasks"] != ["?"]
        assert str(app.query_one("#engines-title", Label).content) == "engines"
        assert "drain_tail (engine-0)" in str(app.query_one("#why", Static).content)
        await pilot.press(*["left"] * lefts)
        await until(pilot, lambda: f"{earlier} of {end}" in str(app.query_one("#slider", Static).content))
        await until(pilot, lambda: [row[3] for row in shown(app, "engines")] == then(earlier))
        await pilot.press("end")
        await until(pilot, lambda: [row[3] for row in shown(app, "engines")] == wanted)


async def test_the_search_box_takes_every_key_until_enter_and_then_q_quits(make_run: Callable[..., RunDir]) -> None:
    app = Top(Feed(make_run(trained(1)), CONFIG), CONFIG)
    async with app.run_test(size=(140, 45)) as pilot:
        await until(pilot, lambda: bool(shown(app, "events")))
        await pilot.press("slash", *"q4")
        assert (app.query_one("#search", Input).value, app.return_code) == ("q4", None)
        await pilot.press("enter", "q")
        await until(pilot, lambda: app.return_code == 0)


async def test_a_tick_while_the_application_closes_draws_nothing(make_run: Callable[..., RunDir]) -> None:
    app = Top(Feed(make_run(trained(1)), CONFIG), CONFIG)
    async with app.run_test(size=(140, 45)) as pilot:
        await until(pilot, lambda: bool(shown(app, "events")))
        await app.query_one("#head").remove()
        app.draw()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "store").mkdir()
    with broker.choose({"PATH": os.environ.get("PATH", "")}, tmp_path / "store", BrokerConfig()) as server:
        yield server.url


async def test_what_a_live_run_adds_is_shown_until_it_has_finished(
    store: str, make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setattr("pipeline.top.feed.archive.has_writer", lambda folder: True)
    run = make_run(trained(1))
    run.update(redis_url=store)
    bus = await Bus.connect(store, run.info().run, actor="test")
    for envelope in trained(1).log:
        await bus.post(envelope.stream, encode(envelope))
    feed = Feed(run, CONFIG)
    app = Top(feed, CONFIG)
    async with app.run_test(size=(140, 45)) as pilot:
        await until(pilot, lambda: "live" in head(app))
        story = Story()
        await bus.post(
            "control", encode(story.add(events.ActorFailed(actor="x", error="E", message="new", fatal=False)))
        )
        await until(pilot, lambda: "new" in shown(app, "events")[0][-1])
        await until(pilot, lambda: feed.depths is not None and feed.depths["control"].length >= 1)
        await bus.post("control", encode(story.add(events.RunFinished(reason="trained"))))
        await until(pilot, lambda: "archive" in head(app) and "trained" in head(app))
    await bus.close()


async def test_a_store_that_is_gone_is_said_and_the_archive_is_shown(
    make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setattr("pipeline.top.feed.archive.has_writer", lambda folder: True)
    monkeypatch.setattr("pipeline.top.feed.CONNECT_S", 0.2)
    run = make_run(trained(1))
    run.update(redis_url=f"unix://{tmp_path}/nobody.sock")
    app = Top(Feed(run, CONFIG), CONFIG)
    async with app.run_test(size=(140, 45)) as pilot:
        await until(pilot, lambda: "nobody.sock" in head(app))
        assert shown(app, "events")
