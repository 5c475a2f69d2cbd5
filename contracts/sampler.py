"""The plug-in surface: a sampler, which decides which complete groups are trained next.

A sampler is a function `(Pool) -> Sequence[int]`, registered under the entry-point group `sluice.samplers` or named
`package.module:function` in `buffer.sampler`. It runs inside the buffer's core, so it must be pure: no clock, no
randomness, no state of its own, the same pool gives the same choice; a replay calls it again.

The choice: indexes of candidates, none twice, at most `pool.count`. Fewer than `count` means "wait": the buffer asks
again when something changed. When `holes` is empty there is nothing to wait for, so a sampler must then choose `count`
if there are as many candidates. `pipeline.testing.check_sampler` holds a sampler to all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

GROUP = "sluice.samplers"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A complete group.

    `index`: its place in the order of issue. `lag`: the staleness it would be trained with now, in optimizer steps,
    from 0 to `Pool.max_staleness`. `reward`: mean over its `valid` valid samples. `flat`: they all have one reward, so
    its advantages are 0.
    """

    index: int
    lag: int
    reward: float = 0.0
    valid: int = 2
    flat: bool = False


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch of `count` groups is chosen from, to be trained from optimizer step `step`.

    `candidates`: by time of completion. `holes`: the indexes below the newest candidate that are issued and neither
    complete nor trained nor dropped, ascending. `window`: see `buffer.window`.
    """

    candidates: tuple[Candidate, ...]
    holes: tuple[int, ...]
    count: int
    step: int
    max_staleness: int
    window: int


Sampler = Callable[[Pool], Sequence[int]]
