"""The conformance suite, which holds for the embedded server, holds for the real one too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.engine.server import ServerProcess, sglang_launch
from config.schema import EngineConfig, RunConfig
from tests.contract.engine_conformance import *  # noqa: F403 - the suite
from tests.contract.engine_conformance import Client, checkpoint

START_DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def form() -> str:
    return "pickle"


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, sglang_python: str) -> Iterator[Client]:
    """Started as the sidecar starts it, but with the weights of the checkpoint."""
    config = RunConfig(
        engine=EngineConfig(python=sglang_python, max_total_tokens=8192, max_running=16, args=("--load-format", "auto"))
    )
    launch = sglang_launch(config, model_dir, "default")
    # /health says 503 during a pause, but only after its deadline, which is 20 s by default
    launch = replace(launch, env={**launch.env, "SGLANG_HEALTH_CHECK_TIMEOUT": "3"})
    process = ServerProcess(launch, tmp_path_factory.mktemp("server") / "server.log")
    try:
        client = Client(f"http://127.0.0.1:{launch.port}")
        deadline = time.monotonic() + START_DEADLINE_S
        while not _answers(client):
            assert process.alive, process.tail()
            assert time.monotonic() < deadline, process.tail()
            time.sleep(0.2)
        yield client
        assert process.alive, process.tail()
    finally:
        process.kill()


def _answers(client: Client) -> bool:
    try:
        return client.get("/model_info")[0] == 200
    except OSError:
        return False
