"""`pipeline up` over an environment of the real `verifiers` package, its own agent program included.

SLUICE_LANE_VERIFIERS=PYTHON names an interpreter that has verifiers 0.4, msgspec and uv; nothing is installed there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.eventlog import archived, render
from pipeline.rundir import RunDir

VERIFIERS = os.environ.get("SLUICE_LANE_VERIFIERS")
PIPELINE = Path(sys.executable).parent / "pipeline"
LIMIT_S = 900.0
TASKSET = """
import verifiers.v1 as vf

__all__ = ["DigitTaskset"]


class DigitData(vf.TaskData):
    digit: str = "0"


class DigitTask(vf.Task[DigitData]):
    @vf.reward(weight=1.0)
    async def said(self, trace: vf.Trace) -> float:
        return float(self.data.digit in trace.last_reply)


class DigitTaskset(vf.Taskset[DigitTask, vf.TasksetConfig]):
    def load(self) -> list[DigitTask]:
        return [DigitTask(DigitData(prompt=f"Say {n}", digit=str(n)), self.config.task) for n in range(10)]
"""
RECIPE = """
name: verifiers
steps: 3
model:
  source: random
  params:
    {layers: 2, width: 64, heads: 4, positions: 1024, chat: true, vocabulary: {texts: ["Say 0123456789"]}}
producer:
  name: verifiers
  python: {python}
  args:
    taskset: digits
    env: {agent: {harness: {id: "null"}, runtime: {type: subprocess}}}
rollout: {samples: 2, max_new_tokens: 4, open_groups: 2}
buffer: {groups: 2}
trainer: {threads: 1}
engine: {kind: torch, count: 1}
"""

pytestmark = [
    pytest.mark.skipif(VERIFIERS is None, reason="needs SLUICE_LANE_VERIFIERS, see docs/howto/environment.md"),
    pytest.mark.timeout(LIMIT_S + 50.0),
]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that has what `VERIFIERS` has, and the taskset."""
    assert VERIFIERS is not None
    (tmp_path / "tasksets").mkdir()
    (tmp_path / "tasksets" / "digits.py").write_text(TASKSET)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    base = _answer(VERIFIERS, "-c", where)
    _answer(VERIFIERS, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    own = tmp_path / "venv" / "bin" / "python"
    (Path(_answer(str(own), "-c", where)) / "lane.pth").write_text(f"{base}\n{tmp_path / 'tasksets'}\n")
    return own


def _answer(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout.strip()


def test_a_run_over_the_real_package_trains_refits_and_records_exact_turns(tmp_path: Path, python: Path):
    assert VERIFIERS is not None
    recipe, path = tmp_path / "run.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.replace("{python}", str(python)))
    env = {**os.environ, "PATH": f"{Path(VERIFIERS).parent}:{os.environ['PATH']}"}
    answer = subprocess.run(
        [PIPELINE, "up", str(recipe), f"run_dir={path}"],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-4000:]
    log: list[dict[str, Any]] = [msgspec.json.decode(render(*item)) for item in archived(RunDir.open(path))]
    finished = [event["body"] for event in log if event["kind"] == "trajectory.finished"]
    assert len([event for event in log if event["kind"] == "step.finished"]) == 3
    assert len([event for event in log if event["kind"] == "refit.committed"]) >= 3
    assert len(finished) >= 12
    assert all("said" in body["components"] and body["sources"] for body in finished)
    assert not [event for event in log if event["kind"] == "sample.failed"]
    verified = subprocess.run([PIPELINE, "verify", str(path)], capture_output=True, text=True, check=False, timeout=60)
    assert verified.returncode == 0, verified.stdout
