"""The schedules that `make chaos` plays on real runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

from contracts.events import (
    BatchReady,
    EngineQuarantined,
    GroupRef,
    Member,
    PayloadRef,
    Provenance,
    RefitCommitted,
    SampleRef,
    TrajectoryFinished,
)
from tests.chaos.moments import quarantined_tokens
from tests.chaos.processes import BLACKOUTS, ONE_OF_EACH, Kind, plan


def test_the_short_schedule_holds_every_kind_of_fault_and_one_blackout_at_its_end() -> None:
    kinds = [fault.kind for fault in ONE_OF_EACH]
    assert {*kinds, *BLACKOUTS} == set(get_args(Kind))
    assert [kind for kind in kinds if kind in BLACKOUTS] == kinds[-1:]


def test_a_seed_names_its_schedule() -> None:
    assert plan(3) == plan(3) != plan(4)
    for seed in range(20):
        *storm, last = plan(seed)
        assert last.kind in ("everything", "wipe")
        assert len(storm) in (10, 11)


# --- what `make chaos` looks for in the log of a run whose refits were struck ----------------------------------------

ENGINE = Member("engine-1", 3)


def _finished(sample: int) -> TrajectoryFinished:
    return TrajectoryFinished(
        task="t",
        index=1,
        sample=sample,
        attempt=1,
        samples=2,
        reward=1.0,
        components={},
        valid=True,
        payload=PayloadRef(f"p{sample}", 1),
        prompt_tokens=1,
        completion_tokens=1,
        sources=(Provenance(7, ENGINE.actor, ENGINE.boot),),
        seconds=0.1,
    )


def _batch(*samples: int) -> BatchReady:
    refs = tuple(SampleRef(n, 1.0, True, PayloadRef(f"p{n}", 1), 0) for n in samples)
    return BatchReady(batch=1, groups=(GroupRef("t", 1, refs),))


CUT = EngineQuarantined(epoch=2, engine=ENGINE.actor, boot=ENGINE.boot, reason="died")
BACK = RefitCommitted(
    epoch=3, version=8, step=8, engines=(ENGINE,), world_size=2, pause_s=0.1, drain_s=0.1, transfer_s=0.1, bytes=1
)


def test_a_batch_with_what_an_engine_finished_while_it_was_quarantined_is_found() -> None:
    def found(*bodies: Any) -> list[str]:
        return quarantined_tokens(SimpleNamespace(body=body) for body in bodies)  # type: ignore[misc]

    assert len(found(CUT, _finished(0), _finished(1), _batch(0, 1))) == 2
    assert found(CUT, _finished(0), BACK, _finished(1), _batch(1)) == []
    assert found(_finished(0), CUT, _batch(0)) == [], "it was finished before"
    assert found(CUT, _finished(0)) == [], "it was refused"
