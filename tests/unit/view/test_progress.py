"""What a person sees: every figure of the panel, one JSON line a step in a pipe."""

from __future__ import annotations

import io
import json
import logging

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from story import Story, batch, issued, trained

from config.schema import RunConfig
from contracts import events
from pipeline import logs
from pipeline.progress import BARS, Lines, Live, figures, panel, reporter, sparkline, summary
from pipeline.view import View

CONFIG = RunConfig(steps=50)


def shown(story: Story) -> dict[str, str]:
    return dict(figures(CONFIG, View().apply_all(story.log), story.now))


def test_before_the_first_step_the_panel_says_so() -> None:
    assert shown(Story()) == {
        "step": "0 of 50, 0:00",
        "reward": "no step yet",
        "held out": "not evaluated yet",
        "buffer": "no batch yet",
        "refits": "0",
        "tokens": "0 generated a second, 0 in all",
        "rollouts": "0 finished",
        "waiting": "nobody",
    }


def test_the_panel_shows_step_reward_buffer_refits_tokens_and_waits() -> None:
    story = trained(10)
    story.add(events.EvalFinished(version=10, step=10, mean_reward=0.625, samples=4))
    story.add(events.WaitStarted(actor="trainer", on="buffer", cause="no batch"))
    story.add(events.SampleFailed(task="t", index=9, sample=0, attempt=3, samples=2, failure="infra", reason="gone"))
    for number in (11, 12, 13):
        story.add(issued(number), 0.0)
    story.add(batch(11, [0.5]), 0.0)
    story.add(events.GroupDropped(task="t", index=12, reason="stale", samples=2))
    story.add(events.RefitFailed(epoch=12, version=10, phase="load", reason="deadline"))
    story.add(
        events.RefitRequested(epoch=13, version=10, step=10, engines=(), gateways=(), drain="finish", deadline_at=0)
    )
    story.add(events.RunStopping(reason="trained"), 9.5)
    lines = shown(story)
    assert lines["step"] == "10 of 50, 1:17, stopping: trained"
    assert lines["reward"].startswith("0.750  ▁")
    assert lines["reward"].endswith("█")
    assert lines["held out"].startswith("0.625 at step 10")
    assert lines["buffer"] == "1 groups open, 1 in batches to be trained; staleness 0.50, at most 1"
    assert lines["refits"] == (
        "11, last pause 0.50 s (drain 0.20, transfer 0.10), 1 failed, 0 quarantines, epoch 13 to version 10 for 9.5 s"
    )
    assert lines["rollouts"] == "10 finished, 1 failed (infra), 1 groups dropped (stale)"
    assert lines["waiting"] == "trainer for buffer (no batch) 14 s"
    console = Console(file=io.StringIO(), width=120)
    console.print(panel(CONFIG, View().apply_all(story.log), story.now))
    output = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert all(name in output for name in lines)


def test_a_pipe_gets_one_json_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    logs.configure(None, "driver", console=True, stream=sys.stdout)
    story = trained(3)
    view = View()
    with reporter(CONFIG, structlog.get_logger()) as lines:
        assert isinstance(lines, Lines)
        for envelope in story.log:
            row = view.apply(envelope)
            lines.update(view, story.now)
            if row is not None:
                lines.step(row, view, story.now)
        lines.note("stopping", reason="trained")
        lines.error("trouble")
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in printed] == ["step", "step", "step", "stopping", "trouble"]
    assert [line.get("step") for line in printed[:3]] == [1, 2, 3]
    assert printed[2]["reward"] == 0.75
    assert printed[2]["mismatch"] == 1.01
    assert printed[2]["steps"] == 50
    assert list(printed[2])[:3] == ["timestamp", "level", "event"]
    logging.getLogger().handlers.clear()


def test_a_terminal_gets_a_panel_and_notes_above_it(capsys: pytest.CaptureFixture[str]) -> None:
    story = trained(3)
    view = View().apply_all(story.log)
    with Live(CONFIG, structlog.get_logger()) as live:
        live.step(view.rows[-1], view, story.now)
        live.note("broker", server="embedded")
        live.error("broker exited", code=1)
        live.update(view, story.now)
    output = capsys.readouterr().out
    assert "server=embedded" in output
    assert "broker exited" in output
    assert "3 of 50" in output


def test_figures_that_are_not_known_are_left_out_of_a_line() -> None:
    story = Story()
    story.add(events.RunStarted(config_digest=""))
    view = View()
    row = None
    for envelope in (story.log[0], *trained(1).log[-4:-2]):
        row = view.apply(envelope) or row
    assert row is not None
    assert "held_out" not in summary(row, view, 0.0)
    assert "waits" not in summary(row, view, 0.0)


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 60))
def test_a_sparkline_fits_its_width_and_spans_its_values(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(BARS)
    if len(values) <= width and values and max(values) > min(values):
        assert line[values.index(max(values))] == BARS[-1]
        assert line[values.index(min(values))] == BARS[0]
