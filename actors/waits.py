"""Announcing what an actor waits for, once it has waited longer than the normal rhythm of a run."""

from __future__ import annotations

from typing import Any

import msgspec

from contracts.core import Emit
from contracts.events import WaitEnded, WaitStarted

QUIET_S = 5.0
"""A shorter wait is not announced."""


class Wait(msgspec.Struct, frozen=True):
    """The actor can't go on until `on` acts, since then."""

    on: str
    since: float
    announced: bool = False


def follow(
    wait: Wait | None, on: str | None, actor: str, now: float, *, moved: bool = False
) -> tuple[Wait | None, tuple[Any, ...]]:
    """The wait after a step of `actor` that left it waiting for `on`, and the end of the one before if announced.

    `moved`: the step did what was waited for, so that a wait for the same actor is a new one.
    """
    if on == (None if wait is None else wait.on) and not moved:
        return wait, ()
    fresh = None if on is None else Wait(on=on, since=now)
    if wait is None or not wait.announced:
        return fresh, ()
    return fresh, (Emit(WaitEnded(actor=actor, on=wait.on, seconds=now - wait.since)),)


def due(wait: Wait | None) -> float | None:
    """When the wait is to be announced; None if there is nothing to announce."""
    return None if wait is None or wait.announced else wait.since + QUIET_S


def announce(wait: Wait, cause: str, actor: str, *, deadline_at: float | None = None) -> tuple[Wait, tuple[Any, ...]]:
    """The wait, announced. `deadline_at`: when it fails; None if it is bounded by the run alone."""
    event = WaitStarted(actor=actor, on=wait.on, cause=cause, deadline_at=deadline_at)
    return msgspec.structs.replace(wait, announced=True), (Emit(event),)
