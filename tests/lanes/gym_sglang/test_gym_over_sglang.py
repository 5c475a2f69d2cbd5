"""`pipeline up gym-cpu` over real NeMo-Gym servers and a real SGLang server. Run by `make test-gym-sglang`.

Continuous integration doesn't run it: it has a lane for each of the two. A missing environment fails it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pipeline.eventlog import archived, render
from pipeline.rundir import RunDir

ROOT = Path(__file__).parents[3]
GYM, SGLANG = ROOT / ".venv-gym" / "bin" / "python", ROOT / ".venv-sglang" / "bin" / "python"
PIPELINE = Path(sys.executable).parent / "pipeline"
PATIENCE_S = 1800.0


@pytest.mark.timeout(PATIENCE_S + 60.0)
def test_three_steps_on_real_games_and_tokens_of_the_real_server(tmp_path: Path) -> None:
    for python, make in ((GYM, "gym"), (SGLANG, "sglang")):
        assert python.exists(), f"{python} is not there: run `make {make}`"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = [
        f"run_dir={tmp_path / 'run'}", f"gateway.port={port}", f"producer.args.python={GYM}",
        "engine.kind=sglang", f"engine.python={SGLANG}", "engine.max_total_tokens=16384", "engine.max_running=32",
        "model.params.tied=false", "launch.start_deadline_s=900", "fleet.misses=20", "fleet.probe_deadline_s=20",
    ]  # fmt: skip
    done = subprocess.run(
        [PIPELINE, "up", "gym-cpu", *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    subprocess.run([PIPELINE, "verify", str(tmp_path / "run")], check=True, timeout=120)
    log = [msgspec.json.decode(render(*item)) for item in archived(RunDir.open(tmp_path / "run"))]
    kinds = [event["kind"] for event in log]
    assert kinds.count("step.finished") == 3
    assert kinds.count("refit.committed") >= 3
    failures = {event["body"]["failure"] for event in log if event["kind"] == "sample.failed"}
    assert failures <= {"infra", "timeout"}
