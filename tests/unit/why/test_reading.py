"""Whoever waits for a long log at a terminal sees how far its reading is; elsewhere nothing is written."""

from __future__ import annotations

import io
import itertools
from functools import partial
from types import SimpleNamespace

import pytest

from pipeline import eventlog, reading
from pipeline.parting import compare
from pipeline.rundir import RunDir
from pipeline.simulate import archive
from pipeline.why import load
from tests.stalls.scene import BASE, Scene


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    scene = Scene(BASE)
    scene.start()
    scene.run(8.0)
    return archive.write(scene.world, BASE, tmp_path_factory.mktemp("runs") / "long")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal, on which the first thing is said at once, and every later one a second after."""
    found = Terminal()
    seconds = itertools.count()
    monkeypatch.setattr(reading, "sys", SimpleNamespace(stderr=found))
    monkeypatch.setattr(reading.time, "monotonic", lambda: float(next(seconds)))
    return found


def events(run: RunDir) -> int:
    return sum(segment.records for segment in eventlog.segments(run))


def test_why_says_how_far_it_has_read_and_takes_it_back(run: RunDir, terminal: Terminal):
    assert load.gather(run, BASE).model.events == events(run)
    said = terminal.getvalue().split(reading.CLEAR)
    assert said[1] == f"reading long: {eventlog.BATCH} of {events(run)} events"
    assert f"reading long: {events(run)} of {events(run)} events" in said
    assert said[-1] == "", "the answer stands alone"


def test_diff_says_so_too(run: RunDir, terminal: Terminal):
    found = compare(partial(reading.numbered, run), partial(reading.numbered, run))
    assert found.parting is None
    assert f"of {events(run)} events" in terminal.getvalue()


def test_what_is_read_soon_or_into_a_file_says_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    for stream, patience in ((Terminal(), 1e9), (io.StringIO(), -1.0)):
        monkeypatch.setattr(reading, "FIRST_S", patience)
        monkeypatch.setattr(reading, "sys", SimpleNamespace(stderr=stream))
        assert sum(len(batch) for batch in reading.told(run, eventlog.batches(run))) == events(run)
        assert stream.getvalue() == ""


def test_a_run_without_events_says_nothing(terminal: Terminal, run: RunDir):
    assert list(reading.told(run, [])) == []
    assert terminal.getvalue() == ""
