"""Starting a Gym of our own: `ng_run` in its environment, kept by a process that ends all of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec

from actors.environments.nemo_gym.head import Gym, GymError
from actors.network import free_port

GRACE_S = 20.0
"""What Gym gets to end its servers before they are killed."""
LOOK_S = 0.5
SLOW_RAY = "node timed out during startup"
"""What Gym's Ray says after 30 s on a busy machine; nothing sets these."""
STARTS = 3
"""Starts of Gym before that is taken for an error."""
KINDS = ("resources_servers", "responses_api_agents", "responses_api_models", "environments")
KEEPER = Path(__file__).with_name("keeper.py")
TAIL = 3000
"""Characters of Gym's log that an error shows."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start Gym. `python`: the interpreter of its environment; `overrides`: in Hydra's form."""

    python: Path
    config_paths: tuple[str, ...]
    overrides: tuple[str, ...]
    policy_url: str
    run_dir: Path
    deadline_s: float
    head_port: int = 0


class Servers:
    """One `ng_run`, started anew when it ends by itself. Use `start`, then `ready` before each rollout, and `close`."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        port = launch.head_port or free_port()
        self.gym = Gym(f"http://127.0.0.1:{port}")
        self._port = port
        self._log = launch.run_dir / "logs" / "gym.log"
        self._scratch = Path(tempfile.mkdtemp(prefix="gym-"))
        self._process: asyncio.subprocess.Process | None = None
        self._up = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start Gym and wait until all its servers answer. Raises `GymError` with the end of its log."""
        for _ in range(STARTS - 1):
            try:
                await self._begin()
                break
            except GymError as error:
                if SLOW_RAY not in str(error):
                    raise
        else:
            await self._begin()
        self._watching = asyncio.create_task(self._watch())

    async def ready(self, seconds: float) -> None:
        """Wait while Gym is being started anew. Raises `GymError` after `seconds`."""
        try:
            await asyncio.wait_for(self._up.wait(), seconds)
        except TimeoutError as error:
            raise GymError(f"Gym was not up again within {seconds:g} s; its log is {self._log}") from error

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._end()
        await self.gym.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def _watch(self) -> None:
        pause = 1.0
        while True:
            assert self._process is not None
            await self._process.wait()
            self._up.clear()
            self.gym.forget()
            await asyncio.sleep(pause)
            pause = min(2 * pause, 30.0)
            with contextlib.suppress(GymError):
                await self._begin()

    async def _begin(self) -> None:
        launch = self._launch
        program = launch.python.with_name("ng_run")
        if not program.is_file():
            raise GymError(
                f"producer.args.python={launch.python}: there is no ng_run beside it; `make gym` installs NeMo-Gym "
                "into .venv-gym"
            )
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if self._log.exists():  # so that what an earlier start said is not taken for this one's
            self._log.replace(self._log.with_name(self._log.name + ".1"))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(KEEPER), str(GRACE_S), str(self._log), str(program), *self._words(),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            cwd=self._scratch, env=self._environment(), start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(launch.deadline_s):
                await self._wait()
        except TimeoutError as error:
            await self._end()
            late = f"Gym was not up after producer.args.start_deadline_s={launch.deadline_s:g} s"
            raise GymError(f"{late}:{self._tail()}") from error
        except GymError:
            await self._end()
            raise
        self._up.set()

    async def _wait(self) -> None:
        """Until every server that the head knows answers. Raises `GymError` if `ng_run` ends before."""
        assert self._process is not None
        while True:
            if self._process.returncode is not None:
                raise GymError(f"ng_run ended with status {self._process.returncode}:{self._tail()}")
            with contextlib.suppress(GymError):
                agents = await self.gym.agents()
                if agents and all([await _listens(url) for url in agents.values()]) and self._announced():
                    return
            await asyncio.sleep(LOOK_S)

    def _announced(self) -> bool:
        """`ng_run` says so once all its servers answer, and nothing else tells."""
        return b"servers ready!" in self._said()

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), GRACE_S + 10.0)
        except TimeoutError:
            process.kill()
            await process.wait()

    def _words(self) -> list[str]:
        """`ng_run`'s arguments: the recipe's, and what makes it use one environment, one head and our gateway."""
        launch = self._launch
        venvs = self._scratch / "venvs"
        environment = launch.python.parent.parent
        for kind, name in _servers(launch.python):
            link = venvs / kind / name / ".venv"
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(environment)
        return [
            f"+config_paths=[{','.join(launch.config_paths)}]",
            "+skip_venv_if_present=true",
            f"+uv_venv_dir={venvs}",
            "+head_server.host=127.0.0.1",
            f"+head_server.port={self._port}",
            f"+policy_base_url={launch.policy_url}",
            "+policy_api_key=unused",
            "+policy_model_name=policy",
            *launch.overrides,
        ]

    def _environment(self) -> dict[str, str]:
        """Gym starts a Ray of its own, of another version: it must find no other, nor be found."""
        dropped = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV", "RAY_ADDRESS")
        kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("RAY_")}
        bin_dir = str(self._launch.python.parent)
        return {
            **kept,
            "PATH": f"{bin_dir}:{kept.get('PATH', '')}",
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": str(self._scratch),
            "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def _tail(self) -> str:
        return f" the end of {self._log}:\n{self._said().decode(errors='replace')[-TAIL:]}"

    def _said(self) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self._log.read_bytes()
        return b""


def _servers(python: Path) -> list[tuple[str, str]]:
    """Kind and name of every server that comes with Gym."""
    return [
        (kind, path.name)
        for packages in python.parent.parent.glob("lib/python3*/site-packages")
        for kind in KINDS
        for path in (packages / kind).glob("*")
        if path.is_dir() and not path.name.startswith("_")
    ]


async def _listens(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 2.0)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def package_file(python: Path, name: str) -> Path | None:
    """A file that comes with Gym, such as `environments/blackjack/data/example.jsonl`."""
    found = [path / name for path in python.parent.parent.glob("lib/python3*/site-packages") if (path / name).is_file()]
    return found[0] if found else None
