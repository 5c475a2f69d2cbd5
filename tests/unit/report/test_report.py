"""The report: every chart shows what the events say, and the file needs no network."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from story import Story, failed, stepped, trained

from config import loading
from config.schema import RunConfig
from contracts import events
from pipeline import report, rundir
from pipeline.charts import POINTS, Chart, charts, moving_mean, thin
from pipeline.view import View

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


def view() -> View:
    return View().apply_all(story().log)


def drawn(config: RunConfig = CONFIG) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts(config, view())}


def trace(chart: Chart, name: str) -> dict[str, Any]:
    return next(trace for trace in chart.data if trace.get("name") == name)


def page() -> str:
    info = rundir.describe("demo", CONFIG, "digest")
    return report.render(info, CONFIG, view())


def test_reward_is_drawn_for_training_and_held_out_tasks_with_the_target() -> None:
    chart = drawn()["reward"]
    assert trace(chart, "train")["y"] == [(n / 12 + 0.5) / 2 for n in range(1, 13)]
    assert (trace(chart, "held out")["x"], trace(chart, "held out")["y"]) == ([3, 6], [0.25, 0.5])
    assert chart.layout["shapes"][0]["y0"] == 0.9
    assert "shapes" not in drawn(RunConfig())["reward"].layout


def test_staleness_counts_every_sample_and_marks_what_is_over_the_bound() -> None:
    (bars,) = drawn()["staleness"].data
    assert (bars["x"], bars["y"]) == ([0, 1], [12, 12])
    assert bars["marker"]["color"][0] != bars["marker"]["color"][1]


def test_each_refit_is_a_bar_of_its_parts_and_mishaps_are_marked() -> None:
    chart = drawn()["refits"]
    assert len(trace(chart, "drain")["x"]) == 13
    heights = [trace(chart, part)["y"][0] for part in ("drain", "transfer", "load, verify, commit")]
    assert heights == pytest.approx([0.2, 0.1, 0.2])
    assert trace(chart, "failed epoch")["text"] == ["epoch 20  transfer: deadline"]
    assert len(trace(chart, "quarantine")["x"]) == 1


def test_mismatch_throughput_waits_and_policy_metrics_are_drawn() -> None:
    found = drawn()
    assert trace(found["mismatch"], "tokens of older versions")["y"] == [1.02] * 12
    assert trace(found["throughput"], "generated")["y"][0] == pytest.approx(10 / 6)
    assert found["waits"].data[0]["y"] == ["trainer for buffer"]
    assert found["waits"].data[0]["x"] == [2.5]
    assert found["policy-loss"].data[0]["y"] == [0.1] * 12
    assert "policy-kl_reference" not in found


def test_a_run_of_one_step_draws_only_what_it_has() -> None:
    one = Story()
    one.add(stepped(1))
    assert charts(CONFIG, View().apply_all(one.log)) == []


def test_the_page_needs_no_network() -> None:
    """Outside of the inlined library, which asks for nothing unless a map is drawn, no address occurs."""
    own = page().replace(report.plotly(), "")
    assert len(own) < 200_000
    assert re.findall(r"(?:https?:)?//[\w.]", own.replace("//# ", "")) == []
    assert "src=" not in own
    assert "<link" not in own
    assert "@import" not in own


def test_text_of_events_can_not_become_markup() -> None:
    own = page().replace(report.plotly(), "")
    assert "<b>differs" not in own
    assert "alert(1)</script>" not in own
    assert own.count("</script>") == 2


def test_every_chart_has_its_place_and_its_call() -> None:
    own = page().replace(report.plotly(), "")
    places = re.findall(r"<div id=(chart-[\w-]+)>", own)
    calls = re.findall(r'draw\(\.\.\.\["(chart-[\w-]+)"', own)
    assert sorted(places) == sorted(calls)
    assert len(calls) == len(drawn())


def test_the_page_tells_the_facts() -> None:
    own = page()
    for fact in (
        "0.292 to 0.750",
        "0.500",
        "1 groups dropped: stale",
        "1 failed: timeout",
        "epoch 20",
        "collector-0",
        "sluice-rl",
        "target_reward: 0.9",
    ):
        assert fact in own, fact


def test_data_that_is_no_number_is_still_json() -> None:
    odd = Story()
    odd.add(stepped(1, loss=float("nan")))
    odd.add(stepped(2, loss=float("inf")))
    text = report.plots(charts(CONFIG, View().apply_all(odd.log)))
    payload = re.findall(r"draw\(\.\.\.(.*)\);", text)
    assert [msgspec.json.decode(p)[1][0]["y"] for p in payload if "policy-loss" in p] == [[None, None]]


@given(st.lists(st.integers(), max_size=60), st.integers(1, 20))
def test_thinning_keeps_order_and_the_last(items: list[int], points: int) -> None:
    kept = thin(items, points)
    assert len(kept) <= points + 1
    assert kept[-1:] == items[-1:]
    left = iter(items)
    assert all(item in left for item in kept)
    assert thin(list(range(POINTS))) == list(range(POINTS))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_the_moving_mean_stays_within_the_values(values: list[float]) -> None:
    means = moving_mean(values, 5)
    assert len(means) == len(values)
    assert means[0] == values[0]
    assert all(min(values) - 1e-9 <= mean <= max(values) + 1e-9 for mean in means)
