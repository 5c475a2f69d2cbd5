"""A command that is printed works where it is pasted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.invocation import command


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An executable `pipeline` that prints its arguments, one a line."""
    path = tmp_path / "a venv" / "bin" / "pipeline"
    path.parent.mkdir(parents=True)
    path.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)
    return path


def ran(text: str) -> list[str]:
    return subprocess.run(text, shell=True, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_way_to_the_program_is_part_of_it_where_the_path_does_not_lead_there(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(installed), "up"])
    for path in ("/usr/bin:/bin", f"{_other(installed)}:/usr/bin:/bin"):
        monkeypatch.setenv("PATH", path)
        assert ran(command("up", "--resume", Path("/runs/my run"))) == ["up", "--resume", "/runs/my run"]
    monkeypatch.setenv("PATH", f"{installed.parent}:/usr/bin:/bin")
    assert command("up", "--resume", "/runs/r") == "pipeline up --resume /runs/r"


def _other(installed: Path) -> Path:
    """A folder with another `pipeline`, which must not be taken."""
    other = installed.parent.parent / "other" / "pipeline"
    other.parent.mkdir(exist_ok=True)
    shutil.copy(shutil.which("false") or "/bin/false", other)
    return other.parent


def test_as_a_module_it_is_run_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/pipeline/__main__.py", "up"])
    assert command("version") == f"{sys.executable} -m pipeline version"


def test_within_another_program_it_is_named_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest"])
    assert command("version") == "pipeline version"
