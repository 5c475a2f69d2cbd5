"""The bus's conformance suite on fakeredis: no server needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import fakeredis
import pytest

from pipeline.bus import Bus, Keys
from pipeline.bus.address import parse
from pipeline.bus.link import Link
from tests.contract.bus_conformance import *  # noqa: F403 - the suite
from tests.contract.bus_conformance import Store


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    server = fakeredis.FakeServer(version=(7,))
    opened: list[Bus] = []

    async def opening(actor: str, **limits: Any) -> Bus:
        link = Link(fakeredis.FakeAsyncRedis(server=server, protocol=2), parse("redis://fake"), 1.0)
        opened.append(Bus(link, "test", actor, **limits))
        return opened[-1]

    raw = fakeredis.FakeAsyncRedis(server=server, protocol=2)
    raw.response_callbacks.clear()
    yield Store(opening, raw, Keys("test").prefix)
    for bus in opened:
        await bus.close()
    await raw.aclose()
