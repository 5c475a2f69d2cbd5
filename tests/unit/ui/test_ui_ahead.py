"""What two processes fold of a log is what one folds, whatever becomes of the second."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.recorder.archive import Index, Writer, read, read_index
from contracts.core import Entry
from pipeline import eventlog
from pipeline.rundir import RunDir
from pipeline.simulate import archive
from pipeline.ui import _ahead, _source
from pipeline.ui._ahead import Part, parts
from pipeline.ui._data import RunData
from pipeline.ui._drawing import Drawing
from pipeline.ui._index import NAMES, Query
from pipeline.ui._samples import Wanted
from pipeline.ui._source import Source
from tests.stalls.scene import BASE, Scene

PATIENCE_S = 60.0
BAD = 330
"""Place of an event that can't be read."""


@pytest.fixture(scope="module")
def recorded(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The scene's log in several segments of small frames, with an event that can't be read, and a torn end."""
    run = archive.write(scene.world, BASE, tmp_path_factory.mktemp("ahead") / "run")
    log = list(scene.world.store.log)
    for path in run.events.glob("*"):
        path.unlink()
    for first, entries in ((0, log[:250]), (250, log[250:500]), (500, log[500:])):
        writer = Writer(run.events, 0.0)
        for place, entry in enumerate(entries, first + 1):
            bad = Entry(entry.stream, entry.entry, b"nonsense") if place == BAD else entry
            writer.append(bad.stream, bad.entry, bad.data)
            if not place % 64:
                writer.flush(0.0)
        writer.close(0.0)
    third = run.events / "000003.zst"
    third.write_bytes(third.read_bytes()[:-9])
    index = read_index(run.events)
    (run.events / "index.json").write_bytes(msgspec.json.encode(Index(index.segments[:2])))
    return run


def plain(run: RunDir) -> RunData:
    """Folded event by event, in one process."""
    data = RunData(run.info(), BASE)
    for entry in read(run.events):
        batch, bad = eventlog.readable([entry], data.index.position(len(data.index) - 1) if len(data.index) else 0)
        data.unreadable += len(bad)
        for each, envelope, _ in batch.items():
            data.apply(each, envelope)
    return data


def drawn(of: RunData | Drawing) -> dict[str, Any]:
    """Everything that is drawn and searched."""
    index, timeline, length = of.index, of.timeline, of.timeline.length
    windows = [(0.0, length), (0.0, length / 3), (length / 2, length / 1.9)]
    return {
        "columns": [index.column(name).tolist() for name in NAMES],
        "actors": index.actors,
        "entries": [index.entry(row) for row in range(len(index))],
        "found": [list(index.choose(Query(kinds=("refit.*",)))), [*index.containing(range(len(index)), "engine-1")]],
        "windows": [timeline.window(index, begin, end, 900) for begin, end in windows],
        "samples": of.samples.page(Wanted(order="longest"), 0, 200),
    }


def judged(data: RunData) -> dict[str, Any]:
    held = {name: value for name, value in vars(data.model).items() if name not in ("_handlers", "clocks")}
    return {
        "charts": data.charts(),
        "overview": data.overview(data.model.last_at, _source.Evidence()),
        "model": held,
        "unreadable": data.unreadable,
    }


def test_merged_parts_are_what_one_process_draws(recorded: RunDir):
    expected = drawn(plain(recorded))
    assert len(expected["entries"]) > 500
    assert expected["windows"][0]["lanes"]
    for size in (100, 512, 100_000):
        merged, encoder, decoder = Drawing(), msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Part)
        for part in parts(recorded.events, size):
            merged.merge(decoder.decode(encoder.encode(part)))
        assert drawn(merged) == expected


def test_what_was_merged_is_gone_on_with(recorded: RunDir, scene: Scene):
    whole, merged = plain(recorded), Drawing()
    first = list(parts(recorded.events, 100))[:3]
    for part in first:
        merged.merge(part)
    at = first[-1].position
    later = [entry for entry in read(recorded.events) if eventlog.number(entry.entry) > at]
    for start in range(0, len(later), 100):
        merged.extend(eventlog.readable(later[start : start + 100], at)[0])
    assert drawn(merged) == drawn(whole)


def test_parts_end_in_front_of_what_is_damaged(recorded: RunDir, tmp_path: Path):
    events = damaged(recorded, tmp_path).events
    found = list(parts(events, 100))
    assert 250 < found[-1].position < 500


async def opened(run: RunDir) -> Source:
    source = Source(run, BASE, lambda: 0.0)
    following = asyncio.create_task(source.follow())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while source.state == "loading" and not following.done():
                await source.change(source.version, 1.0)
    finally:
        following.cancel()
        await asyncio.wait({following}, timeout=PATIENCE_S)
    assert following.cancelled()
    return source


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every log is opened by two processes; the list gets the places of the parts that came."""
    came: list[int] = []
    merge = Drawing.merge

    def noted(self: Drawing, part: Part) -> None:
        came.append(part.position)
        merge(self, part)

    monkeypatch.setattr(_source, "MANY", 0)
    monkeypatch.setattr(_source, "cores", lambda: 2)
    monkeypatch.setattr(Drawing, "merge", noted)
    yield came
    assert not [line for line in children() if "_ahead" in line]


def children() -> list[str]:
    """Command lines of the processes that this one started."""
    found = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True, timeout=PATIENCE_S
    )
    return found.stdout.splitlines()


