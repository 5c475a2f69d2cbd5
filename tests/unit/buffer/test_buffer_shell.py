"""The buffer's shell performs nothing."""

from __future__ import annotations

from typing import Any

import pytest

from actors.buffer.actor import build
from actors.buffer.core import BufferCore
from config.schema import RunConfig


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
