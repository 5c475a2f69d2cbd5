"""One rollout's time, and its episode at the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from actors.collector.core import Try
from actors.gateway import client as gateway
from config.schema import RolloutConfig
from contracts.producer import Endpoint
from contracts.trajectory import Sampling

T = TypeVar("T")


class Deadline:
    """A point in time on the loop's clock."""

    def __init__(self, seconds: float) -> None:
        self._at = asyncio.get_running_loop().time() + seconds

    def left(self) -> float:
        return max(0.001, self._at - asyncio.get_running_loop().time())


async def bounded(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """`work`'s value. Raises `TimeoutError` in time even if `work` ignores its cancellation."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    if not done:
        raise TimeoutError
    return task.result()


class Remote:
    """`actors.collector.session.Remote` of one rollout."""

    def __init__(
        self,
        client: gateway.GatewayClient,
        name: str,
        each: Try,
        sampling: Sampling,
        rules: RolloutConfig,
        deadline: Deadline,
    ) -> None:
        self._client = client
        self._name = name
        self._each = each
        self._sampling = sampling
        self._rules = rules
        self._deadline = deadline

    async def open(self) -> Endpoint:
        left = self._deadline.left()
        url = await self._client.open(self._name, self._sampling, left, self._rules.noncontiguous)
        return Endpoint(
            base_url=url,
            session=self._name,
            temperature=self._sampling.temperature,
            max_new_tokens=self._sampling.max_new_tokens,
            deadline_s=left,
            sample=self._each.sample,
            attempt=self._each.attempt,
        )

    async def finish(self, session: str) -> gateway.Record:
        return await self._client.finish(session)
