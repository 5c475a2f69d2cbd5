"""A report holds trajectories only when asked for, the newest groups first, and no more than a file may hold."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from pipeline import cli
from pipeline.rundir import RunDir
from pipeline.simulate import archive
from pipeline.ui import _kept, _trajectory
from pipeline.ui._data import RunData
from tests.stalls.scene import BASE, Scene
from tests.unit.ui.shown import EVIL


class Letters:
    """Stands in for a tokenizer: an id is a letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trajectory, "load_tokenizer", lambda source, params: Letters())


def held(run: RunDir) -> tuple[str, Any]:
    page = run.report.read_text()
    (text,) = re.findall(r'<script id="embedded" type="application/json">(.*?)</script>', page, re.DOTALL)
    return page, json.loads(text)


def test_a_report_holds_prompts_and_answers_only_when_asked_for(run: RunDir, data: RunData):
    done = CliRunner().invoke(cli.main, ["report", str(run.path)])
    assert (done.exit_code, done.output.strip()) == (0, str(run.report))
    page, found = held(run)
    assert found["samples"] is None
    assert "ask:" not in page
    done = CliRunner().invoke(cli.main, ["report", str(run.path), "--trajectories"])
    assert done.output.strip() == f"{run.report}, which holds prompts and answers"
    page, found = held(run)
    assert EVIL not in page, "what a model wrote becomes no markup"
    sample = next(iter(found["samples"]["tokens"].values()))
    assert sample["trajectory"]["info"]["answer"] == EVIL
    assert "".join(sample["trajectory"]["sequences"][0]["tokens"]) == "ask:<b>!"
    kinds = [data.index.kind(row) for row in range(len(data.index))]
    assert found["samples"]["of"] == kinds.count("trajectory.finished")


def test_the_newest_groups_are_kept_and_no_more_than_there_is_room(
    run: RunDir, data: RunData, monkeypatch: pytest.MonkeyPatch
):
    everything = _kept.kept(run, data)
    groups = list(dict.fromkeys(line["index"] for line in everything["samples"]))
    assert len(groups) > 3
    of = {n: [line["row"] for line in everything["samples"] if line["index"] == n] for n in groups}
    size = [len(msgspec.json.encode({row: everything["tokens"][row] for row in of[n]})) for n in groups[:3]]
    monkeypatch.setattr(_kept, "BYTES", sum(size) - 1)
    found = _kept.kept(run, data)
    assert sorted(found["tokens"]) == sorted([*of[groups[0]], *of[groups[1]]])
    assert [line["row"] for line in found["samples"]] == [*of[groups[0]], *of[groups[1]]]


def test_a_run_without_payloads_says_why_there_are_none(tmp_path: Any):
    scene = Scene(BASE)
    scene.start()
    scene.run(60.0, lambda: scene.step() >= 2)
    run = archive.write(scene.world, BASE, tmp_path / "run")
    done = CliRunner().invoke(cli.main, ["report", str(run.path), "--trajectories"])
    assert done.exit_code == 2
    assert "holds no trajectory for a report: `recorder.payloads` was off" in done.output
