"""What each engine does within each epoch: drains, holds, receives, waits for the verdict, serves again or does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from contracts import events as ev

Phase = Literal["drain", "hold", "transfer", "verify", "quarantined"]
"""drain: until nothing runs; hold: drained, others are not; transfer: until its load is complete; verify: until the
epoch's end; quarantined: until a commit names it again, or a boot."""


class Stretch(msgspec.Struct, frozen=True):
    """One engine in one phase. `end`: how the phase ended; `reason`: why, if not well. Times as handed in."""

    engine: str
    phase: Phase
    epoch: int
    start: float
    stop: float
    end: str = "done"
    reason: str = ""


class Barriers:
    """Folds the events of refits; every stretch that is over goes to `take`."""

    def __init__(self, take: Callable[[Stretch], None]) -> None:
        self._take = take
        self.under_way: dict[str, tuple[Phase, int, float]] = {}
        """Engine -> the phase that it is in, of which epoch, since when."""
        self.handlers: dict[type, Callable[[Any, float], None]] = {
            ev.RefitRequested: self._requested,
            ev.EngineDrained: lambda body, at: self._next(body.engine, "hold", body.epoch, at),
            ev.TransferStarted: self._started,
            ev.EngineLoaded: lambda body, at: self._next(body.engine, "verify", body.epoch, at),
            ev.RefitCommitted: self._committed,
            ev.RefitFailed: lambda body, at: self._all_end(at, "failed", f"{body.phase}: {body.reason}"),
            ev.EngineQuarantined: self._quarantined,
            ev.EngineDead: lambda body, at: self._ends(body.engine, at, "died", body.reason),
            ev.ActorBooted: lambda body, at: self._ends(body.actor, at, "restarted"),
        }
        """Kind -> what to call with an event of it and its time."""

    def open(self, at: float) -> list[Stretch]:
        """What is under way at `at`."""
        return [
            Stretch(engine, phase, epoch, since, max(at, since), "open")
            for engine, (phase, epoch, since) in self.under_way.items()
        ]

    def _requested(self, event: ev.RefitRequested, at: float) -> None:
        self._all_end(at, "cut off")
        for member in event.engines:
            self._ends(member.actor, at)
            self.under_way[member.actor] = ("drain", event.epoch, at)

    def _started(self, event: ev.TransferStarted, at: float) -> None:
        for member in event.members:
            self._next(member.engine, "transfer", event.epoch, at)

    def _next(self, engine: str, phase: Phase, epoch: int, at: float) -> None:
        """The engine goes on to its next phase; word of an epoch that is over for it changes nothing."""
        begun = self.under_way.get(engine)
        if begun is None or begun[1] != epoch or begun[0] == "quarantined":
            return
        self._ends(engine, at)
        self.under_way[engine] = (phase, epoch, at)

    def _committed(self, event: ev.RefitCommitted, at: float) -> None:
        for member in event.engines:
            self._ends(member.actor, at, "committed")
        self._all_end(at, "left out")

    def _quarantined(self, event: ev.EngineQuarantined, at: float) -> None:
        self._ends(event.engine, at, "quarantined", event.reason)
        self.under_way[event.engine] = ("quarantined", event.epoch, at)

    def _all_end(self, at: float, how: str, reason: str = "") -> None:
        for engine in [engine for engine, begun in self.under_way.items() if begun[0] != "quarantined"]:
            self._ends(engine, at, how, reason)

    def _ends(self, engine: str, at: float, how: str = "done", reason: str = "") -> None:
        begun = self.under_way.pop(engine, None)
        if begun is not None:
            phase, epoch, since = begun
            self._take(Stretch(engine, phase, epoch, since, max(at, since), how, reason))
