"""The refit barrier, searched exhaustively with the real coordinator, gateway and engine cores.

Safe is S1 to S6 of docs/explanation/refit-barrier.md. Live: from every world, once faults stop, there is a way to one
where the newest epoch is committed, the gate is open, an engine serves and no caller waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.model.refit_model import CRASHES, FAULTS, RefitModel
from tests.model.search import Result, search

TWO: dict[str, Any] = {"epochs": 2}
ONE: dict[str, Any] = {"epochs": 2, "engines": 1}
BOUNDS: dict[str, dict[str, Any]] = {
    "a refit": {"faults": 0},
    "a start of three engines": {"faults": 0, "steps": 0, "engines": 3, "committed": False},
    "one fault of any kind while serving": {"steps": 0, "kinds": FAULTS - {"repeat", "stale"}},
    "a crash in a refit": {"kinds": CRASHES, "stepped": True},
    "one fault in a refit": {"kinds": FAULTS - CRASHES - {"silent", "repeat", "stale"}},
    "a message twice, one engine": {"engines": 1, "epochs": 3, "kinds": {"repeat"}},
    "one fault of an engine in flight": {"drain": "in_flight", "kinds": {"fail", "corrupt"}},
    "a crash and the epoch after it, one engine": {"engines": 1, "epochs": 3, "kinds": CRASHES, "stepped": True},
    "a result too late, one engine": {
        "engines": 1,
        "epochs": 3,
        "faults": 2,
        "kinds": {"fail", "stale"},
        "stepped": True,
    },
}
"""Others by `python -m tests.model.refit_model`, see docs/explanation/refit-barrier.md."""


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=list(BOUNDS))
def test_whatever_fails_once_the_barrier_is_safe_and_a_commit_stays_possible(bounds: dict[str, Any]) -> None:
    result = search(RefitModel(**{**TWO, **bounds}), liveness=True)
    assert result.wrong == "", str(result)
    assert result.states > 1_000


def test_the_reduction_loses_no_verdict() -> None:
    """The same searches with and without it, and a broken barrier that both find broken."""
    bounds: dict[str, Any] = {"engines": 1, "epochs": 3, "kinds": {"fail", "late", "crash refit", "crash trainer"}}
    whole = search(RefitModel(reduce=False, **bounds), liveness=True)
    reduced = search(RefitModel(**bounds), liveness=True)
    assert (whole.wrong, reduced.wrong) == ("", "")
    assert reduced.states < whole.states
    bounds |= {"kinds": {"corrupt"}, "without": {"digest"}}
    assert search(RefitModel(reduce=False, **bounds)).wrong == search(RefitModel(**bounds)).wrong != ""


NEEDED: dict[str, tuple[str, dict[str, Any]]] = {
    "digest": ("S4", {"kinds": {"corrupt"}}),
    "whole loads": ("S4", {"kinds": {"fail"}}),
    "serving only": ("S1", {"kinds": {"late"}}),
    "one request": ("S3", {"kinds": {"repeat"}}),
    "intent": ("S5", {"faults": 0}),
    "buffer": ("S6", {"kinds": {"silent"}, "steps": 0}),
    "result epoch": ("S4", {"kinds": {"fail", "stale"}, "faults": 2, "epochs": 3}),
    "drain": ("S1", {"kinds": {"late"}}),
    "drain + wait for gates": ("S1", {"faults": 0}),
    "drain + count calls": ("S1", {"faults": 0}),
    "gate + request epoch": ("S1", {"faults": 0}),
    "gate + lease": ("S2", {"kinds": {"early"}, "engines": 2}),
    "lease + wait for gates": ("S2", {"kinds": {"early"}, "engines": 2}),
    "ack epoch + wait for drains": ("S4", {"kinds": {"fail"}, "epochs": 3, "backoff_s": 0.0}),
    "wait for drains + drained before load + one by one": ("S1", {"kinds": {"late"}}),
}
"""Mechanisms -> what goes wrong without them, and within which bounds: one engine, unless said otherwise.

Where several are named, each covers for the others: with one of them the same search finds nothing wrong.
"""
STUCK: dict[str, dict[str, Any]] = {
    "deadlines": {"kinds": {"fail"}},
    "deadlines + trainer boot": {"kinds": {"crash trainer"}, "backoff_s": 0.0},
}
"""The same, for what never comes to an end."""


@pytest.mark.parametrize(
    ("mechanism", "wrong"),
    [("drain", "S1: engine-1 receives weights while"), ("spans", "S1: tokens of versions (0, 1) are labelled with 0")],
)
def test_in_flight_breaks_without_holding_still_or_without_spans(mechanism: str, wrong: str) -> None:
    result = search(RefitModel(without=frozenset({mechanism}), drain="in_flight", faults=0, steps=1, epochs=2))
    assert result.wrong.startswith(wrong), str(result)


def searched(mechanisms: Iterable[str], bounds: dict[str, Any], liveness: bool = False) -> Result:
    return search(RefitModel(without=frozenset(mechanisms), **{**ONE, **bounds}), liveness)


@pytest.mark.parametrize("mechanisms", NEEDED)
def test_without_its_mechanisms_the_barrier_breaks(mechanisms: str) -> None:
    wrong, bounds = NEEDED[mechanisms]
    result = searched(mechanisms.split(" + "), bounds)
    print(f"without {mechanisms}: {result}")
    assert result.wrong.startswith(wrong), str(result)
    assert result.path, "the log shows how"


@pytest.mark.parametrize("mechanisms", STUCK)
def test_without_deadlines_the_barrier_gets_stuck(mechanisms: str) -> None:
    result = searched(mechanisms.split(" + "), STUCK[mechanisms], liveness=True)
    print(f"without {mechanisms}: {result}")
    assert result.wrong == "no way leads on from here", str(result)


SEVERAL = {m: b for m, (_, b) in NEEDED.items() if "+" in m and "engines" not in b} | {
    m: b for m, b in STUCK.items() if "+" in m
}


@pytest.mark.parametrize("mechanisms", SEVERAL)
def test_each_of_several_mechanisms_covers_for_the_others(mechanisms: str) -> None:
    names = mechanisms.split(" + ")
    for kept in names:
        result = searched({*names} - {kept}, SEVERAL[mechanisms], liveness=mechanisms in STUCK)
        assert result.wrong == "", f"with {kept}: {result}"
