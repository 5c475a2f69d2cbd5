"""Which actors a run consists of, and how a name becomes a shell."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from config.schema import RunConfig
from contracts.core import Shell

KINDS = ("recorder", "refit", "gateway", "engine", "trainer", "buffer", "source", "collector")
"""Every kind of actor, in the order in which they are started."""


class UnknownActor(ValueError):
    """No actor of the run has this name: lists those that exist."""

    @classmethod
    def of(cls, name: str, config: RunConfig) -> UnknownActor:
        """For a run with this configuration."""
        return cls(f"no actor {name!r} in this run; it has {', '.join(names(config))}")


def names(config: RunConfig) -> tuple[str, ...]:
    """The actors of a run, in start order: `engine-0`, `engine-1`, ..., `trainer`, ..."""
    counts = {
        "gateway": config.gateway.count,
        "engine": config.engine.count,
        "collector": config.launch.collectors,
    }
    return tuple(
        name for kind in KINDS for name in ([f"{kind}-{n}" for n in range(counts[kind])] if kind in counts else [kind])
    )


def kind_of(name: str) -> str:
    """`engine-0` -> `engine`."""
    head, _, tail = name.rpartition("-")
    return head if tail.isdigit() and head else name


def build(config: RunConfig, name: str) -> Shell:
    """The shell of actor `name`. Raises `UnknownActor`."""
    if name not in names(config):
        raise UnknownActor.of(name, config)
    module: Any = import_module(f"actors.{kind_of(name)}.actor")
    return module.build(config, name)
