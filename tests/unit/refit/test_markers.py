"""The log of a refit: one line a step, in words that people and reproducers search for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog
from structlog.testing import capture_logs

from actors.refit.actor import build
from actors.refit.state import Log
from config.schema import RunConfig
from contracts.events import EngineFailed, TransferFailed
from tests.unit.refit.drive import Drive, stepped


def lines(commands: list[Any]) -> list[str]:
    """As `key=value`, the way a terminal shows them."""
    logs = [c for c in commands if isinstance(c, Log)]
    return [" ".join((log.text, *(f"{k}={v}" for k, v in log.fields.items()))) for log in logs]


def four() -> Drive:
    """Four engines, the first epoch is being opened."""
    drive = Drive(engines=4)
    drive.fleet()
    return drive


ALL = (0, 1, 2, 3)


def test_a_refit_that_commits_says_each_step_and_ends_with_what_it_was() -> None:
    drive = four()
    said = drive.open()
    drive.now += 0.25
    said = [*said, *drive.drain(ALL)]
    drive.now += 0.5
    said += drive.load(ALL)
    assert lines(said) == [
        "refit requested version=0 engines=['engine-0', 'engine-1', 'engine-2', 'engine-3'] "
        "gateways=['gateway-0'] epoch=1",
        "gate closed version=0 gateway=gateway-0 boot=1 seconds=0.1 epoch=1",
        *(f"engine drained version=0 engine=engine-{n} seconds=0.1 epoch=1" for n in ALL),
        "transfer offered version=0 offered=0 bytes=400 seconds=0.25 epoch=1",
        "refit drained version=0 seconds=0.25 world_size=5 fresh=True epoch=1",
        "transfer finished version=0 seconds=0.5 bytes=400 epoch=1",
        *(f"engine loaded version=0 engine=engine-{n} seconds=0.2 epoch=1" for n in ALL),
        "refit committed version=0 engines=4 world_size=5 pause_s=0.75 transfer_s=0.5 bytes=400 epoch=1",
    ]


def test_the_group_of_the_first_commit_carries_the_next_refits_too() -> None:
    drive = four()
    drive.open()
    drive.drain(ALL)
    drive.load(ALL)
    for version in (1, 2):
        drive.hear(stepped(version, version))
        drive.open()
        said = lines(drive.drain(ALL))
        assert said[-1] == f"refit drained version={version} seconds=0.0 world_size=5 fresh=False epoch={version + 1}"
        drive.load(ALL)


def test_a_failure_names_transfer_refit_phase_and_error() -> None:
    drive = four()
    drive.open()
    drive.drain(ALL)
    said = lines(drive.hear(TransferFailed(epoch=1, phase="send", error="RuntimeError", reason="connection reset")))
    assert said == [
        "refit failed version=0 transfer=gloo refit=1 phase=send error=RuntimeError reason=connection reset "
        "failures=1 seconds=0.0 epoch=1"
    ]


def test_a_quarantine_names_engine_error_and_reason() -> None:
    drive = four()
    drive.open()
    drive.now += 1.0
    failed = EngineFailed(epoch=1, engine="engine-2", boot=1, phase="drain", error="Deadline", reason="busy")
    assert lines(drive.hear(failed)) == [
        "engine quarantined version=0 engine=engine-2 error=Deadline reason=failed in drain: busy seconds=1.0 epoch=1"
    ]


async def test_every_line_carries_the_run_and_rounds_its_seconds(tmp_path: Path) -> None:
    shell = build(RunConfig(), "refit")

    class Context:
        run_dir = str(tmp_path)
        log = structlog.get_logger().bind(run="r", actor="refit")

        async def register(self, name: str) -> int:
            return 0

        def state(self) -> Any:
            return shell.core.initial()

    await shell.start(Context())  # type: ignore[arg-type]
    with capture_logs() as captured:
        await shell.perform(Log("refit committed", {"version": 7, "pause_s": 0.0212345, "epoch": 8}))
    assert captured == [
        {
            "run": "r",
            "actor": "refit",
            "event": "refit committed",
            "log_level": "info",
            "version": 7,
            "pause_s": 0.021,
            "epoch": 8,
        }
    ]
