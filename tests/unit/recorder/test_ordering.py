"""The order of commits: ids number a run's events, whatever stream they are in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.recorder.ordering import START, advance, number, settled
from contracts.core import Entry


def entry(stream: str, n: int) -> Entry:
    return Entry(stream, f"{n}-0", b"")


def test_ids_are_compared_as_numbers() -> None:
    assert number(START) < number("9-0") < number("10-0")


def test_what_lies_beyond_a_full_page_waits() -> None:
    full = [entry("tasks", n) for n in (1, 3, 5)]
    early, late = entry("control", 2), entry("control", 9)
    assert settled([*full, early, late], 3) == [full[0], early, full[1], full[2]]
    assert settled([*full, early, late], 4)[-1] == late


def test_cursors_move_behind_what_was_taken() -> None:
    assert advance({"a": START, "b": "3-0"}, [entry("a", 1), entry("a", 2)]) == {"a": "2-0", "b": "3-0"}


@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(1, 9))
def test_readings_of_any_size_give_the_whole_log_in_order(streams: list[str], page: int) -> None:
    log = [entry(stream, n) for n, stream in enumerate(streams, 1)]
    cursors = dict.fromkeys("abc", START)
    seen: list[Entry] = []
    while True:
        reading = [
            e
            for stream in "abc"
            for e in [e for e in log if e.stream == stream and number(e.entry) > number(cursors[stream])][:page]
        ]
        if not reading:
            break
        taken = settled(reading, page)
        cursors = advance(cursors, taken)
        seen += taken
    assert seen == log
