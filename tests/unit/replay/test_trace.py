"""A trace that Perfetto can draw: every span on its track, arrows that arrive, barriers with their phases."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from contracts import events
from contracts.envelope import decode
from pipeline import cli, trace
from pipeline.rundir import RunDir
from tests.stalls.scene import Scene
from tests.unit.view.story import Story


@pytest.fixture(scope="module")
def made(scene: Scene) -> dict[str, Any]:
    return trace.chrome(decode(entry.stream, entry.data) for entry in scene.world.store.log)


def of(made: dict[str, Any], *phases: str) -> list[dict[str, Any]]:
    return [event for event in made["traceEvents"] if event["ph"] in phases]


def names(made: dict[str, Any]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in of(made, "M") if e["name"] == "process_name"}


def test_every_event_has_the_fields_that_the_format_asks_for(made: dict[str, Any]):
    assert {event["ph"] for event in made["traceEvents"]} == {"M", "X", "s", "f", "b", "e"}
    for event in made["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0


def test_every_actor_has_a_process_and_every_event_of_the_log_a_mark(made: dict[str, Any], scene: Scene):
    assert set(names(made).values()) >= set(scene.world.actors)
    marks = [e for e in of(made, "X") if e["tid"] == trace.EVENTS]
    assert len(marks) == len(scene.world.store.log)


def test_spans_of_one_track_nest(made: dict[str, Any]):
    tracks: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in of(made, "X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)


def test_every_arrow_leaves_its_cause_and_arrives_later_at_another_actor(made: dict[str, Any], scene: Scene):
    starts = {event["id"]: event for event in of(made, "s")}
    ends = {event["id"]: event for event in of(made, "f")}
    assert starts.keys() == ends.keys()
    assert all(ends[n]["ts"] >= starts[n]["ts"] and ends[n]["pid"] != starts[n]["pid"] for n in starts)
    log = [decode(entry.stream, entry.data) for entry in scene.world.store.log]
    by_id = {envelope.id: envelope for envelope in log}
    caused = [e for e in log if e.causation_id in by_id and by_id[e.causation_id].actor != e.actor]
    assert len(starts) == len(caused) > 50
    marked = {(event["pid"], event["ts"]) for event in of(made, "X") if event["tid"] == trace.EVENTS}
    assert all((event["pid"], event["ts"]) in marked for event in starts.values()), (
        "an arrow needs a mark to leave from"
    )


def test_a_refit_is_a_span_with_its_phases_inside(made: dict[str, Any], scene: Scene):
    pid = next(pid for pid, name in names(made).items() if name == "refit")
    spans = [e for e in of(made, "X") if e["pid"] == pid and e["tid"] >= trace.DOES and e["tid"] < trace.WAITS]
    whole = [e for e in spans if e["name"].startswith("refit ")]
    committed = sum(isinstance(decode(e.stream, e.data).body, events.RefitCommitted) for e in scene.world.store.log)
    assert sum(e["args"]["end"] == "committed" for e in whole) == committed > 2
    for span in whole:
        inside = [e for e in spans if e["args"]["epoch"] == span["args"]["epoch"] and e is not span]
        if span["args"]["end"] == "committed":
            assert [e["name"] for e in sorted(inside, key=lambda e: e["ts"])] == ["drain", "transfer", "verify"]
            assert sum(e["dur"] for e in inside) == pytest.approx(span["dur"], abs=1.0)


def test_rollouts_begin_and_end_once_each(made: dict[str, Any]):
    counts = Counter((event["ph"], event["id"]) for event in of(made, "b", "e"))
    assert set(counts.values()) == {1}
    assert {id for ph, id in counts if ph == "b"} == {id for ph, id in counts if ph == "e"}


def test_what_is_still_open_ends_with_the_log():
    story = Story()
    story.add(events.RunStarted(config_digest=""))
    story.add(events.WaitStarted(actor="trainer", on="buffer", cause="no batch"), actor="trainer")
    story.add(
        events.RefitRequested(epoch=1, version=0, step=0, engines=(), gateways=(), drain="finish", deadline_at=0.0),
        actor="refit",
    )
    story.add(events.DataExhausted(issued=3), after=7.0, actor="source")
    spans = {e["name"]: e for e in of(trace.chrome(story.log), "X") if e["tid"] != trace.EVENTS}
    assert spans["waits for buffer"]["dur"] == pytest.approx(8e6)
    assert (spans["waits for buffer"]["args"]["over"], spans["refit 1"]["args"]["end"]) == (False, "open")
    assert spans["drain"]["dur"] == spans["refit 1"]["dur"] == pytest.approx(7e6)


def test_the_command_writes_json(run: RunDir, tmp_path: Path):
    out = tmp_path / "trace.json"
    result = CliRunner().invoke(cli.main, ["trace", str(run.path), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert len(json.loads(out.read_bytes())["traceEvents"]) > 1000
    refused = CliRunner().invoke(cli.main, ["trace", str(run.path), "-o", str(tmp_path / "no" / "trace.json")])
    assert (refused.exit_code, "can't be written" in refused.output) == (2, True)


def test_a_load_has_its_phases_within_it_and_one_of_an_old_log_has_none():
    story = Story()
    story.add(events.RunStarted(config_digest="c"))
    old = events.EngineLoaded(epoch=1, engine="engine-0", boot=1, digest="d", seconds=0.5)
    phases = (events.Phase("join", 0.1), events.Phase("broadcast", 0.3), events.Phase("digest", 9.0))
    story.add(old, actor="engine-0")
    story.add(msgspec.structs.replace(old, epoch=2, phases=phases, receiver="direct"), actor="engine-0")
    spans = trace.Spans()
    for envelope in story.log:
        spans.apply(envelope)
    found = [(span.name, round(span.start), round(span.end)) for span in spans.spans]
    assert found == [
        ("load epoch 1", 500_000, 1_000_000),
        ("load epoch 2", 1_500_000, 2_000_000),
        ("join", 1_500_000, 1_600_000),
        ("broadcast", 1_600_000, 1_900_000),
        ("digest", 1_900_000, 2_000_000),
    ]
    assert spans.spans[1].args == {"digest": "d", "receiver": "direct"}


def test_the_timeline_of_one_refit_holds_what_was_about_it_and_no_more(scene: Scene):
    log = [decode(entry.stream, entry.data) for entry in scene.world.store.log]
    whole, cut = (trace.chrome(log, epoch) for epoch in (None, 2))
    (refit,) = [event for event in of(cut, "X") if event["name"] == "refit 2"]
    begin, end = refit["ts"] - trace.BESIDE_US, refit["ts"] + refit["dur"] + trace.BESIDE_US
    assert all(event["ts"] <= end and event["ts"] + event["dur"] >= begin for event in of(cut, "X"))
    about = [event for event in of(whole, "X") if event["ts"] <= end and event["ts"] + event["dur"] >= begin]
    assert Counter(event["name"] for event in of(cut, "X")) == Counter(event["name"] for event in about)
    assert len(of(cut, "b")) == len(of(cut, "e")) < len(of(whole, "b"))
    assert len(of(cut, "s")) == len(of(cut, "f")) < len(of(whole, "s"))


def test_a_refit_that_is_not_in_the_log_is_refused_with_those_that_are(run: RunDir, tmp_path: Path):
    result = CliRunner().invoke(cli.main, ["trace", str(run.path), "-o", str(tmp_path / "t.json"), "--epoch", "9999"])
    assert result.exit_code == 2
    assert "no refit 9999 in the log; epochs there: 1 to " in result.output
    assert trace.chrome(()) == {"traceEvents": [], "displayTimeUnit": "ms", "otherData": {"run": ""}}
    with pytest.raises(LookupError, match="epochs there: none"):
        trace.chrome((), 1)
