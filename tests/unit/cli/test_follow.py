"""`pipeline log --follow`: the archive first, then what is new in the store, each event once, to the end of the run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from story import Story, trained  # pyright: ignore[reportMissingImports] - pytest puts its folder on the path

from actors.recorder.archive import Writer, has_writer
from config.schema import BrokerConfig
from contracts import events
from contracts.envelope import STREAMS, encode
from pipeline import broker, eventlog
from pipeline.bus import Bus
from pipeline.cli import main
from pipeline.errors import Exit, PipelineError
from pipeline.eventlog import Filter, follow, lines
from pipeline.launcher import _shareable
from pipeline.rundir import RunDir


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "store").mkdir()
    env = {"PATH": os.environ.get("PATH", "")}
    with broker.choose(env, tmp_path / "store", BrokerConfig()) as server:
        yield server.url


def test_what_is_archived_and_what_is_live_come_once_and_in_order(
    store: str, make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    archived = trained(2)
    run = make_run(archived)
    run.update(redis_url=store)
    whole = trained(2)
    whole.add(events.TrainingFinished(version=2, step=2))
    whole.add(events.RunFinished(reason="trained"))

    async def fill() -> None:
        bus = await Bus.connect(store, run.info().run, actor="test")
        for envelope in whole.log:
            await bus.post(envelope.stream, encode(envelope))
        await bus.close()

    asyncio.run(fill())
    printed = [json.loads(line) for line in lines(run, Filter(), follow=True)]
    assert [line["entry"] for line in printed] == [f"{n}-0" for n in range(1, len(whole.log) + 1)]
    assert printed[-1]["kind"] == "run.finished"
    only = [json.loads(line)["kind"] for line in lines(run, Filter(kinds=("training.*",)), follow=True)]
    assert only == ["training.finished"]


@pytest.mark.parametrize("kept", [2, 0], ids=["the end is there", "all is trimmed"])
@pytest.mark.parametrize("follow_it", [True, False], ids=["followed", "as it is now"])
def test_what_is_archived_and_trimmed_while_the_archive_is_read_is_not_missed(
    store: str, make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch, follow_it: bool, kept: int
) -> None:
    monkeypatch.setenv("REDIS_URL", store)
    whole = trained(3)
    whole.add(events.TrainingFinished(version=3, step=3))
    whole.add(events.RunFinished(reason="trained"))
    run = make_run(trained(1))
    known = len(trained(1).log)

    async def fill() -> None:
        bus = await Bus.connect(store, run.info().run, actor="test")
        for envelope in whole.log:
            await bus.post(envelope.stream, encode(envelope))
        for stream in STREAMS:
            await bus.trim(stream, f"{len(whole.log) - kept + 1}-0")
        await bus.close()

    asyncio.run(fill())
    read = eventlog.archived

    def late(*given: Any, **named: Any) -> Iterator[Any]:
        """The recorder archives the rest just after the archive was read."""
        yield from read(*given, **named)
        monkeypatch.setattr(eventlog, "archived", read)
        writer = Writer(run.events, 0.0)
        for place, envelope in enumerate(whole.log[known : len(whole.log) - kept], known + 1):
            writer.append(envelope.stream, f"{place}-0", encode(envelope))
        writer.close(0.0)

    monkeypatch.setattr(eventlog, "archived", late)
    if follow_it:
        entries = [json.loads(line)["entry"] for line in lines(run, Filter(), follow=True)]
        assert entries == [f"{n}-0" for n in range(1, len(whole.log) + 1)]
    else:
        found = [envelope.id for envelope in eventlog.everything(run, Filter())]
        assert found == [envelope.id for envelope in whole.log]


def test_a_reader_that_stops_early_leaves_no_connection(
    store: str, make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", store)
    run = make_run(Story())

    async def fill() -> None:
        bus = await Bus.connect(store, run.info().run, actor="test")
        for envelope in trained(1).log:
            await bus.post(envelope.stream, encode(envelope))
        await bus.close()

    asyncio.run(fill())
    following = lines(run, Filter(), follow=True)
    assert json.loads(next(following))["kind"] == "run.started"
    following.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_password_is_not_written_into_the_run_directory() -> None:
    assert _shareable("unix:///tmp/x.sock") == "unix:///tmp/x.sock"
    assert _shareable("redis://host:6379/0") == "redis://host:6379/0"
    assert _shareable("redis://user:secret@host:6379/0") is None


def test_a_log_of_another_release_is_named(make_run: Callable[..., RunDir]) -> None:
    run = make_run(trained(1))
    writer = Writer(run.events, 0.0)
    writer.append("control", "9999-0", msgspec.msgpack.encode({"body": {"kind": "wait.vanished"}}))
    writer.close(0.0)
    with pytest.raises(PipelineError, match=r"this log was written by another version, sluice-rl 0\.1\.0 \(code "):
        list(lines(run, Filter(), follow=False))


def test_a_run_that_is_driven_and_not_recorded_yet_is_waited_for(
    make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(Story())
    looks = iter([True, True, False])
    monkeypatch.setattr(RunDir, "driven", lambda self: next(looks))
    monkeypatch.setattr("pipeline.eventlog.START_EVERY_S", 0.0)
    assert list(follow(run)) == []
    assert next(looks, None) is None


def test_a_directory_without_events_has_no_writer_and_is_no_run_that_was_verified(
    make_run: Callable[..., RunDir],
) -> None:
    run = make_run(Story())
    shutil.rmtree(run.events)
    assert not has_writer(run.events)
    done = CliRunner().invoke(main, ["verify", str(run.path)])
    assert done.exit_code == Exit.USAGE
    assert "holds no events: nothing was archived" in done.output
