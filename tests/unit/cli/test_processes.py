"""Processes: what an actor's process is told, when it ends, and that nothing outlives its driver."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors import leftovers
from config.schema import LaunchConfig, RunConfig, TrainerConfig
from contracts.core import Fatal
from pipeline import cluster, host, reaper
from pipeline.cluster import Cluster, actor_environment
from pipeline.errors import Exit, PipelineError
from pipeline.host import Host, Installation, Left, installation
from pipeline.reaper import MARK, Reaper, marked

HOST = ("buffer", "unix:///x", "run", "/tmp/x", {})


@pytest.fixture
def driver() -> Installation:
    return installation()


# --- host ---


def test_the_four_packages_come_from_this_installation(driver: Installation) -> None:
    assert driver.root == str(Path(host.__file__).resolve().parent.parent)


def test_a_process_with_other_packages_than_the_driver_runs_nothing(driver: Installation) -> None:
    other_root = Installation(driver.version, "/elsewhere")
    other_version = Installation("0.0.1", driver.root)
    assert Host(*HOST).run(other_root, same_root=True).how == "foreign"
    assert "this process" in Host(*HOST).run(other_version, same_root=False).message


def test_a_stray_module_in_front_is_named(driver: Installation, tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("raise SystemExit(99)\n")
    program = (
        "import sys, msgspec\n"
        "from pipeline.host import Host, Installation\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"driver = Installation({driver.version!r}, {driver.root!r})\n"
        f"left = Host(*{HOST!r}).run(driver, same_root=True)\n"
        "print(left.how, left.message)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"foreign the package 'config' resolves to {tmp_path / 'config.py'}")


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        ("done", Left("done")),
        ("fenced", Left("fenced")),
        (Fatal("no model"), Left("fatal", "no model")),
    ],
)
def test_how_an_actor_left_is_told(
    driver: Installation, monkeypatch: pytest.MonkeyPatch, answer: str | Exception, left: Left
) -> None:
    calls: list[tuple[object, ...]] = []

    def run_actor(*args: object) -> str:
        calls.append(args)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("pipeline.runtime.run_actor", run_actor)
    assert Host(*HOST).run(driver, same_root=True) == left
    assert calls == [("buffer", "unix:///x", "run", Path("/tmp/x"))]


def test_any_other_error_ends_the_process_so_that_it_is_restarted(driver: Installation) -> None:
    program = (
        "from pipeline import host, runtime\n"
        "from pipeline.host import Host, Installation\n"
        "host.RESTART_PAUSE_S = 0\n"
        "def fail(*_): raise ValueError('boom')\n"
        "runtime.run_actor = fail\n"
        f"Host(*{HOST!r}).run(Installation({driver.version!r}, {driver.root!r}), same_root=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "buffer failed: ValueError: boom\n")


def test_a_process_gets_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "old")
    monkeypatch.setenv("B", "old")
    Host("buffer", "", "", "", {"A": "new", "B": None})
    assert (os.environ["A"], "B" in os.environ) == ("new", False)


def test_threads_are_the_trainers() -> None:
    config = RunConfig(trainer=TrainerConfig(threads=3))
    assert actor_environment(config, "trainer")["OMP_NUM_THREADS"] == "3"
    assert actor_environment(RunConfig(), "trainer")["OMP_NUM_THREADS"] is None
    assert actor_environment(config, "engine-0")["OMP_NUM_THREADS"] == "1"
    assert actor_environment(config, "engine-0")["PYTHONSAFEPATH"] == "1"


# --- cluster ---


def test_ray_that_can_not_be_had_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    config = RunConfig(launch=LaunchConfig(ray_address="nonsense::1"))
    there = Cluster(config, tmp_path)
    with pytest.raises(PipelineError, match=r"launch.ray_address=nonsense::1") as caught:
        there.start()
    assert caught.value.code is Exit.FAILED
    assert Path.cwd() != tmp_path
    there.stop()


@pytest.fixture
def late_ray(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A Ray whose node is always late; the calls that it saw."""
    import ray

    calls: list[str] = []

    def init(**options: object) -> None:
        calls.append("init")
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    return calls


def test_a_local_ray_that_is_late_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_ray: list[str]
) -> None:
    import ray

    late = ray.init

    def init(**options: Any) -> None:
        monkeypatch.setattr(ray, "init", lambda **options: late_ray.append("up"))
        late(**options)

    monkeypatch.setattr(ray, "init", init)
    here = Cluster(RunConfig(), tmp_path)
    here.start()
    assert late_ray == ["init", "shutdown", "up"]
    here.stop()


def test_a_local_ray_that_is_always_late_and_a_cluster_that_is_not_there_fail_with_their_reason(
    tmp_path: Path, late_ray: list[str]
) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    for address, tries in ((None, cluster.STARTS), (f"127.0.0.1:{listening.getsockname()[1]}", 1)):
        late_ray.clear()
        one = Cluster(RunConfig(launch=LaunchConfig(ray_address=address)), tmp_path)
        with pytest.raises(PipelineError, match="timed out during startup") as caught:
            one.start()
        assert caught.value.code is Exit.FAILED
        assert f"launch.ray_address={address or 'null'}" in str(caught.value)
        assert ("/dev/shm" if address is None else "ray status --address=") in str(caught.value)
        assert late_ray == ["init", "shutdown"] * tries
        one.stop()
    listening.close()


