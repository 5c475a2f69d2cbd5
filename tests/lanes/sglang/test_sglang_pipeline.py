"""`pipeline up sglang-cpu`: a whole run whose tokens come from the real server, which is killed in the middle."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.processes import children, send
from tests.e2e.conftest import Run, boots, steps

PATIENCE_S = 400.0
"""Longest wait for an event of such a run on a loaded machine."""
STEPS = 6


@pytest.mark.timeout(3 * PATIENCE_S)
def test_a_run_trains_on_tokens_of_the_real_server_and_of_its_successor(sglang_python: str, tmp_path: Path) -> None:
    """Uncertain until it has loaded whole weights, which its tokens then show to be those of the trainer."""
    words = [f"run_dir={tmp_path / 'run'}", f"engine.python={sglang_python}", f"steps={STEPS}", "refit.verify=probe"]
    run = Run(tmp_path / "run", "sglang-cpu", *words, "engine.restart_backoff_s=0.1", patience_s=PATIENCE_S)
    try:
        log = run.wait_for(lambda log: bool(steps(log)))
        (server,) = children(boots(log, "engine-0")[-1]["body"]["pid"])
        send(server, signal.SIGKILL)
        assert run.end() == 0, run.tail() + _logs(run.path)
    finally:
        run.kill()
    run.verify()
    log = run.events()

    def bodies(kind: str) -> list[dict]:
        return [event["body"] for event in log if event["kind"] == kind]

    (dead,) = bodies("engine.dead")
    assert (dead["boot"], "signal SIGKILL" in dead["reason"]) == (1, True), dead
    assert [step["step"] for step in bodies("step.finished")] == [*range(1, STEPS + 1)]
    health = [(event["boot"], event["health"]) for event in bodies("engine.health")]
    assert health.index((2, "uncertain")) < health.index((2, "healthy"))
    loads = [event for event in bodies("engine.loaded") if event["boot"] == 2]
    assert loads
    assert all(len(load["probe"]) == 4 for load in loads), "its weights generate"
    # what a server says of its tokens is what the trainer computes for the same weights
    gaps = {event["batch"]: event["metrics"].get("mismatch_kl_lag0") for event in bodies("step.finished")}
    assert all(0 <= gap < 1e-4 for gap in gaps.values() if gap is not None), gaps
    for boot in (1, 2):
        finished = [event for event in bodies("trajectory.finished") if {s["boot"] for s in event["sources"]} == {boot}]
        keys = {event["payload"]["key"] for event in finished}
        samples = [
            (event["batch"], sample)
            for event in bodies("batch.ready")
            for group in event["groups"]
            for sample in group["samples"]
        ]
        fresh = {batch for batch, sample in samples if sample["payload"]["key"] in keys and sample["lag"] == 0}
        assert any(gaps[batch] is not None for batch in fresh), f"no step on fresh tokens of boot {boot}"


def _logs(path: Path) -> str:
    return "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted((path / "logs").glob("engine*")))
