"""The terminal application: panels over a `Feed`, a slider through time, and keys."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.widgets import DataTable, Footer, Input, Label, Sparkline, Static, TabbedContent, TabPane, Tabs
from textual.worker import get_current_worker

from actors.recorder.ordering import number
from config.schema import RunConfig
from pipeline.errors import PipelineError
from pipeline.top import tables
from pipeline.top.board import RECENT, Board
from pipeline.top.feed import Feed
from pipeline.top.search import Search, holds
from pipeline.top.tables import Row
from pipeline.why import render
from pipeline.why.diagnosis import NOTHING, diagnose
from pipeline.why.result import Evidence

REFRESH_S = 0.5
PLACEHOLDER = f"text: filters the newest {RECENT} events; enter searches the whole log up to this moment"
STRIDE = 50
"""Parts of a log that the arrow keys step over."""

TABLES: dict[str, tuple[str, ...]] = {
    "actors": tables.ACTORS,
    "engines": tables.ENGINES,
    "streams": tables.STREAMS_HEAD,
    "buffer": tables.BUFFER,
    "events": tables.EVENTS,
}


class Top(App[None]):
    """Shows the newest moment until a key asks for an earlier one."""

    CSS = """
    #head { padding: 0 1; height: auto; }
    TabbedContent { height: 1fr; }
    #slider { height: 1; padding: 0 1; color: $accent; }
    DataTable { height: auto; }
    .title { padding: 1 1 0 1; text-style: bold; }
    Sparkline { height: 3; margin: 0 1; }
    #why { padding: 1; }
    """
    TITLE = "pipeline top"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("left", "slide(-1)", "back", priority=True),
        Binding("right", "slide(1)", "forward", priority=True),
        Binding("shift+left", "event(-1)", "event back", priority=True),
        Binding("shift+right", "event(1)", "event forward", priority=True),
        Binding("home", "edge(0)", "first", priority=True),
        Binding("end", "edge(1)", "now", priority=True),
        Binding("slash", "search", "search events"),
        Binding("escape", "leave", "leave the search", show=False),
        *(
            Binding(str(n), f"tab('{name}')", name, show=False)
            for n, name in enumerate(("overview", "plots", "events", "why"), 1)
        ),
    ]

    def __init__(self, feed: Feed, config: RunConfig) -> None:
        super().__init__()
        self._feed = feed
        self._config = config
        self._board: Board | None = None
        """The earlier moment that is shown, None for the newest."""
        self._evidence: Evidence | None = None
        """What its actors were at, None until they were looked into."""
        self._search: Search | None = None
        self._wanted: int | None = None
        self._drawn: dict[str, list[Row]] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with TabbedContent(initial="overview"):
            with TabPane("1 overview", id="overview"), VerticalScroll():
                for name in ("actors", "engines", "streams", "buffer"):
                    yield Label(name, id=f"{name}-title", classes="title", markup=False)
                    yield DataTable(id=name, cursor_type="none", zebra_stripes=True)
            with TabPane("2 plots", id="plots"):
                yield VerticalScroll(id="charts")
            with TabPane("3 events", id="events-pane"):
                yield Input(placeholder=PLACEHOLDER, id="search")
                yield Label("", id="searched", markup=False)
                with VerticalScroll():
                    yield DataTable(id="events", cursor_type="none", zebra_stripes=True)
            with TabPane("4 why", id="why-pane"), VerticalScroll():
                yield Static(id="why")
        yield Static(id="slider")
        yield Footer()

    def on_mount(self) -> None:
        for name, columns in TABLES.items():
            self.query_one(f"#{name}", DataTable).add_columns(*columns)
        for widget in (self.query_one(Tabs), *self.query(DataTable)):
            widget.can_focus = False  # the arrow keys move through time
        self._feed.start()
        self.set_interval(REFRESH_S, self.draw)
        self.draw()

    def on_unmount(self) -> None:
        self._feed.stop()

    # --- drawing ---

    def draw(self) -> None:
        """Show the chosen moment. While the application closes, a tick may find that its widgets are gone."""
        with self._feed.lock, contextlib.suppress(NoMatches):
            board = self._board or self._feed.history.board
            live = self._feed.live and self._board is None
            now = time.time() if live else board.at if self._board else max(board.at, self._feed.end)
            self._head(board, now, live=live)
            evidence = self._feed.evidence if self._board is None else self._evidence
            self._tables(board, now, evidence, live=live)
            self._events(board)
            self._plots(board)
            self._why(board, now, evidence or NOTHING)
            self._slider(board)

    def _head(self, board: Board, now: float, *, live: bool) -> None:
        text = Text()
        if self._feed.error:
            text.append(f"{self._feed.error}\n", "bold red")
        for name, value in tables.headline(self._config, board, now, live=live):
            text.append(f"{name:<9}", "bold").append(f"{value}\n")
        text.right_crop(1)
        self.query_one("#head", Static).update(text)

    def _tables(self, board: Board, now: float, evidence: Evidence | None, *, live: bool) -> None:
        self._fill("actors", tables.actors(self._config, board, now))
        self._fill("engines", tables.engines(self._config, board, now, evidence))
        self._fill("streams", tables.streams(board, now, self._feed.depths if live else None, evidence))
        self._fill("buffer", tables.buffer(board, now))
        for name, title in tables.titles(evidence, live=live).items():
            self.query_one(f"#{name}-title", Label).update(title)

    def _events(self, board: Board) -> None:
        """The newest events that hold the text, and those that a search found before them."""
        wanted = self.query_one("#search", Input).value.lower()
        search = self._search
        if search is not None and (search.text != wanted or search.upto > board.position):
            search = None
        if search is not None and search.done and board.position > search.upto + RECENT // 2:
            search.go_on(board.position)
            self._look_through(search)
        behind = 0 if search is None else search.seen
        newest = [item for item in board.recent if number(item[0].entry) > behind]
        listed = tables.events(newest, board.view.started_at or 0.0)
        rows = [row for row in listed if holds(row, wanted)]
        self._fill("events", [*rows, *(search.found if search else ())])
        self.query_one("#searched", Label).update(search.line() if search else "")

    def _fill(self, name: str, rows: Iterable[Row]) -> None:
        """Cells hold text of the run, which is no markup."""
        fresh = list(rows)
        if self._drawn.get(name) == fresh:
            return
        self._drawn[name] = fresh
        table = self.query_one(f"#{name}", DataTable)
        table.clear()
        table.add_rows([Text(cell) for cell in row] for row in fresh)

    def _plots(self, board: Board) -> None:
        charts = self.query_one("#charts", VerticalScroll)
        found = tables.plots(board)
        if not charts.children:
            for _ in found:
                charts.mount(Label("", classes="title", markup=False), Sparkline())
        labels, lines = charts.query(Label), charts.query(Sparkline)
        for label, line, (title, values) in zip(labels, lines, found.items(), strict=False):  # mounting takes a while
            label.update(tables.legend(title, values))
            line.data = values

    def _why(self, board: Board, now: float, evidence: Evidence) -> None:
        if not board.model.events:
            return
        found = diagnose(board.model, self._config, now, evidence)
        self.query_one("#why", Static).update(Text("\n".join(render.lines(found))))

    def _slider(self, board: Board) -> None:
        bar = self.query_one("#slider", Static)
        end = self._feed.history.board.position
        if not self._feed.loaded:
            bar.update(Text(f"reading: {end:,} of at least {self._feed.expected:,} events"))
            return
        bar.update(Text(tables.slider(board.position, end, board.at, self.size.width - 45)))

    # --- keys ---

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While text is typed, its keys are the text's."""
        return action not in ("slide", "event", "edge") or not isinstance(self.focused, Input)

    def action_leave(self) -> None:
        self.set_focus(None)

    def on_input_submitted(self, submitted: Input.Submitted) -> None:
        """The search stands; keys are commands again."""
        self.set_focus(None)
        self._begin_search()

    def _begin_search(self) -> None:
        """Search the log up to the moment that is shown."""
        with self._feed.lock:
            board = self._board or self._feed.history.board
            wanted = self.query_one("#search", Input).value.lower()
            self._search = Search(wanted, board.position, board.view.started_at or 0.0) if wanted else None
        if self._search is not None:
            self._look_through(self._search)

    @work(thread=True, exclusive=True, group="search")
    def _look_through(self, search: Search) -> None:
        """Another search, or one up to another moment, makes this one void."""
        worker = get_current_worker()
        try:
            for batch in self._feed.batches(search.seen):
                with self._feed.lock:
                    search.take(batch)
                if search.done or worker.is_cancelled:
                    return
            with self._feed.lock:
                search.end()
        except PipelineError as error:
            self._feed.error = str(error)

    def action_tab(self, name: str) -> None:
        panes = {"events": "events-pane", "why": "why-pane"}
        self.query_one(TabbedContent).active = panes.get(name, name)

    def action_search(self) -> None:
        self.action_tab("events")
        self.query_one("#search", Input).focus()

    def action_slide(self, direction: int) -> None:
        self._go(direction * max(1, self._feed.history.board.position // STRIDE))

    def action_event(self, direction: int) -> None:
        self._go(direction)

    def action_edge(self, last: int) -> None:
        self._go(None if last else -self._feed.history.board.position)

    def _go(self, by: int | None) -> None:
        end = self._feed.history.board.position
        if not self._feed.loaded or not end:
            return
        here = end if self._wanted is None else self._wanted
        there = end if by is None else min(max(here + by, 1), end)
        self._wanted = None if there == end else there
        if self._wanted is None:
            self._board = None
            self._moved()
        else:
            self._seek(self._wanted)

    @work(thread=True, exclusive=True)
    def _seek(self, position: int) -> None:
        """Fold up to there; a later key makes this one void."""
        worker = get_current_worker()
        try:
            board = self._feed.at(position)
        except PipelineError as error:
            self._feed.error = str(error)
            return

        def wanted() -> bool:
            return not worker.is_cancelled and self._wanted == position

        if not wanted():
            return
        self._board, self._evidence = board, None
        self.call_from_thread(self._moved)
        evidence = self._feed.look(board.position, wanted)
        if wanted():
            self._evidence = evidence
            self.call_from_thread(self.draw)

    def _moved(self) -> None:
        if self._search is not None:
            self._begin_search()
        self.draw()
