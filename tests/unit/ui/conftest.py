"""A simulated run with archived trajectories, of which an engine was killed: as a directory, and folded."""

from __future__ import annotations

import msgspec
import pytest

from actors.recorder.actor import PAYLOADS, Payload
from actors.recorder.archive import Writer
from config.schema import RunConfig
from contracts import events
from contracts.envelope import decode
from pipeline.rundir import RunDir
from pipeline.simulate import archive
from pipeline.ui._data import RunData
from tests.stalls.scene import BASE, Scene
from tests.unit.ui.shown import log_of, rollout


@pytest.fixture(scope="session")
def scene() -> Scene:
    scene = Scene(BASE)
    scene.start()
    scene.run(60.0, lambda: scene.step() >= 6)
    scene["engine-1"].kill()
    scene.run(60.0, lambda: scene.step() >= 12)
    return scene


@pytest.fixture(scope="session")
def config() -> RunConfig:
    return BASE


@pytest.fixture(scope="session")
def run(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = archive.write(scene.world, BASE, tmp_path_factory.mktemp("runs") / "shown")
    payloads = Writer(run / "payloads", 0.0)
    for position, envelope in log_of(scene):
        if isinstance(envelope.body, events.TrajectoryFinished) and envelope.body.sample != 1:
            data = msgspec.msgpack.encode(Payload(envelope.body.payload.key, rollout(envelope.body)))
            payloads.append(PAYLOADS, f"{position}-0", data)
    payloads.close(0.0)
    return run


@pytest.fixture(scope="session")
def data(scene: Scene, run: RunDir) -> RunData:
    data = RunData(run.info(), BASE)
    for entry in scene.world.store.log:
        data.apply(entry, decode(entry.stream, entry.data))
    return data
