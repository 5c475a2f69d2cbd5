"""When a run ends, and how: decided from the view alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from actors import registry
from config.schema import RunConfig
from pipeline.errors import Exit
from pipeline.host import Left
from pipeline.view import View

NORMAL = ("trained", "target reward reached", "no more tasks")
"""Reasons of an end with which the run is done."""


class Verdict(msgspec.Struct, frozen=True):
    """The run ends with `code`; `reason` goes into the log, `message` to the person."""

    code: Exit
    reason: str
    message: str


def judge(config: RunConfig, view: View, left: Mapping[str, Left], now: float, started: float) -> Verdict | None:
    """None while the run goes on. `left`: actors that left for good; `started`: when this session began."""
    return (
        _failed(config, view, left)
        or _crash_loop(config, view, now)
        or _complete(config, view)
        or _never_started(config, view, now, started)
    )


def _failed(config: RunConfig, view: View, left: Mapping[str, Left]) -> Verdict | None:
    """An actor said that the run can't go on, or left although nobody asked it to."""
    for failure in view.failures:
        if failure.fatal:
            return _failure(failure.actor, failure.message, Exit.FAILED)
    for name, how in left.items():
        if how.how == "foreign":
            return _failure(name, how.message, Exit.MISSING)
        return _failure(name, how.message or f"left the run ({how.how})", Exit.FAILED)
    return None


def _crash_loop(config: RunConfig, view: View, now: float) -> Verdict | None:
    for name in registry.names(config):
        deaths = view.recent_deaths(name, now, config.launch.restart_window_s)
        if deaths > config.launch.restarts:
            last = next((f for f in reversed(view.failures) if f.actor == name), None)
            cause = f": {last.error}: {last.message}" if last else ""
            return _failure(
                name,
                f"was restarted {deaths} times within {config.launch.restart_window_s:g} s "
                f"(launch.restarts={config.launch.restarts}){cause}",
                Exit.FAILED,
            )
    return None


def _complete(config: RunConfig, view: View) -> Verdict | None:
    if view.training_finished:
        return Verdict(Exit.DONE, "trained", f"trained {view.step} steps")
    if config.target_reward is not None:
        reward = view.mean_reward(config.target_window)
        if reward is not None and reward >= config.target_reward:
            text = f"mean reward {reward:.3f} reached target_reward={config.target_reward:g} at step {view.step}"
            return Verdict(Exit.DONE, "target reward reached", text)
    if view.starved(config.buffer.groups):
        return Verdict(Exit.DONE, "no more tasks", f"the producer has no more tasks; trained {view.step} steps")
    return None


def _never_started(config: RunConfig, view: View, now: float, started: float) -> Verdict | None:
    limit = config.launch.start_deadline_s
    if view.first_commit_at is not None or now < started + limit:
        return None
    silent = [name for name in registry.names(config) if name not in view.boots]
    parts = [f"not up: {', '.join(silent)}"] if silent else []
    parts += [f"{wait.actor} waits for {wait.on} ({wait.cause})" for wait in view.longest_waits(now)]
    parts += [f"{failure.actor}: {failure.error}: {failure.message}" for failure in list(view.failures)[-2:]]
    parts += [f"epoch {mishap.epoch}: {mishap.reason}" for mishap in list(view.mishaps)[-2:]]
    seen = "; ".join(parts) or "every actor is up and none says what it waits for"
    message = f"no refit was committed within launch.start_deadline_s={limit:g}: {seen}"
    return Verdict(Exit.START, "start-up deadline", message)


def _failure(name: str, message: str, code: Exit) -> Verdict:
    return Verdict(code, f"{name} failed", f"{name}: {message}")


def log_file(run_dir: Path, verdict: Verdict) -> Path:
    """Where to read on: the log of the actor that a failure names, else the folder of all logs."""
    name = verdict.reason.removesuffix(" failed")
    path = run_dir / "logs" / f"{name}.jsonl"
    return path if path.exists() else run_dir / "logs"
