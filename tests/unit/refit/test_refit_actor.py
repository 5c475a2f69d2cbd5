"""The coordinator's shell: epochs are durable before use, and one that the store forgot ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from actors.refit.actor import HIGH, EpochUsed, RefitShell, build
from actors.refit.state import FsyncHigh, HighWritten, Log, RefitState
from config.schema import RunConfig
from contracts.core import Fatal


class FakeContext:
    def __init__(self, run_dir: Path, store_epoch: int = 0, state: RefitState | None = None) -> None:
        self.run_dir = str(run_dir)
        self.log = structlog.get_logger().bind(run="r")
        self._epoch = store_epoch
        self._state = state or RefitState()

    def state(self) -> RefitState:
        return self._state

    async def register(self, name: str) -> int:
        assert name == "epoch"
        return self._epoch


async def started(context: Any) -> RefitShell:
    shell = build(RunConfig(), "refit")
    await shell.start(context)
    return shell


async def test_epoch_is_in_the_file_when_the_core_hears_of_it(tmp_path: Path) -> None:
    shell = await started(FakeContext(tmp_path / "run"))
    assert await shell.perform(FsyncHigh(1)) == HighWritten(1)
    assert await shell.perform(FsyncHigh(4)) == HighWritten(4)
    assert (tmp_path / "run" / HIGH).read_text() == "4\n"
    assert [p.name for p in (tmp_path / "run").iterdir()] == [HIGH]
    await shell.close()


async def test_file_is_synced_before_it_is_renamed_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("os.fsync", lambda fd: calls.append("sync"))
    real = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: (calls.append("rename"), real(self, target))[1])
    shell = await started(FakeContext(tmp_path))
    await shell.perform(FsyncHigh(1))
    assert calls == ["sync", "rename", "sync"]


async def test_store_behind_the_file_ends_the_run(tmp_path: Path) -> None:
    await (await started(FakeContext(tmp_path))).perform(FsyncHigh(5))
    await started(FakeContext(tmp_path, store_epoch=5))
    with pytest.raises(Fatal, match=r"store knows epoch 4.*that 5 was used"):
        await started(FakeContext(tmp_path, store_epoch=4, state=RefitState(epoch=4)))


async def test_number_that_was_written_but_not_yet_requested_is_no_loss(tmp_path: Path) -> None:
    await (await started(FakeContext(tmp_path))).perform(FsyncHigh(5))
    await started(FakeContext(tmp_path, store_epoch=4, state=RefitState(epoch=5, phase="opening")))


async def test_late_write_of_a_replaced_boot_does_not_lower_the_mark(tmp_path: Path) -> None:
    shell = await started(FakeContext(tmp_path))
    await shell.perform(FsyncHigh(5))
    for epoch in (4, 5):
        with pytest.raises(EpochUsed, match=f"5 was used.*use {epoch}"):
            await shell.perform(FsyncHigh(epoch))
    assert (tmp_path / HIGH).read_text() == "5\n"


async def test_file_with_something_else_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / HIGH).write_text("x7\n")
    with pytest.raises(Fatal, match="not 'x7"):
        await started(FakeContext(tmp_path))


async def test_log_lines_carry_their_fields_with_rounded_seconds(tmp_path: Path) -> None:
    shell = await started(FakeContext(tmp_path))
    with capture_logs() as lines:
        await shell.perform(Log("refit committed", {"version": 7, "engines": 4, "pause_s": 1.23456}))
        await shell.perform(Log("refit failed", {"phase": "join"}, warning=True))
    assert [line.pop("log_level") for line in lines] == ["info", "warning"]
    assert lines == [
        {"run": "r", "version": 7, "engines": 4, "pause_s": 1.235, "event": "refit committed"},
        {"run": "r", "phase": "join", "event": "refit failed"},
    ]


async def test_unknown_commands_and_payloads_are_refused(tmp_path: Path) -> None:
    shell = await started(FakeContext(tmp_path))
    with pytest.raises(TypeError):
        await shell.perform(msgspec.UNSET)
    with pytest.raises(KeyError):
        shell.payload("x")
