"""Blocking calls of an environment, in threads that may be given up.

A thread can't be stopped. One whose call outlives its deadline, or whose caller left, is given up: another takes its
place, and it ends by itself if the call ever returns. Threads are daemons, so a stuck one does not keep the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

THREADS = 16
"""Calls that run at a time."""


class CallTimeout(Exception):
    """A call did not return within its deadline."""


class _Job:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.started: float | None = None
        self.returned = False
        self.given_up = False


class Calls:
    """A pool of threads for blocking calls. Used from one event loop."""

    def __init__(self, name: str, threads: int = THREADS) -> None:
        self._name = name
        self._threads = threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._busy = 0
        self._usable = 0
        self._stuck = 0

    @property
    def stuck(self) -> int:
        """Threads that were given up and have not returned."""
        return self._stuck

    async def run(self, work: Callable[[], T], deadline_s: float) -> T:
        """What `work()` returns or raises. Raises `CallTimeout` `deadline_s` after a thread took it up."""
        job = _Job(work)
        with self._lock:
            self._pending += 1
            self._jobs.put(job)
            self._staff()
        try:
            return await self._wait(job, deadline_s)
        finally:
            if not job.future.done():
                self._give_up(job)

    @staticmethod
    async def _wait(job: _Job, deadline_s: float) -> Any:
        while True:
            left = deadline_s if job.started is None else job.started + deadline_s - time.monotonic()
            if left <= 0:
                raise CallTimeout(f"no answer within {deadline_s:g} s")
            done, _ = await asyncio.wait({job.future}, timeout=left)
            if done:
                value, error = job.future.result()
                if error is not None:
                    raise error
                return value

    def _staff(self) -> None:
        """With the lock held: one more thread if more jobs wait than threads are free, and there is room for it."""
        if self._pending > self._usable - self._busy and self._usable < self._threads:
            self._usable += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _give_up(self, job: _Job) -> None:
        with self._lock:
            job.given_up = True
            if job.started is not None and not job.returned:
                self._usable -= 1
                self._busy -= 1
                self._stuck += 1
                # Jobs may be queued for the thread that is lost.
                self._staff()

    def close(self) -> None:
        """Let idle threads end."""
        for _ in range(self._usable):
            self._jobs.put(None)

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            with self._lock:
                self._pending -= 1
                if job.given_up:
                    continue
                self._busy += 1
                job.started = time.monotonic()
            outcome = _outcome(job.work)
            with self._lock:
                job.returned = True
                if job.given_up:
                    self._stuck -= 1
                    return
                self._busy -= 1
            # The loop may be gone: nobody waits for the answer then.
            with contextlib.suppress(RuntimeError):
                job.loop.call_soon_threadsafe(_resolve, job.future, outcome)


def _outcome(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error
    except BaseException as error:
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def _resolve(future: asyncio.Future[Any], outcome: tuple[Any, Exception | None]) -> None:
    if not future.done():
        future.set_result(outcome)
