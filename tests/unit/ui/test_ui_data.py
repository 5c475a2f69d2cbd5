"""The views of the page say what the events say, however much of them is asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import events as ev
from contracts.events import kind
from pipeline.eventlog import Batch
from pipeline.oneline import summary
from pipeline.ui import _index, _timeline
from pipeline.ui._barriers import Barriers, Stretch
from pipeline.ui._data import RunData
from pipeline.ui._index import Index, Query
from pipeline.ui._plots import peaks, thin
from pipeline.ui._samples import Wanted
from pipeline.ui._timeline import KINDS, Timeline, binned, levels
from pipeline.why.result import Evidence
from tests.stalls.scene import Scene
from tests.unit.ui.shown import log_of


def search(data: RunData, query: Query, offset: int = 0, limit: int = 500, *, newest: bool = True) -> dict[str, Any]:
    return asyncio.run(data.search(query, offset, limit, newest=newest))


# --- index ---


def test_every_event_is_found_by_row_id_and_place(data: RunData, scene: Scene):
    for row, (position, envelope) in enumerate(log_of(scene)):
        assert data.index.envelope(row) == envelope
        assert data.index.row_of(envelope.id) == row
        assert data.index.row_at(position) == row
        assert (data.index.kind(row), data.index.actor(row)) == (kind(envelope.body), envelope.actor)
    assert data.index.row_of("nobody:1.0") is None
    assert data.index.row_at(10**9) is None


def test_blocks_and_the_open_end_hold_the_same(monkeypatch: pytest.MonkeyPatch, scene: Scene):
    monkeypatch.setattr(_index, "BLOCK", 7)
    monkeypatch.setattr(_index, "KEPT", 1)
    index = Index()
    for entry, (position, envelope) in zip(scene.world.store.log, log_of(scene), strict=True):
        index.extend(Batch((entry,), (envelope,), (position,)))
    assert [index.envelope(row) for row in range(len(index))] == [envelope for _, envelope in log_of(scene)]
    found = [row for part in index.containing(range(len(index)), "ENGINE-1") for row in part]
    assert found == [row for row, entry in enumerate(scene.world.store.log) if b"engine-1" in entry.data]


def test_causes_of_many_are_those_of_each(data: RunData, scene: Scene):
    rows = {envelope.id: row for row, (_, envelope) in enumerate(log_of(scene))}
    want = [rows.get(envelope.causation_id or "", -1) for _, envelope in log_of(scene)]
    assert data.index.causes(np.arange(len(data.index))).tolist() == want
    assert max(want) > 0
    assert data.index.causes(np.arange(0)).tolist() == []


# --- search ---

TWO = ("refit.committed", "step.finished")


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        (Query(), lambda e: True),
        (Query(kinds=("refit.*",)), lambda e: kind(e.body).startswith("refit.")),
        (Query(kinds=("refit.committed", "step.finished")), lambda e: kind(e.body) in TWO),
        (Query(actors=("trainer", "nobody")), lambda e: e.actor == "trainer"),
        (Query(since=1700000001.0, until=1700000002.0), lambda e: 1700000001 <= e.wall_ns / 1e9 <= 1700000002),
        (Query(kinds=("no.such",)), lambda e: False),
    ],
)  # fmt: skip
def test_a_query_finds_what_is_like_it(data: RunData, scene: Scene, query: Query, wanted: Any):
    want = [position for position, envelope in log_of(scene) if wanted(envelope)]
    pages = [search(data, query, offset, 400)["events"] for offset in range(0, len(want) + 400, 400)]
    assert [event["n"] for page in pages for event in page] == want[::-1]
    assert search(data, query)["total"] == len(want)


def test_oldest_first_keeps_places_while_the_log_grows(data: RunData, scene: Scene):
    grown = RunData(data.info, data.config)
    half = len(scene.world.store.log) // 2
    query, pages = Query(text="epoch"), []
    for count, (entry, (_, envelope)) in enumerate(zip(scene.world.store.log, log_of(scene), strict=True), 1):
        grown.apply(entry, envelope)
        if count in (half, len(scene.world.store.log)):
            pages.append(search(grown, query, 3, 10, newest=False))
    assert [event["n"] for event in pages[0]["events"]] == [event["n"] for event in pages[1]["events"]]
    assert pages[0]["total"] < pages[1]["total"]
    assert pages[1]["total"] == search(data, query)["total"], "what came later was not searched"


def test_an_event_is_told_with_its_causes_and_effects(data: RunData, scene: Scene):
    committed = next(row for row in range(len(data.index)) if data.index.kind(row) == "refit.committed")
    found = data.event(committed)
    body = msgspec.json.decode(found["event"])
    assert body["kind"] == "refit.committed"
    chain = [data.index.envelope(cause["row"]) for cause in found["causes"]]
    assert chain[0].id == data.index.envelope(committed).causation_id
    assert [each.causation_id for each in chain[:-1]] == [each.id for each in chain[1:]]
    for effect in found["effects"]:
        assert data.index.envelope(effect["row"]).causation_id == data.index.envelope(committed).id
    with pytest.raises(IndexError):
        data.event(len(data.index))


def test_a_line_is_short_and_tells_times_since_the_start():
    wait = ev.WaitStarted(actor="a", on="b", cause="x" * 500, deadline_at=1012.5)
    text = summary(wait, 1000.0)
    assert "deadline_at=+12.500" in text
    assert len(text) <= 220


# --- timeline ---


def stretches(*steps: tuple[float, Any]) -> list[tuple[str, str, int, float, float, str]]:
    found: list[Stretch] = []
    barriers = Barriers(found.append)
    for at, event in steps:
        barriers.handlers[type(event)](event, at)
    found += barriers.open(99.0)
    return [(s.engine, s.phase, s.epoch, s.start, s.stop, s.end) for s in found]


def requested(epoch: int, *engines: str) -> ev.RefitRequested:
    members = tuple(ev.Member(name, 1) for name in engines)
    return ev.RefitRequested(
        epoch=epoch, version=1, step=1, engines=members, gateways=(), drain="finish", deadline_at=0.0
    )


def started(epoch: int, *engines: str) -> ev.TransferStarted:
    ranks = tuple(ev.Rank(name, 1, n, 1) for n, name in enumerate(engines))
    return ev.TransferStarted(epoch=epoch, version=1, group="g", fresh=True, members=ranks, world_size=3)


def committed(epoch: int, *engines: str) -> ev.RefitCommitted:
    members = tuple(ev.Member(name, 1) for name in engines)
    return ev.RefitCommitted(
        epoch=epoch, version=1, step=1, engines=members, world_size=2, pause_s=1, drain_s=1, transfer_s=1, bytes=1
    )


def drained(epoch: int, engine: str) -> ev.EngineDrained:
    return ev.EngineDrained(epoch=epoch, engine=engine, boot=1, seconds=0.0)


def loaded(epoch: int, engine: str) -> ev.EngineLoaded:
    return ev.EngineLoaded(epoch=epoch, engine=engine, boot=1, digest="", seconds=0.0)


def test_an_engine_goes_through_the_phases_of_an_epoch():
    assert stretches(
        (1, requested(7, "a")), (2, drained(7, "a")), (3, started(7, "a")), (5, loaded(7, "a")), (6, committed(7, "a"))
    ) == [
        ("a", "drain", 7, 1, 2, "done"),
        ("a", "hold", 7, 2, 3, "done"),
        ("a", "transfer", 7, 3, 5, "done"),
        ("a", "verify", 7, 5, 6, "committed"),
    ]


def test_a_quarantine_lasts_until_the_next_epoch_that_asks_for_the_engine():
    out = ev.EngineQuarantined(epoch=7, engine="b", boot=1, reason="digest differs")
    found = stretches(
        (1, requested(7, "a", "b")), (2, out), (3, drained(7, "b")), (4, committed(7, "a")), (9, requested(8, "b"))
    )
    assert ("b", "drain", 7, 1, 2, "quarantined") in found
    assert ("b", "quarantined", 7, 2, 9, "done") in found
    assert ("b", "drain", 8, 9, 99.0, "open") in found


def test_a_failed_epoch_a_death_and_late_words_end_what_they_concern():
    failed = ev.RefitFailed(epoch=7, version=1, phase="transfer", reason="deadline")
    dead = ev.EngineDead(engine="b", boot=1, reason="killed")
    assert stretches((1, requested(7, "a", "b")), (2, dead), (3, failed), (4, drained(7, "a"))) == [
        ("b", "drain", 7, 1, 2, "died"),
        ("a", "drain", 7, 1, 3, "failed"),
    ]


def test_the_window_holds_every_span_and_event_that_it_touches(data: RunData):
    whole = data.window(None, None, 1200)
    spans = [span for lane in whole["lanes"] for span in lane["spans"]]
    assert {KINDS[span[2]] for span in spans} >= {"drain", "hold", "transfer", "verify", "step", "rollout", "wait"}
    assert any("died" in span[4] or "restarted" in span[4] for span in spans), "the killed engine does not show"
    middle = data.timeline.length / 2
    part = data.window(middle, middle + 0.2, 1200)
    assert [s for lane in part["lanes"] for s in lane["spans"]] == [
        s for s in spans if s[0] <= middle + 0.2 and s[1] >= middle
    ]
    assert len(part["marks"]) == part["events"] > 0
    for cause, effect, at, then, by, of in part["arrows"]:
        assert data.index.envelope(effect).causation_id == data.index.envelope(cause).id
        assert (at, then) == (data.index.wall(cause) - 1.7e9, data.index.wall(effect) - 1.7e9) or at <= then
        assert (by, of) == (data.index.actor(cause), data.index.actor(effect))
        assert by != of


def test_a_window_of_much_is_bins_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, data: RunData):
    whole = data.window(None, None, 1200)
    monkeypatch.setattr(_timeline, "SPANS", 5)
    monkeypatch.setattr(_timeline, "FEWEST", 5)
    monkeypatch.setattr(_timeline, "MARKS", 10)
    coarse = data.window(None, None, 1200)
    for fine, lane in zip(whole["lanes"], coarse["lanes"], strict=True):
        if "bins" in lane:
            assert len(lane["spans"]) + sum(found[2] for found in lane["bins"]) == len(fine["spans"])
        elif "levels" in lane:
            assert max(lane["levels"]) > 0
        else:
            assert lane["spans"] == fine["spans"]
    assert sum(map(sum, coarse["density"].values())) == len(data.index) == coarse["events"]
    assert len(msgspec.json.encode(coarse)) < 100_000


def test_what_is_under_way_at_the_end_is_told(scene: Scene):
    timeline, index = Timeline(), Index()
    for entry, (position, envelope) in zip(scene.world.store.log, log_of(scene), strict=True):
        timeline.extend(index.extend(Batch((entry,), (envelope,), (position,))), [envelope])
        if isinstance(envelope.body, ev.TransferStarted):
            break
    under_way = timeline.window(index, 0.0, timeline.length, 800)["open"]
    assert ("engine-0", "barrier", "transfer") in {(each[0], each[1], KINDS[each[3]]) for each in under_way}
    assert any(each[1] == "waits" for each in under_way)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1, max_size=40), st.integers(1, 50))
def test_bins_count_every_span_and_levels_are_those_of_the_middle(spans: list[tuple[float, float]], bins: int):
    starts = np.array([start for start, _ in spans])
    ends = starts + np.array([length for _, length in spans])
    found = binned(starts, ends, np.zeros(len(spans), int), 0.0, 110.0, bins)
    assert sum(each[2] for each in found) == len(spans)
    assert all(0 <= each[3] <= 1 for each in found)
    for bin, level in enumerate(levels(starts, ends, 0.0, 110.0, bins)):
        middle = (bin + 0.5) * 110.0 / bins
        assert level == sum(start <= middle < end for start, end in zip(starts, ends, strict=True))


# --- charts, samples, the rest ---


def test_charts_show_the_rows_of_the_run(data: RunData):
    found = {chart["name"]: chart for chart in data.charts()}
    assert {"reward", "staleness", "pauses", "depth", "throughput", "waits", "lags"} <= set(found)
    steps = [row.step for row in data.view.rows]
    assert found["reward"]["x"] == steps
    assert found["reward"]["series"][0]["y"] == [row.reward for row in data.view.rows]
    for chart in found.values():
        assert {len(series["y"]) for series in chart["series"]} == {len(chart["x"])}
    zoomed = {chart["name"]: chart for chart in data.charts(3, 5)}
    assert zoomed["reward"]["x"] == [3, 4, 5]
    pauses = found["pauses"]
    total = sum(value for series in pauses["series"] for value in series["y"])
    assert total == pytest.approx(sum(refit.pause_s for refit in data.view.refits))


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300), st.integers(8, 50))
def test_thinning_keeps_the_extremes_and_the_order(values: list[float | None], points: int):
    x, (kept,) = thin(list(range(len(values))), [values], points)
    assert x == sorted(set(x))
    assert [values[n] for n in x] == kept
    assert len(x) <= max(points, 2) + 2
    known = [value for value in values if value is not None]
    if known:
        assert {max(known), min(known)} <= set(kept)


def test_of_many_bars_the_longest_stay():
    x, (drain, load) = peaks(list(range(100)), [[float(n % 10) for n in range(100)], [1.0] * 100], 10)
    assert drain == [9.0] * 10
    assert load == [1.0] * 10
    assert x == list(range(9, 100, 10))


def test_samples_are_listed_by_group_version_split_and_order(data: RunData, scene: Scene):
    bodies = [
        (row, envelope.body)
        for row, (_, envelope) in enumerate(log_of(scene))
        if isinstance(envelope.body, ev.TrajectoryFinished)
    ]
    assert data.samples.page(Wanted(), 0, 3) == (len(bodies), [row for row, _ in bodies[:-4:-1]])
    total, rows = data.samples.page(Wanted(index=2), 0, 50)
    assert set(rows) == {row for row, body in bodies if body.index == 2}
    assert total == len(rows)
    total, rows = data.samples.page(Wanted(version=1), 0, 200)
    assert {row for row, body in bodies if any(s.version == 1 for s in body.sources)} <= set(rows)
    rewards = [data.index.envelope(row).body.reward for row in data.samples.page(Wanted(order="highest"), 0, 200)[1]]  # type: ignore[union-attr]
    assert rewards == sorted(rewards, reverse=True)
    assert data.samples.page(Wanted(split="eval"), 0, 50)[0] == sum(body.split == "eval" for _, body in bodies)


def test_the_overview_tells_engines_and_actors(data: RunData, scene: Scene):
    found = data.overview(data.model.last_at, Evidence())
    engines = {engine["name"]: engine for engine in found["engines"]}
    assert engines["engine-1"]["boots"] == 2
    assert engines["engine-0"]["boots"] == 1
    assert engines["engine-0"]["in_flight"] is None
    assert engines["engine-0"]["version"] == data.view.serving["engine-0"]
    assert {actor["name"] for actor in found["actors"]} >= {"trainer", "buffer", "refit", "gateway-0"}
    assert dict(found["figures"])["restarts"] == "1"
    assert msgspec.json.decode(msgspec.json.encode(found))["step"] == data.view.step
