"""A bundle tells what happened and nothing that is secret, and what it holds replays."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from actors.recorder import archive as archives
from actors.recorder.archive import Writer
from config import loading
from config.schema import EvalConfig
from contracts import events, limits
from contracts.envelope import decode, encode
from pipeline import bundle, cli
from pipeline.errors import Exit, PipelineError
from pipeline.replay.check import check
from pipeline.replay.recorded import Recorded
from pipeline.rundir import RunDir, config_of
from pipeline.secrets import Scrubber
from pipeline.simulate import archive
from tests.stalls.gallery import PATIENT, long_tail_in_drain, two_coordinators
from tests.stalls.scene import BASE, Scene

SECRET = "hunter2-hunter2"


@pytest.fixture
def stalled(tmp_path: Path) -> RunDir:
    """A stalled run with a secret in its logs, its configuration and its events, and prompts in its tasks."""
    scene = Scene(PATIENT)
    long_tail_in_drain(scene)
    _prompting(scene)
    scene.start()
    scene.run(30.0)
    scene.world.post(
        events.ActorFailed(actor="source", error="E", message=f"GET https://me:{SECRET}@host/x", fatal=False), "secret"
    )
    scene.run(30.0)
    run = archive.write(scene.world, PATIENT, tmp_path / "run")
    (run.logs / "source.jsonl").write_text(json.dumps({"event": f"token {SECRET} sk-abcdefghijklmnopqrstuv"}) + "\n")
    info = json.loads((run / "run.json").read_text())
    info["config"]["producer"]["args"] = {"api_key": SECRET, "max_new_tokens": 64}
    (run / "run.json").write_text(json.dumps(info))
    (run / "config.yaml").write_bytes(msgspec.yaml.encode(info["config"]))
    return run


def _prompting(scene: Scene) -> None:
    """The scene's tasks get prompts."""
    shell: Any = scene["source"].shell
    perform = shell.perform

    def prompts(actor: Any, command: Any) -> None:
        after = actor.after
        actor.after = lambda delay, fetched: after(delay, _with_prompts(fetched))
        perform(actor, command)
        actor.after = after

    shell.perform = prompts


def _with_prompts(fetched: Any) -> Any:
    tasks = tuple(msgspec.structs.replace(task, payload=b'{"prompt":"the owner\'s data"}') for task in fetched.tasks)
    return msgspec.structs.replace(fetched, tasks=tasks)


def content(run: RunDir) -> bytes:
    """Everything in a run directory, decompressed."""
    found = [path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.suffix != ".zst"]
    found += [entry.data for folder in ("events", "journals") for entry in archives.read(run / folder)]
    return b"\n".join(found)


def test_secrets_and_data_stay_at_home(stalled: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    assert SECRET.encode() in content(stalled)
    assert b"the owner's data" in content(stalled)
    facts = bundle.make(stalled, tmp_path / "b.tar.gz", stacks=False)
    packed = content(bundle.unpack(tmp_path / "b.tar.gz", tmp_path / "out"))
    assert SECRET.encode() not in packed
    assert b"sk-abcdefghijklmnopqrstuv" not in packed
    assert b"the owner's data" not in packed
    assert b"max_new_tokens" in packed
    assert facts["hidden"] >= 4
    assert not facts["payloads"]


def test_a_bundle_is_a_run_that_replays_and_is_explained(stalled: RunDir, tmp_path: Path):
    bundle.make(stalled, tmp_path / "b.tar.gz", stacks=False)
    run = bundle.unpack(tmp_path / "b.tar.gz", tmp_path / "out")
    verdict = check(Recorded.read(run, config_of(run)))
    assert verdict.divergences == ()
    assert verdict.steps == check(Recorded.read(stalled, config_of(stalled))).steps
    assert "drain_tail (engine-0)" in (run / "why.txt").read_text()
    result = CliRunner().invoke(cli.main, ["why", str(run.path), "--json"])
    assert json.loads(result.output)["cause"]["code"] == "drain_tail"


def test_what_was_refused_for_its_size_is_refused_without_its_data_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "HELD_OUT", 400)
    config = msgspec.structs.replace(BASE, eval=EvalConfig(every=5, groups=16))
    scene = Scene(config)
    _prompting(scene)
    scene.start()
    scene.run(30.0)
    run = archive.write(scene.world, config, tmp_path / "run")
    bundle.make(run, tmp_path / "b.tar.gz", stacks=False)
    unpacked = bundle.unpack(tmp_path / "b.tar.gz", tmp_path / "unpacked")
    assert b"HeldOutTooLarge" in content(unpacked)
    assert b"owner's data" not in content(unpacked)
    for each in (run, unpacked):
        assert check(Recorded.read(each, config_of(each))).divergences == ()


def test_a_divergence_of_the_run_is_one_of_the_bundle(stalled: RunDir, tmp_path: Path):
    text = (stalled / "run.json").read_text()
    (stalled / "run.json").write_text(text.replace('"max_staleness": 1', '"max_staleness": 2'))
    before = check(Recorded.read(stalled, config_of(stalled))).divergences
    bundle.make(stalled, tmp_path / "b.tar.gz", stacks=False)
    run = bundle.unpack(tmp_path / "b.tar.gz", tmp_path / "out")
    after = check(Recorded.read(run, config_of(run))).divergences
    assert [(each.actor, each.seq) for each in after] == [(each.actor, each.seq) for each in before] != []


