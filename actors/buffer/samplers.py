"""Which complete groups go into the next batch; `contracts.sampler` says what a sampler is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from contracts.sampler import GROUP, Pool, Sampler


class SamplerError(ValueError):
    """No sampler has this name, or one broke its contract: says which, and how."""


# --- the shipped ones ------------------------------------------------------------------------------------------------


def fifo(pool: Pool) -> tuple[int, ...]:
    """Those that completed first."""
    return tuple(candidate.index for candidate in pool.candidates[: pool.count])


def ready_first(pool: Pool) -> tuple[int, ...]:
    """The least stale; of equal ones those that completed first."""
    ordered = sorted(pool.candidates, key=lambda candidate: candidate.lag)
    return tuple(candidate.index for candidate in ordered[: pool.count])


def in_order(pool: Pool) -> tuple[int, ...]:
    """Strictly by index, up to the first hole."""
    return _up_to(pool, 1)


def windowed(pool: Pool) -> tuple[int, ...]:
    """By index, past holes, but none `pool.window` or more behind the first hole."""
    return _up_to(pool, pool.window)


def _up_to(pool: Pool, reach: int) -> tuple[int, ...]:
    indexes = sorted([candidate.index for candidate in pool.candidates])
    if pool.holes:
        indexes = [index for index in indexes if index < pool.holes[0] + reach]
    return tuple(indexes[: pool.count])


SAMPLERS: Mapping[str, Sampler] = {
    "windowed": windowed,
    "in_order": in_order,
    "fifo": fifo,
    "ready_first": ready_first,
}
"""By the names of `buffer.sampler`."""

# --- plug-ins --------------------------------------------------------------------------------------------------------


def load(name: str) -> Sampler:
    """The shipped sampler `name`, one registered under `sluice.samplers`, or `package.module:function`.

    Raises `SamplerError` saying what is known and what would work.
    """
    if name in SAMPLERS:
        return SAMPLERS[name]
    registered = entry_points(group=GROUP)
    found = {entry.value: entry for entry in registered if entry.name == name}
    if len(found) > 1:
        raise SamplerError(f"buffer.sampler={name!r} is registered more than once: {', '.join(sorted(found))}")
    if found:
        return _import(name, next(iter(found.values())))
    if ":" in name:
        return _import(name, EntryPoint(name=name, value=name, group=GROUP))
    known = ", ".join([*SAMPLERS, *sorted({entry.name for entry in registered})])
    raise SamplerError(
        f"buffer.sampler={name!r} is unknown; known: {known}. Name one of these, install the distribution that "
        f"registers it under entry-point group {GROUP!r}, or write package.module:function"
    )


def _import(name: str, entry: EntryPoint) -> Sampler:
    try:
        sampler = entry.load()
    except (ImportError, AttributeError) as error:
        raise SamplerError(f"buffer.sampler={name!r} ({entry.value}) can't be imported: {error}") from error
    if not callable(sampler):
        raise SamplerError(f"buffer.sampler={name!r} ({entry.value}) is a {type(sampler).__name__}, not a function")
    return sampler  # type: ignore[return-value]


def choose(name: str, sampler: Sampler, pool: Pool) -> tuple[int, ...]:
    """What `sampler` chooses from `pool`, held to its contract. Raises `SamplerError` naming what it broke."""
    try:
        chosen = tuple(sampler(pool))
    except Exception as error:
        raise SamplerError(f"sampler {name!r} raised {type(error).__name__}: {error}") from error
    known = {candidate.index for candidate in pool.candidates}
    strange = [index for index in chosen if index not in known]
    if strange:
        raise SamplerError(f"sampler {name!r} chose {strange}, which are no candidates")
    if len(set(chosen)) < len(chosen):
        raise SamplerError(f"sampler {name!r} chose {list(chosen)}: one of them twice")
    if len(chosen) > pool.count:
        raise SamplerError(f"sampler {name!r} chose {len(chosen)} groups, {pool.count} at most were asked for")
    if not pool.holes and len(chosen) < min(pool.count, len(known)):
        raise SamplerError(
            f"sampler {name!r} chose {len(chosen)} of {len(known)} groups although nothing is left to wait for "
            f"and {pool.count} were asked for"
        )
    return chosen


def holes(floor: int, closed: frozenset[int], ready: Sequence[int]) -> tuple[int, ...]:
    """The indexes from `floor` up to the newest ready one that are neither closed nor ready."""
    done = closed.union(ready)
    return tuple([index for index in range(floor, max(ready, default=floor)) if index not in done])
