"""A run directory belongs to one driver at a time, and is found by what a person types."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from story import Story  # pyright: ignore[reportMissingImports] - pytest puts its folder on the path

from config import loading
from pipeline import resuming, rundir
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import FOLDERS, RunDir, RunInfo

CONFIG = loading.load("quickstart")


def info(name: str = "demo") -> RunInfo:
    return rundir.describe(name, CONFIG, "digest")


def create(path: Path | None) -> RunDir:
    return RunDir.create(path, info(), "steps: 3\n")


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(PipelineError) as caught:
        call()
    assert caught.value.code is Exit.USAGE
    return str(caught.value)


def test_a_new_run_has_its_folders_configuration_and_facts(tmp_path: Path) -> None:
    run = create(tmp_path / "deep" / "down" / "run")
    assert {path.name for path in run.path.iterdir()} == {"run.json", "config.yaml", "lock", *FOLDERS}
    found = run.info()
    assert found.run.startswith("demo-")
    assert found.pid == os.getpid()
    assert found.versions["python"] == sys.version.split()[0]
    assert {"sluice-rl", "ray", "torch", "code"} <= found.versions.keys()
    assert found.config["steps"] == CONFIG.steps
    assert (run / "config.yaml").read_text() == "steps: 3\n"


def test_ids_of_runs_differ_even_within_a_second() -> None:
    assert len({info().run for _ in range(20)}) > 1


def test_an_empty_directory_may_be_used_and_another_may_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    create(tmp_path / "empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert "is not empty: choose an empty or a new directory" in refusal(lambda: create(tmp_path / "full"))
    (tmp_path / "file").touch()
    said = refusal(lambda: create(tmp_path / "file" / "run"))
    assert said == f"run_dir={tmp_path}/file/run: {tmp_path}/file is a file; choose another place"


def test_a_directory_that_can_not_be_made_is_refused_with_the_reason() -> None:
    assert "run_dir=/proc/none/run: No such file or directory (/proc/none)" in refusal(
        lambda: create(Path("/proc/none/run"))
    )
    long = Path("d" * 300)
    assert f"run_dir={long}: File name too long; choose another place" in refusal(lambda: create(long))


@pytest.mark.parametrize("existed", [False, True])
def test_a_disk_that_is_full_leaves_no_half_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    if existed:
        (tmp_path / "run").mkdir()
    replace = os.replace

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    assert "run: No space left on device; choose another place" in refusal(lambda: create(tmp_path / "run"))
    assert list(tmp_path.rglob("*")) == ([tmp_path / "run"] if existed else [])
    monkeypatch.setattr(os, "replace", replace)
    create(tmp_path / "run")


def test_the_directory_of_a_live_run_is_refused_and_that_of_a_dead_one_can_be_resumed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from pipeline import rundir; from pipeline.rundir import RunDir\n"
        "run = RunDir.create(Path(sys.argv[1]), rundir.describe('x', {}, ''), '')\n"
        "print(run.info().pid, flush=True); time.sleep(600)\n"
    )
    path = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        pid = other.stdout.readline().strip()
        assert f"belongs to a run that is live (process {pid})" in refusal(lambda: create(path))
        assert f"process {pid}" in refusal(RunDir.open(path).lock)
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()  # pyright: ignore[reportOptionalMemberAccess]
    assert f"holds an earlier run: go on with `pipeline up --resume {path}`" in refusal(lambda: create(path))
    RunDir.open(path).lock()


def test_an_unfinished_draft_of_a_run_can_be_used_again(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    run.unlock()
    (run / "run.json").unlink()
    assert create(tmp_path / "run").info().name == "demo"


@pytest.mark.parametrize("existed", [False, True])
def test_a_run_that_was_refused_leaves_nothing(tmp_path: Path, existed: bool) -> None:
    if existed:
        (tmp_path / "run").mkdir()
    run = create(tmp_path / "run")
    (run / "logs/driver.jsonl").touch()
    run.withdraw()
    assert list(tmp_path.rglob("*")) == ([tmp_path / "run"] if existed else [])
    create(tmp_path / "run").unlock()


@pytest.mark.parametrize("written", ["logs/trainer.jsonl", "broker.txt"])
def test_a_run_that_was_refused_stays_when_somebody_else_wrote_into_it(tmp_path: Path, written: str) -> None:
    run = create(tmp_path / "run")
    (run / written).touch()
    run.withdraw()
    assert (run / "run.json").exists()
    assert (run / written).exists()


def test_runs_are_found_by_path_by_name_and_by_being_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: Callable[..., RunDir]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no run under runs/ yet" in refusal(lambda: RunDir.find(None))
    first, second = create(None), create(None)
    assert first.path.parent == second.path.parent == tmp_path / "runs"
    first.write(info("older"))
    second.write(info("newer"))
    newest = max((first, second), key=lambda run: run.info().created)
    assert RunDir.find(None).path == newest.path
    assert RunDir.find(first.path.name).path == first.path
    assert RunDir.find(str(second.path)).path == second.path
    elsewhere = make_run(Story(), "elsewhere")
    assert RunDir.find("elsewhere").path == elsewhere.path
    said = refusal(lambda: RunDir.find(first.path.name[:-1] + "x"))
    assert any(f"did you mean {run.path.name}?" in said for run in (first, second))
    (tmp_path / "nothing").mkdir()
    assert "holds no run (it has no run.json): give the directory" in refusal(lambda: RunDir.find("nothing"))
    (tmp_path / "file").touch()
    assert "file is a file: give the directory of a run" in refusal(lambda: RunDir.find("file"))
    other = first if newest is second else second
    (other / "run.json").write_text("{")
    os.utime(other / "run.json", (0, 0))
    assert RunDir.find(None).path == newest.path, "damage of an older run is no obstacle"


def test_damaged_facts_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    (run / "run.json").write_text("{")
    assert f"{run / 'run.json'} can't be read: Input data was truncated. Put back a copy of it" in refusal(run.info)
    assert str(run / "run.json") in refusal(lambda: RunDir.find(str(run.path)))


def test_a_run_goes_by_the_settings_in_its_facts(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    (run / "config.yaml").write_text("[")
    assert rundir.config_of(run) == CONFIG
    run.update(config={**run.info().config, "steps": -2})
    said = refusal(lambda: rundir.config_of(run))
    assert "run.json holds settings that this version can't use: steps=-2: expected a whole number" in said
    assert f"Use the version that wrote them, sluice-rl 0.1.0 (code {rundir.code()})" in said


def test_facts_are_replaced_whole(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    run.update(ended="done", redis_url="unix:///x")
    assert json.loads((run / "run.json").read_text())["ended"] == "done"
    assert run.info().redis_url == "unix:///x"
    assert not list(run.path.glob(".run.json*"))


def test_a_run_is_driven_while_its_driver_holds_it(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    assert run.driven()
    assert RunDir.open(run.path).driven()
    run.unlock()
    assert not run.driven()
    run.lock()
    assert run.driven()
    run.unlock()
    (run / "lock").unlink()
    assert not run.driven()


def test_settings_that_were_adopted_half_are_those_of_the_next_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path / "run", info(), loading.dump(CONFIG))
    changed = msgspec.structs.replace(CONFIG, steps=CONFIG.steps + 1)
    written: list[Path] = []

    def crash(path: Path, data: bytes) -> None:
        if written:
            raise OSError(errno.EIO, "crashed", str(path))
        written.append(path)
        path.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(rundir.atomic, "write", crash)
        with pytest.raises(OSError, match="crashed"):
            run.adopt(changed, rundir.Era(msgspec.to_builtins(CONFIG), {}))
    before = rundir.config_of(run)
    assert resuming.changes(before, resuming.written(run, before)) == {"steps": (CONFIG.steps, CONFIG.steps + 1)}
