"""What NeMo-Gym needs is asked for before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from config.loading import build
from pipeline import preflight
from pipeline.errors import Exit, PipelineError


def recipe(args: dict[str, Any], port: int = 0) -> Any:
    model = {"source": "random", "params": {"vocabulary": {"texts": ["a"]}}}
    data = ["rows.jsonl", {"path": "rows.jsonl", "agent": "a"}, "environments/x.jsonl"]
    gym = {"name": "nemo_gym", "args": {"data": data, "start": True, **args}}
    return build({"model": model, "producer": gym, "gateway": {"port": port}})


def test_paths_of_a_recipe_hold_for_actors_in_other_directories(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    args = preflight.absolute(recipe({}), tmp_path).producer.args
    assert args["data"] == [
        str(tmp_path / "rows.jsonl"),
        {"path": str(tmp_path / "rows.jsonl"), "agent": "a"},
        "environments/x.jsonl",
    ]
    assert args["python"] == str(tmp_path / ".venv-gym/bin/python")
    own = preflight.absolute(recipe({"python": "/opt/gym/bin/python"}), tmp_path).producer.args
    assert own["python"] == "/opt/gym/bin/python"


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_producer", lambda config: None)


def test_a_missing_gym_is_named_with_what_installs_it():
    with pytest.raises(PipelineError, match="make gym") as caught:
        preflight.check(recipe({"python": "/nowhere/python"}, port=18765))
    assert caught.value.code is Exit.MISSING


def test_a_gateway_without_a_fixed_port_is_refused():
    with pytest.raises(PipelineError, match=r"gateway\.port=0") as caught:
        preflight.check(recipe({"python": sys.executable}))
    assert caught.value.code is Exit.USAGE
