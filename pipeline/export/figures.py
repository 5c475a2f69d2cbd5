"""The figures of a run by name, with labels: what every sink exports. Pure: the moment is handed in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from pipeline.top.board import Board

PREFIX = "sluice"
MODES = ("starting", "uncertain", "serving", "suspect", "quarantined", "dead", "retired")


class Figure(msgspec.Struct, frozen=True):
    """One value; a `counter` never falls while the log grows. Named as Prometheus does: unit, then `_total`."""

    name: str
    help: str
    value: float
    kind: Literal["gauge", "counter"] = "gauge"
    labels: Mapping[str, str] = {}


def figures(board: Board, now: float) -> Iterator[Figure]:
    """Every figure of the board; those of one name follow each other."""
    yield from _training(board)
    yield from _work(board, now)
    yield from _refits(board)
    yield from _fleet(board)
    yield from _waits(board, now)


def _gauge(name: str, help: str, value: float, **labels: str) -> Figure:
    return Figure(f"{PREFIX}_{name}", help, float(value), "gauge", labels)


def _count(name: str, help: str, value: float, **labels: str) -> Figure:
    return Figure(f"{PREFIX}_{name}", help, float(value), "counter", labels)


def _training(board: Board) -> Iterator[Figure]:
    view = board.view
    yield _gauge("step", "Optimizer steps of the newest weights.", view.step)
    yield _gauge("finished", "1 once the run has finished.", view.finished is not None)
    if not view.rows:
        return
    row = view.rows[-1]
    flat = row.flat()
    known = {
        "reward_mean": ("Mean reward of the valid samples of the newest step.", row.reward),
        "reward_eval_mean": ("Mean held-out reward.", row.eval_reward),
        "step_seconds": ("Duration of the newest optimizer step.", row.seconds),
        "step_waited_seconds": ("How long the trainer waited for its newest batch.", row.waited_s),
        "staleness_mean_steps": ("Mean staleness of the newest batch, in optimizer steps.", flat.get("staleness/mean")),
        "staleness_max_steps": ("Largest staleness in the newest batch.", flat.get("staleness/max")),
    }
    for name, (help, value) in known.items():
        if value is not None:
            yield _gauge(name, help, value)
    for name, value in row.policy.items():
        yield _gauge("policy", "Metrics of the trainer at the newest step, by name.", value, metric=name)


def _work(board: Board, now: float) -> Iterator[Figure]:
    view, model = board.view, board.model
    yield _count("events_total", "Events in the log.", view.events)
    yield _count("trajectories_total", "Trajectories that were finished.", view.totals["trajectories"])
    yield _count("generated_tokens_total", "Tokens of finished trajectories.", view.totals["generated_tokens"])
    yield _gauge("generated_tokens_per_second", "Tokens of finished trajectories lately.", view.generated_per_s(now))
    for reason, count in sorted(view.drops.items()):
        yield _count("groups_dropped_total", "Groups dropped, by reason.", count, reason=reason)
    for key, count in sorted(view.totals.items()):
        if key.startswith("failed:"):
            help = "Samples that failed for good, by kind of failure."
            yield _count("samples_failed_total", help, count, failure=key.removeprefix("failed:"))
    states = {"complete": model.complete(), "begun": model.begun(), "untouched": model.untouched()}
    for state, groups in states.items():
        yield _gauge("groups", "Train groups that are in no batch yet, by state.", len(groups), state=state)
    yield _gauge("batches_untrained", "Batches that wait for the trainer.", len(model.untrained()))
    yield _count("tasks_issued_total", "Train tasks issued.", view.issued)


def _refits(board: Board) -> Iterator[Figure]:
    view = board.view
    yield _count("refits_total", "Refits committed.", view.totals["refits"])
    yield _count("refits_failed_total", "Epochs that ended without a commit.", view.totals["failed_refits"])
    yield _count("quarantines_total", "Engines quarantined.", view.totals["quarantines"])
    yield _gauge("refitting", "1 while a refit is under way.", view.refitting is not None)
    if view.refits:
        last = view.refits[-1]
        for phase, seconds in (("whole", last.pause_s), ("drain", last.drain_s), ("transfer", last.transfer_s)):
            yield _gauge("refit_pause_seconds", "The newest refit's pause, by phase.", seconds, phase=phase)
        yield _gauge("refit_bytes", "Bytes that the newest refit sent.", last.bytes)


def _fleet(board: Board) -> Iterator[Figure]:
    view, model = board.view, board.model
    for name, engine in sorted(model.engines.items()):
        for mode in MODES:
            yield _gauge(
                "engine_state", "1 for the state that an engine is in.", engine.mode == mode, engine=name, state=mode
            )
    for name, version in sorted(view.serving.items()):
        yield _gauge("engine_version", "Version of the weights that an engine serves.", version, engine=name)
    for name, boots in sorted(view.boots.items()):
        yield _count("boots_total", "Processes of an actor so far.", len(boots), actor=name)


def _waits(board: Board, now: float) -> Iterator[Figure]:
    for (actor, on), wait in sorted(board.model.waits.items()):
        help = "How long an actor has been waiting for another."
        yield _gauge("wait_seconds", help, max(now - wait.since, 0.0), actor=actor, on=on)
