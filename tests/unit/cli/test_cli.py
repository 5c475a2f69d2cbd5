"""The command line: each kind of failure has its message and its exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner, Result
from story import Story, booted, trained  # pyright: ignore[reportMissingImports] - pytest puts its folder on the path

from contracts import events
from contracts.core import Fatal
from pipeline import cli, launcher, single
from pipeline.errors import Exit
from pipeline.rundir import RunDir


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REDIS_URL", raising=False)


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.main, list(words))


def process(words: Sequence[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pipeline", *words]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


# --- help, recipes, version ---


def test_help_is_quick_and_loads_nothing_heavy(tmp_path: Path) -> None:
    heavy = {"torch", "ray", "redis", "transformers", "omegaconf", "structlog", "rich", "aiohttp", "numpy"}
    program = (
        "import sys; from pipeline.cli import main\n"
        "try: main(['--help'])\n"
        f"except SystemExit: print(sorted(set(sys.modules) & {heavy!r}))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("up", "recipes", "actor", "log", "report", "version"):
        assert f"\n  {command} " in done.stdout


def test_recipes_are_listed_with_a_line_each() -> None:
    result = call("recipes")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert any(line.startswith("quickstart ") and "GRPO" in line for line in lines)
    assert any(line.startswith("smollm2-cpu ") for line in lines)


def test_versions_are_printed() -> None:
    assert "sluice-rl 0.1.0" in call("version").output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_can_not_be_written_ends_in_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pipeline", "recipes"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == Exit.FAILED
    assert done.stderr == "pipeline: the output can't be written: No space left on device\n"


def test_what_a_terminal_has_no_sign_for_becomes_a_question_mark(tmp_path: Path) -> None:
    program = "from pipeline import cli; cli._printable(); print('reward \u2581\u2582')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == (b"reward ??\n", b"")


# --- up, refused ---


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["up", ""], Exit.USAGE, "no recipe ''. Shipped are"),
        (["up", "quikstart"], Exit.USAGE, "no recipe 'quikstart'; did you mean quickstart?"),
        (["up", "nowhere.yaml"], Exit.USAGE, "no such file"),
        (["up", "simulated", "steps=3"], Exit.USAGE, "trains nothing: `pipeline simulate` runs it"),
        (["up", "trainer.lrr=1"], Exit.USAGE, "did you mean trainer.lr?"),
        (["up", "quickstart", "steps=many"], Exit.USAGE, "steps=many: expected a whole number"),
        (["up", "quickstart", "steps"], Exit.USAGE, "expected key=value"),
        (["up", "model.source=/nowhere"], Exit.MISSING, "model.source=/nowhere: it is not a directory"),
        (["up", "model.source=here", "model.params.layers=2"], Exit.USAGE, "takes none: remove layers"),
        (["up", "model.source=package:no-such-thing"], Exit.MISSING, "pip install --no-deps no-such-thing"),
        (["up", "model.params.heads=3"], Exit.USAGE, "model.params.width=128 is not an even multiple of heads=3"),
        (["up", "producer.name=nothing"], Exit.MISSING, "producer.name='nothing' is not installed; known: "),
        (["up", "engine.python=/no/python"], Exit.MISSING, "engine.python=/no/python: no such program"),
        (
            ["up", "network.host=203.0.113.1", "gateway.port=7"],
            Exit.MISSING,
            "gateway.port=7 on network.host=203.0.113.1",
        ),
        (["up", "--resume", "nothing"], Exit.USAGE, "no run 'nothing'"),
        (["up", "--nonsense"], Exit.USAGE, "No such option"),
        (["report", "nothing"], Exit.USAGE, "no run 'nothing'"),
        (["log"], Exit.USAGE, "no run under runs/ yet"),
        (["actor", "buffer"], Exit.USAGE, "no run under runs/ yet"),
        (["actor"], Exit.USAGE, "Missing argument"),
        (["nonsense"], Exit.USAGE, "No such command"),
    ],
)
def test_what_can_not_be_run_is_refused_with_its_code(words: list[str], code: Exit, message: str) -> None:
    result = call(*words)
    assert (result.exit_code, message in result.output) == (code, True), result.output
    assert not Path("runs").exists()


def test_a_model_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    result = call("up", "model.source=model")
    assert result.exit_code == Exit.MISSING
    assert f"model.source={tmp_path / 'model'}: it has no config.json" in result.output


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = call("up", f"gateway.port={taken.getsockname()[1]}")
    assert result.exit_code == Exit.MISSING
    assert "Address already in use; choose another port" in result.output


def test_a_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    result = call("up", "run_dir=full")
    assert result.exit_code == Exit.USAGE
    assert "is not empty" in result.output


def test_an_unreachable_store_is_refused_in_time_without_its_password_and_leaves_no_run(tmp_path: Path) -> None:
    began = time.monotonic()
    done = process(
        ["up", "run_dir=run", "broker.start_deadline_s=1"], tmp_path, REDIS_URL="redis://me:hunter2@127.0.0.1:1/0"
    )
    assert done.returncode == Exit.BROKER
    assert "REDIS_URL=redis://me:***@127.0.0.1:1/0" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    assert time.monotonic() - began < 30
    assert not (tmp_path / "run").exists()
    malformed = process(["up", "run_dir=run"], tmp_path, REDIS_URL="http://x")
    assert malformed.returncode == Exit.BROKER
    assert "Accepted forms: redis://" in malformed.stderr, "the same command, corrected, is not refused as a second run"
    assert not (tmp_path / "run").exists()


def test_a_stray_module_beside_the_caller_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("raise SystemExit(99)\n")
    assert process(["recipes"], tmp_path).returncode == Exit.DONE
    command = [sys.executable, "-m", "pipeline", "recipes"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == Exit.MISSING
    assert f"the package 'config' resolves to {tmp_path / 'config.py'}" in done.stderr


# --- resume ---


def test_a_complete_run_is_not_started_again(make_run: Callable[..., RunDir]) -> None:
    story = trained(2)
    story.add(events.TrainingFinished(version=2, step=2))
    story.add(events.RunFinished(reason="trained"))
    run = make_run(story)
    result = call("up", "--resume", str(run.path))
    assert result.exit_code == Exit.DONE, result.output
    assert "trained 2 steps" in result.output
    assert run.report.exists()


def test_a_resumed_run_keeps_its_settings(make_run: Callable[..., RunDir]) -> None:
    run = make_run(trained(2))
    result = call("up", "--resume", str(run.path), "launch.restarts=3", "steps=900", "seed=5", "buffer.groups=7")
    assert result.exit_code == Exit.USAGE
    assert "seed=5: a resumed run keeps seed=0" in result.output
    assert "buffer.groups=7: a resumed run keeps buffer.groups=" in result.output
    assert "steps" not in result.output
    assert "leave out 'quickstart'" in call("up", "quickstart", "--resume", str(run.path)).output


def edit(run: RunDir, old: str, new: str) -> None:
    text = (run / "config.yaml").read_text()
    assert old in text
    (run / "config.yaml").write_text(text.replace(old, new))


def test_a_config_yaml_that_was_edited_counts_as_if_its_values_were_given(
    make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(trained(2))
    edit(run, "seed: 0", "seed: 7")
    result = call("up", "--resume", str(run.path), "buffer.groups=7")
    assert result.exit_code == Exit.USAGE
    assert (
        "seed=7: a resumed run keeps seed=0, for the tasks issued so far came from it: put that back" in result.output
    )
    assert "buffer.groups=7: a resumed run keeps buffer.groups=32, for batches and credit are counted" in result.output
    assert result.output.count("leave it out") == 1
    edit(run, "seed: 7", "seed: 0")
    edit(run, "steps: 160", "steps: 900")
    sessions: list[launcher.Session] = []
    monkeypatch.setattr(launcher.Session, "run", lambda self: sessions.append(self) or Exit.DONE)
    monkeypatch.setattr(launcher.RunDir, "lock", lambda _: None)
    assert call("up", "--resume", str(run.path), "steps=900", "trainer.lr=1e-3").exit_code == Exit.DONE
    (session,) = sessions
    assert session._before is not None
    assert (session._before.steps, session._config.steps, session._config.trainer.lr) == (160, 900, 1e-3)
    assert session._edited == {"steps": 900}


def test_a_damaged_config_yaml_is_named_with_its_fix_and_a_missing_one_is_written_anew(
    make_run: Callable[..., RunDir],
) -> None:
    run = make_run(trained(2))
    path = run / "config.yaml"
    before = path.read_text()
    path.write_text("steps: [")
    result = call("up", "--resume", str(run.path))
    assert result.exit_code == Exit.USAGE
    assert f"Correct {path}, or delete it: the settings of the run are in run.json too" in result.output
    path.unlink()
    assert "seed=5: a resumed run keeps" in call("up", "--resume", str(run.path), "seed=5").output
    assert path.read_text() == before


def test_a_live_run_is_not_resumed(make_run: Callable[..., RunDir]) -> None:
    run = make_run(trained(2))
    run.lock()
    assert "belongs to a run that is live" in call("up", "--resume", str(run.path)).output
    run.unlock()


# --- log ---


def test_events_are_printed_in_order_and_filtered(make_run: Callable[..., RunDir]) -> None:
    story = trained(2)
    run = make_run(story)
    every = [json.loads(line) for line in call("log", str(run.path)).output.splitlines()]
    assert [line["entry"] for line in every] == [f"{n}-0" for n in range(1, len(story.log) + 1)]
    task = next(line for line in every if line["kind"] == "task.issued")
    assert task["body"]["payload"] == {}
    assert task["at"].startswith("1970-01-01T00:16:")
    assert [json.loads(x)["body"]["version"] for x in _log(run, "--kind", "refit.c*")] == [0, 1, 2]
    assert {json.loads(x)["stream"] for x in _log(run, "--stream", "policy", "--stream", "fleet")} == {
        "policy",
        "fleet",
    }
    assert len(_log(run, "--actor", "test")) == len(story.log)


def test_events_are_picked_by_when_they_were(make_run: Callable[..., RunDir]) -> None:
    story = trained(2)
    run = make_run(story)
    every = _log(run)
    fifth = json.loads(every[4])
    assert _log(run, "--since", "5") == _log(run, "--since", fifth["id"]) == every[4:]
    walls = [json.loads(line)["wall_ns"] for line in every]
    late = [line for line, wall in zip(every, walls, strict=True) if wall >= walls[0] + 4_000_000_000]
    assert 0 < len(late) < len(every)
    assert _log(run, "--since", "+4") == late
    assert _log(run, "--until", "5-0") == _log(run, "--until", fifth["id"]) == every[:5]
    assert _log(run, "--since", "3", "--until", "5") == every[2:5]
    same = [line for line, wall in zip(every, walls, strict=True) if wall == walls[4]]
    assert _log(run, "--since", fifth["at"], "--until", fifth["at"]) == same
    missing = call("log", str(run.path), "--since", "nobody:1.0")
    assert missing.exit_code == Exit.USAGE
    assert "no event 'nobody:1.0'" in missing.output
    assert "names no moment" in call("log", str(run.path), "--until", "yesterday").output


def test_an_event_is_printed_with_everything_that_followed_from_it(make_run: Callable[..., RunDir]) -> None:
    story = trained(1)
    ids = [envelope.id for envelope in story.log]
    causes = {ids[3]: ids[1], ids[5]: ids[3], ids[6]: ids[2]}
    story.log = [msgspec.structs.replace(e, causation_id=causes.get(e.id)) for e in story.log]
    run = make_run(story)
    assert [json.loads(line)["id"] for line in _log(run, "--cause", ids[1])] == [ids[1], ids[3], ids[5]]
    assert [json.loads(line)["id"] for line in _log(run, "--cause", ids[1], "--cause", ids[6])] == [
        ids[1],
        ids[3],
        ids[5],
        ids[6],
    ]


def _log(run: RunDir, *words: str) -> list[str]:
    result = call("log", str(run.path), *words)
    assert result.exit_code == 0
    return result.output.splitlines()


def test_an_unknown_stream_is_refused_with_the_known_ones(make_run: Callable[..., RunDir]) -> None:
    result = call("log", str(make_run(Story()).path), "--stream", "refits")
    assert result.exit_code == Exit.USAGE
    assert "streams are tasks, trajectories" in result.output


@pytest.mark.parametrize(
    ("kind", "near"), [("refit.comitted", "refit.committed"), ("nonsense", "refit.*"), ("refti.*", "refit.")]
)
def test_a_kind_that_no_event_has_is_refused_with_what_comes_near(
    make_run: Callable[..., RunDir], kind: str, near: str
) -> None:
    result = call("log", str(make_run(Story()).path), "--kind", kind)
    assert result.exit_code == Exit.USAGE
    assert f"--kind {kind!r}: no event is of that kind" in result.output
    assert near in result.output


@pytest.mark.parametrize(
    "words",
    [
        ("bundle", "--no-stacks", "-o", "file/out.tar.gz"),
        ("bundle", "--to-test", "name", "--tests", "file/tests"),
        ("trace", "-o", "file/trace.json"),
    ],
)
def test_a_place_that_can_not_be_written_is_named(make_run: Callable[..., RunDir], words: tuple[str, ...]) -> None:
    Path("file").touch()
    result = call(words[0], str(make_run(trained(1)).path), *words[1:])
    assert result.exit_code == Exit.USAGE
    assert f"pipeline: {words[-1]} can't be written: " in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--actor", "engine-7"), "--actor 'engine-7': no event of the run is of it; there are test"),
        (("--since", "10", "--until", "5"), "--since lies behind --until"),
        (("--since", "+10", "--until", "+5"), "--since lies behind --until"),
    ],
)
def test_a_filter_that_nothing_can_pass_is_refused(
    make_run: Callable[..., RunDir], words: tuple[str, ...], said: str
) -> None:
    result = call("log", str(make_run(trained(1)).path), *words)
    assert (result.exit_code, result.stdout) == (Exit.USAGE, "")
    assert said in result.output


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_a_length_of_time_is_a_number_of_seconds(make_run: Callable[..., RunDir], seconds: str) -> None:
    run = make_run(trained(1))
    for words in (("why", "--patience"), ("replay", "--delay", "test:1.0", "--by")):
        result = call(words[0], str(run.path), *words[1:], seconds)
        assert result.exit_code == Exit.USAGE
        assert words[-1] in result.output


def test_following_a_finished_run_ends(make_run: Callable[..., RunDir]) -> None:
    story = trained(1)
    story.add(events.RunFinished(reason="done"))
    assert len(_log(make_run(story), "--follow")) == len(story.log)


def test_following_a_run_without_a_store_is_refused(make_run: Callable[..., RunDir]) -> None:
    run = make_run(trained(1))
    result = call("log", str(run.path), "--follow")
    assert result.exit_code == Exit.BROKER
    assert "does not say which store it used" in result.output
    run.update(redis_url=f"unix://{run.path}/none.sock")
    assert "the run is not live" in call("log", str(run.path), "--follow").output


def test_a_damaged_archive_is_named(make_run: Callable[..., RunDir]) -> None:
    run = make_run(trained(1))
    (run.events / "000001.zst").unlink()
    result = call("log", str(run.path))
    assert result.exit_code == Exit.FAILED
    assert "000001.zst is missing: index.json lists" in result.output
    assert "put back a copy of it; `pipeline bundle` packs what can be read without it" in result.output


@pytest.mark.parametrize("command", ["log", "why", "trace", "diff", "export", "report", "verify"])
def test_a_run_whose_events_were_removed_is_not_taken_for_one_without(
    make_run: Callable[..., RunDir], command: str
) -> None:
    words = {"diff": (str(make_run(trained(1), "other").path),)}.get(command, ())
    run = make_run(trained(1))
    for path in run.events.iterdir():
        path.unlink()
    before = call(command, *words, str(run.path))
    assert "although" not in before.output  # as if nothing had been recorded yet
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    result = call(command, *words, str(run.path))
    assert result.exit_code == Exit.FAILED
    assert f"{run.events} holds no event, although this run has metrics.jsonl" in result.output


def test_starts_of_actors_are_counted_not_the_numbers_that_they_have(make_run: Callable[..., RunDir]) -> None:
    story = Story()
    story.add(booted("buffer", 1), actor="buffer", boot=1)
    story.add(booted("buffer", 3), actor="buffer", boot=3)  # a resume with other settings took number 2
    assert " boots=2\n" in call("verify", str(make_run(story).path)).output


# --- report and actor ---


def test_a_report_is_written_from_the_archive(make_run: Callable[..., RunDir]) -> None:
    run = make_run(trained(3))
    result = call("report", str(run.path))
    assert (result.exit_code, result.output.strip()) == (0, str(run.report))
    empty = call("report", str(make_run(Story(), "empty").path))
    assert empty.exit_code == Exit.FAILED
    assert "no finished training step" in empty.output


def test_an_actor_needs_to_know_its_store(make_run: Callable[..., RunDir]) -> None:
    run = make_run(Story())
    result = call("actor", "buffer", "--run", str(run.path))
    assert result.exit_code == Exit.BROKER
    assert "set REDIS_URL" in result.output


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        ("done", Exit.DONE, ""),
        ("fenced", Exit.FAILED, "a later start of it has taken over"),
        (Fatal("no model"), Exit.FAILED, "buffer: no model"),
    ],
)
def test_how_an_actor_left_is_its_exit_code(
    make_run: Callable[..., RunDir],
    monkeypatch: pytest.MonkeyPatch,
    outcome: str | Exception,
    code: Exit,
    message: str,
) -> None:
    run = make_run(Story())
    run.update(redis_url="unix:///x")
    calls: list[tuple[object, ...]] = []

    def run_actor(*args: object) -> str:
        calls.append(args)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("pipeline.runtime.run_actor", run_actor)
    result = call("actor", "buffer", "--run", str(run.path))
    assert result.exit_code == code
    assert message in result.output
    assert calls == [("buffer", "unix:///x", run.info().run, run.path)]


def test_an_actor_without_its_store_or_of_unknown_name_is_refused(
    make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors.registry import UnknownActor
    from pipeline.bus import BusUnavailable

    run = make_run(Story())
    run.update(redis_url="unix:///x")
    for error, code in ((UnknownActor("no actor 'x'"), Exit.USAGE), (BusUnavailable("gone"), Exit.BROKER)):

        def fail(*_: object, error: Exception = error) -> str:
            raise error

        monkeypatch.setattr("pipeline.runtime.run_actor", fail)
        assert call("actor", "engine-9", "--run", str(run.path)).exit_code == code
    for name in ("nosuch", "engine", "buffer-0"):
        result = call("actor", name, "--run", str(run.path))
        assert (result.exit_code, f"no actor {name!r} in this run; it has recorder" in result.output) == (
            Exit.USAGE,
            True,
        )
    run.update(ended="trained")
    assert "; the run has ended (trained) besides" in call("actor", "nosuch", "--run", str(run.path)).output
    assert "buffer: the run has ended (trained), and its store does not answer: gone" in (
        call("actor", "buffer", "--run", str(run.path)).output
    )


@pytest.mark.parametrize("by_ray", [False, True])
def test_a_signal_while_processes_start_ends_the_run_in_order(
    by_ray: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Starting:
        def __init__(self, *_: object) -> None:
            self.prepare = self.stop = lambda: calls.append("called")

        def start(self) -> None:
            if by_ray:
                raise SystemExit(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)

    broker = SimpleNamespace(url="unix:///nowhere", describe=lambda: "none", stop=lambda: calls.append("stopped"))
    monkeypatch.setattr(launcher, "Cluster", Starting)
    monkeypatch.setattr(launcher, "choose", lambda *_: broker)
    before = signal.getsignal(signal.SIGTERM)
    result = call("up", "quickstart", f"run_dir={tmp_path / 'run'}")
    assert result.exit_code == Exit.INTERRUPTED, result.output
    assert f"pipeline up --resume {tmp_path / 'run'}" in result.output
    assert calls == ["called", "called", "stopped"]
    assert RunDir.open(tmp_path / "run").info().ended == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_while_the_store_starts_ends_what_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        launcher, "Cluster", lambda *_: SimpleNamespace(prepare=lambda: None, stop=lambda: calls.append("stopped"))
    )
    monkeypatch.setattr(launcher, "choose", interrupt)
    result = call("up", "quickstart", f"run_dir={tmp_path / 'run'}")
    assert result.exit_code == Exit.INTERRUPTED, result.output
    assert f"pipeline up --resume {tmp_path / 'run'}" in result.output
    assert calls == ["stopped"]


def test_an_interrupted_command_has_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(single, "run", interrupt)
    assert call("actor", "buffer").exit_code == Exit.INTERRUPTED
