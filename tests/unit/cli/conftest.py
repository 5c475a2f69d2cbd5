"""Runs that were archived, for the commands that read them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "view"))

from story import Story

from actors.recorder.archive import Writer
from config import loading
from contracts.envelope import encode
from pipeline import rundir
from pipeline.rundir import RunDir


def archive(folder: Path, story: Story) -> None:
    """Write the story's events as the recorder would."""
    writer = Writer(folder, 0.0)
    for number, envelope in enumerate(story.log, 1):
        writer.append(envelope.stream, f"{number}-0", encode(envelope))
    writer.close(0.0)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunDir]:
    """Make the directory of a run whose log is a story."""

    def make(story: Story, name: str = "demo", path: Path | None = None) -> RunDir:
        config = loading.load("quickstart", [f"name={name}"])
        info = rundir.describe(name, config, loading.digest(config))
        run = RunDir.create(path or tmp_path / name, info, loading.dump(config))
        archive(run.events, story)
        run.unlock()
        return run

    return make