async def test_two_processes_open_what_one_opens(recorded: RunDir, together: list[int]):
    source, alone = await opened(recorded), plain(recorded)
    assert together[-1] == alone.model.position == len(alone.index) + 1
    assert source.data.unreadable == 1
    assert (drawn(source.data), judged(source.data)) == (drawn(alone), judged(alone))


async def test_an_event_that_only_one_of_them_can_read_is_in_neither(scene: Scene, together: list[int], tmp_path: Path):
    """The second looks at no task's name."""
    run = archive.write(scene.world, BASE, tmp_path / "run")
    log = list(scene.world.store.log)
    odd = next(place for place, entry in enumerate(log) if entry.stream == "tasks")
    envelope = msgspec.msgpack.decode(log[odd].data)
    envelope["body"]["task"] = 5
    log[odd] = Entry(log[odd].stream, log[odd].entry, msgspec.msgpack.encode(envelope))
    for path in run.events.glob("*"):
        path.unlink()
    writer = Writer(run.events, 0.0)
    for entry in log:
        writer.append(entry.stream, entry.entry, entry.data)
    writer.close(0.0)
    source, alone = await opened(run), plain(run)
    assert together
    assert source.data.unreadable == alone.unreadable == 1
    assert (drawn(source.data), judged(source.data)) == (drawn(alone), judged(alone))


FIRST = """
import os, sys
from pathlib import Path
from pipeline.ui import _ahead
out = os.fdopen(int(sys.argv[2]), "wb")
data = _ahead.msgspec.msgpack.encode(next(_ahead.parts(Path(sys.argv[1]), 300)))
LENGTH = _ahead._length.pack(len(data))
"""
"""A process that has made the first part."""
FAULTS = {
    "dies at once": "raise SystemExit(3)",
    "dies after a part": f"{FIRST}\nout.write(LENGTH + data)\nout.flush()\nos.kill(os.getpid(), 9)",
    "dies within a part": f"{FIRST}\nout.write(LENGTH + data[:-9])",
    "writes nonsense": f"{FIRST}\nout.write(_ahead._length.pack(9) + b'nonsense!')",
    "writes too much": f"{FIRST}\nout.write(_ahead._length.pack(1 << 60))",
    "writes nothing": "import time\ntime.sleep(600)",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_becomes_of_the_second_changes_nothing(
    recorded: RunDir, together: list[int], fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(_ahead, "PROGRAM", ("-c", FAULTS[fault]))
    if fault == "writes nothing":
        monkeypatch.setattr(_ahead, "PART_S", 0.5)
    with caplog.at_level(logging.WARNING, "pipeline.ui"):
        source = await opened(recorded)
    alone = plain(recorded)
    assert (drawn(source.data), judged(source.data)) == (drawn(alone), judged(alone))
    assert len(together) == (fault == "dies after a part")
    assert "alone behind event" in caplog.text


async def test_damage_is_named_and_what_is_in_front_of_it_is_shown(
    recorded: RunDir, together: list[int], tmp_path: Path
):
    run = damaged(recorded, tmp_path)
    source = Source(run, BASE, lambda: 0.0)
    following = asyncio.create_task(source.follow())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not source.problem:
                await source.change(source.version, 1.0)
    finally:
        following.cancel()
        await asyncio.wait({following}, timeout=PATIENCE_S)
    assert "000002.zst is damaged" in source.problem
    assert together
    assert source.data.index.position(len(source.data.index) - 1) == source.data.model.position > 250


def damaged(run: RunDir, folder: Path) -> RunDir:
    copied = shutil.copytree(run.path, folder / "run")
    second = copied / "events" / "000002.zst"
    data = bytearray(second.read_bytes())
    data[len(data) // 2] ^= 0xFF
    second.write_bytes(data)
    return RunDir.open(copied)


def test_nobody_is_written_to_for_long(recorded: RunDir):
    """The process whose reader is gone ends."""
    reading, writing = os.pipe()
    command: Sequence[str] = (sys.executable, *_ahead.PROGRAM, str(recorded.events), str(writing))
    with subprocess.Popen(command, pass_fds=(writing,)) as process:
        os.close(writing)
        assert os.read(reading, 1)
        os.close(reading)
        assert process.wait(PATIENCE_S) == 0
