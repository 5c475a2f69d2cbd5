"""Limits in time for many things at once, by one timer for all: a timer each would cost more than the things do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

EVERY_S = 0.25
"""How often is looked for what is overdue, and how late it is found at most."""


class Overdue:
    """`with overdue.after(seconds, end):` calls `end` once if the body is not left by then, or `EVERY_S` later."""

    def __init__(self) -> None:
        self._limits: set[Limit] = set()
        self._timer: asyncio.TimerHandle | None = None

    def after(self, seconds: float, end: Callable[[], None]) -> Limit:
        return Limit(self._limits, self._watch, asyncio.get_running_loop().time() + seconds, end)

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        late = [limit for limit in self._limits if limit.at <= now]
        self._limits.difference_update(late)
        for limit in late:
            limit.end()
        if self._limits:
            self._watch()


class Limit:
    """One of them."""

    __slots__ = ("_limits", "_watch", "at", "end")

    def __init__(self, limits: set[Limit], watch: Callable[[], None], at: float, end: Callable[[], None]) -> None:
        self._limits, self._watch = limits, watch
        self.at, self.end = at, end

    def __enter__(self) -> None:
        self._limits.add(self)
        self._watch()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limits.discard(self)
