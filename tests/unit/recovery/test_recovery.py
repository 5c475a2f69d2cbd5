"""A resume finds the store lost, behind, or another one, and makes it whole from the run directory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.recorder import archive
from actors.recorder.actor import PAYLOADS, Payload
from actors.refit.actor import HIGH
from actors.trainer import checkpoint
from config.schema import BrokerConfig
from contracts.core import Entry
from contracts.envelope import Envelope, decode, encode
from contracts.events import ActorBooted, TrajectoryFinished
from pipeline.broker import Broker, choose
from pipeline.bus import Bus
from pipeline.cores import core_of
from pipeline.errors import PipelineError
from pipeline.launcher import Session
from pipeline.recovery import REBUILDING, recover
from pipeline.rundir import RunDir
from pipeline.runtime.journal import Journal
from pipeline.runtime.machine import GROUP
from pipeline.simulate import archive as simulated
from pipeline.simulate.world import World
from tests.chaos.schedules import config
from tests.unit.recovery.test_rebuild import PLANS, half_way


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with choose({}, tmp_path_factory.mktemp("broker"), BrokerConfig()) as running:
        yield running


@pytest.fixture(scope="module")
def world() -> World:
    return half_way()


@pytest.fixture
def run(world: World, tmp_path: Path) -> RunDir:
    """An archived run; each test has its own keys."""
    directory = simulated.write(world, config(1), tmp_path / "run")
    directory.update(run=f"run-{time.monotonic_ns()}")
    write_payloads(directory, world)
    return directory


def write_payloads(directory: RunDir, world: World) -> None:
    writer = archive.Writer(directory / "payloads", 0.0)
    for entry in world.store.log:
        if entry.stream == "trajectories" and isinstance(
            body := decode(entry.stream, entry.data).body, TrajectoryFinished
        ):
            key = body.payload.key
            writer.append(PAYLOADS, entry.entry, msgspec.msgpack.encode(Payload(key, world.store.archived[key])))
    writer.close(0.0)


class Notes(list[tuple[str, dict[str, Any]]]):
    def __call__(self, message: str, **fields: Any) -> None:
        self.append((message, fields))

    @property
    def reasons(self) -> list[str]:
        return [fields["reason"] for _, fields in self if "reason" in fields]


def last(directory: RunDir) -> dict[str, Entry]:
    return {entry.stream: entry for entry in archive.read(directory.events)}


async def resume(broker: Broker, directory: RunDir, notes: Notes | None = None, changed: Any = None) -> bool:
    note = Notes() if notes is None else notes
    return await recover(broker.url, directory, config(1), changed or config(1), last(directory), note)


@pytest.fixture
async def bus(broker: Broker, run: RunDir) -> AsyncIterator[Bus]:
    connected = await Bus.connect(broker.url, run.info().run, actor="trainer")
    yield connected
    await connected.close()


async def test_an_empty_store_is_filled_with_everything_that_somebody_needs(
    broker: Broker, run: RunDir, world: World, bus: Bus
) -> None:
    notes = Notes()
    assert await resume(broker, run, notes)
    assert notes.reasons == ["the store holds nothing of this run"]
    for name, actor in world.actors.items():
        mine = await Bus.connect(broker.url, run.info().run, actor=name)
        boot, seq = await mine.boot()
        assert boot == world.store.boots[name] + 2, "every process that may still live is fenced"
        assert seq == world.store.seqs[name]
        snapshot = await mine.snapshot()
        assert snapshot is not None
        folded, state = Journal(actor.core).fold(snapshot, await mine.journal(after=snapshot[0]))
        assert folded == seq
        if actor.machine is not None:
            assert state == actor.machine.state
        await mine.close()
    for name, value in world.store.registers.items():
        assert await bus.register(name) == value
    kept = sorted(key for key in world.store.payloads if not key.startswith(PLANS))
    assert await bus.payloads(kept) == [world.store.payloads[key] for key in kept]


async def test_work_in_hand_comes_back_to_whoever_had_it(broker: Broker, run: RunDir, world: World) -> None:
    await resume(broker, run)
    for stream in ("tasks", "trajectories", "batches"):
        pending = world.store.streams[stream].pending
        for name, actor in world.actors.items():
            if stream not in actor.core.work:
                continue
            mine = await Bus.connect(broker.url, run.info().run, actor=name)
            await mine.ensure_group(stream, GROUP)
            got = []
            while found := await mine.read_work({stream: 1000}, GROUP, block_ms=None):
                got += found
            redelivered = {item.entry for item in got if item.deliveries > 1}
            assert redelivered == {f"{at}-0" for at, item in pending.items() if item.consumer == name}
            await mine.close()


async def test_new_events_go_on_behind_the_last_archived_one(
    broker: Broker, run: RunDir, world: World, bus: Bus
) -> None:
    await resume(broker, run)
    assert await bus.post("control", b"x") == f"{len(world.store.log) + 1}-0"


async def test_the_recorder_begins_anew_and_uses_no_id_of_an_event_twice(broker: Broker, run: RunDir) -> None:
    end = sum(1 for _ in archive.read(run.events))
    writer = archive.Writer(run.events, 0.0)
    for seq, boot in ((1, 1), (7, 2)):
        body = ActorBooted(actor="recorder", boot=boot, pid=1, host="h")
        event = Envelope(
            id=f"recorder:{seq}.1",
            run=run.info().run,
            stream="fleet",
            actor="recorder",
            boot=boot,
            epoch=0,
            wall_ns=0,
            mono_ns=0,
            body=body,
        )
        writer.append("fleet", f"{end + boot}-0", encode(event))
    writer.close(0.0)
    assert await resume(broker, run)
    recorder = await Bus.connect(broker.url, run.info().run, actor="recorder")
    assert await recorder.boot() == (4, 7)
    core = core_of(config(1), "recorder")
    assert Journal(core).fold(await recorder.snapshot(), await recorder.journal(after=7)) == (7, core.initial())
    await recorder.close()


async def test_a_store_that_is_whole_is_left_alone(broker: Broker, run: RunDir, bus: Bus) -> None:
    await resume(broker, run)
    await bus.post("control", b"newer than the archive")
    assert not await resume(broker, run)


async def test_a_store_that_lost_its_end_is_rebuilt(broker: Broker, run: RunDir, world: World, bus: Bus) -> None:
    await resume(broker, run)
    await bus._link.command("SET", bus.keys.order, len(world.store.log) - 5)
    notes = Notes()
    assert await resume(broker, run, notes)
    assert notes.reasons == [
        f"the store ends at event {len(world.store.log) - 5}, the archive at {len(world.store.log)}"
    ]


async def test_a_store_that_went_another_way_is_rebuilt(broker: Broker, run: RunDir, bus: Bus) -> None:
    await resume(broker, run)
    end = last(run)["policy"].entry
    await bus._link.command("DEL", bus.keys.stream("policy"))
    await bus._link.command("XADD", bus.keys.stream("policy"), end, "e", b"another event")
    notes = Notes()
    assert await resume(broker, run, notes)
    assert notes.reasons == [f"event {end} of policy is another one in the store than in the archive"]


async def test_a_rebuild_that_was_interrupted_is_done_again(broker: Broker, run: RunDir, bus: Bus) -> None:
    await resume(broker, run)
    await bus._link.command("SET", bus.keys.prefix + REBUILDING, 1)
    notes = Notes()
    assert await resume(broker, run, notes)
    assert notes.reasons == ["an earlier rebuild of the store was interrupted"]
    assert not await bus._link.command("EXISTS", bus.keys.prefix + REBUILDING)


async def test_an_archive_without_payloads_is_refused_and_says_so(broker: Broker, run: RunDir) -> None:
    for file in (run / "payloads").iterdir():
        file.unlink()
    with pytest.raises(PipelineError, match=r"the archive lacks \d+ of \d+ trajectories"):
        await resume(broker, run)


async def test_what_lies_behind_the_cut_leaves_archive_metrics_and_checkpoints(
    broker: Broker, run: RunDir, world: World
) -> None:
    end = len(world.store.log)
    writer = archive.Writer(run.events, 0.0)
    writer.append("control", f"{end + 2}-0", b"behind a hole")
    writer.close(0.0)
    (run / "metrics.jsonl").write_text('{"version": 1}\n{"version": 900}\n')
    stale = checkpoint.directory(run / "checkpoints", 900, 9)
    checkpoint.write(stale, {"weights": lambda file: file.write_bytes(b"x")}, {})
    notes = Notes()
    await resume(broker, run, notes)
    numbers = [int(entry.entry.partition("-")[0]) for entry in archive.read(run.events)]
    assert numbers == list(range(1, end + 1))
    assert [json.loads(line)["version"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1]
    assert not stale.exists()
    assert "checkpoint set aside: the log does not know its version" in [text for text, _ in notes]


async def test_an_epoch_that_only_the_disk_knows_is_not_used_again(broker: Broker, run: RunDir, bus: Bus) -> None:
    (run / HIGH).write_text("4711\n")
    await resume(broker, run)
    assert await bus.register("epoch") == 4711


async def test_new_settings_decide_behind_what_the_old_ones_decided(
    broker: Broker, run: RunDir, world: World, bus: Bus
) -> None:
    await resume(broker, run)
    changed = msgspec.structs.replace(config(1), steps=500)
    await resume(broker, run, changed=changed)
    (era,) = run.info().eras
    assert era.seqs["trainer"] == world.store.seqs["trainer"]
    assert msgspec.convert(era.config, type(changed)) == config(1)
    assert "steps: 500" in (run / "config.yaml").read_text()
    snapshot = await bus.snapshot()
    assert snapshot is not None
    assert snapshot[0] == era.seqs["trainer"]
    assert await bus.journal(after=snapshot[0]) == []


async def test_a_store_is_rebuilt_over_a_change_of_settings_too(broker: Broker, run: RunDir, bus: Bus) -> None:
    await resume(broker, run)
    changed = msgspec.structs.replace(config(1), steps=500)
    await resume(broker, run, changed=changed)
    await bus._link.command("DEL", bus.keys.order)
    assert await recover(broker.url, run, changed, changed, last(run), Notes())


async def test_a_session_that_resumes_recovers_its_store_before_anything_starts(
    broker: Broker, run: RunDir, world: World
) -> None:
    session = Session(config(1), run, before=config(1))
    last = await asyncio.to_thread(session._replay)
    assert max(int(entry.entry.partition("-")[0]) for entry in last.values()) == len(world.store.log)
    assert await asyncio.to_thread(session._recover, broker, last) == last
    assert not await resume(broker, run), "the store is whole now"
