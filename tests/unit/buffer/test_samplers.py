"""The samplers against their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.buffer.marks import Marks
from actors.buffer.samplers import SAMPLERS, Candidate, fifo, in_order, ready_first

candidates = st.lists(
    st.builds(Candidate, index=st.integers(0, 12), lag=st.integers(0, 3)), unique_by=lambda c: c.index, max_size=10
)


@pytest.mark.parametrize("name", SAMPLERS)
@given(candidates=candidates, count=st.integers(1, 5), closed=st.sets(st.integers(0, 12)))
def test_a_choice_has_no_more_than_asked_for_no_repeats_and_only_candidates(
    name: str, candidates: list[Candidate], count: int, closed: set[int]
) -> None:
    marks = Marks()
    for number in sorted(closed - {c.index for c in candidates}):
        marks = marks.add(number)
    chosen = SAMPLERS[name](candidates, count, marks)
    assert len(chosen) == len(set(chosen)) <= count
    assert set(chosen) <= {c.index for c in candidates}
    if name != "in_order":
        assert len(chosen) == min(count, len(candidates))


def test_fifo_takes_those_that_completed_first() -> None:
    assert fifo([Candidate(5, 0), Candidate(1, 3), Candidate(2, 0)], 2, Marks()) == (5, 1)


def test_ready_first_takes_the_least_stale_and_among_equals_the_first() -> None:
    held = [Candidate(5, 1), Candidate(1, 3), Candidate(2, 0), Candidate(0, 1)]
    assert ready_first(held, 3, Marks()) == (2, 5, 0)


def test_in_order_goes_by_index_over_closed_ones_up_to_the_first_hole() -> None:
    held = [Candidate(4, 0), Candidate(1, 0), Candidate(2, 0)]
    assert in_order(held, 5, Marks().add(0)) == (1, 2)
    assert in_order(held, 5, Marks().add(0).add(3)) == (1, 2, 4)
    assert in_order(held, 1, Marks().add(0)) == (1,)
    assert in_order(held, 5, Marks()) == ()


@given(st.permutations(range(9)), st.integers(0, 9))
def test_marks_hold_what_was_added_and_keep_only_the_holes_in_memory(order: list[int], count: int) -> None:
    marks = Marks()
    for number in order[:count]:
        marks = marks.add(number)
    assert {n for n in range(12) if n in marks} == set(order[:count])
    assert len(marks) == count
    assert marks.floor not in marks
    assert all(number > marks.floor for number in marks.above)
