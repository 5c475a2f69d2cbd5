"""Each stall of the gallery is told apart from the others, by its cause and by who is to blame."""

from __future__ import annotations

import pytest

from pipeline.why.causes import CAUSES
from tests.stalls.gallery import GALLERY, Stall
from tests.stalls.scene import BASE, Scene


def arranged(stall: Stall) -> Scene:
    scene = Scene(stall.config, pace=stall.pace)
    stall.arrange(scene)
    scene.start()
    scene.run(stall.seconds)
    return scene


@pytest.mark.parametrize("stall", GALLERY, ids=lambda stall: stall.name.replace(" ", "-"))
def test_the_true_cause_is_named(stall: Stall):
    scene = arranged(stall)
    found = scene.diagnose()
    assert found.stuck, found
    assert found.cause is not None
    assert found.cause.code == stall.cause, found
    assert found.cause.culprit.startswith(stall.culprit), found
    if stall.events_suffice:
        alone = scene.diagnose_from_events()
        assert alone.cause is not None
        assert (alone.cause.code, alone.cause.culprit) == (found.cause.code, found.cause.culprit), alone


@pytest.mark.parametrize("seconds", [0.5, 3.0, 8.0, 15.0])
def test_a_healthy_run_is_never_called_stuck(seconds: float):
    scene = Scene(BASE)
    scene.start()
    scene.run(seconds)
    found = scene.diagnose()
    assert not found.stuck, found
    assert found.cause is None


def test_the_gallery_shows_every_cause_that_a_simulation_can_have():
    shown = {stall.cause for stall in GALLERY}
    elsewhere = {
        "unknown",
        "store_unreachable",
        "refits_fail",
        "actor_failed",
        "actor_silent",
        "gate_not_closed",
        "trainer_not_offering",
        "engine_retired",
    }
    assert shown | elsewhere == set(CAUSES)
