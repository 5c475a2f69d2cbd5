"""`pipeline why` on run directories."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from actors import registry
from actors.recorder.archive import Writer
from config.schema import RunConfig
from contracts import events
from contracts.envelope import Envelope, encode
from pipeline import cli, moments
from pipeline.cores import core_of
from pipeline.errors import PipelineError
from pipeline.simulate import archive
from tests.stalls.gallery import PATIENT, long_tail_in_drain
from tests.stalls.scene import BASE, Scene


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["why", *words])


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scene = Scene(PATIENT)
    long_tail_in_drain(scene)
    scene.start()
    scene.run(60.0)
    return archive.write(scene.world, PATIENT, tmp_path_factory.mktemp("runs") / "stalled").path


def test_a_stall_is_told_in_words_and_by_the_exit_code(stalled: Path):
    result = call(str(stalled))
    assert result.exit_code == 1, result.output
    assert "Stuck: " in result.output
    assert "cause  drain_tail (engine-0)" in result.output
    assert "oldest episode" in result.output, "the journals of the gateways were not read"
    assert "missing: gate.closed from gateway-0" in result.output


def test_json_holds_the_whole_diagnosis(stalled: Path):
    found = json.loads(call(str(stalled), "--json").output)
    assert found["cause"]["code"] == "drain_tail"
    assert found["path"][0]["waiter"] == "trainer"


def test_an_earlier_moment_shows_the_run_as_it_was(stalled: Path):
    result = call(str(stalled), "--until", "40")
    assert result.exit_code == 0
    assert "step 0" in result.output
    assert call(str(stalled), "--until", "40", "--now", "+600").exit_code == 1


def test_patience_decides_what_is_a_stall(stalled: Path):
    assert call(str(stalled), "--patience", "1000").exit_code == 0


def test_a_run_that_was_interrupted_while_stuck_is_explained_as_it_was_then(stalled: Path, tmp_path: Path):
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("run.json", "config.yaml"):
        (copy / name).write_bytes((stalled / name).read_bytes())
    writer = Writer(copy / "events", 0.0)
    last, when = 0, 0
    from actors.recorder.archive import read

    for entry in read(stalled / "events"):
        writer.append(entry.stream, entry.entry, entry.data)
        last = int(entry.entry.partition("-")[0])
    when = int((1_700_000_000 + 90) * 1e9)
    for offset, body in enumerate((events.RunStopping(reason="interrupted"), events.RunFinished(reason="interrupted"))):
        envelope = Envelope(
            id=f"post:{offset}", run="r", stream="control", actor="driver", boot=0, epoch=0,
            wall_ns=when + offset, mono_ns=0, body=body,
        )  # fmt: skip
        writer.append("control", f"{last + 1 + offset}-0", encode(envelope))
    writer.close(0.0)
    (copy / "journals").mkdir()
    result = call(str(copy))
    assert result.exit_code == 1, result.output
    assert "When the run was stopped (interrupted): stuck" in result.output


@pytest.mark.parametrize(
    "text", ["soon", "+later", "+-3", "+nan", "+inf", "+1_0", "+", "12-1", "²", "2026-99-99T00:00:00Z"]
)
def test_a_moment_that_is_none_is_refused_with_the_forms(stalled: Path, text: str):
    result = call(str(stalled), "--until", text)
    assert result.exit_code == 2
    assert "names no moment" in result.output


def test_moments_are_read_in_every_form():
    assert moments.parse("17").position == moments.parse("17-0").position == 17
    assert moments.parse("trainer:4.0").id == "trainer:4.0"
    assert moments.parse("+2.5").after_s == 2.5
    assert moments.parse("1970-01-01T00:01:00").at == moments.parse("1970-01-01T00:01:00Z").at == 60.0
    with pytest.raises(PipelineError, match="a time is needed"):
        moments.parse("17").time(0.0)


def test_every_actor_of_a_run_has_a_core_and_the_simulation_uses_the_same():
    config = msgspec.structs.replace(RunConfig(), engine=BASE.engine)
    cores = {name: core_of(config, name) for name in registry.names(config)}
    assert {type(actor.core) for actor in Scene(config).world.actors.values()} == {
        type(core) for name, core in cores.items() if name != "recorder"
    }
    with pytest.raises(registry.UnknownActor):
        core_of(config, "nobody-0")


def test_an_archive_is_explained_without_what_a_live_run_needs() -> None:
    heavy = {"torch", "ray", "redis", "transformers", "structlog", "rich", "aiohttp", "numpy", "asyncio"}
    program = (
        "import sys, pipeline.why.load, pipeline.why.render, pipeline.rundir\n"
        f"print(sorted(set(sys.modules) & {heavy!r}))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
