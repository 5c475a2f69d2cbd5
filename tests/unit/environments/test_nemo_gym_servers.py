"""A Gym of our own starts, is started anew when it ends, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from actors.environments.nemo_gym.head import GymError
from actors.environments.nemo_gym.keeper import Log
from actors.environments.nemo_gym.servers import KEEPER, Launch, Servers

NG_RUN = """\
#!{python}
import json, os, subprocess, sys, threading, signal
from http.server import BaseHTTPRequestHandler, HTTPServer
words = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:])
port = int(words["head_server.port"])
{before}
config = "player: {{responses_api_agents: {{a: {{host: 127.0.0.1, port: %d}}}}}}" % port
class Head(BaseHTTPRequestHandler):
    def do_GET(self):
        data = json.dumps(config).encode()
        self.send_response(200); self.send_header("content-length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_): pass
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
print(json.dumps([words, dict(os.environ)]), flush=True)
server = HTTPServer(("127.0.0.1", port), Head)
print("All 1 / 1 servers ready! Polling", flush=True)
server.serve_forever()
"""


def installed(tmp_path: Path, before: str = "") -> Path:
    """An environment with an `ng_run` of a few lines; answers its interpreter."""
    directory = tmp_path / "venv" / "bin"
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "ng_run"
    program.write_text(NG_RUN.format(python=sys.executable, before=textwrap.dedent(before)))
    program.chmod(0o755)
    (tmp_path / "venv/lib/python3.12/site-packages/resources_servers/game").mkdir(parents=True, exist_ok=True)
    return directory / "python"


def launch(tmp_path: Path, python: Path, deadline_s: float = 60.0) -> Launch:
    return Launch(
        python=python, config_paths=("a.yaml", "b.yaml"), overrides=("+x=1",), policy_url="http://g/v1",
        run_dir=tmp_path, deadline_s=deadline_s,
    )  # fmt: skip


def pids(log: Path) -> list[int]:
    """What the last two `ng_run` said of themselves and their children."""
    said = [path.read_text() for path in (log.with_name("gym.log.1"), log) if path.exists()]
    lines = "".join(said).splitlines()
    return [int(word) for line in lines if line.startswith("pids") for word in line.split()[1:]]


def lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


async def gone(found: list[int]) -> None:
    async with asyncio.timeout(60):
        while any(lives(pid) for pid in found):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_gym_is_up_once_its_servers_are_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_ADDRESS", "somebody's")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    servers = Servers(launch(tmp_path, installed(tmp_path)))
    await servers.start()
    await servers.ready(1.0)
    log = tmp_path / "logs" / "gym.log"
    assert await servers.gym.agents() == {"player": servers.gym.head}
    found = pids(log)
    assert [lives(pid) for pid in found] == [True, True]
    text = log.read_text()
    for said in ('"config_paths": "[a.yaml,b.yaml]"', '"policy_base_url": "http://g/v1"', '"x": "1"'):
        assert said in text
    assert '"RAY_ADDRESS": "local"' in text
    assert '"PYTHONPATH"' not in text
    await servers.close()
    assert not any(lives(pid) for pid in found)


async def test_gym_is_started_anew_when_it_ends_by_itself(tmp_path: Path):
    servers = Servers(launch(tmp_path, installed(tmp_path)))
    await servers.start()
    log = tmp_path / "logs" / "gym.log"
    first = pids(log)
    os.kill(first[0], signal.SIGKILL)
    await gone(first)
    async with asyncio.timeout(60):
        while len(pids(log)) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await servers.ready(60.0)
    assert await servers.gym.agents()
    await servers.close()
    await gone(pids(log))


@pytest.mark.parametrize(
    ("before", "deadline_s", "says"),
    [
        ("sys.exit('bad config')", 60.0, "ng_run ended with status 1: the end of .*bad config"),
        ("import time; print('slow', flush=True); time.sleep(1000)", 3.0, "not up after .*start_deadline_s=3 s.*slow"),
    ],
)
async def test_a_gym_that_does_not_come_up_is_an_error_with_its_log(
    tmp_path: Path, before: str, deadline_s: float, says: str
):
    servers = Servers(launch(tmp_path, installed(tmp_path, before), deadline_s))
    with pytest.raises(GymError, match=f"(?s){says}"):
        await servers.start()
    with pytest.raises(GymError, match=r"not up again within 0\.01 s"):
        await servers.ready(0.01)
    await servers.close()


async def test_a_ray_that_was_too_slow_is_given_another_try(tmp_path: Path):
    before = f"""
    flag = {str(tmp_path / "tried")!r}
    if not os.path.exists(flag):
        open(flag, "w").close()
        sys.exit("Exception: The current node timed out during startup. This could happen")
    """
    servers = Servers(launch(tmp_path, installed(tmp_path, before)))
    await servers.start()
    await servers.close()
    assert "timed out during startup" in (tmp_path / "logs" / "gym.log.1").read_text()
    assert "timed out during startup" not in (tmp_path / "logs" / "gym.log").read_text()


async def test_a_missing_installation_is_named(tmp_path: Path):
    servers = Servers(launch(tmp_path, tmp_path / "nowhere" / "python"))
    with pytest.raises(GymError, match="make gym"):
        await servers.start()
    await servers.close()


def test_the_log_is_bounded_and_the_newest_is_kept(tmp_path: Path):
    log = Log(tmp_path / "log", limit=1000)
    for number in range(100):
        log.write(f"line {number:03d} {'x' * 40}\n".encode())
    old, new = (tmp_path / "log.1").read_text(), (tmp_path / "log").read_text()
    assert max(len(old), len(new)) <= 1000
    kept = [int(line.split()[1]) for line in (old + new).splitlines()]
    assert kept == list(range(kept[0], 100))
    assert len(kept) > 19


def test_a_program_that_can_not_be_run_says_so_in_the_log(tmp_path: Path):
    command = [sys.executable, str(KEEPER), "0.2", str(tmp_path / "log"), str(tmp_path / "nothing")]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode == 127
    assert "nothing can't be run" in (tmp_path / "log").read_text()


def test_everything_ends_with_whoever_started_it_even_by_sigkill(tmp_path: Path):
    """The keeper's parent is killed; the program ignores all but SIGKILL, and its child has a session of its own."""
    log = tmp_path / "out"
    program = "import os, signal, subprocess, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"
    program += "c = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    program += f"open({str(log)!r}, 'w').write(f'pids {{os.getpid()}} {{c.pid}}\\n')\ntime.sleep(1000)"
    command = [sys.executable, str(KEEPER), "0.2", str(tmp_path / "log"), sys.executable, "-c", program]
    parent = f"import subprocess, time\np = subprocess.Popen({command!r}, stdin=subprocess.PIPE)\ntime.sleep(1000)"
    started: Any = subprocess.Popen([sys.executable, "-c", parent])
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found = pids(log)
    started.kill()
    started.wait()
    while any(lives(pid) for pid in found):
        assert time.monotonic() < deadline
        time.sleep(0.01)
