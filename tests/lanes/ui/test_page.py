"""The page in a real browser: an archive, a live run, a report; an error on the console fails the test."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from actors.recorder.archive import Writer
from config.schema import RunConfig
from contracts.core import Entry
from pipeline import report
from pipeline.broker import Broker, choose
from pipeline.bus import Bus
from pipeline.rundir import RunDir
from pipeline.simulate import archive
from pipeline.ui import _server, _trajectory
from tests.lanes.ui import chromium
from tests.stalls.gallery import PATIENT, long_tail_in_drain
from tests.stalls.scene import BASE, Scene
from tests.unit.ui.shown import EVIL

try:
    from playwright.sync_api import Browser, Page, expect, sync_playwright  # pyright: ignore[reportMissingImports]
except ImportError:
    pytest.fail("this lane needs the package `playwright`: run `make test-ui`", pytrace=False)

PATIENCE_MS = 60_000
EXPECTED = ("willReadFrequently", "400 (Bad Request)")
"""What `painted` brings about, which reads the canvas back, and a time that is none."""
SHOTS = os.environ.get("SLUICE_SHOTS")
"""A folder for screenshots, to be looked at."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium.find()
    if path is None:
        pytest.fail(
            "no browser that starts: install chromium (`apt-get install chromium`), or name one in SLUICE_CHROMIUM"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    yield from opened(browser, "light")


def opened(browser: Browser, scheme: Any) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("requestfailed", lambda request: said.append(request.url) if "/api/live" not in request.url else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    yield page
    page.close()
    said = [line for line in said if not any(known in line for known in EXPECTED)]
    assert said == [], "the console has errors"


class Serving:
    """The server of one run, in a thread of its own."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        self.address = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(_server.serve(run, config, "127.0.0.1", None, self._tell))
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _tell(self, address: str) -> None:
        self.address = address
        self._ready.set()

    def _work(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            return
        finally:
            self._ready.set()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._ready.wait(PATIENCE_MS / 1000)
        return self.address

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(PATIENCE_MS / 1000)


class Letters:
    """Stands in for a tokenizer: an id is a letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    held = _trajectory.load_tokenizer
    _trajectory.load_tokenizer = lambda source, params: Letters()
    with Serving(request.getfixturevalue("run"), BASE) as address:
        yield address
    _trajectory.load_tokenizer = held


def shot(page: Page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


def painted(page: Page) -> int:
    """Pixels of the timeline's canvas that something was drawn on."""
    return page.locator("canvas.lanes").evaluate(
        """(canvas) => {
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let drawn = 0;
            for (let at = 3; at < data.length; at += 4) drawn += data[at] > 0;
            return drawn;
        }"""
    )


def settled(page: Page, reached: Callable[[], bool]) -> None:
    for _ in range(PATIENCE_MS // 100):
        if reached():
            return
        page.wait_for_timeout(100)
    pytest.fail("the page did not come to it")


# --- an archive ---


def test_the_overview_draws_every_chart_and_table(browser: Browser, address: str, scheme: str):
    for page in opened(browser, scheme):
        page.goto(address)
        expect(page.locator(".pill")).to_have_text("archived")
        expect(page.locator(".why h2")).to_contain_text("tuck")
        for name in ("reward", "staleness", "pauses", "depth"):
            expect(page.locator(f'.chart[data-name="{name}"] canvas')).to_be_visible()
        expect(page.locator(".tablebox").first).to_contain_text("engine-1")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        shot(page, f"overview-{scheme}")


def test_a_chart_is_zoomed_by_dragging(page: Page, address: str):
    page.goto(address)
    plot = page.locator('.chart[data-name="reward"] .u-over')
    expect(plot).to_be_visible()
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 40, steps=4)
    with page.expect_response(lambda response: "/api/plots?from=" in response.url):
        page.mouse.up()
    page.get_by_text("show all steps").click()
    expect(page.get_by_text("show all steps")).to_be_hidden()


def test_the_timeline_zooms_pans_and_opens_an_event(page: Page, address: str):
    page.goto(f"{address}#timeline")
    canvas = page.locator("canvas.lanes")
    settled(page, lambda: painted(page) > 2000)
    whole = page.locator(".range").inner_text()
    shot(page, "timeline")
    canvas.dblclick(position={"x": 700, "y": 200})
    canvas.dblclick(position={"x": 700, "y": 200})
    settled(page, lambda: page.locator(".range").inner_text() != whole)
    canvas.focus()
    closer = page.locator(".range").inner_text()
    page.keyboard.press("a")
    settled(page, lambda: page.locator(".range").inner_text() != closer)
    shot(page, "timeline-zoomed")
    page.keyboard.press("0")
    settled(page, lambda: page.locator(".range").inner_text() == whole)
    box = canvas.bounding_box()
    assert box is not None
    clicked = False
    for y in range(40, int(box["height"]) - 10, 7):
        for x in range(160, int(box["width"]) - 10, 60):
            page.mouse.move(box["x"] + x, box["y"] + y)
            if canvas.evaluate("(canvas) => canvas.style.cursor") == "pointer":
                page.mouse.click(box["x"] + x, box["y"] + y)
                clicked = True
                break
        if clicked:
            break
    expect(page.locator(".detail h2")).to_be_visible()


def test_events_are_searched_and_shown_with_their_causes(page: Page, address: str, scene: Scene):
    page.goto(f"{address}#events")
    expect(page.locator(".said")).to_have_text(f"{len(scene.world.store.log):,} events")
    page.get_by_label("text in any field").fill("ENGINE-1")
    page.get_by_label("Kind").select_option("refit.committed")
    expect(page.locator(".rows .row .kind").first).to_have_text("refit.committed")
    settled(page, lambda: set(page.locator(".rows .row .kind").all_inner_texts()) == {"refit.committed"})
    page.locator(".rows .row").first.click()
    expect(page.locator(".detail")).to_contain_text('"epoch"')
    expect(page.locator(".detail .chain .row").first).to_be_visible()
    shot(page, "event")
    page.locator(".detail .chain .row").first.click()
    expect(page.locator(".detail h2")).not_to_have_text("refit.committed")
    page.get_by_text("show in the timeline").click()
    settled(page, lambda: painted(page) > 500)
    page.keyboard.press("Escape")
    expect(page.locator(".detail")).to_be_hidden()
    page.goto(f"{address}#events")
    page.get_by_label("from, s or time").fill("yesterday")
    expect(page.locator(".said")).to_contain_text("names no moment")


def test_the_list_reaches_the_first_event(page: Page, address: str):
    page.goto(f"{address}#events")
    expect(page.locator(".rows .row .n").first).to_be_visible()
    page.locator(".list").evaluate("(list) => (list.scrollTop = list.scrollHeight)")
    expect(page.locator(".rows .row .n").last).to_have_text("1")
    assert page.locator(".rows .row").count() < 100, "rows that nobody sees are drawn"


def test_a_trajectory_is_text_whatever_the_model_wrote(page: Page, address: str):
    page.goto(f"{address}#trajectories")
    pick = page.locator(".pick", has_text="sample 0").first
    pick.click()
    tokens = page.locator(".tokens")
    expect(tokens).to_have_text("ask:<b>!")
    expect(tokens.locator("span")).to_have_count(8)
    colours = [tokens.locator("span").nth(n).evaluate("(span) => span.style.background") for n in (0, 4, 6)]
    assert len(set(colours)) == 3, "versions have no colours of their own"
    tokens.locator("span").nth(6).hover()
    expect(page.locator(".tokentip")).to_contain_text("version 4 on engine-1, boot 2")
    expect(page.locator(".tokentip")).to_contain_text("-2")
    expect(page.locator(".view pre")).to_contain_text(EVIL.replace('"', '\\"'))
    assert page.locator(".view img").count() == 0
    assert "taken" not in page.title()
    shot(page, "trajectory")
    page.get_by_role("button", name="log-probability").click()
    page.get_by_role("button", name="loss mask").click()
    expect(page.locator(".legend", has_text="trained on")).to_be_visible()


# --- a report ---


def test_a_report_opens_from_a_file(page: Page, run: RunDir):
    page.goto(report.write(run).as_uri())
    expect(page.locator('.chart[data-name="reward"] canvas')).to_be_visible()
    expect(page.get_by_text("Where it ran")).to_be_visible()
    shot(page, "report")
    page.get_by_role("link", name="timeline").click()
    settled(page, lambda: painted(page) > 2000)
    page.get_by_role("link", name="events").click()
    page.locator(".rows .row").first.click()
    expect(page.locator(".detail pre").first).to_be_visible()


def test_a_report_with_trajectories_shows_them_token_by_token(page: Page, run: RunDir, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_trajectory, "load_tokenizer", lambda source, params: Letters())
    page.goto(report.write(run, trajectories=True).as_uri() + "#trajectories")
    picks = page.locator(".pick")
    expect(picks.first).to_be_visible()
    page.get_by_label("Order").select_option("lowest")
    settled(page, lambda: float(picks.first.locator("b").inner_text()) <= float(picks.last.locator("b").inner_text()))
    picks.first.click()
    expect(page.locator(".tokens")).to_contain_text("ask:<b>!")
    expect(page.locator(".legend")).to_contain_text("version 3")
    assert page.title() != "taken"
    shot(page, "report-trajectories")


# --- a live run ---


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    from config.schema import BrokerConfig

    with choose({"PATH": ""}, tmp_path_factory.mktemp("store"), BrokerConfig()) as broker:
        yield broker


def post(url: str, run: str, entries: list[Entry]) -> None:
    """In a thread: the browser's driver has an event loop in this one."""

    async def work() -> None:
        bus = await Bus.connect(url, run, actor="test")
        try:
            for entry in entries:
                assert await bus.post(entry.stream, entry.data) == entry.entry
        finally:
            await bus.close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work()).result(PATIENCE_MS / 1000)


def test_a_live_run_moves_by_itself_and_its_stall_is_told(page: Page, broker: Broker, tmp_path: Path):
    stalled = Scene(PATIENT)
    long_tail_in_drain(stalled)
    stalled.start()
    stalled.run(30.0)
    run = archive.write(stalled.world, PATIENT, tmp_path / "run")
    run.update(run="live-page", redis_url=broker.url, ended=None)
    for path in (run / "events").glob("*"):
        path.unlink()
    log = list(stalled.world.store.log)
    recorder = Writer(run.events, 0.0)
    try:
        for entry in log[:40]:
            recorder.append(entry.stream, entry.entry, entry.data)
        recorder.flush(0.0)
        post(broker.url, "live-page", log[:60])
        with Serving(run, PATIENT) as address:
            page.goto(f"{address}#events")
            expect(page.locator(".pill")).to_have_text("live")
            expect(page.locator(".said")).to_have_text("60 events")
            post(broker.url, "live-page", log[60:])
            expect(page.locator(".said")).to_have_text(f"{len(log)} events")
            expect(page.locator(".why")).to_have_class("card why stuck")
            expect(page.locator(".why .path li").first).to_be_visible()
            shot(page, "live-stuck")
            page.close()
    finally:
        recorder.close(0.0)
