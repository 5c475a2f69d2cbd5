"""A simulated run in memory and as a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.recorder.ordering import number
from config.schema import RunConfig
from contracts.envelope import decode
from pipeline.replay import journals
from pipeline.replay.recorded import Log, Recorded
from pipeline.rundir import RunDir
from pipeline.simulate import archive
from tests.stalls.scene import BASE, Scene


def recorded_of(scene: Scene, config: RunConfig) -> Recorded:
    """The scene as `Recorded` would read it from an archive."""
    log = Log(
        [(number(e.entry), decode(e.stream, e.data)) for e in scene.world.store.log], lambda: scene.world.store.log
    )
    records = {
        name: [journals._records.decode(data) for data in found]
        for name, found in scene.world.store.journals.items()
    }  # fmt: skip
    return Recorded(config, log, records)


@pytest.fixture(scope="session")
def scene() -> Scene:
    """A healthy run with a restart of the trainer and of an engine in it."""
    scene = Scene(BASE, seed=3)
    scene.start()
    scene.world.later(3.0, scene["trainer"].kill)
    scene.world.later(4.0, scene["engine-1"].kill)
    scene.run(9.0)
    assert scene.step() > 3
    return scene


@pytest.fixture
def recorded(scene: Scene) -> Recorded:
    return recorded_of(scene, BASE)


@pytest.fixture(scope="session")
def run(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    path: Path = tmp_path_factory.mktemp("runs") / "healthy"
    return archive.write(scene.world, BASE, path)
