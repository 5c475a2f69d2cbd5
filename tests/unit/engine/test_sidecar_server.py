"""A server is ready when it answers, says why when it isn't, and never outlives its sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine import server as server_module
from actors.engine.server import Launch, Server, ServerError, attach, sglang_launch, start, torch_launch
from config.schema import EngineConfig, ModelConfig, RefitConfig, RunConfig
from tests.unit.engine.fake_server import FakeServer

ANSWERING = """
import http.server, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"weight_version": "default"}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print("listening", flush=True)
pathlib.Path(PORT_FILE + ".tmp").write_text(str(server.server_port))
pathlib.Path(PORT_FILE + ".tmp").rename(PORT_FILE)
server.serve_forever()
"""
GUARD = Path(server_module.__file__).with_name("guard.py")
FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else signal.SIG_DFL)
if os.fork() == 0:
    time.sleep(600)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def script(source: str, *args: str, **names: object) -> tuple[str, ...]:
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    return sys.executable, "-c", head + source, *args


def answering(tmp_path: Path, label: str | None = None) -> Launch:
    """A server that answers the label `default`."""
    port_file = str(tmp_path / "port")
    return Launch(script(ANSWERING, PORT_FILE=port_file), {}, port_file=port_file, label=label)


@contextlib.asynccontextmanager
async def running(launch: Launch, log: Path | None) -> AsyncIterator[Server]:
    server = await start(launch, log, 30.0)
    try:
        yield server
    finally:
        await server.close()


def alive(group: int) -> bool:
    """Whether a process of the group is left that is not a zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, found = stat.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                return True
    return False


async def gone(group: int) -> None:
    async with asyncio.timeout(20):
        while alive(group):  # noqa: ASYNC110 - the end of a process that isn't our child
            await asyncio.sleep(0.05)


# --- command lines ---------------------------------------------------------------------------------------------------

CONFIG = RunConfig(
    seed=9,
    model=ModelConfig(dtype="bfloat16"),
    engine=EngineConfig(threads=3, max_running=7, max_total_tokens=512, args=("--extra", "1"), python="/env/python"),
    refit=RefitConfig(deadline_s=45.0),
)


def values(command: tuple[str, ...]) -> dict[str, str]:
    return {flag: value for flag, value in itertools.pairwise(command) if flag.startswith("--")}


def test_the_embedded_server_gets_its_settings(tmp_path: Path) -> None:
    launch = torch_launch(CONFIG, Path("/models/m"), tmp_path / "port")
    assert launch.command[:3] == ("/env/python", "-m", "actors.engine.torch_server")
    assert launch.command[-2:] == ("--extra", "1")
    assert "--exit-with-stdin" in launch.command
    expected = {
        "--model-path": "/models/m",
        "--load-format": "dummy",
        "--host": "127.0.0.1",
        "--port": "0",
        "--port-file": str(tmp_path / "port"),
        "--device": "cpu",
        "--dtype": "bfloat16",
        "--threads": "3",
        "--seed": "9",
        "--max-running": "7",
        "--max-total-tokens": "512",
        "--group-timeout-s": "45",
    }
    assert values(launch.command).items() >= expected.items()
    assert launch.env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("receiver", ["direct", "sglang"])
@pytest.mark.parametrize(("device", "cpu"), [("cpu", True), ("cuda:1", False)])
def test_sglang_gets_its_settings_and_a_guard(device: str, cpu: bool, receiver: Any) -> None:
    engine = EngineConfig(kind="sglang", device=device, args=("--tp-size", "2"))
    config = RunConfig(engine=engine, refit=RefitConfig(receiver=receiver))
    launch = sglang_launch(config, Path("/models/m"), "nonce")
    assert launch.command[:4] == (sys.executable, "-I", "-S", str(GUARD))
    inside = str(GUARD.parent / "inside" / "launch.py")
    program = (inside,) if cpu or receiver == "direct" else ("-m", "sglang.launch_server")
    assert launch.command[4 : 5 + len(program)] == (sys.executable, *program)
    assert launch.command[-2:] == ("--tp-size", "2")
    expected = {
        "--host": "127.0.0.1",
        "--port": str(launch.port),
        "--device": device[:4].rstrip(":"),
        "--load-format": "dummy",
        "--weight-version": "nonce",
    }
    assert values(launch.command).items() >= expected.items()
    assert {"--skip-tokenizer-init", "--skip-server-warmup"} <= set(launch.command)
    assert ("torch_native" in launch.command) == cpu
    assert ("SGLANG_USE_CPU_ENGINE" in launch.env) == cpu
    assert launch.env.get("SLUICE_RECEIVER") == ("direct" if receiver == "direct" else None)
    assert launch.label == "nonce"
    assert int(launch.env["SGLANG_GRPC_PORT"]) not in (launch.port, launch.port + 10000)


def test_over_nccl_a_server_has_the_trainers_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    for kind in ("sglang", "torch"):
        config = RunConfig(engine=EngineConfig(kind=kind, device="cuda:1"), refit=RefitConfig(transport="nccl"))
        of_ours = kind == "torch"
        made = torch_launch(config, tmp_path, tmp_path / "port") if of_ours else sglang_launch(config, tmp_path, "")
        assert made.env["NCCL_CUMEM_ENABLE"] == "1", "a user's own value stays"
        assert made.env["NCCL_NVLS_ENABLE"] == "0"
        assert made.env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


