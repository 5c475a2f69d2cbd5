"""The check of a sampler, for its own tests; `pipeline.testing` exports it."""

from __future__ import annotations

from random import Random

from actors.buffer.samplers import SamplerError, choose, holes
from contracts.sampler import Candidate, Pool, Sampler

RUNS = 50
GROUPS = 40


def check_sampler(sampler: Sampler, name: str = "sampler") -> None:
    """Hold a sampler to `contracts.sampler`, over seeded runs whose groups complete in random order.

    Raises `SamplerError` naming what is broken: a choice that is no legal one, another choice for the same pool, or
    waiting when there is nothing to wait for.
    """
    for seed in range(RUNS):
        seen = [(pool, choose(name, sampler, pool)) for pool in _pools(Random(seed), name, sampler)]
        for pool, chosen in reversed(seen):
            again = choose(name, sampler, pool)
            if again != chosen:
                raise SamplerError(
                    f"sampler {name!r} is not pure: it chose {list(chosen)}, then {list(again)} from {pool}"
                )


def _pools(random: Random, name: str, sampler: Sampler) -> list[Pool]:
    """The pools that a run offers to the sampler: at each completion, and once all groups are complete."""
    count, staleness = random.randint(1, 4), random.randint(0, 3)
    window = random.randint(1, 1 + count * staleness)
    waiting = list(range(GROUPS))
    ready: list[Candidate] = []
    closed: set[int] = set()
    pools: list[Pool] = []
    while waiting or len(ready) >= count:
        if waiting:
            index = waiting.pop(random.randrange(min(len(waiting), count * (staleness + 1))))
            ready.append(_candidate(random, index, staleness))
        if waiting and random.random() < 0.5:
            continue  # The trainer has enough in hand.
        floor = next(index for index in range(GROUPS + 1) if index not in closed)
        pool = Pool(
            candidates=tuple(ready),
            holes=holes(floor, frozenset(closed), [candidate.index for candidate in ready]),
            count=count,
            step=len(closed) // count,
            max_staleness=staleness,
            window=window,
        )
        pools.append(pool)
        chosen = choose(name, sampler, pool)
        if len(chosen) == count:
            ready = [candidate for candidate in ready if candidate.index not in chosen]
            closed.update(chosen)
    return pools


def _candidate(random: Random, index: int, staleness: int) -> Candidate:
    valid = random.randint(2, 8)
    flat = random.random() < 0.3
    reward = random.choice((0.0, 1.0)) if flat else random.random()
    return Candidate(index=index, lag=random.randint(0, staleness), reward=reward, valid=valid, flat=flat)
