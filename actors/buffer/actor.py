"""The buffer has no effects beyond its events: its shell performs nothing."""

from __future__ import annotations

from typing import Any

from actors.buffer.core import BufferCore
from actors.buffer.samplers import SamplerError
from config.schema import RunConfig
from contracts.core import Context, Fatal


class BufferShell:
    """`contracts.core.Shell` of the buffer."""

    def __init__(self, config: RunConfig) -> None:
        self.core = BufferCore(config)

    async def start(self, context: Context) -> None:
        pass

    async def perform(self, command: Any) -> Any | None:
        raise TypeError(f"the buffer can't perform {command!r}")

    def payload(self, handle: str) -> bytes:
        raise KeyError(handle)

    async def close(self) -> None:
        pass


def build(config: RunConfig, actor: str) -> BufferShell:
    """Raises `Fatal` if there is no sampler of the configured name."""
    try:
        return BufferShell(config)
    except SamplerError as error:
        raise Fatal(str(error)) from error
