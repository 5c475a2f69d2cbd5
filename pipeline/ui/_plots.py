"""The charts of a run as plain data, for the page and for report.html. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from actors.recorder.metrics import Row
from config.schema import RunConfig
from pipeline.view import View

POINTS = 800
"""Points of a line; of more, each stretch keeps its lowest and its highest."""
SMOOTH = 10
"""Steps of the moving mean of the reward."""
SCALARS = ("loss", "entropy", "grad_norm", "clip_fraction", "is_weight_mean", "kl_reference", "lr", "padding_fraction")
"""Policy metrics drawn on their own."""

Number = float | int | None
Colour = Literal["blue", "orange", "green", "red", "grey", "violet"]


class Series(msgspec.Struct, frozen=True):
    """One line of a chart, or one part of its bars. `faint`: drawn behind the others."""

    label: str
    colour: Colour
    y: list[Number]
    kind: Literal["line", "points", "bars"] = "line"
    faint: bool = False


class Chart(msgspec.Struct, frozen=True):
    """A titled figure. `caption` says how to read it; `x` is shared; bars are stacked; `target` is a level to reach.

    With `ticks`, `x` counts categories from 0.
    """

    name: str
    title: str
    caption: str
    x: list[Number]
    series: list[Series]
    across: str = "step"
    up: str = ""
    target: float | None = None
    ticks: list[str] = []
    small: bool = False


def charts(config: RunConfig, view: View, begin: float | None = None, end: float | None = None) -> list[Chart]:
    """All charts that the run has data for; of the steps `begin` to `end` where they are given."""
    rows = [row for row in view.rows if (begin is None or row.step >= begin) and (end is None or row.step <= end)]
    found = [
        reward(config, view, rows),
        staleness(rows),
        lags(config, rows),
        mismatch(rows),
        pauses(view, begin, end),
        depth(rows),
        throughput(rows),
        waits(rows),
        *(scalar(rows, name) for name in SCALARS),
    ]
    return [chart for chart in found if any(value is not None for series in chart.series for value in series.y)]


def reward(config: RunConfig, view: View, rows: Sequence[Row]) -> Chart:
    """Training reward, its moving mean, held-out reward and the target."""
    known = [row for row in rows if row.reward is not None]
    values = [row.reward or 0.0 for row in known]
    held = {e.step: e.reward for e in view.evaluations}
    steps = sorted({row.step for row in known} | {s for s in held if rows and rows[0].step <= s <= rows[-1].step})
    places = {row.step: n for n, row in enumerate(known)}
    means = moving_mean(values)
    columns = {
        "train": [values[places[step]] if step in places else None for step in steps],
        "mean": [means[places[step]] if step in places else None for step in steps],
        "held": [held.get(step) for step in steps],
    }
    x, (train, mean, out) = thin(steps, list(columns.values()))
    series = [Series("train", "blue", train, faint=True), Series(f"train, mean of {SMOOTH}", "blue", mean)]
    if any(value is not None for value in out):
        series.append(Series("held out", "orange", out, "points"))
    caption = "Mean over the valid samples of each step; held-out tasks are never trained on."
    return Chart("reward", "Reward", caption, x, series, up="mean reward", target=config.target_reward)


def staleness(rows: Sequence[Row]) -> Chart:
    """Mean and worst lag of each step's samples."""
    caption = "Optimizer steps that the oldest trainable token of a sample lags behind the version it trains."
    return lines(
        "staleness", "Staleness", caption, rows,
        [("mean", "blue", lambda row: _lag(row, worst=False)), ("worst", "orange", lambda row: _lag(row, worst=True))],
        up="lag (steps)",
    )  # fmt: skip


def _lag(row: Row, *, worst: bool) -> Number:
    found = row.contents.lags if row.contents is not None else {}
    if not found:
        return None
    return max(found) if worst else sum(lag * n for lag, n in found.items()) / sum(found.values())


def lags(config: RunConfig, rows: Sequence[Row]) -> Chart:
    """How many samples had which lag; those over the bound are red."""
    found: Counter[int] = Counter()
    for row in rows:
        if row.contents is not None:
            found.update(row.contents.lags)
    shown, bound = sorted(found), config.buffer.max_staleness
    series = [Series("samples", "blue", [found[lag] if lag <= bound else None for lag in shown], "bars")]
    if any(lag > bound for lag in shown):
        series.append(Series("over the bound", "red", [found[lag] if lag > bound else None for lag in shown], "bars"))
    caption = f"Samples by lag; buffer.max_staleness={bound}."
    ticks = [str(lag) for lag in shown]
    return Chart("lags", "Samples by lag", caption, [*range(len(shown))], series, "lag (steps)", "samples", ticks=ticks)


def mismatch(rows: Sequence[Row]) -> Chart:
    """Mean exp|train - generation logprob|, of fresh and of lagged tokens."""
    caption = "Mean exp|trainer - engine logprob|: 1 is exact. Older versions differ because the policy moved on."
    return lines(
        "mismatch", "Mismatch", caption, rows,
        [
            ("all tokens", "grey", _policy("mismatch_exp")),
            ("tokens of the trained version", "blue", _policy("mismatch_exp_lag0")),
            ("tokens of older versions", "orange", _policy("mismatch_exp_lagged")),
        ],
        up="mean exp|diff|",
    )  # fmt: skip


