"""The fork server: forks run what was asked with the caller's environment, and a caller without one runs it itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import forked_worker, idle
from pipeline.forked_worker import READY

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
PATIENCE_S = 240.0
"""Longer than a starved machine takes for what is done in a second elsewhere."""

SERVER = """
import sys
from pipeline import forks
forks.EARLY, forks.RAY = (), ("wave",)  # no Ray here
forks.REQUEST_S = 240.0
forks.main(sys.argv[1])
"""
WORKER = """
import json, os, pathlib, sys, threading
told = {"argv": sys.argv[1:], "pid": os.getpid(), "directory": os.getcwd(), "a": os.environ.get("A"),
        "b": os.environ.get("B"), "wave": "wave" in sys.modules, "group": os.getpgid(0)}
if sys.argv[2:] == ["stay"]:
    read, write = os.pipe()
else:
    read = None
scratch = pathlib.Path(sys.argv[1] + ".new")
scratch.write_text(json.dumps(told))
scratch.rename(sys.argv[1])
if read is not None:
    os.read(read, 1)
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller goes on without a fork that is too slow; here it has to come."""
    monkeypatch.setattr(forked_worker, "ANSWER_S", PATIENCE_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    address = str(tmp_path / "folder" / "forks")
    (tmp_path / "folder").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVER, address], stdin=subprocess.PIPE, env={**os.environ, "B": "server's"}
    )
    wait_for(lambda: Path(address).exists())
    yield address, process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def wait_for(what) -> None:
    until = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def lives(pid: int) -> bool:
    """Zombies do: Ray takes them for alive."""
    return Path(f"/proc/{pid}").exists()


def told(path: Path) -> dict:
    wait_for(path.exists)
    return json.loads(path.read_text())


def test_a_fork_has_the_callers_arguments_environment_and_directory(
    server, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, process = server
    monkeypatch.setenv("A", "caller's")
    monkeypatch.delenv("B", raising=False)
    monkeypatch.chdir(tmp_path)
    connection = forked_worker.fork(address, [str(program), str(tmp_path / "told"), "x y"])
    assert connection is not None
    with connection:
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1) == b""
    answer = told(tmp_path / "told")
    assert answer["argv"] == [str(tmp_path / "told"), "x y"]
    assert (answer["a"], answer["b"], answer["directory"]) == ("caller's", None, str(tmp_path))
    assert answer["pid"] not in (os.getpid(), process.pid)
    assert answer["group"] == answer["pid"], "Ray kills the group of a worker that ended"


def test_a_fork_that_is_killed_is_no_zombie_and_its_caller_ends_with_it(server, program: Path, tmp_path: Path) -> None:
    address, _ = server
    connection = forked_worker.fork(address, [str(program), str(tmp_path / "told"), "stay"])
    assert connection is not None
    with connection:
        pid = told(tmp_path / "told")["pid"]
        os.kill(pid, signal.SIGKILL)
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1) == b""
        wait_for(lambda: not lives(pid))


def test_forks_outlive_their_server_which_ends_with_its_driver(server, program: Path, tmp_path: Path) -> None:
    address, process = server
    connection = forked_worker.fork(address, [str(program), str(tmp_path / "told"), "stay"])
    assert connection is not None
    with connection:
        pid = told(tmp_path / "told")["pid"]
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
        assert not (tmp_path / "folder").exists()
        assert lives(pid)
        os.kill(pid, signal.SIGKILL)
    assert forked_worker.fork(address, ["never run"]) is None


def test_a_fork_whose_caller_has_gone_runs_nothing(server, program: Path, tmp_path: Path) -> None:
    """It comes late, and the caller has started a worker of its own by then: there must not be two."""
    address, _ = server
    request = {"arguments": [str(program), str(tmp_path / "never")], "environment": {}, "directory": "/"}
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(address)
        caller.sendall(json.dumps(request).encode() + b"\n")
        caller.settimeout(PATIENCE_S)
        assert caller.recv(1) == READY
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(1) == b""  # it has ended
    assert not (tmp_path / "never").exists()


def test_what_is_no_request_is_turned_away_and_the_next_is_served(server, program: Path, tmp_path: Path) -> None:
    address, _ = server
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(address)
        caller.sendall(b"nonsense\n")
        caller.settimeout(PATIENCE_S)
        assert caller.recv(1) == b""
    connection = forked_worker.fork(address, [str(program), str(tmp_path / "told")])
    assert connection is not None
    connection.close()
    told(tmp_path / "told")


def test_without_a_server_the_worker_runs_in_the_callers_own_process(tmp_path: Path) -> None:
    """As Ray starts it; Ray's own worker is a stand-in."""
    workers = tmp_path / "ray" / "_private" / "workers"
    workers.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").touch()
    (workers / "default_worker.py").write_text(WORKER)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), forked_worker.ADDRESS: str(tmp_path / "nobody")}
    process = subprocess.Popen([sys.executable, "-P", forked_worker.__file__, str(tmp_path / "told")], env=env)
    assert process.wait(PATIENCE_S) == 0
    assert told(tmp_path / "told")["pid"] == process.pid


def test_the_caller_of_a_fork_stays_until_the_fork_ends(server, program: Path, tmp_path: Path) -> None:
    workers = tmp_path / "ray" / "_private" / "workers"
    workers.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").touch()
    (workers / "default_worker.py").write_text(WORKER)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), forked_worker.ADDRESS: server[0]}
    command = [sys.executable, "-P", forked_worker.__file__, str(tmp_path / "told"), "stay"]
    process = subprocess.Popen(command, env=env)
    pid = told(tmp_path / "told")["pid"]
    assert pid != process.pid
    assert process.poll() is None
    os.kill(pid, signal.SIGKILL)
    assert process.wait(PATIENCE_S) == 0


def test_a_server_with_threads_forks_nobody(tmp_path: Path) -> None:
    """A fork would lose them, and whatever they hold."""
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    address = str(tmp_path / "forks")
    done = subprocess.run(
        [sys.executable, "-P", "-c", thread + SERVER, address], stdin=subprocess.PIPE, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0
    assert forked_worker.fork(address, ["never run"]) is None


def test_a_stand_in_for_an_agent_ends_with_its_parent() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", idle.__file__, "agent.py"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0


def test_what_is_imported_for_all_starts_no_thread() -> None:
    program = (
        "import sys; from pipeline import forks as f; f._import(f.EARLY + f.RAY); print(f._threads(), sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, check=True, timeout=PATIENCE_S)
    threads, _, modules = done.stdout.partition(b" ")
    assert threads == b"1"
    assert b"'ray._raylet'" in modules
    assert b"'torch'" not in modules
    assert b"'numpy'" not in modules


def test_workers_of_another_ray_get_no_fork(server, program: Path, tmp_path: Path, monkeypatch) -> None:
    """Ray has read the environment of the first."""
    address, _ = server
    for job, path in (("1", "first"), ("2", "second"), ("1", "third")):
        monkeypatch.setenv("RAY_JOB_ID", job)
        connection = forked_worker.fork(address, [str(program), str(tmp_path / path)])
        assert (connection is None) == (job == "2")
        if connection is not None:
            connection.close()
            assert told(tmp_path / path)["wave"]


def test_no_two_forks_draw_the_same_ids() -> None:
    program = """
import os
from pipeline import forks
forks._import(forks.EARLY)
forks._import(forks.RAY)
import ray
for _ in range(2):
    if not os.fork():
        print(ray.WorkerID.from_random().hex(), ray.ObjectID.from_random().hex(), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    drawn = done.stdout.split()
    assert len(drawn) == 4, done.stderr
    assert len(set(drawn)) == 4
