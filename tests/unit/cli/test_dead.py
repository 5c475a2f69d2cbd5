"""`pipeline dead`: what was given up is shown with its reason, handed out again or forgotten, on a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from story import Story, trained  # pyright: ignore[reportMissingImports] - pytest puts its folder on the path

from config.schema import BrokerConfig
from contracts.envelope import decode, encode
from contracts.events import TaskIssued
from pipeline import broker
from pipeline.bus import Bus, WorkEntry
from pipeline.cli import main
from pipeline.errors import Exit
from pipeline.rundir import RunDir
from pipeline.verify import Verifier

GROUP = "readers"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with broker.choose({}, tmp_path_factory.mktemp("store"), BrokerConfig()) as server:
        yield server.url


class Grave:
    """A run of which the first task and something unreadable are dead letters."""

    def __init__(self, run: RunDir, url: str) -> None:
        self.run, self.url = run, url
        self.task = next(e for e in trained(1).log if isinstance(e.body, TaskIssued))

    def pipeline(self, *words: str) -> Result:
        command, *rest = words
        return CliRunner().invoke(main, ["dead", command, str(self.run.path), *rest])

    def lines(self, *words: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.pipeline(*words).stdout.splitlines()]

    def names(self) -> list[str]:
        return [letter["letter"] for letter in self.lines("list", "--json")]

    async def _bury(self) -> None:
        bus = await self._connect()
        await bus.ensure_group("tasks", GROUP)
        for data in (encode(self.task), b"\xc1 no event"):
            await bus.post("tasks", data)
        for number, entry in enumerate(await bus.read_work({"tasks": 9}, GROUP, block_ms=None)):
            await bus.bury("tasks", GROUP, entry.entry, reason=f"reason {number}", now=1.7e9)
        await bus.close()

    async def _taken(self) -> list[WorkEntry]:
        bus = await self._connect()
        found = await bus.read_work({"tasks": 9}, GROUP, block_ms=None)
        await bus.close()
        return found

    async def _connect(self) -> Bus:
        return await Bus.connect(self.url, self.run.info().run, actor="collector-0")

    def bury(self) -> Grave:
        asyncio.run(self._bury())
        return self

    def taken(self) -> list[WorkEntry]:
        """What a reader of the work stream gets."""
        return asyncio.run(self._taken())


@pytest.fixture
def grave(store: str, make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch) -> Grave:
    monkeypatch.delenv("REDIS_URL", raising=False)
    run = make_run(Story())
    run.update(redis_url=store)
    return Grave(run, store)


def test_a_run_without_dead_letters_says_so(grave: Grave) -> None:
    result = grave.pipeline("list")
    assert (result.exit_code, result.stdout) == (0, "no dead letters\n")
    assert grave.lines("list", "--json") == []


def test_letters_are_listed_with_time_kind_deliveries_and_reason(grave: Grave) -> None:
    grave.bury()
    first, second = grave.pipeline("list").stdout.splitlines()
    assert first.split("  ")[1:] == ["2023-11-14T22:13:20+00:00", "task.issued", "1 deliveries", "reason 0"]
    assert second.split("  ")[2:] == ["unreadable", "1 deliveries", "reason 1"]
    readable, unreadable = grave.lines("list", "--json", "--stream", "tasks")
    assert readable["letter"] == first.split("  ")[0] == f"tasks/{readable['entry']}"
    assert readable["event"]["id"] == grave.task.id
    assert (unreadable["event"], bytes.fromhex(unreadable["data"])) == (None, b"\xc1 no event")
    assert grave.lines("list", "--json", "--stream", "batches") == []


def test_a_letter_is_shown_whole(grave: Grave) -> None:
    readable, unreadable = grave.bury().names()
    text = grave.pipeline("show", readable).stdout
    assert f'"id": "{grave.task.id}"' in text
    assert "reason      reason 0" in text
    assert "unreadable, 10 bytes: c1206e6f206576656e74" in grave.pipeline("show", unreadable).stdout
    assert [letter["letter"] for letter in grave.lines("show", "--all", "--json")] == [readable, unreadable]


def test_a_requeued_letter_is_work_again_under_an_id_of_its_own(grave: Grave) -> None:
    readable, unreadable = grave.bury().names()
    result = grave.pipeline("requeue", readable)
    (entry,) = grave.taken()
    assert result.stdout == f"{readable} requeued as tasks {entry.entry}\n"
    envelope = decode("tasks", entry.data)
    assert (envelope.body, envelope.causation_id) == (grave.task.body, grave.task.id)
    assert envelope.id.startswith(f"{grave.task.id}+dead.")
    assert grave.names() == [unreadable]
    verifier = Verifier()
    verifier.apply_all([grave.task, envelope])
    assert "task-issued-once" not in {finding.rule for finding in verifier.findings()}


def test_an_unreadable_letter_is_not_requeued_and_nor_is_any_other(grave: Grave) -> None:
    readable, unreadable = grave.bury().names()
    result = grave.pipeline("requeue", "--all")
    assert result.exit_code == Exit.FAILED
    assert f"{unreadable} can't be requeued" in result.stderr
    assert grave.names() == [readable, unreadable]
    assert grave.taken() == []


def test_a_dropped_letter_is_gone(grave: Grave) -> None:
    readable, unreadable = grave.bury().names()
    assert grave.pipeline("drop", unreadable).stdout == f"{unreadable} dropped\n"
    assert grave.names() == [readable]
    assert grave.pipeline("drop", "--all").stdout == f"{readable} dropped\n"
    assert grave.names() == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("drop",), "or give --all"),
        (("drop", "--all", "tasks/1-0"), "or give --all"),
        (("show", "tasks/1-0"), "no dead letter 'tasks/1-0' in this run; there are: none"),
        (("list", "--stream", "policy"), "only work streams have dead letters: tasks, trajectories, batches"),
    ],
)
def test_what_can_not_be_meant_is_refused_by_name(grave: Grave, words: tuple[str, ...], text: str) -> None:
    result = grave.pipeline(*words)
    assert result.exit_code == Exit.USAGE
    assert text in result.stderr


def test_without_a_store_it_says_which_one_it_looked_for(
    grave: Grave, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pipeline.dead.CONNECT_S", 0.1)
    url = f"unix://{tmp_path}/none.sock"
    grave.run.update(redis_url=url)
    result = grave.pipeline("list")
    assert result.exit_code == Exit.BROKER
    assert (
        f"{url} does not answer: look while the run is live (`pipeline up --resume {grave.run.path}`)" in result.stderr
    )
    assert f"REDIS_URL={url}" not in result.stderr
    monkeypatch.setenv("REDIS_URL", url)
    assert f"REDIS_URL={url} could not be reached" in grave.pipeline("list").stderr
    monkeypatch.delenv("REDIS_URL")
    grave.run.update(ended="trained")
    finished = grave.pipeline("list").stderr
    assert "the run has finished (trained), its store has ended with it, and nothing is left to be done" in finished
    assert f"`pipeline log {grave.run.path} --kind bus.data_lost`" in finished
    assert "--resume" not in finished
    grave.run.update(redis_url=None)
    assert "set REDIS_URL" in grave.pipeline("list").stderr
