"""The refit barrier, searched exhaustively: it is safe and never stuck, and each of its mechanisms is needed.

Safe means: at most one commit an epoch and none after a newer one began, versions that only rise, commits of engines
only that acknowledged this epoch, under this boot, with the offered digest, no load under a running sequence, and no
sequence that is labelled with another commit than the one it runs under.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.refit_model import RefitModel
from tests.model.search import search


@pytest.mark.parametrize(
    "bounds", [{"committed": False, "steps": 0}, {"committed": True, "steps": 1}], ids=["start", "serving"]
)
def test_whatever_fails_once_the_barrier_is_safe_and_a_commit_stays_possible(bounds: dict[str, Any]) -> None:
    result = search(RefitModel(faults=1, **bounds), liveness=True)
    assert result.wrong == "", str(result)
    assert result.states > 10_000
    assert result.cut < result.states / 100, "most worlds must be within the bounds"


NEEDED = {
    "ack_epoch": ("crash", "what is labelled with epoch"),
    "ack_boot": ("crash", "without having loaded"),
    "digest": ("corrupt", "without having loaded"),
    "gate_wait": ("", "what is labelled with epoch"),
    "drain_wait": ("crash", "loads weights while a sequence runs"),
}
"""Mechanism -> the fault that makes it needed, and what goes wrong without it."""


@pytest.mark.parametrize("mechanism", NEEDED)
def test_without_one_mechanism_the_barrier_breaks(mechanism: str) -> None:
    fault, wrong = NEEDED[mechanism]
    bounds: dict[str, Any] = {"kinds": frozenset({fault}), "committed": True, "epochs": 3}
    result = search(RefitModel(without=mechanism, **bounds))
    print(f"without {mechanism}: {result}")
    assert wrong in result.wrong
    assert any(line.startswith("refit reads") for line in result.path)
    faults = [line for line in result.path if "crashes" in line or "other weights" in line]
    assert len(faults) == (1 if fault else 0)


def test_without_deadlines_the_barrier_gets_stuck() -> None:
    result = search(RefitModel(without="deadlines", kinds=frozenset({"fail"}), steps=0), liveness=True)
    assert result.wrong == "no way leads on from here", str(result)
