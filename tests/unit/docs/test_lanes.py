"""The page's lane is run where there is a browser, and where there is none nobody can take it for passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """What the script itself calls, without any browser."""
    for name in ("bash", "cat", "dirname", "env", "xargs"):
        path = next(f for folder in os.environ["PATH"].split(":") if (f := Path(folder) / name).is_file())
        (tmp_path / name).symlink_to(path)
    return tmp_path


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def lanes(tools: Path, lane: str, **environment: str) -> subprocess.CompletedProcess[str]:
    found = {"PATH": str(tools), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **environment}
    words = [str(ROOT / ".ci" / "lanes"), script(tools / "lane", lane)]
    return subprocess.run(words, env=found, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("how", ["on PATH", "by its name"])
def test_the_page_is_tested_where_a_browser_starts(tools: Path, how: str) -> None:
    browser = script(tools / ("google-chrome" if how == "on PATH" else "mine"), "exit 0")
    done = lanes(tools, 'echo "ran $1"', **({} if how == "on PATH" else {"SLUICE_CHROMIUM": browser}))
    assert done.returncode == 0, done.stderr
    assert "ran test-ui" in done.stdout.splitlines()
    assert "NOT RUN" not in done.stdout


@pytest.mark.parametrize("stub", [False, True])
def test_without_a_browser_that_starts_it_is_said_last_that_the_page_was_not_tested(tools: Path, stub: bool) -> None:
    if stub:
        script(tools / "chromium-browser", "echo install the snap; exit 1")
    done = lanes(tools, 'echo "ran $1"')
    assert done.returncode == 0, done.stderr
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert len(ran) == 4
    assert "ran test-ui" not in ran
    assert done.stdout.rpartition(ran[-1])[2].count("NOT RUN: test-ui") == 1


def test_a_lane_that_fails_fails_the_whole_and_all_have_run(tools: Path) -> None:
    done = lanes(tools, 'echo "ran $1"; [ "$1" != test-gym ]')
    assert done.returncode != 0
    assert done.stdout.count("ran ") == 4
    assert "NOT RUN: test-ui" in done.stdout
