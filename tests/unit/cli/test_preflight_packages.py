"""A package that a backend needs is asked for in the environment that will run it, before anything is started."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from config.loading import load
from pipeline import preflight
from pipeline.errors import Exit, PipelineError


def refused(*overrides: str) -> str:
    with pytest.raises(PipelineError) as caught:
        preflight.check(load("quickstart", overrides))
    assert caught.value.code is Exit.MISSING
    return str(caught.value)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of its own that has no package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def package(python: Path, *names: str) -> None:
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    for name in names:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise RuntimeError('it was imported')\n")


def test_sglang_is_looked_for_where_engines_run(bare: Path):
    said = refused("engine.kind=sglang")
    assert f"engine.kind=sglang: the environment of engine.python=null, so of {sys.executable}, has no sglang" in said
    assert "make sglang" in said
    said = refused("engine.kind=sglang", f"engine.python={bare}")
    assert f"the environment of engine.python={bare} has no sglang" in said
    package(bare, "sglang")
    preflight.check(load("quickstart", ["engine.kind=sglang", f"engine.python={bare}"]))


def test_megatron_is_looked_for_where_the_trainer_runs():
    said = refused("trainer.backend=megatron")
    assert "trainer.backend=megatron needs megatron.core, megatron.bridge" in said
    assert "make megatron" in said
    assert sys.executable in said


def test_verifiers_is_looked_for_where_the_producer_runs(bare: Path):
    assert "producer.python=null has no verifiers" in refused("producer.name=verifiers")
    said = refused("producer.name=verifiers", f"producer.python={bare}")
    assert f"producer.python={bare} has no verifiers" in said
    assert "pip install 'verifiers==0.4.*' msgspec" in said
    package(bare, "verifiers", "msgspec")
    preflight.check(load("quickstart", ["producer.name=verifiers", f"producer.python={bare}"]))


def test_a_program_that_is_no_python_is_named(tmp_path: Path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho cannot start >&2; exit 3\n")
    fake.chmod(0o755)
    assert f"engine.python={fake}: it is no Python that runs: cannot start" in refused(
        "engine.kind=sglang", f"engine.python={fake}"
    )
