"""The recorder's decisions: nothing is trimmed before it is durable and before every actor has booted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.recorder.core import (
    EVERYTHING,
    FLUSH_BYTES,
    FLUSH_S,
    OWN_JOURNAL,
    TRIM_S,
    Appended,
    Flush,
    Flushed,
    Follow,
    RecorderCore,
    Recovered,
    State,
    Trim,
)
from actors.recorder.ordering import number
from config.schema import RecorderConfig
from contracts.core import ARCHIVED_CHECKPOINT, Booted, Emit, Raise, Tick
from contracts.events import ActorFailed

ACTORS = ("buffer", "trainer")


class Driver:
    """Steps the core along a clock."""

    def __init__(self, **config: Any) -> None:
        self.core = RecorderCore(RecorderConfig(**config), ACTORS)
        self.state = self.core.initial()
        self.now = 100.0

    def step(self, input: Any, after: float = 0.0) -> list[Any]:
        self.now += after
        self.state, commands = self.core.step(self.state, input, self.now)
        return list(commands)

    def tick(self) -> list[Any]:
        """Go to where the core wants to be woken."""
        wake = self.core.wake(self.state)
        assert wake is not None
        self.now = max(self.now, wake)
        return self.step(Tick())


def test_a_boot_follows_the_log_and_forgets_what_was_in_memory() -> None:
    driver = Driver()
    assert driver.step(Booted(1)) == [Follow()]
    driver.step(Appended(10, ("buffer",)))
    driver.step(Flushed({"policy": "5-0"}, 10, False))
    driver.step(Appended(10))
    assert driver.step(Booted(2)) == [Follow()]
    assert driver.state == State(cursors={"policy": "5-0"}, booted=("buffer",), trim_at=driver.now + TRIM_S)


def test_a_checkpoint_counts_as_archived_once_its_announcement_is_durable() -> None:
    driver = Driver()
    driver.step(Booted(1))
    driver.step(Appended(10, checkpoint=3))
    driver.step(Appended(10))
    assert driver.tick() == [Flush(False)]
    driver.step(Appended(10, checkpoint=5))  # too late for this flush
    flushed = Flushed({"policy": "5-0"}, 10, False)
    assert driver.step(flushed) == [Raise(ARCHIVED_CHECKPOINT, 3)]
    assert driver.tick() == [Flush(False)]
    assert driver.step(flushed) == [Raise(ARCHIVED_CHECKPOINT, 5)]
    driver.step(Appended(10))
    driver.tick()
    assert driver.step(flushed) == [], "a register only rises"


def test_a_checkpoint_that_was_in_memory_when_the_recorder_died_is_not_archived() -> None:
    driver = Driver()
    driver.step(Booted(1))
    driver.step(Appended(FLUSH_BYTES, checkpoint=3))
    driver.step(Flushed({}, 10, False))
    driver.step(Appended(FLUSH_BYTES, checkpoint=5))
    driver.step(Booted(2))
    driver.step(Appended(FLUSH_BYTES))
    assert driver.step(Flushed({}, 10, False)) == []
    driver.step(Appended(FLUSH_BYTES, checkpoint=5))
    assert driver.step(Flushed({}, 10, False)) == [Raise(ARCHIVED_CHECKPOINT, 5)]


def test_a_record_stays_in_memory_for_less_than_a_second() -> None:
    driver = Driver()
    driver.step(Booted(1))
    assert driver.step(Appended(10)) == []
    assert driver.core.wake(driver.state) == driver.now + FLUSH_S
    assert driver.step(Appended(10), 0.5) == []
    assert driver.tick() == [Flush(False)]
    assert driver.now == pytest.approx(100.0 + FLUSH_S)


def test_much_is_flushed_at_once() -> None:
    driver = Driver()
    driver.step(Booted(1))
    assert driver.step(Appended(FLUSH_BYTES)) == [Flush(False)]


def test_one_flush_runs_at_a_time() -> None:
    driver = Driver()
    driver.step(Booted(1))
    assert driver.step(Appended(FLUSH_BYTES)) == [Flush(False)]
    assert driver.step(Appended(FLUSH_BYTES)) == []
    assert driver.core.wake(driver.state) == 100.0 + TRIM_S
    assert driver.step(Flushed({}, 1, False)) == [Flush(False)]


def test_a_segment_ends_when_it_is_full_or_old() -> None:
    driver = Driver(segment_mib=1.0, segment_s=60.0)
    driver.step(Booted(1))
    assert driver.step(Appended(FLUSH_BYTES)) == [Flush(False)]
    driver.step(Flushed({}, 2 << 20, False))
    driver.step(Appended(1))
    assert driver.tick() == [Flush(True)]
    driver.step(Flushed({}, 1, True))
    assert driver.state.segment_bytes == 0
    driver.step(Appended(1), 10.0)
    assert driver.tick() == [Flush(False)]
    driver.step(Flushed({}, 1, False))
    driver.step(Appended(1), 61.0)
    assert Flush(True) in driver.tick()


def boot_all(driver: Driver) -> None:
    driver.step(Booted(1))
    driver.step(Appended(1, ACTORS))
    driver.tick()
    driver.step(Flushed({"policy": "5-0", "journal:buffer": "3-0"}, 1, False))


def test_what_was_durable_at_the_last_trimming_goes_at_the_next() -> None:
    driver = Driver()
    boot_all(driver)
    assert driver.step(Tick(), TRIM_S) == []
    driver.step(Appended(1))
    driver.tick()
    driver.step(Flushed({"policy": "9-0", "ledger": "8-0", "journal:buffer": "30-0"}, 1, False))
    expected = {"policy": "5-0", "journal:buffer": "3-0", OWN_JOURNAL: EVERYTHING}
    assert driver.step(Tick(), TRIM_S) == [Trim(expected, "9-0")], "journals number their own records"
    assert driver.state.floors["policy"] == "9-0"


def test_nothing_is_trimmed_before_every_actor_booted() -> None:
    driver = Driver()
    driver.step(Booted(1))
    driver.step(Appended(1, ("buffer",)))
    driver.tick()
    driver.step(Flushed({"policy": "5-0"}, 1, False))
    for _ in range(5):
        assert driver.step(Tick(), TRIM_S) == []
    driver.step(Appended(0, ("trainer",)))
    assert driver.step(Tick(), TRIM_S) == []
    assert [type(c) for c in driver.step(Tick(), TRIM_S)] == [Trim]


def test_a_complete_log_is_flushed_closed_and_done() -> None:
    driver = Driver()
    driver.step(Booted(1))
    assert not driver.core.done(driver.state)
    assert driver.step(Appended(10, (), finished=True)) == [Flush(True)]
    assert not driver.core.done(driver.state)
    assert driver.step(Flushed({"control": "7-0"}, 10, True)) == []
    assert driver.core.done(driver.state)
    assert driver.core.wake(driver.state) is None
    assert driver.step(Tick(), 100.0) == []


def test_a_complete_log_waits_for_the_flush_in_flight() -> None:
    driver = Driver()
    driver.step(Booted(1))
    driver.step(Appended(FLUSH_BYTES))
    assert driver.step(Appended(3, (), finished=True)) == []
    assert driver.step(Flushed({}, 10, False)) == [Flush(True)]
    driver.step(Flushed({}, 3, True))
    assert driver.core.done(driver.state)


def test_a_finished_run_that_is_resumed_is_recorded_again() -> None:
    driver = Driver()
    driver.step(Booted(1))
    driver.step(Appended(10, (), finished=True))
    driver.step(Flushed({}, 10, True))
    driver.step(Booted(2))
    assert not driver.core.done(driver.state)


def test_an_archive_behind_what_was_durable_is_announced() -> None:
    driver = Driver()
    boot_all(driver)
    assert driver.step(Recovered({"policy": "5-0", "journal:buffer": "12-0"})) == []
    (emit,) = driver.step(Recovered({"policy": "4-0"}))
    assert isinstance(emit, Emit)
    assert isinstance(emit.event, ActorFailed)
    assert not emit.event.fatal
    assert "policy ends at 4-0 instead of 5-0" in emit.event.message
    assert "journal:buffer ends at 0-0 instead of 3-0" in emit.event.message


def test_it_takes_no_work_and_ignores_what_it_does_not_know() -> None:
    driver = Driver()
    assert driver.core.intake(driver.state) == {}
    assert driver.step(Tick()) == []


@given(st.lists(st.sampled_from(["append", "tick", "flushed", "boot", "wait"]), max_size=60))
def test_no_trim_goes_beyond_what_is_durable(story: list[str]) -> None:
    driver = Driver()
    driver.step(Booted(1))
    driver.step(Appended(0, ACTORS))
    written, durable, taken, flushing = 0, 0, 0, False
    for what in story:
        if what == "append":
            written += 1
            commands = driver.step(Appended(100))
        elif what == "flushed" and flushing:
            durable, flushing = taken, False
            commands = driver.step(Flushed({"policy": f"{durable}-0"}, 100, False))
        elif what == "boot":
            written, flushing = durable, False
            commands = driver.step(Booted(2))
        else:
            commands = driver.step(Tick(), TRIM_S if what == "wait" else 1.0)
        for command in commands:
            if isinstance(command, Flush):
                assert not flushing
                flushing, taken = True, written
            if isinstance(command, Trim):
                assert number(command.floors.get("policy", "0-0")) <= durable
                assert number(command.archived) == durable
