"""`pipeline scale` and `pipeline chaos kill`, and what the driver does about engines that come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from story import Story

from config.schema import EngineConfig, LaunchConfig, RunConfig
from contracts import events
from contracts.envelope import decode
from pipeline import inject, scaling
from pipeline.cli import main
from pipeline.errors import Exit, PipelineError
from pipeline.inject import Process
from pipeline.outside import Outside
from pipeline.rundir import RunDir
from pipeline.view import View
from tests.unit.cli.test_driver import Scene, finished

MakeRun = Callable[..., RunDir]


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def here(pid: int, at: float | None = None) -> Process:
    return Process(pid, os.uname().nodename, time.time() if at is None else at)


# --- signals ---------------------------------------------------------------------------------------------------------


def test_a_process_that_runs_here_is_killed_once(victim: subprocess.Popen[bytes]) -> None:
    process = here(victim.pid)
    assert process.lives
    assert process.kill()
    assert victim.wait() == -signal.SIGKILL
    assert not process.kill()


def test_a_number_that_was_given_to_another_process_since_is_left_alone(victim: subprocess.Popen[bytes]) -> None:
    assert not here(victim.pid, at=time.time() - 3600).kill()
    assert victim.poll() is None


def test_a_process_that_ended_and_was_not_reaped_does_not_live() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not here(child.pid).lives
    child.wait()


def test_chaos_kill_stops_and_continues_the_newest_boot_of_an_actor(
    make_run: MakeRun, victim: subprocess.Popen[bytes]
) -> None:
    story = Story()
    story.now = time.time()
    story.add(events.ActorBooted(actor="engine-1", boot=1, pid=1, host="elsewhere"))
    story.add(events.ActorBooted(actor="engine-1", boot=2, pid=victim.pid, host=os.uname().nodename))
    run = make_run(story)
    answer = CliRunner().invoke(main, ["chaos", "kill", str(run.path), "engine-1", "--signal", "STOP"])
    assert answer.output == f"SIGSTOP to engine-1, process {victim.pid}\n"
    _, status = os.waitpid(victim.pid, os.WUNTRACED)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    assert CliRunner().invoke(main, ["chaos", "kill", str(run.path), "engine-1", "--signal", "CONT"]).exit_code == 0
    assert CliRunner().invoke(main, ["chaos", "kill", str(run.path), "engine-1"]).exit_code == 0
    assert victim.wait() == -signal.SIGKILL
    again = CliRunner().invoke(main, ["chaos", "kill", str(run.path), "engine-1"])
    assert (again.exit_code, "does not run any more" in again.output) == (Exit.FAILED, True)


def test_chaos_kill_names_the_actors_there_are_and_the_host_to_go_to(make_run: MakeRun) -> None:
    story = Story()
    story.add(events.ActorBooted(actor="buffer", boot=1, pid=7, host="node-9"))
    run = make_run(story)
    with pytest.raises(PipelineError, match=r"no actor 'bufer' has booted in this run; there are buffer"):
        inject.inject(run, "bufer", "KILL")
    with pytest.raises(PipelineError, match=r"buffer runs on node-9 as process 7.*kill -KILL 7"):
        inject.inject(run, "buffer", "KILL")
    answer = CliRunner().invoke(main, ["chaos", "kill", str(run.path), "x", "y"])
    assert answer.exit_code == Exit.USAGE


def test_an_external_process_is_killed_here_and_named_elsewhere(
    victim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    outside = Outside(View(), tmp_path)
    assert "has to restart it" in outside.restart("engine-0", Process(victim.pid, "elsewhere", time.time()))
    assert "has to restart it" in outside.restart("engine-0", None)
    assert outside.restart("engine-0", here(victim.pid)) == "killed"


# --- scaling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("collectors=2", "only engines can be scaled"),
        ("engines=0", "must be 1 to 1024"),
        ("engines=two", "must be 1 to 1024"),
    ],
)
def test_what_can_not_be_scaled_is_named(word: str, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        scaling.parse(word)


def test_external_servers_bound_the_fleet() -> None:
    config = RunConfig(engine=EngineConfig(kind="external", count=1, urls=("http://a", "http://b")))
    assert scaling.resized(config, 2).engine.count == 2
    with pytest.raises(PipelineError, match=r"engines=3: engine.kind=external has 2 servers"):
        scaling.resized(config, 3)


def test_a_fleet_of_any_size_is_checked_as_at_the_start() -> None:
    broken = RunConfig(name="a b")
    with pytest.raises(PipelineError, match="name='a b'"):
        scaling.resized(broken, 2)


def test_what_happens_next_depends_on_who_starts_processes() -> None:
    ray = RunConfig(engine=EngineConfig(count=2))
    external = msgspec.structs.replace(ray, launch=LaunchConfig(mode="external"))
    assert scaling.outlook(ray, 2, "R") == "the run has 2 engines already"
    assert scaling.outlook(ray, 1, "R") == "serving until the next commit, then leaving: engine-1"
    assert scaling.outlook(ray, 3, "R") == "being started, to join with the next refit: engine-2"
    assert "pipeline actor engine-2 --run R" in scaling.outlook(external, 3, "R")


class Bus:
    """The store of one run, as far as scaling goes."""

    config = msgspec.json.encode(RunConfig(engine=EngineConfig(count=2)))
    posted: list[Any] = []

    @classmethod
    async def connect(cls, *_: Any, **__: Any) -> Bus:
        return cls()

    async def get_config(self) -> bytes:
        return self.config

    async def put_config(self, data: bytes) -> None:
        type(self).config = data

    async def post(self, stream: str, data: bytes) -> None:
        self.posted.append(decode(stream, data).body)

    async def close(self) -> None:
        pass


def test_scale_changes_the_configuration_before_it_tells_anybody(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "Bus", Bus)
    monkeypatch.delenv("REDIS_URL", raising=False)
    run = make_run(Story())
    refused = CliRunner().invoke(main, ["scale", str(run.path), "engines=3"])
    assert (refused.exit_code, "set REDIS_URL" in refused.output) == (Exit.BROKER, True)
    run.update(redis_url="unix:///x")
    done = CliRunner().invoke(main, ["scale", str(run.path), "engines=3"])
    assert done.output == "being started, to join with the next refit: engine-2\n"
    assert msgspec.json.decode(Bus.config, type=RunConfig).engine.count == 3
    assert Bus.posted == [events.FleetScaled(engines=3)]
    run.update(ended="done")
    ended = CliRunner().invoke(main, ["scale", str(run.path), "engines=3"])
    assert (ended.exit_code, "has ended" in ended.output) == (Exit.USAGE, True)
    assert CliRunner().invoke(main, ["scale", "a", "b", "engines=3"]).exit_code == Exit.USAGE


# --- the driver ------------------------------------------------------------------------------------------------------


def health(boot: int, ordered: bool) -> events.EngineHealth:
    return events.EngineHealth(
        engine="engine-0", boot=boot, was="dead", health="restarting", reason="r", ordered=ordered
    )


async def test_the_driver_starts_the_engines_that_are_new_and_leaves_out_what_left() -> None:
    scene = Scene()
    scene.processes.gone["engine-1"] = scene.processes.gone.get("engine-1", events_left())
    launched: list[list[str]] = []

    def scale() -> None:
        launched.append(scene.processes.launched)
        if len(launched) > 1:
            return
        story = Story()
        story.add(events.FleetScaled(engines=1))
        story.add(events.FleetScaled(engines=3))
        story.add(events.FleetScaled(engines=1))
        scene.log.put(story)
        scene.log.put(finished(1))

    scene.processes.on_launch = scale
    verdict = await scene.run()
    assert verdict.code is Exit.DONE
    assert launched[1] == ["engine-1", "engine-2"]
    assert scene.screen.notes.count("scaled") == 3


def events_left() -> Any:
    from pipeline.host import Left

    return Left("done")


async def test_the_driver_ends_the_boot_that_the_coordinator_gave_up_and_no_later_one() -> None:
    scene = Scene()
    restarted: list[tuple[str, int | None]] = []

    def restart(name: str, process: Process | None) -> str:
        restarted.append((name, None if process is None else process.pid))
        return "killed"

    scene.processes.restart = restart  # type: ignore[attr-defined]

    def begin() -> None:
        story = Story()
        story.add(health(1, ordered=True))
        story.add(events.ActorBooted(actor="engine-0", boot=2, pid=42, host="h"))
        story.add(health(1, ordered=True))
        story.add(health(2, ordered=False))
        story.add(health(2, ordered=True))
        scene.log.put(story)
        scene.log.put(finished(1))

    scene.processes.on_launch = begin
    await scene.run()
    assert restarted == [("engine-0", None), ("engine-0", 42)]