def test_payloads_come_along_when_asked_for(stalled: RunDir, tmp_path: Path):
    writer = Writer(stalled / "payloads", 0.0)
    writer.append("payload", "1-0", b"tokens")
    writer.close(0.0)
    bundle.make(stalled, tmp_path / "b.tar.gz", payloads=True, stacks=False)
    run = bundle.unpack(tmp_path / "b.tar.gz", tmp_path / "out")
    assert b"the owner's data" in content(run)
    assert [entry.data for entry in archives.read(run / "payloads")] == [b"tokens"]


def test_stacks_say_for_each_actor_how_they_were_taken(tmp_path: Path, stalled: RunDir):
    import socket

    writer = Writer(stalled.events, 0.0)
    last = [e for e in archives.read(stalled.events)][-1]
    for offset, (name, pid) in enumerate((("trainer", os.getpid()), ("buffer", 2**22 + 1)), 1):
        envelope = decode(last.stream, last.data)
        body = events.ActorBooted(actor=name, boot=9, pid=pid, host=socket.gethostname())
        moved = msgspec.structs.replace(envelope, stream="fleet", actor=name, id=f"{name}:x", body=body)
        place = int(last.entry.partition("-")[0]) + offset
        writer.append("fleet", f"{place}-0", encode(moved))
    writer.close(0.0)
    facts = bundle.make(stalled, tmp_path / "b.tar.gz")
    assert facts["stacks"]["buffer"] == f"process {2**22 + 1} does not exist"
    assert facts["stacks"]["trainer"]


def test_a_test_is_written_that_passes_now_and_fails_when_a_core_changes(stalled: RunDir, tmp_path: Path):
    result = CliRunner().invoke(
        cli.main, ["bundle", str(stalled.path), "--to-test", "long_tail", "--tests", str(tmp_path / "tests")]
    )
    assert result.exit_code == 0, result.output
    test = tmp_path / "tests" / "test_long_tail.py"
    assert "('drain_tail', 'engine-0')" in test.read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(test)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    broken = tmp_path / "conftest.py"
    broken.write_text("import actors.buffer.batches\nactors.buffer.batches.AHEAD = 0\n")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout
    assert "test_long_tail_replays_as_recorded" in done.stdout


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_run_without_its_config_yaml_is_bundled_with_what_run_json_says(stalled: RunDir, tmp_path: Path, how: str):
    config = config_of(stalled)
    (stalled / "config.yaml").unlink() if how == "missing" else (stalled / "config.yaml").write_text("a: [")
    assert bundle.make(stalled, tmp_path / "b.tar.gz", stacks=False)["damage"] == []
    run = bundle.unpack(tmp_path / "b.tar.gz", tmp_path / "out")
    assert loading.load(run / "config.yaml").steps == config_of(run).steps == config.steps


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def test_of_a_damaged_run_what_can_be_read_is_taken_and_the_rest_is_named(stalled: RunDir, tmp_path: Path):
    before = list(archives.read(stalled.events))
    writer = Writer(stalled.events, 0.0)
    writer.append("control", f"{int(before[-1].entry[:-2]) + 1}-0", before[-1].data)
    writer.close(0.0)
    _flip(stalled.events / "000002.zst", -20)
    _flip(stalled / "journals" / "000001.zst", 2000)
    (stalled / "journals" / "index.json").write_text("{")
    result = CliRunner().invoke(
        cli.main, ["bundle", str(stalled.path), "--no-stacks", "-o", str(tmp_path / "b.tar.gz")]
    )
    assert result.exit_code == 0, result.output
    said = [line for line in result.output.splitlines() if line.startswith("damaged, and left out: ")]
    assert len(said) == 2
    assert "000002.zst is damaged: 0 of 1 records can be read; put back a copy of it" in said[0]
    assert "index.json is damaged" in said[1]
    run = bundle.unpack(tmp_path / "b.tar.gz", tmp_path / "out")
    assert [entry.entry for entry in archives.read(run.events)] == [entry.entry for entry in before]
    assert json.loads((run / "bundle.json").read_text())["damage"] == [line.partition(": ")[2] for line in said]
    assert "drain_tail" in (run / "why.txt").read_text()
    words = ["bundle", str(stalled.path), "--to-test", "torn", "--tests", str(tmp_path)]
    assert "damaged, and left out: " in CliRunner().invoke(cli.main, words).output


def test_steps_behind_a_gap_of_a_journal_are_left_out(stalled: RunDir, tmp_path: Path):
    kept = [e for e in archives.read(stalled / "journals") if e.stream != "journal:buffer" or e.entry != "7-0"]
    shutil.rmtree(stalled / "journals")
    writer = Writer(stalled / "journals", 0.0)
    for entry in kept:
        writer.append(entry.stream, entry.entry, entry.data)
    writer.close(0.0)
    facts = bundle.make(stalled, tmp_path / "b.tar.gz", stacks=False)
    assert [text[:50] for text in facts["damage"]] == ["step 7 of buffer is missing from its journal: the "]
    run = bundle.unpack(tmp_path / "b.tar.gz", tmp_path / "out")
    left = [entry.entry for entry in archives.read(run / "journals", {"journal:buffer"})]
    assert left == [f"{number}-0" for number in range(1, 7)]


