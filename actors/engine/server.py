"""The server behind an engine actor: its command line, its start, its end.

A server that we start listens on loopback only, whatever `network.host` says: the sidecar's proxy is the one way to it.
It dies with the sidecar, because its stdin is a pipe that closes then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from actors.engine.client import CallError, HttpEngineClient
from actors.network import free_port
from config import gpus, nccl
from config.schema import RunConfig, is_direct

HOST = "127.0.0.1"
PROBE_S, PROBE_DEADLINE_S = 0.1, 5.0
"""Pause between two looks whether a server is ready, and how long one may take."""
POLL_S = 0.1
"""Pause between two looks whether a process has ended."""
STOP_S, KILL_S = 10.0, 2.0
"""How long a server may take to end after SIGTERM, and after SIGKILL."""
TAIL_BYTES = 4000
"""How much of the server's log an error quotes."""


class ServerError(Exception):
    """The server did not become ready: says how it ended or what it did not do, and quotes the end of its log."""


class Launch(msgspec.Struct, frozen=True):
    """How to start a server. It takes `port`, or writes its own to `port_file`, where nothing may be before.

    With `label` it counts as ready once it answers that label of its weights.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    port: int = 0
    port_file: str | None = None
    label: str | None = None


def torch_launch(config: RunConfig, model_dir: Path, port_file: Path, index: int = 0) -> Launch:
    """The embedded server of engine `index`."""
    engine = config.engine
    placed = gpus.of_engine(config, index)
    command = (
        *(engine.python or sys.executable, "-m", "actors.engine.torch_server"),
        *("--model-path", str(model_dir)),
        *("--load-format", "dummy"),
        *("--host", HOST),
        *("--port", "0"),
        *("--port-file", str(port_file)),
        *("--device", f"cuda:{placed[0]}" if placed else engine.device),
        *("--dtype", config.model.dtype),
        *("--threads", str(engine.threads)),
        *("--seed", str(config.seed)),
        *("--max-running", str(engine.max_running)),
        *("--max-total-tokens", str(engine.max_total_tokens)),
        *("--group-timeout-s", f"{config.refit.deadline_s:g}"),
        *("--exit-with-stdin", *engine.args),
    )
    env = {"PYTHONSAFEPATH": "1"} | nccl.aligned(config, os.environ) | _threads(engine.threads)
    return Launch(command, env, port_file=str(port_file))


def sglang_launch(config: RunConfig, model_dir: Path, label: str, index: int = 0) -> Launch:
    """A real SGLang server, that of engine `index`. Further flags (attention backend, ...) come with `engine.args`.

    Its port is chosen before it binds it; `label` tells it from a server that was faster.
    """
    engine = config.engine
    port = free_port()
    here = Path(__file__)
    apart, on_cpu = is_direct(config), engine.device == "cpu"
    program = (str(here.parent / "inside" / "launch.py"),) if apart or on_cpu else ("-m", "sglang.launch_server")
    command = (
        *(sys.executable, "-I", "-S", str(here.with_name("guard.py"))),
        *(engine.python or sys.executable, *program),
        *("--model-path", str(model_dir)),
        *("--load-format", "dummy"),
        *("--host", HOST),
        *("--port", str(port)),
        *("--device", engine.device.partition(":")[0]),
        *("--dtype", config.model.dtype),
        *("--random-seed", str(config.seed)),
        *("--max-running-requests", str(engine.max_running)),
        *("--max-total-tokens", str(engine.max_total_tokens)),
        *("--weight-version", label),
        *("--log-level", "warning"),
        *("--skip-tokenizer-init", "--skip-server-warmup"),
        *(("--attention-backend", "torch_native", "--sleep-on-idle") if on_cpu else ()),
        *_placed(gpus.of_engine(config, index)),
        *(("--enable-memory-saver",) if engine.release != "none" else ()),
        *engine.args,
    )
    # by default the port of its gRPC server, which does not run, is `port` + 10000: too large for most free ports
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "SGLANG_GRPC_PORT": str(free_port())}
    env |= nccl.aligned(config, os.environ)
    if apart:
        env |= {"SLUICE_RECEIVER": "direct", **nccl.NEVER_ENDED}
    if on_cpu:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""} | _threads(engine.threads)
    return Launch(command, env, port=port, label=label)


def _placed(numbers: tuple[int, ...]) -> tuple[str, ...]:
    """SGLang's flags for its GPUs. It sees the others too: memory of one that it can't see can't be handed to it."""
    size = len(numbers)
    parallel = ("--tp-size", str(size)) if size > 1 else ()
    return ("--base-gpu-id", str(min(numbers)), *parallel) if numbers else ()


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


