"""A whole run whose trainer is the megatron backend: two ranks, refits into the embedded engines, a lost rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pipeline.eventlog import archived, render
from pipeline.rundir import RunDir

PATIENCE_S = 500.0
"""Longest that such a run may take on a loaded machine."""
TINY = Path(__file__).parents[2] / "e2e" / "tiny.yaml"
PIPELINE = [sys.executable, "-m", "pipeline"]


@pytest.mark.timeout(PATIENCE_S + 90.0)
def test_a_run_trains_on_two_ranks_and_refits_every_step(tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = [
        f"run_dir={path}",
        "steps=4",
        "eval.every=0",
        "trainer.backend=megatron",
        "trainer.device=cpu",
        "trainer.ranks=2",
        "trainer.megatron.tensor_parallel=2",
        "launch.start_deadline_s=400",
    ]
    done = subprocess.run([*PIPELINE, "up", TINY, *words], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:] + _logs(path)
    subprocess.run([*PIPELINE, "verify", path], check=True, timeout=60)
    log = [msgspec.json.decode(render(*item)) for item in archived(RunDir.open(path))]

    def bodies(kind: str) -> list[dict]:
        return [event["body"] for event in log if event["kind"] == kind]

    assert [step["step"] for step in bodies("step.finished")] == [1, 2, 3, 4]
    assert len(bodies("refit.committed")) >= 3
    assert not bodies("refit.failed")
    assert not bodies("engine.quarantined")
    # what the engines say of their tokens is what megatron computes for the same weights
    gaps = [step["metrics"].get("mismatch_kl_lag0") for step in bodies("step.finished")]
    assert gaps[0] is not None
    assert all(0 <= gap < 1e-6 for gap in gaps if gap is not None), gaps


def _logs(path: Path) -> str:
    return "".join(f"\n--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted((path / "logs").glob("trainer*")))
