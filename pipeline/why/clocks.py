"""Whose clock disagrees with the others', as the times of events tell it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.why.facts import Actor, Skew

SKEW_S = 2.0
"""A smaller disagreement is not noted."""


class Clocks:
    """`skews`: actor -> how its clock is off.

    In log order `Model` keeps `peak`, and calls `moved` and `late` when an event's times ask for it, which is seldom.
    """

    def __init__(self, actors: Mapping[str, Actor]) -> None:
        """`actors`: everyone heard so far, kept by the caller."""
        self.skews: dict[str, Skew] = {}
        self._actors = actors
        self.peak, self.ahead = 0.0, ""
        """The latest time that was read, and whose clock it was."""

    def moved(self, actor: Actor, name: str, at: float, offset_ns: int) -> None:
        """The wall and the monotonic clock of an actor keep their distance, over restarts on one host too."""
        if actor.offset_ns is not None and abs(offset_ns - actor.offset_ns) > SKEW_S * 1e9:
            moved = (offset_ns - actor.offset_ns) / 1e9
            self.skews[name] = Skew(name, moved, at, "its wall clock jumped against its host's monotonic clock")
        actor.offset_ns = offset_ns

    def late(self, name: str, at: float) -> None:
        """No event lies long before one that was committed earlier."""
        peak, ahead = self.peak, self.ahead
        if name == "driver" or ahead == name:
            return
        culprit, seconds = self._odd_one(name, ahead, peak - at)
        if culprit not in self.skews:
            text = f"{name} wrote {peak - at:.1f} s before what {ahead} had written earlier"
            self.skews[culprit] = Skew(culprit, seconds, at, text)

    def _odd_one(self, behind: str, ahead: str, seconds: float) -> tuple[str, float]:
        """Of two actors whose clocks disagree, the one that also disagrees with most others."""
        offsets = sorted(a.offset_ns for a in self._actors.values() if a.offset_ns is not None)
        middle = offsets[len(offsets) // 2] if offsets else 0
        far = {name: abs((self._actors[name].offset_ns or 0) - middle) for name in (behind, ahead)}
        return (ahead, seconds) if far[ahead] > far[behind] else (behind, -seconds)
