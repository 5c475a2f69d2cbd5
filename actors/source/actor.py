"""Pulls tasks from the producer.

The producer's iterator runs on an event loop of its own, in a daemon thread: one that blocks can't hold up the actor,
whose deadline then ends the wait.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from actors.environments.isolated import loaded
from actors.environments.loading import ProducerError, load
from actors.source.core import Exhausted, Fetched, FetchedTask, FetchTasks, ProducerFailed, SourceCore, weight
from config.schema import RunConfig
from contracts import limits
from contracts.core import Context, Fatal
from contracts.producer import Producer, Task

PATIENCE_S = 0.5
"""A slow producer's tasks are handed on after this long, even if fewer than asked for."""


class NotATask(TypeError):
    """A producer yielded something that is not a usable `contracts.producer.Task`."""


class TaskTooLarge(ValueError):
    """A task does not fit into the log."""


class NoTaskInTime(Exception):
    """A producer did not yield its next task before the deadline."""


class SourceShell:
    """`contracts.core.Shell` of the task source."""

    def __init__(self, config: RunConfig, actor: str) -> None:
        self.core = SourceCore(config, actor)
        self._config = config
        self._readers: dict[str, Reader] = {}

    async def start(self, context: Context) -> None:
        producer = self._config.producer
        try:
            self._producer: Any = await loaded(producer, load)
        except ProducerError as error:
            raise Fatal(str(error)) from error

    async def perform(self, command: Any) -> Any | None:
        match command:
            case FetchTasks():
                return await self._fetch(command)
        raise TypeError(f"the source can't perform {command!r}")

    def payload(self, handle: str) -> bytes:
        raise KeyError(handle)

    async def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    async def _fetch(self, command: FetchTasks) -> Fetched | Exhausted | ProducerFailed:
        """Up to `n` tasks; what ended the iteration is answered once the tasks before it are handed on."""
        reader = self._reader(command)
        deadline_s = self._config.producer.task_deadline_s
        tasks: list[FetchedTask] = []
        started, size = time.monotonic(), 0
        while not tasks or (len(tasks) < command.n and size < limits.FETCH and time.monotonic() - started < PATIENCE_S):
            try:
                task = await reader.next(deadline_s)
            except Exception as error:
                if tasks:
                    break
                return self._failed(command, reader, error)
            if task is None:
                break
            tasks.append(task)
            size += weight(task)
        return Fetched(command.split, tuple(tasks)) if tasks else Exhausted(command.split)

    def _reader(self, command: FetchTasks) -> Reader:
        """The open iterator if it stands at the cursor, else a new one."""
        reader = self._readers.get(command.split)
        if reader is None or (reader.epoch, reader.cursor) != (command.epoch, command.cursor) or reader.ended:
            if reader is not None:
                reader.close()
            reader = Reader(self._producer, command.cursor, self._config.seed, command.split, command.epoch)
            self._readers[command.split] = reader
        return reader

    @staticmethod
    def _failed(command: FetchTasks, reader: Reader, error: Exception) -> ProducerFailed:
        name = type(error).__name__
        return ProducerFailed(split=command.split, cursor=reader.cursor, error=name, message=str(error))


class Reader:
    """One iteration over a producer's tasks, on a thread of its own. `cursor` stands behind the last task it gave.

    Pass `epoch` has a seed of its own, so that each shuffles anew.
    """

    def __init__(self, producer: Producer, cursor: str | None, seed: int, split: str, epoch: int) -> None:
        self.cursor = cursor
        self.epoch = epoch
        self.ended = False
        self._open = lambda: aiter(producer.tasks(cursor, seed + epoch, split))
        self._tasks: AsyncIterator[Task] | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="producer-tasks", daemon=True).start()

    async def next(self, deadline_s: float) -> FetchedTask | None:
        """The next task, None at the end. Raises what the producer raised, `NoTaskInTime`, `NotATask`, `TaskTooLarge`.

        After anything but a task the iteration is over.
        """
        self.ended = True
        future = asyncio.run_coroutine_threadsafe(self._advance(), self._loop)
        done, _ = await asyncio.wait({asyncio.wrap_future(future)}, timeout=deadline_s)
        if not done:
            future.cancel()
            raise NoTaskInTime(f"no task within producer.task_deadline_s={deadline_s:g} s")
        answer = future.result()
        if answer is None:
            return None
        task = _checked(answer, self.epoch)
        self.ended = False
        self.cursor = task.cursor
        return task

    async def _advance(self) -> Task | None:
        if self._tasks is None:
            self._tasks = self._open()
        return await anext(self._tasks, None)

    def close(self) -> None:
        """Stop the thread, or leave it to itself if the producer blocks it."""
        self._loop.call_soon_threadsafe(self._loop.stop)


def _checked(task: Any, epoch: int) -> FetchedTask:
    """The task with its payload as JSON. Raises `NotATask` naming the field, and `TaskTooLarge`."""
    if not isinstance(task, Task):
        raise NotATask(f"tasks() yielded {type(task).__name__}, contracts.producer.Task is expected")
    for name in ("id", "cursor"):
        value = getattr(task, name)
        if not isinstance(value, str) or not value:
            raise NotATask(f"task {task.id!r}: {name}={value!r}, a string that is not empty is expected")
    try:
        payload = json.dumps(task.payload, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise NotATask(f"task {task.id!r}: payload is not JSON: {error}") from error
    if (length := len(task.id.encode())) > limits.TASK_ID:
        raise TaskTooLarge(
            f"task {task.id[:64]!r}...: id has {length:,} bytes, limit {limits.TASK_ID}: use a shorter one"
        )
    checked = FetchedTask(id=task.id, payload=payload.encode(), cursor=task.cursor, epoch=epoch)
    if (size := weight(checked)) > limits.TASK:
        raise TaskTooLarge(
            f"task {task.id!r} has {size:,} bytes of payload, id and cursor, limit {limits.TASK:,}: shorten it, or "
            "have its payload name a file that the producer reads when it makes the prompt"
        )
    return checked


def build(config: RunConfig, actor: str) -> SourceShell:
    return SourceShell(config, actor)