def pauses(view: View, begin: float | None, end: float | None) -> Chart:
    """Pause of each committed refit by its parts."""
    found = [r for r in view.refits if (begin is None or r.step >= begin) and (end is None or r.step <= end)]
    x: Sequence[float] = [refit.epoch for refit in found]
    rest = [max(0.0, refit.pause_s - refit.drain_s - refit.transfer_s) for refit in found]
    parts = [[refit.drain_s for refit in found], [refit.transfer_s for refit in found], rest]
    thinned, (drain, transfer, load) = peaks(x, parts)
    series = [
        Series("drain", "orange", drain, "bars"),
        Series("transfer", "blue", transfer, "bars"),
        Series("load, verify, commit", "grey", load, "bars"),
    ]
    caption = "Generation is paused from refit.requested to refit.committed; one bar an epoch."
    if len(thinned) < len(x):
        caption += f" Of {len(x)} epochs, the longest of each {-(-len(x) // len(thinned))} is shown."
    return Chart("pauses", "Pauses", caption, list(thinned), series, "epoch", "seconds")


def depth(rows: Sequence[Row]) -> Chart:
    """Groups in the buffer when each batch was picked."""
    caption = "Groups left after each batch was picked: complete ones, and those still rolled out."
    return lines(
        "depth", "Buffer", caption, rows,
        [
            ("ready", "green", lambda row: row.ready_groups),
            ("open", "blue", lambda row: row.open_groups),
            ("flat", "grey", lambda row: row.flat_groups),
        ],
        up="groups",
    )  # fmt: skip


def throughput(rows: Sequence[Row]) -> Chart:
    """Tokens a second, generated and trained, between steps."""
    caption = "Between one step's end and the next."
    return lines(
        "throughput", "Throughput", caption, rows,
        [("generated", "blue", _rate("generated_tokens")), ("trained", "green", _rate("trained_tokens"))],
        up="tokens a second",
    )  # fmt: skip


def waits(rows: Sequence[Row]) -> Chart:
    """Seconds that actors waited for each other, in total."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.waits)
    shown = [(who.replace("/", " for "), seconds) for who, seconds in total.most_common(8)]
    caption = "Seconds that each kind of actor waited for another, summed over actors."
    series = [Series("waited", "violet", [round(seconds, 3) for _, seconds in shown], "bars")]
    ticks = [who for who, _ in shown]
    return Chart("waits", "Waits", caption, [*range(len(shown))], series, "", "seconds", ticks=ticks)


def scalar(rows: Sequence[Row], name: str) -> Chart:
    return lines(f"policy-{name}", name, "", rows, [(name, "blue", _policy(name))], small=True)


# --- pieces ----------------------------------------------------------------------------------------------------------


def lines(
    name: str,
    title: str,
    caption: str,
    rows: Sequence[Row],
    parts: Sequence[tuple[str, Colour, Callable[[Row], Number]]],
    *,
    up: str = "",
    small: bool = False,
) -> Chart:
    """A chart over the steps; parts that have no value at all are left out."""
    read = [Series(label, colour, [value(row) for row in rows]) for label, colour, value in parts]
    read = [series for series in read if any(y is not None for y in series.y)]
    x, columns = thin([row.step for row in rows], [series.y for series in read])
    series = [msgspec.structs.replace(series, y=y) for series, y in zip(read, columns, strict=True)]
    return Chart(name, title, caption, x, series, up=up, small=small)


def _policy(name: str) -> Callable[[Row], Number]:
    return lambda row: row.policy.get(name)


def _rate(name: str) -> Callable[[Row], Number]:
    return lambda row: getattr(row, name) / row.since_last_s if row.since_last_s else None


def moving_mean(values: Sequence[float], window: int = SMOOTH) -> list[float]:
    """Mean over up to `window` values that end at each."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def thin(x: Sequence[float], columns: Sequence[Sequence[Number]], points: int = POINTS) -> tuple[Any, list[Any]]:
    """At most about `points` of the places of `x`: of each stretch the ends, and each column's lowest and highest."""
    if len(x) <= points or not columns:
        return list(x), [list(column) for column in columns]
    values = [np.array([np.nan if y is None else y for y in column], float) for column in columns]
    stretches = max(1, points // (2 * len(columns)))
    kept = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), stretches):
        for column in values:
            here = column[part]
            if not np.isfinite(here).any():
                continue
            kept.update((int(part[np.nanargmin(here)]), int(part[np.nanargmax(here)])))
    places = sorted(kept)
    return [x[n] for n in places], [[column[n] for n in places] for column in columns]


def peaks(x: Sequence[float], parts: Sequence[Sequence[float]], points: int = POINTS // 3) -> tuple[Any, list[Any]]:
    """At most `points` places: of each stretch the one where the sum of the parts is highest."""
    if len(x) <= points:
        return list(x), [list(part) for part in parts]
    sums = np.sum([np.asarray(part) for part in parts], axis=0)
    places = [int(part[np.argmax(sums[part])]) for part in np.array_split(np.arange(len(x)), points)]
    return [x[n] for n in places], [[part[n] for n in places] for part in parts]
