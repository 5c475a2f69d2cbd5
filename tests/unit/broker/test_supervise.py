"""The supervisor, run in this process: it ends when asked in any of its ways, and never leaves a server behind."""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from pipeline.broker import supervise
from pipeline.broker.supervise import GAVE_UP, LOCKED, STOPPED, Supervisor

FOREVER = ["sleep", "60"]
STUBBORN = [
    *(sys.executable, "-I", "-S", "-c"),
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()",
]


class Parent:
    """Our end of a supervisor's stdin and stdout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stdin, self._hold = os.pipe()
        read, self.stdout = os.pipe()
        self.facts: TextIO = os.fdopen(read)
        self.told: list[dict[str, Any]] = []

    def spec(self, command: list[str], **changes: Any) -> dict[str, Any]:
        files = {"log": str(self.folder / "log"), "lock": str(self.folder / "lock"), "scratch": None}
        return {"command": command, **files, "lock_s": 5.0, "grace_s": 5.0, "restarts": 2, "window_s": 60.0, **changes}

    def next(self) -> dict[str, Any]:
        self.told.append(json.loads(self.facts.readline()))
        return self.told[-1]

    def write(self) -> None:
        os.write(self._hold, b"x")

    def leave(self) -> None:
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1

    def close(self) -> None:
        self.leave()
        os.close(self.stdin)
        os.close(self.stdout)
        self.told += [json.loads(line) for line in self.facts]
        self.facts.close()


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    parent = Parent(tmp_path)
    yield parent
    if not parent.facts.closed:
        parent.close()


def supervise_while(parent: Parent, script: Callable[[], None], command: list[str], **changes: Any) -> int:
    """Run a supervisor here, since only a main thread may handle signals, and `script` on another thread."""
    driver = threading.Thread(target=script)
    driver.start()
    try:
        return Supervisor(parent.spec(command, **changes), parent.stdin, parent.stdout).run()
    finally:
        driver.join(10)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_server_ends_when_the_parent_lets_go(parent: Parent) -> None:
    def script() -> None:
        parent.next()
        parent.write()
        parent.leave()

    assert supervise_while(parent, script, FOREVER) == STOPPED
    assert [fact["event"] for fact in parent.told] == ["started"]
    assert not alive(parent.told[0]["pid"])


def test_the_server_ends_on_sigterm_and_our_handlers_come_back(parent: Parent) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT)]

    def script() -> None:
        parent.next()
        os.kill(os.getpid(), signal.SIGTERM)

    assert supervise_while(parent, script, FOREVER) == STOPPED
    assert not alive(parent.told[0]["pid"])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT)] == before


def test_the_server_ends_when_we_were_reparented(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = os.getppid()
    orphaned = threading.Event()
    monkeypatch.setattr(os, "getppid", lambda: 1 if orphaned.is_set() else ours)

    def script() -> None:
        parent.next()
        orphaned.set()

    assert supervise_while(parent, script, FOREVER) == STOPPED
    assert not alive(parent.told[0]["pid"])


def test_a_server_deaf_to_sigterm_is_killed_after_its_grace(parent: Parent) -> None:
    def script() -> None:
        parent.next()
        while "deaf" not in (parent.folder / "log").read_text():
            pass
        parent.leave()

    assert supervise_while(parent, script, STUBBORN, grace_s=0.1) == STOPPED
    assert not alive(parent.told[0]["pid"])


def test_a_server_that_dies_is_started_again_with_growing_pauses_until_the_budget_is_used_up(parent: Parent) -> None:
    def script() -> None:
        while parent.next()["event"] != "gave_up":
            pass

    assert supervise_while(parent, script, ["sh", "-c", "exit 4"]) == GAVE_UP
    assert [fact["event"] for fact in parent.told] == ["started", "exited"] * 2 + ["started", "gave_up"]
    assert [fact["pause_s"] for fact in parent.told[1::2]] == [0.05, 0.1, None]
    assert {fact["code"] for fact in parent.told[1::2]} == {4}


def test_old_deaths_are_forgiven(parent: Parent) -> None:
    def script() -> None:
        for _ in range(8):
            parent.next()
        parent.leave()

    assert supervise_while(parent, script, ["sh", "-c", "exit 4"], restarts=1, window_s=0.0) == STOPPED
    assert all(fact["event"] != "gave_up" for fact in parent.told)


def test_a_stop_is_heard_while_pausing(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(supervise, "LAST_PAUSE_S", 60.0)

    def script() -> None:
        while parent.next()["event"] != "exited":
            pass
        parent.leave()

    assert supervise_while(parent, script, ["sh", "-c", "exit 4"]) == STOPPED


@pytest.mark.parametrize("leave", [False, True])
def test_nothing_is_started_while_another_holds_the_directory(parent: Parent, leave: bool) -> None:
    with open(parent.folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script = parent.leave if leave else lambda: None
        assert supervise_while(parent, script, FOREVER, lock_s=5.0 if leave else 0.0) == LOCKED
    parent.close()
    assert parent.told == [{"event": "locked"}]


def test_the_server_is_started_once_a_predecessor_lets_go(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    predecessor = os.open(parent.folder / "lock", os.O_CREAT | os.O_RDWR)
    attempt = fcntl.flock
    attempt(predecessor, fcntl.LOCK_EX)

    def flock(file: int, operation: int) -> None:
        try:
            attempt(file, operation)
        except BlockingIOError:
            os.close(predecessor)
            raise

    monkeypatch.setattr(fcntl, "flock", flock)

    def script() -> None:
        parent.next()
        parent.leave()

    assert supervise_while(parent, script, FOREVER) == STOPPED
    assert [fact["event"] for fact in parent.told] == ["started"]


def test_the_lock_is_held_until_the_server_is_gone(parent: Parent) -> None:
    held: list[bool] = []

    def script() -> None:
        parent.next()
        with open(parent.folder / "lock", "a") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(True)
        parent.leave()

    assert supervise_while(parent, script, FOREVER) == STOPPED
    assert held
    with open(parent.folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_parent_that_stopped_listening_is_no_error_and_scratch_is_removed(parent: Parent) -> None:
    scratch = parent.folder / "scratch"
    scratch.mkdir()
    (scratch / "broker.sock").touch()
    parent.facts.close()
    parent.leave()
    assert supervise_while(parent, lambda: None, FOREVER, scratch=str(scratch)) == STOPPED
    assert not scratch.exists()
    os.close(parent.stdin)
    os.close(parent.stdout)


def test_without_linux_the_server_is_only_watched(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    def script() -> None:
        parent.next()
        parent.leave()

    assert supervise_while(parent, script, FOREVER) == STOPPED


def test_as_a_program_it_takes_its_orders_from_the_command_line(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = json.dumps(parent.spec(["sh", "-c", "exit 4"], restarts=0))
    monkeypatch.setattr(sys, "argv", ["supervise.py", spec])
    with os.fdopen(os.dup(parent.stdin)) as stdin, os.fdopen(os.dup(parent.stdout), "w") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(supervise.__file__, run_name="__main__")
    assert ended.value.code == GAVE_UP
    assert [parent.next()["event"], parent.next()["event"]] == ["started", "gave_up"]
