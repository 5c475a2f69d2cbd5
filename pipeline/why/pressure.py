"""Which stage bounds the pace of a run: back-pressure, told from who was busy and who waited."""

from __future__ import annotations

from pipeline.why.look import Look
from pipeline.why.result import Pressure

WINDOW_S = 300.0
STEPS = 20
"""Newest steps that are looked at."""
BUSY = 0.7
"""Share of the time from which a stage counts as busy."""
NOTABLE = 0.3


def pressure(look: Look) -> Pressure | None:
    """Shares of the last steps' time; None before two steps."""
    model = look.model
    at = list(model.steps_at)[-STEPS:]
    if len(at) < 2:
        return None
    begin = max(at[0], look.now - WINDOW_S)
    window = max(look.now - begin, 1e-9)
    done = sum(finished > begin for finished in at)
    training = sum(list(model.step_s)[len(model.step_s) - done :]) if done else 0.0
    starving = _waited(look, "trainer", "buffer", begin)
    pausing = sum(_within(b.since, b.ended_at or look.now, begin, look.now) for b in model.past)
    if model.barrier is not None:
        pausing += look.now - max(model.barrier.since, begin)
    blocked = _waited(look, "source", "buffer", begin)
    producing = _waited(look, "source", "producer", begin)
    shares = {
        "trainer busy": training / window,
        "trainer waits for a batch": starving / window,
        "refit pauses generation": pausing / window,
        "source waits for credit": blocked / window,
        "source waits for the producer": producing / window,
    }
    shares = {name: round(min(share, 1.0), 3) for name, share in shares.items()}
    stage, text = _judge(look, shares)
    return Pressure(stage=stage, text=text, window_s=round(window, 3), shares=shares)


def _judge(look: Look, shares: dict[str, float]) -> tuple[str, str]:
    if shares["trainer busy"] >= BUSY:
        return "trainer", "the trainer is the bottleneck: rollouts wait for it, which is where an async run should be"
    if shares["source waits for the producer"] >= NOTABLE:
        return "environment", "the producer gives tasks too slowly"
    if shares["refit pauses generation"] >= NOTABLE:
        return "refit", "refits take much of the time: see refit.every, refit.drain, and the drain in `pipeline report`"
    if shares["trainer waits for a batch"] < NOTABLE:
        return "none", "no stage bounds the others clearly"
    if shares["source waits for credit"] >= NOTABLE and not look.model.begun() and not look.model.untouched():
        return "buffer", "the trainer waits while no task may be issued: buffer.max_staleness leaves too little room"
    calls = len(look.in_flight())
    running = look.running()
    if running and calls * 2 < running:
        return (
            "environment",
            f"the trainer waits for rollouts, and of {running} samples under way {calls} are at an engine",
        )
    return "collector", "the trainer waits for rollouts: more engines, shorter answers, or more rollout.open_groups"


def _waited(look: Look, actor: str, on: str, begin: float) -> float:
    """Seconds since `begin` that `actor` waited for `on`, the open wait included."""
    known = look.model.waited.get((actor, on), ())
    total = sum(_within(w.ended_at - w.seconds, w.ended_at, begin, look.now) for w in known)
    wait = look.model.waits.get((actor, on))
    return total + (0.0 if wait is None else look.now - max(wait.since, begin))


def _within(start: float, end: float, begin: float, now: float) -> float:
    return max(0.0, min(end, now) - max(start, begin))
