"""`pipeline why` on a live run: the newest events, the actors' states and the store's own word come from the store."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.recorder.archive import Writer
from config.schema import BrokerConfig
from contracts import events
from contracts.envelope import STREAM_OF, Envelope, decode, encode
from pipeline.broker import Broker, choose
from pipeline.bus import Bus
from pipeline.rundir import RunDir
from pipeline.simulate import archive
from pipeline.why import load
from pipeline.why.diagnosis import diagnose
from tests.stalls.gallery import PATIENT, long_tail_in_drain
from tests.stalls.scene import Scene


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with choose({"PATH": ""}, tmp_path_factory.mktemp("store"), BrokerConfig()) as broker:
        yield broker


@pytest.fixture
def live(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A stalled run whose recorder has archived the first half of its log; the rest is in the store."""
    monkeypatch.delenv("REDIS_URL", raising=False)
    scene = Scene(PATIENT)
    long_tail_in_drain(scene)
    scene.start()
    scene.run(30.0)
    run = archive.write(scene.world, PATIENT, tmp_path / "run")
    run.update(run=f"live-{tmp_path.name}", redis_url=broker.url)
    for path in (run / "events").glob("*"):
        path.unlink()
    recorder = Writer(run.events, 0.0)
    log = list(scene.world.store.log)
    for entry in log[: len(log) // 2]:
        recorder.append(entry.stream, entry.entry, entry.data)
    recorder.flush(0.0)
    asyncio.run(_fill(broker.url, run.info().run, scene))
    yield run
    recorder.close(0.0)


async def _fill(url: str, name: str, scene: Scene) -> None:
    """The whole log and all journals, as the actors' commits would have written them."""
    bus: Any = await Bus.connect(url, name, actor="test")
    try:
        for entry in scene.world.store.log:
            assert await bus.post(entry.stream, entry.data) == entry.entry
        for actor, records in scene.world.store.journals.items():
            for seq, record in enumerate(records, 1):
                await bus._link.command("XADD", bus.keys.journal(actor), f"{seq}-0", "e", record)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
        await process.wait()
        for actor, pid in (("gateway-0", os.getpid()), ("source", process.pid)):
            body = events.ActorBooted(actor=actor, boot=1, pid=pid, host=socket.gethostname())
            newest = decode(scene.world.store.log[-1].stream, scene.world.store.log[-1].data)
            envelope = Envelope(
                id=f"late:{actor}", run=name, stream=STREAM_OF[type(body)], actor=actor, boot=1, epoch=0,
                wall_ns=newest.wall_ns, mono_ns=0, body=body,
            )  # fmt: skip
            await bus.post(envelope.stream, encode(envelope))
    finally:
        await bus.close()


def test_a_live_run_is_explained_from_the_store(live: RunDir):
    case = load.gather(live, PATIENT)
    assert case.live
    assert case.model.events > 150, "the store was not read beyond the archive"
    store = case.evidence.store
    assert store is not None
    assert store.error == ""
    assert store.used > 100_000
    assert store.dead == {"tasks": 0, "trajectories": 0, "batches": 0}
    assert case.evidence.alive["gateway-0"]
    assert not case.evidence.alive["source"]
    found = diagnose(case.model, PATIENT, case.model.last_at + 60.0, case.evidence)
    assert found.cause is not None
    assert (found.cause.code, found.cause.culprit) == ("drain_tail", "engine-0")
    assert "oldest episode" in found.cause.text, "the gateway's state was not folded from its journal"


def test_a_stuck_live_run_is_looked_into(live: RunDir):
    case, found = load.explain(live, PATIENT)
    assert found.cause is not None
    assert (found.cause.code, case.live) == ("drain_tail", True)
    assert "oldest episode" in found.cause.text


def test_a_live_run_whose_store_is_gone_says_so(live: RunDir):
    live.update(redis_url="redis://127.0.0.1:1/0")
    case = load.gather(live, PATIENT)
    found = diagnose(case.model, PATIENT, case.now, case.evidence)
    assert found.cause is not None
    assert (found.stuck, found.cause.code) == (True, "store_unreachable")