def test_an_actor_of_a_kind_that_nobody_knows_is_left_out_and_named(tmp_path: Path):
    scene = Scene(BASE)
    two_coordinators(scene)
    scene.start()
    scene.run(60.0)
    run = archive.write(scene.world, BASE, tmp_path / "run")
    steps = len(scene.world.store.journals["refit-b"])
    words = ["--to-test", "two", "--tests", str(tmp_path)], ["-o", str(tmp_path / "b.tar.gz"), "--no-stacks"]
    for how in words:
        result = CliRunner().invoke(cli.main, ["bundle", str(run.path), *how])
        assert result.exit_code == 0, result.output
        assert f"damaged, and left out: the journal of refit-b, {steps} steps: " in result.output
        assert "of a kind that this version has no core for" in result.output
    unpacked = bundle.unpack(tmp_path / "b.tar.gz", tmp_path / "out")
    streams = {entry.stream for entry in archives.read(unpacked / "journals")}
    assert "journal:refit" in streams
    assert "journal:refit-b" not in streams
    assert "two_writers" in (unpacked / "why.txt").read_text()
    assert check(Recorded.read(unpacked, config_of(unpacked))).divergences == ()
    for how in (["replay", str(run.path)], ["replay", str(run.path), "--check"]):
        result = CliRunner().invoke(cli.main, how)
        assert (result.exit_code, type(result.exception)) == (1, SystemExit)
        assert "the journals hold actor 'refit-b', of a kind that this version has no core for" in result.output
        assert "with --actor (recorder, refit, gateway-0, " in result.output
    assert CliRunner().invoke(cli.main, ["replay", str(run.path), "--actor", "refit"]).exit_code == 0


def test_a_run_whose_events_are_gone_is_bundled_too(stalled: RunDir, tmp_path: Path):
    shutil.rmtree(stalled.events)
    facts = bundle.make(stalled, tmp_path / "b.tar.gz", stacks=False)
    assert "holds no event, although this run has journals/" in facts["damage"][0]
    assert list(archives.read(bundle.unpack(tmp_path / "b.tar.gz", tmp_path / "out") / "journals"))


def test_a_folder_that_is_not_there_is_not_made(stalled: RunDir, tmp_path: Path):
    with pytest.raises(PipelineError, match=r"there is no folder .*/nope; make it first") as caught:
        bundle.make(stalled, tmp_path / "nope" / "b.tar.gz")
    assert caught.value.code is Exit.USAGE
    assert not (tmp_path / "nope").exists()


def test_nothing_is_overwritten(stalled: RunDir, tmp_path: Path):
    (tmp_path / "b.tar.gz").write_bytes(b"mine")
    with pytest.raises(PipelineError, match="exists"):
        bundle.make(stalled, tmp_path / "b.tar.gz")
    assert (tmp_path / "b.tar.gz").read_bytes() == b"mine"
    with pytest.raises(PipelineError, match="lower-case"):
        bundle.to_test(stalled, tmp_path, "../evil")


def test_a_hostile_archive_is_not_unpacked_outside(tmp_path: Path):
    file = tmp_path / "evil.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        member = tarfile.TarInfo("../outside.txt")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    with pytest.raises(PipelineError, match="is no bundle"):
        bundle.unpack(file, tmp_path / "in")
    assert not (tmp_path / "outside.txt").exists()
    file.write_bytes(b"not a tar at all")
    with pytest.raises(PipelineError, match="is no bundle"):
        bundle.unpack(file, tmp_path / "in")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("redis://user:pass@host:1", "redis://***@host:1"),
        ("redis://:pass@host", "redis://***@host"),
        ("http://host/a:b@c", "http://host/a:b@c"),
        ("Authorization: Bearer abcdefghijklmnop", "Authorization: Bearer ***"),
        ("key hf_abcdefghijklmnopqrst.", "key ***."),
        ("tokens=64 max_new_tokens=3", "tokens=64 max_new_tokens=3"),
    ],
)
def test_what_looks_like_a_secret_is_hidden_and_nothing_else(text: str, clean: str):
    scrub = Scrubber({})
    assert scrub.text(text) == clean
    assert scrub.touches(text.encode()) == (text != clean)


def test_settings_are_hidden_by_their_names():
    scrub = Scrubber({"HF_TOKEN": "abcdefghij", "SHORT_TOKEN": "abc"})
    value = {
        "token": "x",
        "tokenizer": "t",
        "max_new_tokens": 4,
        "nested": [{"password": "p"}],
        "note": "abcdefghij abc",
    }
    assert scrub.value(value) == {
        "token": "***", "tokenizer": "t", "max_new_tokens": 4, "nested": [{"password": "***"}], "note": "*** abc"
    }  # fmt: skip