def test_a_head_node_where_nobody_listens_is_not_waited_for(tmp_path: Path, late_ray: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    there = Cluster(RunConfig(launch=LaunchConfig(ray_address=address)), tmp_path)
    with pytest.raises(PipelineError, match=rf"launch\.ray_address={address}\): .*refused.*ray start --head") as caught:
        there.start()
    assert caught.value.code is Exit.FAILED
    assert late_ray == []
    there.stop()


def test_a_cluster_that_refuses_the_login_says_what_must_be_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_ray: list[str]
) -> None:
    import ray

    def init(**options: object) -> None:
        raise RuntimeError("InvalidAuthToken")

    monkeypatch.setattr(ray, "init", init)
    there = Cluster(RunConfig(launch=LaunchConfig(ray_address="auto")), tmp_path)
    with pytest.raises(PipelineError, match="RAY_AUTH_MODE, and the token that it asks for, must be the same"):
        there.start()
    there.stop()


@pytest.fixture
def session_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Has Ray make the folder of a session, as its start does first of all; answers the folder."""
    from ray._private.node import Node

    assert hasattr(Node, "_init_temp"), "the folder of a start that is interrupted is known by this method"

    def make(node: Any) -> None:
        folder = Path(node._ray_params.temp_dir, node._session_name)
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "gcs_server.err").write_text("no room")

    monkeypatch.setattr(Node, "_init_temp", make)

    def start() -> Path:
        node: Any = object.__new__(Node)
        node._ray_params, node._session_name = SimpleNamespace(temp_dir=str(tmp_path / "ray")), "session_1"
        node._init_temp()
        return tmp_path / "ray" / "session_1"

    return start


def test_an_interrupt_while_ray_starts_leaves_no_folder_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session_of_ray: Callable[[], Path]
) -> None:
    import ray

    made: list[Path] = []

    def init(**_: object) -> None:
        made.append(session_of_ray())
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", init)
    here = Cluster(RunConfig(), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        here.start()
    assert made[0].exists()
    here.stop()
    assert not made[0].exists()


def test_what_ray_wrote_before_it_failed_is_kept_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session_of_ray: Callable[[], Path]
) -> None:
    import ray

    def init(**_: object) -> None:
        if not (tmp_path / "ray").exists():
            session_of_ray()
        raise Exception("late")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    (tmp_path / "logs").mkdir()
    here = Cluster(RunConfig(), tmp_path)
    with pytest.raises(PipelineError, match=r"late\. Its logs are in .*/logs/ray\. "):
        here.start()
    here.stop()
    assert not (tmp_path / "ray" / "session_1").exists()
    assert (tmp_path / "logs" / "ray" / "gcs_server.err").read_text() == "no room"


def test_a_cluster_that_was_not_started_needs_no_stop(tmp_path: Path) -> None:
    Cluster(RunConfig(), tmp_path).stop()


async def test_nobody_waits_for_actors_that_were_not_launched(tmp_path: Path) -> None:
    there = Cluster(RunConfig(), tmp_path)
    assert await there.wait(["buffer"], 1.0) == []
    assert there.left() == {}


def test_the_working_directory_is_the_runs_while_ray_looks(tmp_path: Path) -> None:
    before = Path.cwd()
    with cluster._inside(tmp_path):
        assert Path.cwd() == tmp_path
    assert Path.cwd() == before


# --- reaper ---

FAMILY = """
import os, subprocess, sys, time
from pipeline.reaper import MARK, Reaper
os.environ[MARK] = sys.argv[1]
reaper = Reaper(sys.argv[1])
reaper.remove(sys.argv[2])
child = subprocess.Popen(
    [sys.executable, "-P", "-c",
     "import subprocess, time, uuid; subprocess.Popen(['sleep', '600'], start_new_session=True);"
     "from actors.leftovers import BUCKET, SHARED, Claim; held = Claim.file(SHARED / (BUCKET + uuid.uuid4().hex), 1);"
     "print(held.path, flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE, start_new_session=True,
)
print(child.stdout.readline().decode(), end="", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    mark = f"test-{os.getpid()}-kill"
    session, other = tmp_path / "session_1", tmp_path / "session_2"
    for folder in (session, other):
        (folder / "sockets").mkdir(parents=True)
    driver = subprocess.Popen(
        [sys.executable, "-P", "-c", FAMILY, mark, str(session)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        claimed = Path(driver.stdout.readline().strip())
        assert claimed.is_file(), "memory that its trainer shares with engines"
        assert len(marked(f"{MARK}={mark}")) >= 2
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        deadline = time.monotonic() + 20
        while marked(f"{MARK}={mark}") or claimed.exists() or session.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert other.exists(), "what nobody named"
    finally:
        driver.kill()
        driver.wait()
        reaper.sweep(f"{MARK}={mark}")
        driver.stdout.close() if driver.stdout else None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_sweep_kills_what_carries_the_mark_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"test-{os.getpid()}-sweep"
    mine = {**os.environ, MARK: mark}
    monkeypatch.setenv(MARK, mark)
    keeper = Reaper(mark)
    monkeypatch.delenv(MARK)
    target = subprocess.Popen(["sleep", "600"], env=mine)
    bystander = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark + "x"})
    try:
        keeper.sweep()
        assert target.wait(10) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        target.kill()
        target.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_what_a_server_of_sglang_left_is_removed_unless_one_has_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "SHARED", tmp_path)
    left, used, other = (tmp_path / name for name in ("sglang_loads_a_1.shm", "sglang_loads_b_2.shm", "loads.shm"))
    for path in (left, used, other):
        path.write_bytes(b"SLNS")
    with used.open("rb"):
        assert left in (removed := leftovers.sweep())
        assert used not in removed
    assert (left.exists(), used.exists(), other.exists()) == (False, True, True)
