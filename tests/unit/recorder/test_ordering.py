"""The order of commits, restored from ids that are comparable within one stream only."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from actors.recorder.ordering import advance, order, settled
from contracts.core import Entry


def entry(stream: str, id: str, wall: int) -> Entry:
    return Entry(stream, id, msgspec.msgpack.encode({"wall_ns": wall, "other": [1]}))


def test_ids_are_compared_as_numbers() -> None:
    assert order("9-0") < order("10-0") < order("10-2") < order("10-10")
    assert order("7") == (7, 0)


def test_causes_come_before_effects_that_share_their_millisecond() -> None:
    cause, effect = entry("trajectories", "5-0", 100), entry("batches", "5-0", 101)
    assert settled([effect, cause], 10) == [cause, effect]


def test_a_stream_keeps_its_order_whatever_the_clocks_say() -> None:
    first, second = entry("refit", "5-0", 200), entry("refit", "5-1", 100)
    assert settled([first, second], 10) == [first, second]


def test_what_lies_beyond_a_full_page_waits() -> None:
    full = [entry("tasks", f"{n}-0", n) for n in range(1, 4)]
    late = entry("control", "9-0", 9)
    early = entry("control", "2-0", 2)
    assert settled([*full, early, late], 3) == [full[0], full[1], early, full[2]]
    assert late in settled([*full, late], 4)


def test_cursors_move_behind_what_was_taken() -> None:
    assert advance({"a": "0-0", "b": "3-0"}, [entry("a", "1-0", 0), entry("a", "2-0", 0)]) == {"a": "2-0", "b": "3-0"}


def test_data_without_a_stamp_is_ordered_by_id() -> None:
    assert [e.entry for e in settled([Entry("a", "2-0", b"\xc1"), Entry("b", "1-0", b"")], 9)] == ["1-0", "2-0"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 9)), max_size=40), st.integers(1, 9)
)
def test_no_entry_is_lost_or_repeated_over_readings(raw: list[tuple[str, int, int]], page: int) -> None:
    log: dict[str, list[Entry]] = {"a": [], "b": [], "c": []}
    for stream, ms, wall in sorted(raw, key=lambda item: item[1]):
        log[stream].append(entry(stream, f"{ms}-{len(log[stream])}", wall))
    cursors = dict.fromkeys(log, "-1-0")
    seen: list[Entry] = []
    while True:
        reading = [e for s in log for e in [e for e in log[s] if order(e.entry) > _after(cursors[s])][:page]]
        if not reading:
            break
        taken = settled(reading, page)
        assert taken
        cursors = advance(cursors, taken)
        seen += taken
    assert sorted(seen, key=repr) == sorted((e for found in log.values() for e in found), key=repr)
    assert [order(e.entry)[0] for e in seen] == sorted(order(e.entry)[0] for e in seen)


def _after(cursor: str) -> tuple[int, int]:
    return (-1, 0) if cursor == "-1-0" else order(cursor)
