"""A plug-in from its template to its checks."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.errors import Exit

ROOT = Path(__file__).parents[3]


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(words))
    return result.exit_code, result.output


def register(directory: Path, name: str, target: str) -> None:
    info = directory / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sluice.producers]\n{name} = {target}\n")


@pytest.mark.parametrize(("kind", "class_name"), [((), "MyGame"), (("--multi-turn",), "MyGame")])
def test_a_new_package_keeps_its_contract_as_it_is(tmp_path: Path, kind: tuple[str, ...], class_name: str):
    assert run("new", "producer", "my_game", "--dir", str(tmp_path), *kind)[0] == 0
    package = tmp_path / "my_game"
    project = tomllib.loads((package / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["sluice.producers"] == {"my_game": f"my_game:{class_name}"}
    # As one installs it, and stands above it: the folder of the package's name must not hide the package.
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(package / "src")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:pytest_asyncio", "."]
    answer = subprocess.run(
        command, cwd=package, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "6 passed" in answer.stdout


def test_an_installed_producer_is_listed_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert run("new", "producer", "listed_game", "--dir", str(tmp_path))[0] == 0
    register(tmp_path / "listed_game" / "src", "listed_game", "listed_game:ListedGame")
    monkeypatch.syspath_prepend(str(tmp_path / "listed_game" / "src"))
    _, output = run("producers")
    assert "listed_game  listed_game:ListedGame  (listed_game 1)  ok" in output
    code, output = run("producers", "listed_game", "limit=5")
    assert (code, output.count("ok  ")) == (0, 6)
    code, output = run("producers", "reasoning_gym", "x=1")
    assert code == Exit.USAGE
    assert "no setting 'x'" in output
    assert "__init__" not in output
    code, output = run("producers", "listed_game", "limit=1")
    assert code == Exit.USAGE
    assert "limit=1: at least 2 is due" in output


def test_a_broken_producer_fails_by_check_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_game.py").write_text(
        "import itertools\nfrom contracts.producer import Task\ncount = itertools.count()\n"
        "class Broken:\n    contract = 1\n"
        "    async def tasks(self, cursor, seed, split):\n"
        "        while True: yield Task(id=str(next(count)), payload={'k': (1,)}, cursor='1')\n"
        "    def prompt(self, task): return []\n"
        "    def score(self, task, completion): return float('nan')\n"
    )
    register(tmp_path, "broken_game", "broken_game:Broken")
    register(tmp_path, "gone_game", "gone_game:Gone")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, output = run("producers", "broken_game")
    assert code == Exit.FAILED
    failures = [line for line in output.splitlines() if line.startswith("FAIL")]
    assert [line.split(": ")[0].removeprefix("FAIL  broken_game ") for line in failures] == [
        "yields tasks",
        "repeats itself",
        "resumes",
        "scores anything",
    ]
    assert "tuples" in output
    code, output = run("producers")
    assert code == Exit.FAILED
    assert "gone_game:Gone  (gone_game 1)  can't be imported: ModuleNotFoundError" in output


@pytest.mark.parametrize("name", ["My", "1a", "a-b", "class", ""])
def test_a_name_that_can_not_be_a_package_is_refused(tmp_path: Path, name: str):
    code, output = run("new", "producer", name, "--dir", str(tmp_path))
    assert (code, "can't be a producer" in output) == (Exit.USAGE, True)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    code, output = run("new", "producer", "mine", "--dir", str(tmp_path))
    assert (code, "exists already" in output) == (Exit.USAGE, True)


def test_a_place_that_can_not_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    code, output = run("new", "producer", "mine", "--dir", str(tmp_path / "file"))
    assert (code, f"{tmp_path / 'file'} can't be written: " in output) == (Exit.USAGE, True)


def test_a_value_that_is_no_yaml_is_refused():
    code, output = run("producers", "reasoning_gym", "dataset=[")
    assert (code, "is not YAML" in output) == (Exit.USAGE, True)


def test_a_setting_that_a_producer_lacks_or_needs_is_named():
    code, output = run("producers", "nemo_gym", "dtaa=x")
    assert (code, "no setting 'dtaa', did you mean 'data'?" in output) == (Exit.USAGE, True)
    code, output = run("producers", "nemo_gym")
    assert (code, "needs producer.args.data" in output) == (Exit.USAGE, True)


def test_a_setting_without_a_value_is_refused():
    code, output = run("producers", "reasoning_gym", "dataset")
    assert (code, "KEY=VALUE" in output) == (Exit.USAGE, True)
