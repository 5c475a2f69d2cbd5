"""Actors that are started one by one, as containers or a service manager do it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors import registry
from config import loading
from pipeline.broker.choose import find
from tests.e2e.conftest import PIPELINE, TINY, Run, boots, steps

PASSWORD = "pass-word-of-the-store"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The URL of a store of somebody else's, over TCP, with a password."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = ("--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path), "--requirepass", PASSWORD)
    server = subprocess.Popen([find({}).path, "--port", port, *words], stdout=subprocess.DEVNULL)
    yield f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
    server.kill()
    server.wait()


class Supervisor:
    """Starts actors of a run, and those again that end in any other way than in order."""

    def __init__(self, run: Run, url: str) -> None:
        self._run, self._env = run, {**os.environ, "REDIS_URL": url}
        self.living: dict[str, subprocess.Popen[bytes]] = {}
        self.left: dict[str, int] = {}

    def start(self, name: str) -> None:
        with self._run.output.with_suffix(f".{name}").open("ab") as sink:
            words = [PIPELINE, "actor", name, "--run", str(self._run.path)]
            self.living[name] = subprocess.Popen(words, stdout=sink, stderr=sink, env=self._env)

    def tend(self) -> None:
        """Look after every process once."""
        for name, process in list(self.living.items()):
            code = process.poll()
            if code is not None:
                del self.living[name]
                if code == 0:
                    self.left[name] = code
                else:
                    self.start(name)

    def end(self) -> None:
        for process in self.living.values():
            process.kill()
            process.wait()


def test_actors_started_one_by_one_train_over_a_store_with_a_password_and_a_killed_one_goes_on(
    start: Callable[..., Run], store: str
) -> None:
    run = start("launch.mode=external", "steps=20", env={"REDIS_URL": store})
    names = registry.names(loading.load(str(TINY), []))
    supervisor = Supervisor(run, store)
    try:
        while not (run.path / "run.json").exists():
            assert run.process.poll() is None, run.tail()
            time.sleep(0.1)
        for name in names:
            supervisor.start(name)

        def tended(wanted: Callable[[list[dict]], bool]) -> Callable[[list[dict]], bool]:
            return lambda log: (supervisor.tend(), wanted(log))[1]

        log = run.wait_for(tended(lambda log: len(steps(log)) >= 2))
        os.kill(boots(log, "buffer")[-1]["body"]["pid"], 9)
        run.wait_for(tended(lambda log: len(boots(log, "buffer")) == 2))
        while run.process.poll() is None:
            supervisor.tend()
            time.sleep(0.2)
        assert run.end() == 0, run.tail()
        deadline = time.monotonic() + 60
        while supervisor.living:
            assert time.monotonic() < deadline, f"these did not leave: {sorted(supervisor.living)}"
            supervisor.tend()
            time.sleep(0.2)
    finally:
        supervisor.end()
    assert sorted(supervisor.left) == sorted(names), "each left in order, once the run was over"
    assert run.verify()["steps"] == 20
    told = [path for path in run.path.parent.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert told == [], "the password is in no log"
