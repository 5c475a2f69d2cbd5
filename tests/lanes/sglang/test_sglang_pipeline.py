"""`pipeline up sglang-cpu`: a whole run whose tokens come from the real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pipeline.eventlog import archived, render
from pipeline.rundir import RunDir

PATIENCE_S = 400.0
"""Longest that such a run may take on a loaded machine."""
PIPELINE = Path(sys.executable).parent / "pipeline"


@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_run_trains_on_tokens_of_the_real_server(sglang_python: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = [f"run_dir={path}", f"engine.python={sglang_python}", "steps=3"]
    done = subprocess.run([PIPELINE, "up", "sglang-cpu", *words], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:] + _logs(path)
    subprocess.run([PIPELINE, "verify", str(path)], check=True, timeout=60)
    log = [msgspec.json.decode(render(*item)) for item in archived(RunDir.open(path))]

    def bodies(kind: str) -> list[dict]:
        return [event["body"] for event in log if event["kind"] == kind]

    assert [step["step"] for step in bodies("step.finished")] == [1, 2, 3]
    assert len(bodies("refit.committed")) >= 3
    assert not bodies("refit.failed")
    assert not bodies("engine.quarantined")
    # what the server says of its tokens is what the trainer computes for the same weights
    gaps = [step["metrics"].get("mismatch_kl_lag0") for step in bodies("step.finished")]
    assert gaps[0] is not None
    assert all(0 <= gap < 1e-4 for gap in gaps if gap is not None), gaps


def _logs(path: Path) -> str:
    return "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted((path / "logs").glob("engine*")))
