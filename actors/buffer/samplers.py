"""Which complete groups go into the next batch. Pure functions: the same candidates give the same batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from actors.buffer.marks import Marks


class Candidate(msgspec.Struct, frozen=True):
    """A complete group; `lag` is the staleness that it would be trained with, in optimizer steps."""

    index: int
    lag: int


Sampler = Callable[[Sequence[Candidate], int, Marks], tuple[int, ...]]
"""(candidates by time of completion, how many, indexes already trained or dropped) -> chosen indexes, fewer if it must
wait. No index is chosen twice, and none that is not a candidate."""


def fifo(candidates: Sequence[Candidate], count: int, closed: Marks) -> tuple[int, ...]:
    """Those that completed first."""
    return tuple(candidate.index for candidate in candidates[:count])


def ready_first(candidates: Sequence[Candidate], count: int, closed: Marks) -> tuple[int, ...]:
    """The least stale; of equal ones those that completed first."""
    return fifo(sorted(candidates, key=lambda candidate: candidate.lag), count, closed)


def in_order(candidates: Sequence[Candidate], count: int, closed: Marks) -> tuple[int, ...]:
    """Strictly by index: the choice ends at the first index that is neither complete nor closed."""
    complete = {candidate.index for candidate in candidates}
    chosen: list[int] = []
    index = closed.floor
    while len(chosen) < count and (index in complete or index in closed):
        if index in complete:
            chosen.append(index)
        index += 1
    return tuple(chosen)


SAMPLERS: Mapping[str, Sampler] = {"fifo": fifo, "ready_first": ready_first, "in_order": in_order}
"""By the names of `buffer.sampler`."""
