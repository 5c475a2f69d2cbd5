"""The recorder's shell: the log is archived whole and once, over any crash, with its payloads and metrics."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.recorder import actor as module
from actors.recorder.actor import RecorderShell, build, payloads
from actors.recorder.archive import ArchiveBusy, Writer, read
from actors.recorder.core import Appended, Flush, Flushed, Follow, Recovered, Trim
from config.schema import RunConfig
from contracts import events
from contracts.core import Entry, Fatal
from contracts.events import (
    ActorBooted,
    BatchReady,
    CheckpointSaved,
    GroupRef,
    PayloadRef,
    RunFinished,
    RunStarted,
    SampleRef,
    StepFinished,
    TrajectoryFinished,
)

CONFIG = RunConfig()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.0)


def trajectory(sample: int) -> TrajectoryFinished:
    return TrajectoryFinished(
        task="t",
        index=0,
        sample=sample,
        attempt=1,
        samples=4,
        reward=float(sample % 2),
        components={},
        valid=True,
        payload=PayloadRef(f"p{sample}", 3),
        prompt_tokens=5,
        completion_tokens=7,
        sources=(),
        seconds=0.1,
    )


def step(number: int) -> list[events.Event]:
    samples = tuple(SampleRef(s, float(s % 2), True, PayloadRef(f"p{s}", 3), s % 3) for s in range(4))
    return [
        BatchReady(batch=number, groups=(GroupRef("t", number, samples),)),
        StepFinished(
            version=number + 1,
            parent_version=number,
            step=number + 1,
            trainer_boot=1,
            batch=number,
            metrics={"loss": 0.5},
            seconds=1.0,
            waited_s=0.5,
            tokens=100,
            tasks=(number,),
        ),
    ]


async def start(log: Any, config: RunConfig = CONFIG) -> RecorderShell:
    shell = build(config, "recorder")
    await shell.start(log)
    return shell


async def follow(shell: RecorderShell, log: Any) -> None:
    """Follow a log that ends with run.finished."""
    await asyncio.wait_for(shell.perform(Follow()), 60)
    assert log.inputs[-1] == Appended(log.inputs[-1].bytes, log.inputs[-1].booted, finished=True)


async def record(log: Any) -> None:
    shell = await start(log)
    await follow(shell, log)
    await shell.perform(Flush(rotate=True))
    await shell.close()


def crash(shell: RecorderShell) -> None:
    """The process dies without closing anything."""
    for writer in shell._writers:
        os.close(writer._lock)


async def test_the_log_is_archived_whole_and_in_order(log: Any) -> None:
    log.add(RunStarted(config_digest=""))
    log.add(ActorBooted(actor="buffer", boot=1, pid=1, host="h"))
    for sample in range(4):
        log.blobs[f"p{sample}"] = b"abc"
        log.add(trajectory(sample))
    for event in step(0):
        log.add(event)
    journal = [log.record("buffer", b"x"), log.record("trainer", b"y")]
    log.record("recorder", b"own")
    log.add(RunFinished(reason="done"))
    await record(log)
    root = Path(log.run_dir)
    assert list(read(root / "events")) == log.events()
    assert sorted(read(root / "journals"), key=repr) == sorted(journal, key=repr)
    assert payloads(root / "payloads") == {f"p{sample}": b"abc" for sample in range(4)}
    assert log.inputs[0] == Recovered({})
    assert {name for input in log.inputs[1:] for name in input.booted} == {"buffer"}


async def test_the_newest_checkpoint_that_was_taken_is_told(log: Any) -> None:
    for version in (4, 7):
        log.add(CheckpointSaved(version=version, step=version, batch=version, path="/c", bytes=1, seconds=0.1))
    log.add(RunFinished(reason="done"))
    shell = await start(log)
    await asyncio.wait_for(shell.perform(Follow()), 60)
    assert [input.checkpoint for input in log.inputs if isinstance(input, Appended)] == [7, 0]
    await shell.close()


@pytest.mark.parametrize("flushed", [True, False])
async def test_a_crash_neither_loses_nor_doubles_records(log: Any, flushed: bool) -> None:
    for number in range(3):
        log.blobs[f"p{number}"] = b"abc"
        log.add(trajectory(number))
        for event in step(number):
            log.add(event)
    shell = await start(log)
    task = asyncio.create_task(shell.perform(Follow()))
    while len(log.inputs) < 2:
        await log.got_input.wait()
        log.got_input.clear()
    if flushed:
        answer = await shell.perform(Flush(rotate=False))
        assert isinstance(answer, Flushed)
        assert answer == Flushed({"trajectories": "7-0", "batches": "8-0", "policy": "9-0"}, answer.bytes, False)
    task.cancel()
    crash(shell)
    for event in step(3):
        log.add(event)
    log.add(RunFinished(reason="done"))
    log.inputs.clear()
    await record(log)
    root = Path(log.run_dir)
    assert list(read(root / "events")) == log.events()
    assert list(payloads(root / "payloads")) == ["p0", "p1", "p2"]
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [1, 2, 3, 4]


async def test_a_payload_that_was_released_is_recorded_as_missing(log: Any) -> None:
    for sample in range(5):
        log.add(trajectory(sample))
        if sample != 3:
            log.blobs[f"p{sample}"] = b"abc"
    log.add(RunFinished(reason="done"))
    await record(log)
    found = payloads(Path(log.run_dir) / "payloads")
    assert found == {"p0": b"abc", "p1": b"abc", "p2": b"abc", "p3": None, "p4": b"abc"}


async def test_payloads_can_be_left_out(log: Any) -> None:
    log.add(trajectory(0))
    log.add(RunFinished(reason="done"))
    config = RunConfig(recorder=type(CONFIG.recorder)(payloads=False, tensorboard=False))
    shell = await start(log, config)
    await follow(shell, log)
    await shell.perform(Flush(rotate=True))
    await shell.close()
    assert payloads(Path(log.run_dir) / "payloads") == {}
    assert not (Path(log.run_dir) / "tensorboard").exists()


async def test_metrics_hold_reward_staleness_and_policy_metrics(log: Any) -> None:
    for event in step(0):
        log.add(event)
    log.add(RunFinished(reason="done"))
    await record(log)
    (row,) = [json.loads(line) for line in (Path(log.run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert row["reward/train"] == 0.5
    assert (row["staleness/lag_0"], row["staleness/lag_1"], row["staleness/max"]) == (2, 1, 2)
    assert row["policy/loss"] == 0.5
    assert list((Path(log.run_dir) / "tensorboard").glob("events.out.tfevents.*"))


async def test_an_unreadable_event_is_archived_all_the_same(log: Any) -> None:
    log.streams["control"].append(Entry("control", "1-0", b"\xc1 not an event"))
    log._count = 1
    log.add(RunFinished(reason="done"))
    await record(log)
    assert [e.entry for e in read(Path(log.run_dir) / "events")] == ["1-0", "2-0"]


async def test_a_restart_after_the_end_of_the_log_ends_at_once(log: Any) -> None:
    log.add(RunFinished(reason="done"))
    await record(log)
    log.inputs.clear()
    await record(log)
    assert log.inputs == [Recovered({"control": "1-0"}), Appended(0, (), finished=True)]


async def test_a_resumed_run_is_followed_to_its_new_end(log: Any) -> None:
    log.add(RunFinished(reason="interrupted"))
    await record(log)
    log.add(RunStarted(config_digest="", resumed=True))
    for event in step(0):
        log.add(event)
    log.add(RunFinished(reason="done"))
    await record(log)
    assert list(read(Path(log.run_dir) / "events")) == log.events()


async def test_trimming_passes_on_the_floors(log: Any) -> None:
    shell = await start(log)
    for event in step(0):
        log.add(event)
    await shell.perform(Trim({"policy": "2-0", "batches": "5-0"}, "7-0"))
    assert log.trimmed == {"policy": "2-0", "batches": "5-0"}
    assert log.discarded == ["7-0"]
    await shell.close()


async def test_it_waits_for_a_predecessor_to_let_go(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Writer(Path(log.run_dir) / "payloads", 0.0)
    starting = asyncio.create_task(start(log))
    await asyncio.sleep(0)
    assert not starting.done()
    other.close(0.0)
    await (await asyncio.wait_for(starting, 10)).close()
    monkeypatch.setattr(module, "PREDECESSOR_S", 0.0)
    other = Writer(Path(log.run_dir) / "payloads", 0.0)
    with pytest.raises(ArchiveBusy):
        await start(log)
    other.close(0.0)


async def test_a_run_directory_that_can_not_be_written_ends_the_run(log: Any) -> None:
    shell = await start(log)
    await shell.close()
    blocked = Path(log.run_dir) / "events"
    shell = await start(log)
    for file in blocked.iterdir():
        file.unlink()
    blocked.rmdir()
    shell._events.append("policy", "1-0", b"x")
    with pytest.raises(Fatal, match="can't be written: No such file"):
        await shell.perform(Flush(rotate=False))
    shell._events._pending = []
    await shell.close()
    (Path(log.run_dir) / "payloads" / "lock").unlink()
    (Path(log.run_dir) / "payloads").rmdir()
    (Path(log.run_dir) / "payloads").write_text("")
    with pytest.raises(Fatal, match="choose another run_dir"):
        await start(log)


async def test_unknown_commands_and_payloads_are_refused(log: Any) -> None:
    shell = build(CONFIG, "recorder")
    with pytest.raises(TypeError, match="can't perform"):
        await shell.perform(object())
    with pytest.raises(KeyError):
        shell.payload("x")


# --- metrics over restarts ---


async def some(log: Any, shell: RecorderShell, first: int, count: int = 3) -> None:
    """A session that trains `count` steps and ends."""
    log.add(RunStarted(config_digest="", resumed=first > 0))
    for number in range(first, first + count):
        log.add(events.SampleFailed(task="t", index=0, sample=0, attempt=1, samples=4, failure="data", reason="x"))
        for event in step(number):
            log.add(event)
    log.add(RunFinished(reason="interrupted"))
    await follow(shell, log)
    await shell.perform(Flush(rotate=True))


def rows(log: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(log.run_dir) / "metrics.jsonl").read_text().splitlines()]


async def test_a_restart_folds_only_what_came_since_the_metrics_were_kept(
    log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = await start(log)
    await some(log, shell, 0)
    await shell.close()
    folded: list[str] = []
    digest = RecorderShell._digest
    monkeypatch.setattr(RecorderShell, "_digest", lambda self, entry: folded.append(entry.entry) or digest(self, entry))
    again = await start(log)
    assert folded == []
    await some(log, again, 3)
    await again.close()
    assert [row["version"] for row in rows(log)] == [1, 2, 3, 4, 5, 6]
    assert [row["total/failed_samples"] for row in rows(log)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("harm", ["missing", "torn", "ahead"])
async def test_metrics_that_are_not_kept_are_folded_from_the_archive(log: Any, harm: str) -> None:
    shell = await start(log)
    await some(log, shell, 0)
    await shell.close()
    kept = Path(log.run_dir) / module.KEPT
    if harm == "ahead":
        state = msgspec.msgpack.decode(kept.read_bytes(), type=module.Kept)
        ahead = msgspec.structs.replace(state, seen={**state.seen, "policy": "900-0"})
        kept.write_bytes(msgspec.msgpack.encode(ahead))
    elif harm == "torn":
        kept.write_bytes(kept.read_bytes()[:-5])
    else:
        kept.unlink()
    again = await start(log)
    await some(log, again, 3)
    await again.close()
    assert [row["total/failed_samples"] for row in rows(log)] == [1, 2, 3, 4, 5, 6]


async def test_what_comes_while_the_archive_is_written_is_not_made_durable_before_its_payload(log: Any) -> None:
    shell = await start(log)
    log.blobs["p0"] = b"abc"
    log.add(trajectory(0))
    await shell._archive(log.events(), ())
    counts = [writer.waiting() for writer in shell._writers]
    assert counts == [1, 0, 1]
    late = log.add(trajectory(1))
    shell._events.append(late.stream, late.entry, late.data)
    for writer, count in zip(shell._writers, counts, strict=True):
        writer.flush(0.0, count)
    root = Path(log.run_dir)
    assert [entry.entry for entry in read(root / "events")] == ["1-0"]
    assert list(payloads(root / "payloads")) == ["p0"]
    await shell.close()
    assert [entry.entry for entry in read(root / "events")] == ["1-0", "2-0"]
