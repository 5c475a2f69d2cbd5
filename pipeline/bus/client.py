"""The bus client (public signatures first; the bodies follow)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.core import Entry
from pipeline.bus.model import Claimed, Commit, Committed, Depth, Inputs, Limits, Trimmed, WorkEntry


class Bus:
    """One actor's access to the store of one run."""

    @classmethod
    async def connect(
        cls,
        url: str,
        run: str,
        *,
        actor: str,
        outage_s: float = 60.0,
        connect_s: float = 10.0,
        limits: Limits = Limits(),
    ) -> Bus:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def boot(self) -> tuple[int, int]:
        raise NotImplementedError

    async def commit(self, commit: Commit) -> Committed:
        raise NotImplementedError

    async def advance(self, boot: int, cursors: Mapping[str, str]) -> None:
        raise NotImplementedError

    async def ensure_group(self, stream: str, group: str) -> None:
        raise NotImplementedError

    async def read_work(self, counts: Mapping[str, int], group: str, *, block_ms: int | None) -> list[WorkEntry]:
        raise NotImplementedError

    async def read_after(self, cursors: Mapping[str, str], *, block_ms: int | None, count: int) -> list[Entry]:
        raise NotImplementedError

    async def read_inputs(
        self, counts: Mapping[str, int], cursors: Mapping[str, str], group: str, *, block_ms: int | None
    ) -> Inputs:
        raise NotImplementedError

    async def claim_idle(self, stream: str, group: str, min_idle_ms: int, count: int) -> Claimed:
        raise NotImplementedError

    async def renew(self, stream: str, group: str, entries: Sequence[str]) -> list[str]:
        raise NotImplementedError

    async def bury(self, stream: str, group: str, entry: str, *, reason: str, now: float) -> str | None:
        raise NotImplementedError

    async def trim(self, stream: str, floor: str) -> Trimmed:
        raise NotImplementedError

    async def payloads(self, keys: Sequence[str]) -> list[bytes]:
        raise NotImplementedError

    async def post(self, stream: str, data: bytes) -> str:
        raise NotImplementedError

    async def register(self, name: str) -> int:
        raise NotImplementedError

    async def snapshot(self, actor: str | None = None) -> tuple[int, bytes] | None:
        raise NotImplementedError

    async def journal(self, actor: str | None = None, *, after: int = 0) -> list[bytes]:
        raise NotImplementedError

    async def cursors(self, actor: str | None = None) -> dict[str, str]:
        raise NotImplementedError

    async def put_config(self, data: bytes) -> None:
        raise NotImplementedError

    async def get_config(self) -> bytes:
        raise NotImplementedError

    async def depths(self, streams: Sequence[str], group: str | None = None) -> dict[str, Depth]:
        raise NotImplementedError
