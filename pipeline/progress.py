"""What a person sees while a run goes on: a live panel on a terminal, one JSON line a step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from actors.recorder.metrics import Row
from config.schema import RunConfig
from pipeline.view import View

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40


def reporter(config: RunConfig, log: Any) -> Live | Lines:
    """The one that fits standard output."""
    return Live(config, log) if sys.stdout.isatty() else Lines(config, log)


class Lines:
    """One structured line a step, through `log`."""

    def __init__(self, config: RunConfig, log: Any) -> None:
        self._log = log
        self._steps = config.steps

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def step(self, row: Row, view: View, now: float) -> None:
        self._log.info("step", **summary(row, view, now), steps=self._steps)

    def update(self, view: View, now: float) -> None:
        pass

    def note(self, message: str, **fields: object) -> None:
        self._log.info(message, **fields)

    def error(self, message: str, **fields: object) -> None:
        self._log.error(message, **fields)


def summary(row: Row, view: View, now: float) -> dict[str, Any]:
    """The figures of one step, short enough for a line."""
    refit = view.refits[-1] if view.refits else None
    staleness = row.flat().get("staleness/mean")
    figures = {
        "step": row.step,
        "version": row.version,
        "reward": row.reward,
        "held_out": view.evaluations[-1].reward if view.evaluations else None,
        "loss": row.policy.get("loss"),
        "mismatch": row.policy.get("mismatch_exp"),
        "staleness": staleness,
        "open": view.open_groups,
        "queued": view.queued_groups,
        "refits": view.totals["refits"],
        "pause_s": refit.pause_s if refit else None,
        "step_s": row.seconds,
        "waited_s": row.waited_s,
        "tokens_per_s": round(view.generated_per_s(now), 1),
        "waits": [f"{wait.actor} for {wait.on}" for wait in view.longest_waits(now)] or None,
    }
    return {key: _rounded(value) for key, value in figures.items() if value is not None}


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """The values as bars, the newest right, each bar a mean of neighbours if there are more than `width`."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


class Live:
    """A panel that is redrawn in place; notes scroll above it, and go to `log`."""

    def __init__(self, config: RunConfig, log: Any) -> None:
        from rich.console import Console
        from rich.live import Live as Panel

        self._config = config
        self._log = log
        self._console = Console(file=sys.stdout)
        self._panel = Panel(console=self._console, refresh_per_second=8, redirect_stdout=False)

    def __enter__(self) -> Live:
        self._panel.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._panel.stop()

    def step(self, row: Row, view: View, now: float) -> None:
        self._log.info("step", **summary(row, view, now), steps=self._config.steps)
        self.update(view, now)

    def update(self, view: View, now: float) -> None:
        self._panel.update(panel(self._config, view, now))

    def note(self, message: str, **fields: object) -> None:
        self._log.info(message, **fields)
        self._print(message, fields, "dim")

    def error(self, message: str, **fields: object) -> None:
        self._log.error(message, **fields)
        self._print(message, fields, "bold red")

    def _print(self, message: str, fields: dict[str, object], style: str) -> None:
        from rich.text import Text

        details = "  ".join(f"{key}={value}" for key, value in fields.items())
        self._console.print(Text(message, style), Text(details), sep="  ")


def panel(config: RunConfig, view: View, now: float) -> Any:
    """The table that `Live` shows."""
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in figures(config, view, now):
        table.add_row(name, value)
    return table


def figures(config: RunConfig, view: View, now: float) -> list[tuple[str, str]]:
    """Name and text of each line of the panel."""
    return [
        ("step", f"{view.step} of {config.steps}, {_elapsed(view, now)}"),
        ("reward", _reward(view)),
        ("held out", _held_out(view)),
        ("buffer", _buffer(view)),
        ("refits", _refits(view, now)),
        ("tokens", f"{view.generated_per_s(now):,.0f} generated a second, {view.totals['generated_tokens']:,} in all"),
        ("rollouts", _rollouts(view)),
        ("waiting", _waiting(view, now)),
    ]


def _elapsed(view: View, now: float) -> str:
    seconds = 0 if view.started_at is None else max(0, int(now - view.started_at))
    minutes, seconds = divmod(seconds, 60)
    state = f", stopping: {view.stopping}" if view.stopping and view.finished is None else ""
    return f"{minutes}:{seconds:02d}{state}"


def _reward(view: View) -> str:
    rewards = view.rewards()
    return f"{rewards[-1]:.3f}  {sparkline(rewards)}" if rewards else "no step yet"


def _held_out(view: View) -> str:
    if not view.evaluations:
        return "not evaluated yet"
    last = view.evaluations[-1]
    return f"{last.reward:.3f} at step {last.step}  {sparkline([e.reward for e in view.evaluations])}"


def _buffer(view: View) -> str:
    if view.depth is None:
        return "no batch yet"
    samples = sum(view.depth.lags.values())
    staleness = sum(lag * count for lag, count in view.depth.lags.items()) / samples if samples else 0.0
    most = max(view.depth.lags, default=0)
    groups = f"{view.open_groups} groups open, {view.queued_groups} in batches to be trained"
    return f"{groups}; staleness {staleness:.2f}, at most {most}"


def _refits(view: View, now: float) -> str:
    parts = [f"{view.totals['refits']}"]
    if view.refits:
        last = view.refits[-1]
        parts.append(f"last pause {last.pause_s:.2f} s (drain {last.drain_s:.2f}, transfer {last.transfer_s:.2f})")
    if view.totals["failed_refits"] or view.totals["quarantines"]:
        parts.append(f"{view.totals['failed_refits']} failed, {view.totals['quarantines']} quarantines")
    if view.refitting is not None:
        epoch, version, since = view.refitting
        parts.append(f"epoch {epoch} to version {version} for {max(0.0, now - since):.1f} s")
    return ", ".join(parts)


def _rollouts(view: View) -> str:
    parts = [f"{view.totals['trajectories']:,} finished"]
    failed = {key.removeprefix("failed:"): n for key, n in view.totals.items() if key.startswith("failed:")}
    parts += [f"{count} failed ({kind})" for kind, count in sorted(failed.items())]
    parts += [f"{count} groups dropped ({reason})" for reason, count in view.drops.most_common(2)]
    return ", ".join(parts)


def _waiting(view: View, now: float) -> str:
    waits = view.longest_waits(now)
    texts = [f"{wait.actor} for {wait.on} ({wait.cause}) {now - wait.since:.0f} s" for wait in waits[:3]]
    return "; ".join(texts) or "nobody"
