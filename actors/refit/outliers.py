"""Who is unlike the fleet: engines that hold the same weights have the same checksums, and answer a prompt alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from actors.refit.state import Seat

TOLERANCE = 0.02
"""Most that a log-probability may differ from the fleet's median: kernels differ, versions differ more."""


def strangers(seats: Sequence[Seat]) -> list[tuple[Seat, str]]:
    """The seats that hold other weights than most of as many ranks do, and why; all of them if there is no majority.

    No fingerprint, no opinion; one alone is compared with nobody.
    """
    found: list[tuple[Seat, str]] = []
    for ranks in sorted({s.ranks for s in seats if s.fingerprint}):
        alike = [s for s in seats if s.fingerprint and s.ranks == ranks]
        ((usual, most),) = Counter(s.fingerprint for s in alike).most_common(1)
        if 2 * most > len(alike):
            reason = f"its weights have other checksums than those of {most} engines of as many ranks"
            found += [(s, reason) for s in alike if s.fingerprint != usual]
        else:
            reason = f"checksums of the weights differ among {len(alike)} engines of as many ranks, without a majority"
            found += [(s, reason) for s in alike]
    return found


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
