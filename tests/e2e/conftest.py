"""Real runs through the command line: real processes, Ray, the embedded broker, engines and trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.eventlog import archived, render
from pipeline.rundir import RunDir

TINY = Path(__file__).parent / "tiny.yaml"
PIPELINE = Path(sys.executable).parent / "pipeline"
PATIENCE_S = 240.0
"""Longest that any awaited event of a tiny run may take on a loaded machine."""


class Run:
    """One `pipeline up` in a process of its own."""

    def __init__(
        self, run_dir: Path, *words: str, env: dict[str, str] | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self.path = run_dir
        self.patience_s = patience_s
        self.output = run_dir.parent / f"{run_dir.name}.out"
        with self.output.open("ab") as sink:
            self.process = subprocess.Popen(
                [PIPELINE, "up", *words],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self._deadline = time.monotonic() + patience_s

    def events(self) -> list[dict]:
        """Everything that the archive holds by now, as `pipeline log` prints it."""
        return [msgspec.json.decode(render(*item)) for item in archived(RunDir.open(self.path))]

    def wait_for(self, wanted: Callable[[list[dict]], bool]) -> list[dict]:
        """The log as soon as `wanted(log)`."""
        self._deadline = time.monotonic() + self.patience_s
        while True:
            log = self.events() if (self.path / "events").exists() else []
            if wanted(log):
                return log
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() < self._deadline, self.tail()
            time.sleep(0.5)

    def end(self) -> int:
        """The exit code."""
        self._deadline = time.monotonic() + self.patience_s
        try:
            return self.process.wait(max(1.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end:\n{self.tail()}")

    def tail(self) -> str:
        return self.output.read_text()[-4000:]

    def verify(self) -> dict[str, int]:
        """The checker's summary; fails with its findings if there are any."""
        answer = subprocess.run([PIPELINE, "verify", str(self.path)], capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return {name: int(value) for name, value in (word.split("=") for word in answer.stdout.split())}

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def steps(log: list[dict]) -> list[dict]:
    return [event for event in log if event["kind"] == "step.finished"]


def boots(log: list[dict], actor: str) -> list[dict]:
    return [event for event in log if event["kind"] == "actor.booted" and event["actor"] == actor]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start runs of the tiny recipe; whatever still runs at the end is killed."""
    runs: list[Run] = []

    def begin(*words: str, resume: Run | None = None, env: dict[str, str] | None = None) -> Run:
        if resume is not None:
            run = Run(resume.path, "--resume", str(resume.path), *words, env=env)
        else:
            path = tmp_path / f"run{len(runs)}"
            run = Run(path, str(TINY), f"run_dir={path}", *words, env=env)
        runs.append(run)
        return run

    yield begin
    for run in runs:
        run.kill()


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One long run that many faults are caused in, one after another; it must be clean when it is stopped in order."""
    path = tmp_path_factory.mktemp("endless") / "run"
    run = Run(path, str(TINY), f"run_dir={path}", "steps=100000", "checkpoint.every=10")
    yield run
    try:
        os.killpg(run.process.pid, signal.SIGTERM)  # to all of its group, as a service manager and `timeout` do
        assert run.end() == 130, run.tail()
        assert f"pipeline up --resume {run.path}" in run.tail()
        run.verify()
    finally:
        run.kill()
