"""`pipeline up gym-cpu` over real NeMo-Gym servers, which it starts and ends. Run by `make test-gym`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.eventlog import archived, render
from pipeline.rundir import RunDir

GYM = os.environ.get("SLUICE_LANE_GYM")
PIPELINE = Path(sys.executable).parent / "pipeline"
LIMIT_S = 900.0

pytestmark = [
    pytest.mark.skipif(GYM is None, reason="needs NeMo-Gym: make test-gym"),
    pytest.mark.timeout(LIMIT_S + 50.0),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def mentions(path: Path) -> list[int]:
    """Processes whose environment or command line names the run directory, or Gym's environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and str(path).encode() in command:
            found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    path = tmp_path_factory.mktemp("gym") / "run"
    assert GYM is not None
    words = [f"run_dir={path}", f"producer.args.python={GYM}", f"gateway.port={free_port()}"]
    started = time.monotonic()
    answer = subprocess.run(
        [PIPELINE, "up", "gym-cpu", *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    print(f"pipeline up gym-cpu took {time.monotonic() - started:.0f} s")
    log = path / "logs" / "gym.log"
    assert answer.returncode == 0, answer.stdout[-4000:] + (log.read_text()[-4000:] if log.exists() else "")
    return path


@pytest.fixture(scope="module")
def events(run: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(render(*item)) for item in archived(RunDir.open(run))]


@pytest.fixture(scope="module")
def results(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["body"] for event in events if event["kind"] == "trajectory.finished"]


def bodies(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event["body"] for event in events if event["kind"] == kind]


def test_it_trains_and_refits_at_least_three_times(run: Path, events: list[dict[str, Any]]):
    assert len(bodies(events, "step.finished")) >= 3
    assert len(bodies(events, "refit.committed")) >= 3
    answer = subprocess.run([PIPELINE, "verify", str(run)], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout


def test_every_environment_was_played_and_nothing_failed_as_noncontiguous_or_data(
    events: list[dict[str, Any]], results: list[dict[str, Any]]
):
    stems = {body["task"].split("-")[2] for body in results}
    assert stems == {"example"}
    assert played(events) == {
        "blackjack_gymnasium_agent",
        "math_with_judge_simple_agent",
        "example_multi_step_simple_agent",
    }
    failed = bodies(events, "sample.failed")
    assert {body["failure"] for body in failed} <= {"infra", "timeout"}, failed[:3]
    assert len(failed) < len(results) / 4


def played(events: list[dict[str, Any]]) -> set[str]:
    """The agents of the tasks that gave a trajectory."""
    rows = {body["task"]: body["payload"] for body in bodies(events, "task.issued")}
    found = set()
    for body in bodies(events, "trajectory.finished"):
        found.add(rows[body["task"]]["row"]["agent_ref"]["name"])
    return found


def test_games_of_several_turns_are_one_exact_sequence(results: list[dict[str, Any]]):
    assert max(body["completion_tokens"] for body in results) > 4, "no episode had a second turn"
    assert not any("noncontiguous" in body["components"] for body in results)


def test_rewards_differ_within_a_game(results: list[dict[str, Any]]):
    assert len({body["reward"] for body in results}) > 1


def test_no_process_is_left(run: Path):
    deadline = time.monotonic() + 60
    while left := mentions(run):
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.2)
