"""A growing set of mostly consecutive numbers, in memory bounded by its holes."""

from __future__ import annotations

import msgspec


class Marks(msgspec.Struct, frozen=True):
    """Every number below `floor`, and those in `above`; `floor` itself is never marked."""

    floor: int = 0
    above: frozenset[int] = frozenset()

    def __contains__(self, number: int) -> bool:
        return number < self.floor or number in self.above

    def __len__(self) -> int:
        return self.floor + len(self.above)

    def add(self, *numbers: int) -> Marks:
        """These marks and `numbers`, which must not be marked yet."""
        above, floor = self.above.union(numbers), self.floor
        if floor not in above:
            return Marks(floor, above)
        while floor in above:
            floor += 1
        return Marks(floor, frozenset([mark for mark in above if mark > floor]))
