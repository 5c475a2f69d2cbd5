"""The charts of a report: from a view to Plotly figures as plain data. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any, TypeVar

import msgspec

from actors.recorder.metrics import Row
from config.schema import RunConfig
from pipeline.view import View

T = TypeVar("T")

POINTS = 4000
"""Points of a line; a longer run is thinned out evenly."""
BARS = 250
"""Bars of refits that would fit side by side; each is so wide, however irregular they come."""
SMOOTH = 10
"""Steps of the moving mean of the reward."""
BLUE, ORANGE, GREEN, RED, GREY = "#2563eb", "#d97706", "#059669", "#dc2626", "#94a3b8"
SCALARS = ("loss", "entropy", "grad_norm", "clip_fraction", "is_weight_mean", "kl_reference", "lr", "padding_fraction")
"""Policy metrics drawn on their own."""


class Chart(msgspec.Struct, frozen=True):
    """A titled figure: Plotly's `data` and `layout`. `caption` says how to read it."""

    name: str
    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any] = {}


def charts(config: RunConfig, view: View) -> list[Chart]:
    """All charts that the run has data for."""
    rows = list(view.rows)
    found = [
        reward(config, view),
        staleness(config, rows),
        refits(view),
        mismatch(rows),
        throughput(rows),
        waits(rows),
        *scalars(rows),
    ]
    return [chart for chart in found if chart.data]


def reward(config: RunConfig, view: View) -> Chart:
    """Training reward, its moving mean, held-out reward and the target."""
    rows = thin([row for row in view.rows if row.reward is not None])
    steps, rewards = [row.step for row in rows], [row.reward or 0.0 for row in rows]
    data = []
    if rows:
        data.append(line("train", steps, rewards, BLUE, width=1, opacity=0.45))
        data.append(line(f"train, mean of {SMOOTH}", steps, moving_mean(rewards), BLUE, width=2.5))
    if view.evaluations:
        held = list(view.evaluations)
        trace = line("held out", [e.step for e in held], [e.reward for e in held], ORANGE, width=2)
        data.append({**trace, "mode": "lines+markers"})
    layout: dict[str, Any] = {"xaxis": {"title": "step"}, "yaxis": {"title": "mean reward"}}
    if config.target_reward is not None:
        layout["shapes"] = [horizontal(config.target_reward)]
        layout["annotations"] = [label("target", config.target_reward)]
    caption = "Mean over the valid samples of each step; held-out tasks are never trained on."
    return Chart("reward", "Reward", caption, data, layout)


def staleness(config: RunConfig, rows: Sequence[Row]) -> Chart:
    """How many optimizer steps the oldest trainable token of each sample lagged behind."""
    lags: Counter[int] = Counter()
    for row in rows:
        if row.contents is not None:
            lags.update(row.contents.lags)
    shown = sorted(lags)
    data = [
        {
            "type": "bar",
            "x": shown,
            "y": [lags[lag] for lag in shown],
            "marker": {"color": [RED if lag > config.buffer.max_staleness else BLUE for lag in shown]},
            "hovertemplate": "lag %{x}: %{y} samples<extra></extra>",
        }
    ]
    caption = f"Samples by lag in optimizer steps; buffer.max_staleness={config.buffer.max_staleness}."
    layout = {"xaxis": {"title": "lag (steps)", "dtick": 1}, "yaxis": {"title": "samples"}, "bargap": 0.3}
    return Chart("staleness", "Staleness", caption, data if shown else [], layout)


def refits(view: View) -> Chart:
    """Pause of each committed refit by parts, with failed epochs and quarantines marked."""
    begin = view.started_at or 0.0
    committed = thin(list(view.refits))
    when = [refit.wall - begin for refit in committed]
    text = [f"epoch {refit.epoch}, version {refit.version}, {len(refit.engines)} engines" for refit in committed]
    width = max((when[-1] - when[0]) / BARS, 0.05) if when else 0.0
    rest = [max(0.0, refit.pause_s - refit.drain_s - refit.transfer_s) for refit in committed]
    parts = [
        ("drain", [refit.drain_s for refit in committed], ORANGE),
        ("transfer", [refit.transfer_s for refit in committed], BLUE),
        ("load, verify, commit", rest, GREY),
    ]
    data: list[dict[str, Any]] = [
        {"type": "bar", "name": name, "x": when, "y": values, "width": width, "text": text, "textposition": "none"}
        | {"marker": {"color": color}, "hovertemplate": "%{text}<br>" + name + " %{y:.3f} s<extra></extra>"}
        for name, values, color in parts
        if committed
    ]
    for name, symbol, chosen in (
        ("failed epoch", "x", [m for m in view.mishaps if m.engine is None]),
        ("quarantine", "diamond", [m for m in view.mishaps if m.engine is not None]),
    ):
        if chosen:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": [mishap.wall - begin for mishap in chosen],
                    "y": [0.0] * len(chosen),
                    "text": [escape(f"epoch {m.epoch} {m.engine or ''} {m.reason}") for m in chosen],
                    "marker": {"color": RED, "symbol": symbol, "size": 11},
                    "hovertemplate": "%{text}<extra></extra>",
                }
            )
    layout = {"barmode": "stack", "xaxis": {"title": "seconds since the start"}, "yaxis": {"title": "pause (s)"}}
    caption = "Generation is paused from refit.requested to refit.committed; one bar an epoch."
    return Chart("refits", "Refits", caption, data, layout)


