"""An actor that follows a stream is not stopped by what the stream's own readers bury."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from contracts.core import Entry
from contracts.envelope import ContractError
from pipeline.runtime.loop import Runtime


def fed(stream: str) -> tuple[Any, list[Any]]:
    warned: list[Any] = []
    log = SimpleNamespace(warning=lambda text, **fields: warned.append(fields["entry"]))
    runtime: Any = SimpleNamespace(_seen={stream: "0-0"}, log=log, push=lambda inputs: None)
    Runtime._feed(runtime, [Entry(stream, "7-0", b"no envelope")])
    return runtime, warned


def test_an_unreadable_work_entry_is_passed_over():
    runtime, warned = fed("tasks")
    assert runtime._seen == {"tasks": "7-0"}
    assert warned == ["7-0"]


def test_an_unreadable_broadcast_entry_ends_the_process():
    with pytest.raises(ContractError):
        fed("control")
