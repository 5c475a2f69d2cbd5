"""One actor in a process of its own, as Ray sees it. Ray is not imported here, nor is anything heavy before `run`."""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

PACKAGES = ("pipeline", "actors", "config", "contracts")
RESTART_PAUSE_S = 0.5
"""Pause before a failed process ends, so that one that fails at once does not spin."""


class Installation(msgspec.Struct, frozen=True):
    """Where the four packages come from, and which release they are."""

    version: str
    root: str


class Left(msgspec.Struct, frozen=True):
    """Why an actor's process left for good.

    `done` after run.stopping; `fenced` by a later boot; `fatal`: the run can't go on; `foreign`: the packages that this
    process would run are not the driver's.
    """

    how: Literal["done", "fenced", "fatal", "foreign"]
    message: str = ""


def installation() -> Installation:
    """This process's. Raises `ImportError` if the packages do not come from one place."""
    roots: dict[str, str] = {}
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or spec.origin is None or Path(spec.origin).name != "__init__.py":
            where = spec.origin if spec else "nowhere"
            raise ImportError(f"the package {package!r} resolves to {where}, which is not this project's")
        roots[package] = str(Path(spec.origin).resolve().parent.parent)
    if len(set(roots.values())) > 1:
        places = ", ".join(f"{package} from {root}" for package, root in roots.items())
        raise ImportError(f"the packages come from several places: {places}")
    return Installation(version("sluice-rl"), roots["pipeline"])


class Host:
    """Runs one actor; a process that ends in any other way than by an answer of `run` is restarted by Ray."""

    def __init__(self, name: str, url: str, run: str, run_dir: str, env: dict[str, str | None]) -> None:
        self._name, self._url, self._run, self._run_dir = name, url, run, run_dir
        for variable, value in env.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value

    def run(self, driver: Installation, *, same_root: bool) -> Left:
        """Run the actor until its run stops. With `same_root`, the packages must be the very files of the driver."""
        foreign = _differs(driver, same_root)
        if foreign:
            return Left("foreign", foreign)
        from actors.startup import lean

        with lean():
            from actors.registry import UnknownActor
            from contracts.core import Fatal
            from pipeline.runtime import run_actor

        try:
            return Left(
                "done" if run_actor(self._name, self._url, self._run, Path(self._run_dir)) == "done" else "fenced"
            )
        except (Fatal, UnknownActor) as error:  # unknown: the run was scaled down meanwhile
            return Left("fatal", str(error))
        except Exception as error:
            print(f"{self._name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            time.sleep(RESTART_PAUSE_S)
            os._exit(1)


def _differs(driver: Installation, same_root: bool) -> str:
    try:
        ours = installation()
    except ImportError as error:
        return f"{error}; a stray file of that name is on sys.path={sys.path}"
    if ours.version != driver.version or (same_root and ours.root != driver.root):
        return (
            f"the driver runs sluice-rl {driver.version} of {driver.root}, this process {ours.version} of {ours.root}"
        )
    return ""
