"""The buffer's shell performs nothing."""

from __future__ import annotations

from typing import Any

import pytest

from actors.buffer.actor import build
from actors.buffer.core import BufferCore
from config.schema import BufferConfig, RunConfig
from contracts.core import Fatal


async def test_it_has_a_core_and_refuses_everything_else() -> None:
    context: Any = None
    shell = build(RunConfig(), "buffer")
    assert isinstance(shell.core, BufferCore)
    await shell.start(context)
    with pytest.raises(TypeError, match="can't perform"):
        await shell.perform(object())
    with pytest.raises(KeyError):
        shell.payload("x")
    await shell.close()


def test_an_unknown_sampler_ends_the_run_and_names_what_there_is():
    with pytest.raises(Fatal, match=r"buffer\.sampler='lifo' is unknown; known: windowed, in_order, fifo"):
        build(RunConfig(buffer=BufferConfig(sampler="lifo")), "buffer")
