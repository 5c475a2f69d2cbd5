"""The samplers against their definitions, and what becomes of one that breaks its contract."""

from __future__ import annotations

import itertools
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.buffer import samplers
from actors.buffer.marks import Marks
from actors.buffer.samplers import SAMPLERS, SamplerError, choose, fifo, holes, in_order, load, ready_first, windowed
from contracts.sampler import Candidate, Pool
from pipeline.testing import check_sampler


def pool(*candidates: tuple[int, int], count: int = 2, missing: tuple[int, ...] = (), window: int = 1) -> Pool:
    """Candidates as (index, lag)."""
    held = tuple(Candidate(index=index, lag=lag) for index, lag in candidates)
    return Pool(candidates=held, holes=missing, count=count, step=3, max_staleness=3, window=window)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_shipped_sampler_keeps_the_contract(name: str):
    check_sampler(SAMPLERS[name], name)


def test_fifo_takes_those_that_completed_first():
    assert fifo(pool((5, 0), (1, 3), (2, 0))) == (5, 1)


def test_ready_first_takes_the_least_stale_and_among_equals_the_first():
    assert ready_first(pool((5, 1), (1, 3), (2, 0), (0, 1), count=3)) == (2, 5, 0)


def test_in_order_goes_by_index_up_to_the_first_hole():
    held = [(4, 0), (1, 0), (2, 0)]
    assert in_order(pool(*held, count=5, missing=(3,))) == (1, 2)
    assert in_order(pool(*held, count=5)) == (1, 2, 4)
    assert in_order(pool(*held, count=1, missing=(3,))) == (1,)
    assert in_order(pool(*held, missing=(0, 3))) == ()


def test_windowed_passes_holes_but_stays_within_the_window_of_the_first():
    held = [(5, 0), (1, 0), (2, 0), (4, 0)]
    assert windowed(pool(*held, count=5, missing=(0, 3), window=3)) == (1, 2)
    assert windowed(pool(*held, count=5, missing=(0, 3), window=5)) == (1, 2, 4)
    assert windowed(pool(*held, count=5, missing=(3,), window=2)) == (1, 2, 4)
    assert windowed(pool(*held, count=5)) == (1, 2, 4, 5)


@given(st.permutations(range(8)), st.integers(1, 3))
def test_a_window_of_one_is_the_strict_order(order: list[int], count: int):
    for done in range(1, len(order)):
        held = [(index, 0) for index in order[:done]]
        offered = pool(*held, count=count, missing=holes(0, frozenset(), order[:done]))
        assert windowed(offered) == in_order(offered)


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (lambda pool: (9,), r"chose \[9\], which are no candidates"),
        (lambda pool: [pool.candidates[0].index] * 2, "one of them twice"),
        (lambda pool: [candidate.index for candidate in pool.candidates], "chose 3 groups, 2 at most"),
        (lambda pool: pool.candidates[0].index / 0, "raised ZeroDivisionError"),
        (lambda pool: (), "chose 0 of 3 groups although nothing is left to wait for"),
    ],
)
def test_a_choice_that_breaks_the_contract_is_named(sampler: samplers.Sampler, said: str):
    with pytest.raises(SamplerError, match=said):
        choose("odd", sampler, pool((0, 0), (1, 0), (2, 0)))
    with pytest.raises(SamplerError):
        check_sampler(sampler)


def test_waiting_for_a_hole_is_a_legal_choice():
    assert choose("patient", lambda pool: (), pool((1, 0), (2, 0), missing=(0,))) == ()


def test_the_kit_finds_a_sampler_that_is_not_pure():
    turn = itertools.count()

    def moody(pool: Pool) -> tuple[int, ...]:
        return fifo(pool) if next(turn) % 3 else ready_first(pool)

    with pytest.raises(SamplerError, match="not pure"):
        check_sampler(moody)


def test_a_plug_in_is_found_by_its_entry_point_or_its_dotted_name(monkeypatch: pytest.MonkeyPatch):
    here = "tests.unit.buffer.test_samplers:newest"
    register(monkeypatch, ("newest", here), ("twice", here), ("twice", "json:dumps"), ("gone", "no_such_module:x"))
    assert load("newest")(pool((3, 0), (4, 0), count=1)) == (4,)
    assert load(here)(pool((3, 0), (4, 0), count=1)) == (4,)
    with pytest.raises(SamplerError, match="registered more than once: json:dumps, tests"):
        load("twice")
    with pytest.raises(SamplerError, match=r"'gone' \(no_such_module:x\) can't be imported: No module"):
        load("gone")
    with pytest.raises(SamplerError, match="known: windowed, in_order, fifo, ready_first, gone, newest, twice"):
        load("lifo")
    with pytest.raises(SamplerError, match="is a str, not a function"):
        load("contracts.sampler:GROUP")
    with pytest.raises(SamplerError, match="can't be imported"):
        load("contracts.sampler:Missing")


def newest(pool: Pool) -> tuple[int, ...]:
    return tuple(sorted((candidate.index for candidate in pool.candidates), reverse=True)[: pool.count])


def register(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    found = EntryPoints(EntryPoint(name=name, value=value, group="sluice.samplers") for name, value in entries)
    monkeypatch.setattr(samplers, "entry_points", lambda group: found.select(group=group))


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_holes_are_what_is_neither_closed_nor_ready_below_the_newest_ready_one(closed: set[int], ready: set[int]):
    marks = Marks()
    for number in sorted(closed):
        marks = marks.add(number)
    ready -= closed
    expected = [index for index in range(10) if index not in closed | ready and any(other > index for other in ready)]
    assert list(holes(marks.floor, marks.above, tuple(ready))) == expected


@given(st.permutations(range(9)), st.integers(0, 9))
def test_marks_hold_what_was_added_and_keep_only_the_holes_in_memory(order: list[int], count: int) -> None:
    marks = Marks()
    for number in order[:count]:
        marks = marks.add(number)
    assert {n for n in range(12) if n in marks} == set(order[:count])
    assert len(marks) == count
    assert marks.floor not in marks
    assert all(number > marks.floor for number in marks.above)
