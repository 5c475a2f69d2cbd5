"""The journal: a fold gives the state that was committed, and notices a core that answers differently."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.core import Booted, Emit, Tick
from contracts.events import RunStopping
from pipeline.runtime.journal import Journal, JournalDiverged, fingerprint


class Added(msgspec.Struct, frozen=True, tag="added"):
    amount: int


class Sum(msgspec.Struct, frozen=True):
    total: int = 0
    boots: int = 0


class SumCore:
    state_type = Sum
    local_type = Added
    work = ()
    watch = ()
    factor = 1

    def initial(self) -> Sum:
        return Sum()

    def step(self, state: Sum, input: Any, now: float):
        if isinstance(input, Added):
            total = state.total + self.factor * input.amount
            return msgspec.structs.replace(state, total=total), (Emit(RunStopping(reason=str(total))),)
        if isinstance(input, Booted):
            return msgspec.structs.replace(state, boots=state.boots + 1), ()
        return state, ()

    def wake(self, state: Sum) -> float | None:
        return None

    def intake(self, state: Sum):
        return {}

    def done(self, state: Sum) -> bool:
        return False


def write(core: SumCore, inputs: list[Any], seq: int = 0, state: Sum | None = None) -> tuple[Sum, list[bytes]]:
    journal, state, records = Journal(core), state or core.initial(), []
    for number, input in enumerate(inputs, start=seq + 1):
        state, commands = core.step(state, input, float(number))
        records.append(journal.record(number, float(number), input, commands))
    return state, records


INPUTS = [Booted(1), Added(3), Tick(), Added(4)]


def test_a_fold_gives_the_state_that_was_committed():
    state, records = write(SumCore(), INPUTS)
    assert Journal(SumCore()).fold(None, records) == (4, state)


def test_a_fold_from_a_snapshot_skips_what_it_covers():
    core = SumCore()
    middle, _ = write(core, INPUTS[:2])
    state, records = write(core, INPUTS)
    journal = Journal(core)
    assert journal.fold((2, journal.snapshot(middle)), records) == (4, state)


def test_a_missing_record_is_noticed():
    _, records = write(SumCore(), INPUTS)
    with pytest.raises(JournalDiverged, match="jumps from 1 to 3"):
        Journal(SumCore()).fold(None, [records[0], *records[2:]])


def test_a_core_that_answers_differently_is_noticed():
    _, records = write(SumCore(), INPUTS)
    changed = SumCore()
    changed.factor = 2
    with pytest.raises(JournalDiverged, match=r"step 2 \(Added\)"):
        Journal(changed).fold(None, records)


def test_the_fingerprint_depends_on_order_kind_and_fields():
    one, two = Emit(RunStopping(reason="a")), Emit(RunStopping(reason="b"))
    assert len({fingerprint(()), fingerprint((one,)), fingerprint((two,)), fingerprint((one, two))}) == 4
    assert fingerprint((one, two)) != fingerprint((two, one))
