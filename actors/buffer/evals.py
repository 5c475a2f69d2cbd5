"""Held-out evaluations: the buffer gathers their rewards and trains on none of them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from actors.buffer.state import Round, State, refusal, reject, with_reward
from actors.states import without
from contracts.core import Emit, Release, Step
from contracts.events import ActorFailed, EvalFinished, TrajectoriesEvent, TrajectoryFinished


class Shape(msgspec.Struct, frozen=True):
    """Groups of one evaluation, its samples in all, and the seconds from its first result to its end."""

    groups: int
    size: int
    deadline_s: float


def admit(state: State, event: TrajectoriesEvent, now: float, shape: Shape) -> Step[State]:
    """Count a result; with the last one the evaluation ends."""
    number = (-1 - event.index) // shape.groups
    if number in state.finished_rounds:
        return state, reject(event, "the evaluation is closed")
    held = state.rounds.get(number) or Round(now + shape.deadline_s)
    key = (event.index, event.sample)
    if key in held.seen:
        return state, reject(event, "duplicate: the sample has a result")
    held = replace(held, seen=held.seen | {key})
    reason = refusal(state, event) if isinstance(event, TrajectoryFinished) else None
    if isinstance(event, TrajectoryFinished) and reason is None:
        commands: tuple[Any, ...] = (Release((event.payload.key,)),)
        held = with_reward(held, event, state.versions)
    else:
        commands = reject(event, reason or "")
    state = replace(state, rounds={**state.rounds, number: held})
    if len(held.seen) < shape.size:
        return state, commands
    state, finished = _finish(state, number, held)
    return state, (*commands, *finished)


def expire(state: State, now: float) -> Step[State]:
    """End the evaluations whose deadline has passed, with what has come."""
    commands: list[Any] = []
    for number, held in state.rounds.items():
        if held.deadline_at <= now:
            state, finished = _finish(state, number, held)
            commands += finished
    return state, commands


def _finish(state: State, number: int, held: Round) -> Step[State]:
    state = replace(state, rounds=without(state.rounds, number), finished_rounds=state.finished_rounds.add(number))
    if held.version is None:
        message = f"held-out evaluation {number} ended with {len(held.seen)} results and no reward among them"
        failed = ActorFailed(actor="buffer", error="NoHeldOutReward", message=message, fatal=False)
        return state, (Emit(failed),)
    mean = sum(held.rewards) / len(held.rewards)
    event = EvalFinished(version=held.version, step=held.step, mean_reward=mean, samples=len(held.rewards))
    return state, (Emit(event),)
