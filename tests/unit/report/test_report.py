"""The report: the page with its data in it, which needs no network and lets nothing else in."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import msgspec
import pytest
from story import Story, failed, stepped, trained

from config import loading
from contracts import events
from contracts.core import Entry
from contracts.envelope import encode
from pipeline import report, rundir
from pipeline.ui._data import RunData

CONFIG = loading.load("quickstart", ["target_reward=0.9", "buffer.max_staleness=0"])


def story() -> Story:
    found = trained(12)
    found.add(events.EvalFinished(version=3, step=3, mean_reward=0.25, samples=4))
    found.add(events.EvalFinished(version=6, step=6, mean_reward=0.5, samples=4))
    found.add(events.RefitFailed(epoch=20, version=12, phase="transfer", reason="deadline"))
    found.add(events.EngineQuarantined(epoch=21, engine="engine-1", boot=1, reason="digest <b>differs</b>"))
    found.add(events.WaitEnded(actor="trainer", on="buffer", seconds=2.5))
    found.add(events.GroupDropped(task="t", index=99, reason="stale", samples=2))
    found.add(events.SampleFailed(task="t", index=98, sample=0, attempt=3, samples=2, failure="timeout", reason="slow"))
    found.add(failed("collector-0", fatal=False, message="</script><script>alert(1)</script>"))
    found.add(stepped(13))
    return found


def folded(told: Story) -> RunData:
    data = RunData(rundir.describe("demo", CONFIG, "digest"), CONFIG)
    for place, envelope in enumerate(told.log, 1):
        data.apply(Entry(envelope.stream, f"{place}-0", encode(envelope)), envelope)
    return data


@pytest.fixture(scope="module")
def page() -> str:
    return report.render(folded(story()))


def held(page: str) -> Any:
    (text,) = re.findall(r'<script id="embedded" type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def charts(page: str) -> dict[str, Any]:
    return {chart["name"]: chart for chart in held(page)["plots"]}


def series(chart: Any, label: str) -> list[Any]:
    return next(each["y"] for each in chart["series"] if each["label"] == label)


def test_reward_is_drawn_for_training_and_held_out_tasks_with_the_target(page: str) -> None:
    chart = charts(page)["reward"]
    assert series(chart, "train")[:12] == [(n / 12 + 0.5) / 2 for n in range(1, 13)]
    assert [(x, y) for x, y in zip(chart["x"], series(chart, "held out"), strict=True) if y] == [(3, 0.25), (6, 0.5)]
    assert chart["target"] == 0.9


def test_staleness_counts_every_sample_and_marks_what_is_over_the_bound(page: str) -> None:
    chart = charts(page)["lags"]
    assert (chart["ticks"], series(chart, "samples"), series(chart, "over the bound")) == (
        ["0", "1"],
        [12, None],
        [None, 12],
    )


def test_each_refit_is_a_bar_of_its_parts(page: str) -> None:
    chart = charts(page)["pauses"]
    assert len(chart["x"]) == 13
    heights = [series(chart, part)[0] for part in ("drain", "transfer", "load, verify, commit")]
    assert heights == pytest.approx([0.2, 0.1, 0.2])


def test_mismatch_throughput_waits_and_policy_metrics_are_drawn(page: str) -> None:
    found = charts(page)
    assert series(found["mismatch"], "tokens of older versions")[:12] == [1.02] * 12
    assert series(found["throughput"], "generated")[1] == pytest.approx(10 / 6)
    assert (found["waits"]["ticks"], series(found["waits"], "waited")) == (["trainer for buffer"], [2.5])
    assert series(found["policy-loss"], "loss")[:12] == [0.1] * 12
    assert "policy-kl_reference" not in found


def test_the_page_needs_no_network(page: str) -> None:
    assert len(page) < 400_000
    own = page.replace((report.STATIC / "vendor" / "uPlot.iife.min.js").read_text(), "")
    assert re.findall(r"https?://", own) == []
    assert "src=" not in re.sub(r"<script>.*", "", own, flags=re.DOTALL)
    assert "<link" not in own
    assert "@import" not in own
    assert not re.search(r"^(import|export) ", report.bundle(), re.MULTILINE)


def test_nothing_runs_but_what_the_policy_names(page: str) -> None:
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert "unsafe" not in policy
    inline = re.findall(r'<script(?: type="module")?>(.*?)</script>', page, re.DOTALL)
    inline += re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(inline) == 3
    for text in inline:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_text_of_events_can_not_become_markup(page: str) -> None:
    assert "<b>differs" not in page
    assert page.count("</script>") == 3
    assert any("alert(1)</script>" in what for _, _, what in held(page)["status"]["mishaps"]), "it is told as text"


def test_the_page_tells_the_facts(page: str) -> None:
    found = held(page)
    figures = dict(found["status"]["figures"])
    assert (figures["reward"], figures["held out"]) == ("0.292 to 0.750", "0.500")
    told = json.dumps(found["status"]["mishaps"])
    for fact in ("1 groups dropped: stale", "1 failed: timeout", "epoch 20", "collector-0"):
        assert fact in told, fact
    assert "sluice-rl" in dict(found["record"]["facts"])
    assert "target_reward: 0.9" in found["record"]["config"]
    assert len(found["events"]) == len(story().log)
    assert found["details"][str(found["events"][-1]["row"])]["kind"] == "step.finished"


def test_a_long_log_is_cut_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "EVENTS", 20)
    monkeypatch.setattr(report, "DETAILS", 5)
    found = report.embedded(folded(story()))
    assert len(found["events"]) <= 20
    assert not {event["kind"] for event in found["events"]} & set(report.COMMON)
    assert len(found["details"]) == 5
    assert found["record"]["left_out"] == len(story().log) - len(found["events"])


def test_data_that_is_no_number_is_still_json() -> None:
    odd = Story()
    odd.add(stepped(1, loss=float("nan")))
    odd.add(stepped(2, loss=float("inf")))
    odd.add(stepped(3, loss=0.5))
    encoded = msgspec.json.decode(msgspec.json.encode(folded(odd).charts()))
    (loss,) = [chart for chart in encoded if chart["name"] == "policy-loss"]
    assert loss["series"][0]["y"] == [None, None, 0.5]
