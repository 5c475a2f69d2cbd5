"""The refit barrier, searched exhaustively with the real coordinator, gateway and engine cores.

Safe is S1 to S6 of docs/explanation/refit-barrier.md. Live: from every world, once faults stop, there is a way to one
where the newest epoch is committed, the gate is open, an engine serves and no caller waits.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.refit_model import FAULTS, RefitModel
from tests.model.search import search

BOUNDS: dict[str, dict[str, Any]] = {
    "a refit": {"faults": 0, "steps": 1},
    "a start of three engines": {"faults": 0, "steps": 0, "engines": 3, "committed": False},
    "one fault of any kind while serving": {"faults": 1, "steps": 0},
    "one fault in a refit": {"faults": 1, "steps": 1, "kinds": FAULTS - {"crash", "silent"}},
    "one fault of an engine in flight": {"drain": "in_flight", "faults": 1, "steps": 1, "kinds": {"fail", "corrupt"}},
}
"""Larger ones by `python -m tests.model.refit_model faults=1 steps=1 epochs=3`, which takes minutes and gigabytes."""


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=list(BOUNDS))
def test_whatever_fails_once_the_barrier_is_safe_and_a_commit_stays_possible(bounds: dict[str, Any]) -> None:
    result = search(RefitModel(epochs=2, **bounds), liveness=True)
    assert result.wrong == "", str(result)
    assert result.states > 1_000


def test_the_reduction_loses_no_verdict() -> None:
    """The same search with and without it, and a broken barrier that both find broken."""
    bounds: dict[str, Any] = {"faults": 0, "steps": 1, "epochs": 2}
    whole = search(RefitModel(reduce=False, **bounds), liveness=True)
    reduced = search(RefitModel(**bounds), liveness=True)
    assert (whole.wrong, reduced.wrong) == ("", "")
    assert reduced.states < whole.states
    bounds |= {"faults": 1, "kinds": frozenset({"corrupt"}), "without": frozenset({"digest"})}
    assert search(RefitModel(reduce=False, **bounds)).wrong == search(RefitModel(**bounds)).wrong != ""


NEEDED: dict[str, tuple[str, str]] = {
    "digest": ("corrupt", "S4"),
    "whole loads": ("fail", "S4"),
    "lease + wait for gates": ("early", "S2"),
    "gate + request epoch": ("", "S1"),
    "gate + lease": ("early", "S2"),
    "drain + wait for gates": ("", "S1"),
    "drain + count calls": ("", "S1"),
}
"""Mechanisms -> the fault that makes them needed, and what goes wrong without them.

Where several are named, each covers for the other: without either alone the same search finds nothing wrong.
"""


@pytest.mark.parametrize(
    ("mechanism", "wrong"),
    [("drain", "S1: engine-1 receives weights while"), ("spans", "S1: tokens of versions (0, 1) are labelled with 0")],
)
def test_in_flight_breaks_without_holding_still_or_without_spans(mechanism: str, wrong: str) -> None:
    result = search(RefitModel(without=frozenset({mechanism}), drain="in_flight", faults=0, steps=1, epochs=2))
    assert result.wrong.startswith(wrong), str(result)


@pytest.mark.parametrize("mechanisms", NEEDED)
def test_without_its_mechanisms_the_barrier_breaks(mechanisms: str) -> None:
    fault, wrong = NEEDED[mechanisms]
    bounds: dict[str, Any] = {"faults": 1 if fault else 0, "kinds": frozenset({fault}), "steps": 1, "epochs": 2}
    result = search(RefitModel(without=frozenset(mechanisms.split(" + ")), **bounds))
    print(f"without {mechanisms}: {result}")
    assert result.wrong.startswith(wrong), str(result)
    assert any("reads RefitRequested" in line for line in result.path), "the log shows how"


def test_without_deadlines_the_barrier_gets_stuck() -> None:
    bounds: dict[str, Any] = {"kinds": frozenset({"fail"}), "steps": 1, "epochs": 2}
    result = search(RefitModel(without=frozenset({"deadlines"}), **bounds), liveness=True)
    assert result.wrong == "no way leads on from here", str(result)
