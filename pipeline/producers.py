"""`pipeline producers`: which producers are installed, and whether one keeps its contract."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any

import msgspec
import yaml

from actors.environments import kit
from actors.environments.isolated import loaded
from actors.environments.loading import ProducerError, SettingError, load
from config.schema import ProducerConfig
from contracts.producer import CONTRACT_VERSION, GROUP
from pipeline.errors import Exit, PipelineError

DEADLINE_S = 60.0
"""Longest that one check may take."""


class Listed(msgspec.Struct, frozen=True):
    """An installed producer; `problem` is empty if its class can be imported and speaks this contract."""

    name: str
    target: str
    distribution: str
    problem: str


def installed() -> list[Listed]:
    """Every producer of this environment, by name. Imports them, constructs none."""
    found = {(entry.name, entry.value): entry for entry in entry_points(group=GROUP)}
    listed = []
    for _, entry in sorted(found.items()):
        dist = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "?"
        listed.append(Listed(entry.name, entry.value, dist, _problem(entry)))
    return listed


def _problem(entry: Any) -> str:
    try:
        factory = entry.load()
    except Exception as error:
        return f"can't be imported: {type(error).__name__}: {error}"
    contract = getattr(factory, "contract", CONTRACT_VERSION)
    spoken = f"states contract={contract!r}, this version speaks {CONTRACT_VERSION}"
    return "" if contract == CONTRACT_VERSION else spoken


def check(name: str, settings: Sequence[str], python: str | None) -> Iterator[tuple[str, str]]:
    """Name and problem (empty if none) of every check, run on a producer constructed with `settings` (KEY=VALUE).

    Raises `PipelineError` if it can't be had.
    """
    config = ProducerConfig(name=name, args=dict(map(_setting, settings)), python=python)

    def fresh() -> Any:
        try:
            return asyncio.run(loaded(config, load))
        except ProducerError as error:
            code = Exit.USAGE if isinstance(error, SettingError) else Exit.MISSING
            raise PipelineError(str(error), code) from error

    producer = fresh()
    for each in kit.CHECKS:
        yield each.__name__.replace("_", " "), asyncio.run(_tried(each, producer))


async def _tried(each: Any, producer: Any) -> str:
    try:
        async with asyncio.timeout(DEADLINE_S):
            await each(producer)
    except TimeoutError:
        return f"not over after {DEADLINE_S:g} s"
    except Exception as error:
        return str(error) if isinstance(error, kit.Broken) else f"{type(error).__name__}: {error}"
    return ""


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise PipelineError(f"{text!r}: expected KEY=VALUE, a setting of the producer", Exit.USAGE)
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise PipelineError(f"{text!r}: the value is not YAML: {error}", Exit.USAGE) from error
