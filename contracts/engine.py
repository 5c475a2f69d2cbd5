"""Protocol of an inference engine: SGLang's native HTTP API, as the engine actor calls it.

Three kinds stand behind it: `sglang` (a real server), `external` (a URL) and `torch` (the embedded server). One HTTP
client speaks to all three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from contracts.events import TensorSpec


class EngineError(Exception):
    """The engine answered an error, or nothing before the deadline: says which call, the status and the text."""


class EngineClient(Protocol):
    """Every call takes a deadline in seconds and raises `EngineError`."""

    async def generate(self, body: Mapping[str, Any], timeout: float) -> Any:
        """POST /generate; body and answer in SGLang's form."""
        ...

    async def abort(self, rid: str, timeout: float) -> None:
        """POST /abort_request. Ends `rid`, if it runs, and then every other id that begins with it: ids are of one
        length and never reused."""
        ...

    async def flush(self, timeout: float) -> bool:
        """POST /flush_cache?timeout=: True when the engine was idle and its cache is gone."""
        ...

    async def pause(self, timeout: float) -> None: ...

    async def resume(self, timeout: float) -> None: ...

    async def join_group(
        self, address: str, port: int, offset: int, world_size: int, group: str, backend: str, timeout: float
    ) -> None:
        """POST /init_weights_update_group. Blocks until all ranks met: post it beside the sender's own join."""
        ...

    async def leave_group(self, group: str, timeout: float) -> None: ...

    async def receive(self, tensors: Sequence[TensorSpec], group: str, version: str, timeout: float) -> None:
        """POST /update_weights_from_distributed with load_format=flattened_bucket and flush_cache=false."""
        ...

    async def take(self, parts: Sequence[str], version: str, timeout: float) -> None:
        """POST /update_weights_from_tensor with load_format=flattened_bucket and flush_cache=false."""
        ...

    async def checksums(self, timeout: float) -> list[dict[str, str]] | None:
        """POST /weights_checker: tensor name -> checksum, one mapping a rank; None if the engine can't tell."""
        ...

    async def healthy(self, timeout: float) -> bool: ...