def mismatch(rows: Sequence[Row]) -> Chart:
    """Mean exp|train - generation logprob|, of fresh and of lagged tokens."""
    names = (
        ("mismatch_exp", "all tokens", GREY),
        ("mismatch_exp_lag0", "tokens of the trained version", BLUE),
        ("mismatch_exp_lagged", "tokens of older versions", ORANGE),
    )
    data = [trace for key, name, color in names for trace in metric(rows, key, name, color)]
    caption = "Mean exp|trainer - engine logprob|: 1 is exact. Older versions differ because the policy moved on."
    layout = {"xaxis": {"title": "step"}, "yaxis": {"title": "mean exp|diff|"}}
    return Chart("mismatch", "Mismatch", caption, data, layout)


def throughput(rows: Sequence[Row]) -> Chart:
    """Tokens a second, generated and trained, between steps."""
    timed = thin([row for row in rows if row.since_last_s])
    steps = [row.step for row in timed]
    data = [
        line(name, steps, [count(row) / (row.since_last_s or 1.0) for row in timed], color)
        for name, count, color in (
            ("generated", lambda row: row.generated_tokens, BLUE),
            ("trained, prompts included", lambda row: row.trained_tokens, GREEN),
        )
        if timed
    ]
    layout = {"xaxis": {"title": "step"}, "yaxis": {"title": "tokens a second"}}
    return Chart("throughput", "Tokens a second", "Averages from one step to the next.", data, layout)


def waits(rows: Sequence[Row]) -> Chart:
    """Total time that each kind of actor announced to be waiting for another."""
    totals: Counter[str] = Counter()
    for row in rows:
        for who, seconds in row.waits.items():
            totals[who] += seconds  # pyright: ignore[reportArgumentType]
    longest = totals.most_common(12)[::-1]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [seconds for _, seconds in longest],
            "y": [who.replace("/", " for ", 1) for who, _ in longest],
            "marker": {"color": ORANGE},
            "hovertemplate": "%{y}: %{x:.1f} s<extra></extra>",
        }
    ]
    layout = {"xaxis": {"title": "seconds"}, "yaxis": {"automargin": True}}
    caption = "Summed over the actors of a kind, so it may exceed the run's time."
    return Chart("waits", "Who waited for whom", caption, data if longest else [], layout)


def scalars(rows: Sequence[Row]) -> list[Chart]:
    """One small chart a policy metric."""
    return [
        Chart(f"policy-{name}", name, "", metric(rows, name, name, BLUE), {"xaxis": {"title": "step"}, "height": 240})
        for name in SCALARS
    ]


# --- pieces ----------------------------------------------------------------------------------------------------------


def metric(rows: Sequence[Row], key: str, name: str, color: str) -> list[dict[str, Any]]:
    """A policy metric by step, if it was reported."""
    found = thin([row for row in rows if key in row.policy])
    return [line(name, [row.step for row in found], [row.policy[key] for row in found], color)] if found else []


def line(
    name: str, x: Sequence[float], y: Sequence[float], color: str, *, width: float = 1.5, opacity: float = 1.0
) -> dict[str, Any]:
    trace = {"type": "scatter", "mode": "lines" if len(x) > 1 else "markers", "name": name, "x": list(x), "y": list(y)}
    return trace | {"line": {"color": color, "width": width}, "marker": {"color": color}, "opacity": opacity}


def horizontal(y: float) -> dict[str, Any]:
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y}
    return across | {"line": {"color": GREEN, "width": 1, "dash": "dash"}}


def label(text: str, y: float) -> dict[str, Any]:
    at = {"xref": "paper", "x": 0, "y": y, "xanchor": "left", "yanchor": "bottom"}
    return at | {"text": text, "showarrow": False, "font": {"color": GREEN}}


def moving_mean(values: Sequence[float], window: int = SMOOTH) -> list[float]:
    """Mean over up to `window` values that end at each."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def thin(items: Sequence[T], points: int = POINTS) -> list[T]:
    """At most about `points` of the items, evenly, the last one always."""
    if len(items) <= points:
        return list(items)
    stride = -(-len(items) // points)
    return [*items[:-1:stride], items[-1]]
