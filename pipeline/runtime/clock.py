"""The run's clock."""

from __future__ import annotations

import time


class WallClock:
    """Seconds since the Unix epoch: read once from the wall, carried on by the monotonic clock.

    A jump of the wall clock while the process lives can't move deadlines, and readings of processes on one host
    agree to the wall clock's accuracy at their starts.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()