class ServerProcess:
    """One process and its group. `log` is a file that takes its output; None inherits ours.

    Raises `ServerError` when it can't be run.
    """

    def __init__(self, launch: Launch, log: Path | None) -> None:
        self._launch = launch
        self._log = log
        self._log_start = 0
        with contextlib.ExitStack() as stack:
            output = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("ab"))
                self._log_start = output.tell()
            try:
                self._process = subprocess.Popen(
                    launch.command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **launch.env},
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"can't run {launch.command[0]!r} (engine.python): {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def url(self) -> str | None:
        """Where it listens, once that is known; its port file is gone then."""
        port = self._launch.port
        if self._launch.port_file is not None:
            file = Path(self._launch.port_file)
            try:
                port = int(file.read_text())
            except FileNotFoundError:
                return None
            file.unlink()
        return f"http://{HOST}:{port}"

    async def ended(self) -> str:
        """Wait for its end; answers how it ended."""
        while (status := self._process.poll()) is None:  # noqa: ASYNC110 - the end of a process sets no event
            await asyncio.sleep(POLL_S)
        number = -status if status < 0 else status - 128
        if number > 0:
            name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
            return f"the server was ended by signal {name}{self.tail()}"
        return f"the server exited with status {status}{self.tail()}"

    async def stop(self) -> None:
        """End the process group: SIGTERM, then SIGKILL for what overstays. Harmless when it has ended."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended(), STOP_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL for the whole group, and for nobody when it is gone."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def tail(self) -> str:
        """The end of what this process logged, for an error."""
        if self._log is None:
            return "; see its output"
        try:
            with self._log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - TAIL_BYTES))
                text = log.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return f"; {self._log} is gone"
        return f"; {self._log} ends with:\n{text}" if text else f"; {self._log} got no line from it"


class Server:
    """A server that answers: `client` calls it. `process` is None for one that somebody else runs."""

    def __init__(self, client: HttpEngineClient, process: ServerProcess | None) -> None:
        self.client = client
        self.process = process
        self.killed: str | None = None
        """Why we ended it."""

    @property
    def alive(self) -> bool:
        return self.process is None or self.process.alive

    async def ended(self) -> str:
        """Wait for its end; answers how it ended. For ever, when it isn't ours."""
        if self.process is None:
            return await asyncio.get_running_loop().create_future()
        return await self.process.ended()

    async def outcome(self, within_s: float) -> str | None:
        """How it ended, if it does within `within_s`."""
        try:
            return await asyncio.wait_for(self.ended(), within_s)
        except TimeoutError:
            return None

    async def kill(self, reason: str) -> None:
        """End it now if it is ours; what it holds is free when this returns."""
        self.killed = reason
        if self.process is not None:
            await asyncio.to_thread(self.process.kill)

    async def close(self) -> None:
        """End it if it is ours, and close all connections."""
        await self.client.close()
        if self.process is not None:
            await self.process.stop()


async def start(launch: Launch, log: Path | None, deadline_s: float) -> Server:
    """Start a server and wait until it answers. Raises `ServerError`; nothing of it is left then."""
    process = ServerProcess(launch, log)
    try:
        client = await _ready(process, launch.label, deadline_s)
    except BaseException:
        process.kill()
        raise
    return Server(client, process)


async def attach(url: str, deadline_s: float) -> Server:
    """Wait until the server at `url` answers. Raises `ServerError`."""
    give_up_at = time.monotonic() + deadline_s
    client = HttpEngineClient(url.rstrip("/"))
    try:
        while not await client.healthy(_probe_s(give_up_at)):
            if time.monotonic() >= give_up_at:
                raise ServerError(f"the server at {url} (engine.urls) did not answer within {deadline_s:g} s")
            await asyncio.sleep(PROBE_S)
    except BaseException:
        await client.close()
        raise
    return Server(client, None)


async def _ready(process: ServerProcess, label: str | None, deadline_s: float) -> HttpEngineClient:
    give_up_at = time.monotonic() + deadline_s
    client: HttpEngineClient | None = None
    try:
        while time.monotonic() < give_up_at:
            if not process.alive:
                raise ServerError(await process.ended())
            if client is None and (url := process.url()) is not None:
                client = HttpEngineClient(url)
            if client is not None and await _is_ready(client, label, _probe_s(give_up_at)):
                return client
            await asyncio.sleep(PROBE_S)
        raise ServerError(
            f"the server did not answer within {deadline_s:g} s (launch.start_deadline_s){process.tail()}"
        )
    except BaseException:
        if client is not None:
            await client.close()
        raise


def _probe_s(give_up_at: float) -> float:
    """How long one probe may take."""
    return min(PROBE_DEADLINE_S, max(0.0, give_up_at - time.monotonic()))


async def _is_ready(client: HttpEngineClient, label: str | None, timeout: float) -> bool:
    try:
        answered = await client.weight_version(timeout)
    except CallError:
        return False
    return label is None or answered == label