# --- start -----------------------------------------------------------------------------------------------------------


async def test_a_server_is_ready_when_it_answers_and_over_when_closed(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    async with running(answering(tmp_path), log) as server:
        assert server.alive
        assert not (tmp_path / "port").exists()
        assert await server.client.weight_version(5) == "default"
        group = server.process.pid  # type: ignore[union-attr]
    assert not server.alive
    assert not alive(group)
    assert log.read_text() == "listening\n"


async def test_an_early_end_is_told_with_the_end_of_this_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("what an earlier boot said\n")
    source = "import sys; print('address already in use', file=sys.stderr); sys.exit(3)"
    with pytest.raises(ServerError) as caught:
        await start(Launch(script(source), {}, port=1), log, 30.0)
    assert "the server exited with status 3" in str(caught.value)
    assert str(caught.value).endswith(f"{log} ends with:\naddress already in use")


async def test_an_early_end_without_a_word_is_told(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="got no line from it"):
        await start(Launch(script("raise SystemExit(1)"), {}, port=1), tmp_path / "log", 30.0)


async def test_without_a_log_the_output_is_ours(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ServerError, match="status 1; see its output"):
        await start(Launch(script("raise SystemExit('no model')"), {}, port=1), None, 30.0)
    assert "no model" in capfd.readouterr().err


async def test_a_server_that_never_answers_is_killed_at_the_deadline(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    source = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(ServerError, match=r"did not answer within 1.5 s \(launch.start_deadline_s\)"):
        await start(Launch(script(source), {}, port=1), tmp_path / "log", 1.5)
    await gone(int(pid_file.read_text()))


async def test_a_stranger_at_the_port_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="did not answer"):
        await start(answering(tmp_path, label="ours"), None, 2.0)


async def test_an_interpreter_that_does_not_exist_is_named() -> None:
    with pytest.raises(ServerError, match=r"can't run '/no/python' \(engine.python\)"):
        await start(Launch(("/no/python",), {}), None, 5.0)


async def test_the_environment_is_passed_on(tmp_path: Path) -> None:
    source = "import os; raise SystemExit(os.environ['OMP_NUM_THREADS'])"
    with pytest.raises(ServerError, match="ends with:\n5"):
        await start(Launch(script(source), {"OMP_NUM_THREADS": "5"}, port=1), tmp_path / "log", 30.0)


# --- end -------------------------------------------------------------------------------------------------------------


async def test_an_end_by_signal_is_told_by_name(tmp_path: Path) -> None:
    async with running(answering(tmp_path), None) as server:
        os.kill(server.process.pid, signal.SIGSEGV)  # type: ignore[union-attr]
        assert "ended by signal SIGSEGV" in await asyncio.wait_for(server.ended(), 10)


async def test_how_a_server_ended_is_asked_for_a_time_only(tmp_path: Path) -> None:
    async with running(answering(tmp_path), None) as server:
        assert await server.outcome(0.0) is None
        os.kill(server.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        assert "ended by signal SIGKILL" in str(await server.outcome(20.0))


async def test_a_server_that_ignores_sigterm_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STOP_S", 0.2)
    log = tmp_path / "log"
    process = server_module.ServerProcess(Launch(script(FAMILY, "deaf"), {}), log)
    group = process.pid
    async with asyncio.timeout(20):
        while not log.read_text():  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.02)
    await process.stop()
    await gone(group)
    await process.stop()


async def test_somebody_elses_server_is_awaited_and_left_alone() -> None:
    async with FakeServer() as fake:
        server = await attach(fake.url + "/", 10.0)
        assert server.alive
        ended = asyncio.create_task(server.ended())
        await server.close()
        assert not ended.done()
        ended.cancel()
        assert fake.paths() == ["/model_info"]


async def test_somebody_elses_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(ServerError, match=r"http://127.0.0.1:1 \(engine.urls\) did not answer within 0.3 s"):
        await attach("http://127.0.0.1:1", 0.3)


# --- the guard -------------------------------------------------------------------------------------------------------


def guarded(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARD), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


async def test_a_guarded_server_dies_with_its_parent() -> None:
    with guarded(*script(FAMILY)) as guard:
        assert guard.stdout is not None
        assert guard.stdin is not None
        guard.stdout.readline()
        assert alive(guard.pid)
        guard.stdin.close()
        await gone(guard.pid)


async def test_a_guarded_server_stops_at_sigterm() -> None:
    with guarded(*script(FAMILY)) as guard:
        assert guard.stdout is not None
        guard.stdout.readline()
        os.killpg(guard.pid, signal.SIGTERM)
        assert guard.wait(20) == 128 + signal.SIGTERM
        await gone(guard.pid)


def test_a_guard_leaves_with_the_status_of_its_server() -> None:
    with guarded(*script("raise SystemExit(7)")) as guard:
        assert guard.wait(20) == 7
