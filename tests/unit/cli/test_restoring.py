"""What a resume would load is known, and whether it can."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from story import Story, trained  # pyright: ignore[reportMissingImports] - pytest puts its folder on the path

from actors.trainer import checkpoint
from contracts.events import ActorFailed, CheckpointSaved, RunFinished, RunStarted
from pipeline.cli import main
from pipeline.errors import Exit
from pipeline.launcher import Session
from pipeline.restoring import Restores
from pipeline.rundir import RunDir, config_of
from pipeline.verdict import Verdict


def write(root: Path, version: int) -> CheckpointSaved:
    path = checkpoint.directory(root, version, version)
    size = checkpoint.write(path, {"policy": lambda file: file.write_text("weights")}, {})
    recorded = Path("/elsewhere") / path.name
    return CheckpointSaved(version=version, step=version, batch=version, path=str(recorded), bytes=size, seconds=0.1)


def damaged(*, fatal: bool) -> ActorFailed:
    return ActorFailed(actor="trainer", error="CheckpointDamaged", message="torn", fatal=fatal)


def told(root: Path, *events: Any) -> str | None:
    restores = Restores()
    for event in events:
        restores.apply(event)
    return restores.lost(root)


def test_as_long_as_one_of_the_two_newest_is_whole_a_run_can_go_on(tmp_path: Path) -> None:
    first, second, third = (write(tmp_path, version) for version in (1, 2, 3))
    one, two, three = (checkpoint.own(tmp_path, saved.path) for saved in (first, second, third))
    assert told(tmp_path, first, second, third) is None
    shutil.rmtree(three)
    assert told(tmp_path, first, second, third) is None
    (two / "policy").unlink()
    lost = told(tmp_path, first, second, third)
    assert lost == f"{three} is gone; {two / 'policy'} is missing from its checkpoint"
    assert told(tmp_path, first, third, damaged(fatal=False)) is None
    assert told(tmp_path, first, third, damaged(fatal=False), second) is None
    assert told(tmp_path, second, third, damaged(fatal=False)) is not None
    shutil.rmtree(one)
    assert told(tmp_path, first) is None, "the initial weights are left"


def test_what_the_trainer_has_refused_is_held_to_its_digest(tmp_path: Path) -> None:
    first, second = (write(tmp_path, version) for version in (1, 2))
    path = checkpoint.own(tmp_path, first.path) / "policy"
    path.write_text("Weights")
    events = (first, second, damaged(fatal=False), damaged(fatal=True))
    assert told(tmp_path, *events[:-1]) is None
    assert told(tmp_path, *events) == f"{path} differs from what was written (SHA-256)"
    path.write_text("weights")
    assert told(tmp_path, *events) is None


@pytest.fixture
def lost(make_run: Callable[..., RunDir]) -> Callable[..., RunDir]:
    """A run whose checkpoints are gone."""

    def make(*ends: Any) -> RunDir:
        story = trained(3)
        for version in (1, 2):
            path = f"/old/{checkpoint.directory(Path(), version, version)}"
            story.add(CheckpointSaved(version=version, step=version, batch=version, path=path, bytes=1, seconds=0.1))
        for event in ends:
            story.add(event)
        return make_run(story)

    return make


def verify(run: RunDir) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["verify", str(run.path)])
    return done.exit_code, "\n".join(line for line in done.output.splitlines() if line.startswith("resumable: "))


def test_verify_names_the_checkpoints_that_an_unfinished_run_lacks(lost: Callable[..., RunDir]) -> None:
    run = lost()
    code, said = verify(run)
    gone = [str(checkpoint.directory(run / "checkpoints", version, version)) for version in (2, 1)]
    assert code == Exit.FAILED
    assert f"no checkpoint to go on from: {gone[0]} is gone; {gone[1]} is gone" in said
    (run / "bundle.json").touch()
    assert verify(run)[1] == "", "a bundle has none"


@pytest.mark.parametrize(
    ("ends", "missed"),
    [
        ((RunFinished(reason="trained"),), False),
        ((RunFinished(reason="interrupted"),), True),
        ((RunFinished(reason="trained"), RunStarted(config_digest="", resumed=True)), True),
    ],
)
def test_a_finished_run_may_have_lost_its_checkpoints(
    lost: Callable[..., RunDir], ends: tuple[Any, ...], missed: bool
) -> None:
    assert (verify(lost(*ends))[1] != "") == missed


def test_a_resume_is_offered_only_where_it_can_go_on(
    lost: Callable[..., RunDir], make_run: Callable[..., RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    for run, said in ((make_run(Story(), "whole"), '"resume": "pipeline up'), (lost(), "is gone; once it is put back")):
        session = Session(config_of(run), run)
        session._replay()
        session._farewell(Verdict(Exit.FAILED, "trainer failed", "gone"))
        output = capsys.readouterr().out
        assert said in output
        assert ('"resume":' in output) != ("once it is put back" in output)
