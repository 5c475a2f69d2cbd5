"""Four real engine servers and a trainer form one group over gloo and are refitted three times."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from contracts.events import RefitCommitted, TransferStarted
from tests.bench.refit import Fleet


@pytest.mark.slow
async def test_a_group_of_five_is_formed_once_and_carries_three_refits(tmp_path: Path) -> None:
    started: list[TransferStarted] = []
    commits: list[RefitCommitted] = []
    with capture_logs() as captured:
        async with Fleet(tmp_path, engines=4, refits=3, real=True, log=structlog.get_logger()) as fleet:
            async for event in fleet.events():
                if isinstance(event, TransferStarted):
                    started.append(event)
                if isinstance(event, RefitCommitted):
                    commits.append(event)
    assert [(s.world_size, s.fresh) for s in started] == [(5, True), (5, False), (5, False), (5, False)]
    assert len({s.group for s in started}) == 1
    assert [c.version for c in commits] == [0, 1, 2, 3]
    lines = [_line(entry) for entry in captured if entry["event"] == "refit committed"]
    pattern = (
        r"refit committed version={} engines=4 world_size=5 pause_s=\d+\.\d+ transfer_s=\d+\.\d+ bytes=529920 epoch={}"
    )
    for version, line in enumerate(lines[:4]):
        assert re.fullmatch(pattern.format(version, version + 1), line), line


def _line(entry: Any) -> str:
    shown = {k: v for k, v in entry.items() if k not in ("event", "log_level", "run", "actor")}
    return " ".join((entry["event"], *(f"{k}={v}" for k, v in shown.items())))
