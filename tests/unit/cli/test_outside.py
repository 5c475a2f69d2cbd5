"""Actors that somebody else runs: the driver knows by events and by the archive's lock that they have left."""

from __future__ import annotations

from pathlib import Path

import pytest
from story import Story, booted

from actors.recorder.archive import Writer
from config import loading
from contracts import events
from pipeline import outside
from pipeline.outside import Outside
from pipeline.view import View


async def test_an_actor_has_left_when_it_says_so_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "LOOK_S", 0.0)
    story, view = Story(), View()
    there = Outside(view, tmp_path / "events")
    there.start()
    there.launch(["buffer"], "url", "run")
    for actor in ("buffer", "trainer"):
        view.apply(story.add(booted(actor)))
    assert await there.wait(["buffer", "trainer"], 1.0) == ["buffer", "trainer"]
    view.apply(story.add(events.ActorLeft(actor="buffer", boot=1)))
    assert await there.wait(["buffer", "trainer"], 1.0) == ["trainer"]
    view.apply(story.add(booted("buffer", 2)))
    assert await there.wait(["buffer"], 1.0) == ["buffer"]
    assert there.left() == {}
    there.stop()


async def test_the_recorder_has_left_when_it_let_go_of_the_archive(tmp_path: Path) -> None:
    there = Outside(View(), tmp_path)
    writer = Writer(tmp_path, 0.0)
    assert await there.wait(["recorder"], 1.0) == ["recorder"]
    writer.close(0.0)
    assert await there.wait(["recorder"], 1.0) == []


def test_a_new_session_waits_for_its_own_actors() -> None:
    story, view = Story(), View()
    view.apply(story.add(events.ActorLeft(actor="buffer", boot=1)))
    assert view.gone == {"buffer"}
    view.begin()
    assert view.gone == set()


def test_ray_and_external_actors_exclude_each_other() -> None:
    with pytest.raises(loading.ConfigError, match=r"launch\.ray_address=auto is for launch\.mode=ray"):
        loading.load("quickstart", ["launch.mode=external", "launch.ray_address=auto"])
