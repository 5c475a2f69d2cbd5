"""Who generates unlike the fleet: engines that hold the same weights answer a fixed prompt alike."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from actors.refit.state import Seat

TOLERANCE = 0.02
"""Most that a log-probability may differ from the fleet's median: kernels differ, versions differ more."""


def outliers(seats: Sequence[Seat]) -> list[tuple[Seat, str]]:
    """The seats whose probe is of another length than most, or far from the median; and why. No probe, no opinion."""
    asked = [s for s in seats if s.probe]
    lengths = {len(s.probe) for s in asked}
    usual = max(lengths, key=lambda length: (sum(len(s.probe) == length for s in asked), length), default=0)
    alike = [s.probe for s in asked if len(s.probe) == usual]
    middle = [median(column) for column in zip(*alike, strict=True)]
    found: list[tuple[Seat, str]] = []
    for seat in asked:
        if len(seat.probe) != usual:
            found.append((seat, f"generated {len(seat.probe)} tokens for the probe, others {usual}"))
            continue
        off = max(abs(a - b) for a, b in zip(seat.probe, middle, strict=True))
        if off > TOLERANCE:
            found.append((seat, f"log-probabilities of the probe are up to {off:.3g} off the fleet's median"))
    return found
