"""A real run survives the loss of its store, of its actors' time, and in the end of everything but its directory.

More of them: `make chaos SEEDS=20`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.processes import Fault, Storm, plan

ONE_OF_EACH = (
    Fault(kind="store"),
    Fault(kind="kill", after=1.0, victims=("trainer", "buffer")),
    Fault(kind="stop", after=1.0, victims=("engine-0", "collector-0"), seconds=3.0),
    Fault(kind="stop store", after=0.5, seconds=2.0),
    Fault(kind="server", after=0.5, victims=("engine-1",)),
    Fault(kind="wipe"),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_outlives_its_store_and_its_actors_and_is_resumed_without_them(tmp_path: Path) -> None:
    Storm(tmp_path).play(ONE_OF_EACH)


def test_a_seed_names_its_schedule() -> None:
    assert plan(3) == plan(3) != plan(4)
    for seed in range(20):
        *storm, last = plan(seed)
        assert last.kind in ("everything", "wipe")
        assert len(storm) in (10, 11)
