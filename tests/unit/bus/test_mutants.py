"""The mutants of the scripts, which are no part of the suite, keep up with the scripts and with the tests they name."""

from __future__ import annotations

from pipeline.bus import scripts
from tests.contract import bus_conformance
from tests.mutation.lua import MUTANTS

TESTS = [name for name in vars(bus_conformance) if name.startswith("test_")]


def test_each_mutant_changes_one_place_of_its_script() -> None:
    places = {(m.script, m.guards): getattr(scripts, m.script).source.count(m.old) for m in MUTANTS if m.old != m.new}
    assert len(places) == len(MUTANTS)
    assert {mutant: count for mutant, count in places.items() if count != 1} == {}


def test_each_mutant_names_tests_that_are_there() -> None:
    words = {word for mutant in MUTANTS for word in mutant.tests.split(" or ")}
    assert {word for word in words if not any(word in name for name in TESTS)} == set()
