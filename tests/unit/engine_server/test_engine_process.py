"""Life of the server process: it never outlives its parent, ends cleanly, and bounds what it reads."""

from __future__ import annotations

import ast
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import actors.engine.torch_server as package

COMMAND = [sys.executable, "-m", "actors.engine.torch_server", "--load-format", "dummy", "--threads", "1"]
PARENT = "import subprocess, sys, time; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); time.sleep(600)"
DEADLINE = 60.0


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + DEADLINE
    while not path.exists():
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.02)
    return f"http://127.0.0.1:{path.read_text().strip()}"


def test_the_server_dies_with_its_parent(saved: Callable[..., Any], tmp_path: Path) -> None:
    port = tmp_path / "port"
    options = ["--model-path", str(saved("llama")[1]), "--port-file", str(port)]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *COMMAND, *options], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        wait_for(port)
        parent.kill()
        parent.wait(10)
        assert select.select([child], [], [], 10)[0], "the server outlived its parent"
    finally:
        if not select.select([child], [], [], 0)[0]:
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        parent.stdout.close()


def test_a_body_over_the_limit_answers_413_and_the_end_of_stdin_ends_the_server(
    saved: Callable[..., Any], tmp_path: Path
) -> None:
    port = tmp_path / "port"
    options = ["--model-path", str(saved("qwen3")[1]), "--port-file", str(port), "--max-body-mib", "1"]
    process = subprocess.Popen([*COMMAND, *options, "--exit-with-stdin"], stdin=subprocess.PIPE)
    try:
        url = wait_for(port)
        request = urllib.request.Request(url + "/generate", b"[" + b"1," * 2**20 + b"1]")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=DEADLINE)
        assert caught.value.code == 413
        caught.value.close()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(10)


def test_the_server_imports_no_transformers_and_of_the_contracts_only_memory_and_weights() -> None:
    for path in Path(package.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            foreign = {name.split(".")[0] for name in names if name not in ("contracts.handles", "contracts.weights")}
            assert not foreign & {"transformers", "ray", "redis", "contracts", "pipeline", "config"}
