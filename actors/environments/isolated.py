"""A producer in a process and an environment of its own (`producer.python`), as if it were here.

The link to the child lives on an event loop of its own thread, so that the proxy can be called from any loop and from
threads. A child that dies fails what was asked of it, and the next call starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

import contracts
from actors.environments.loading import ProducerError, check_contract
from config.schema import ProducerConfig
from contracts.producer import DataError, Outcome, Place, Session, Task

CHILD = Path(__file__).with_name("child.py")
CONTRACTS = Path(contracts.__file__).parent
SHIPPED = {"verifiers": (Path(__file__).with_name("verifiers.py"), "Verifiers")}
"""Producers that come with Sluice but live where it is not installed: file and class."""
LOAD_S = 120.0
"""Longest that the child may take to import and construct the producer."""
LIMIT = 64 * 2**20
"""Longest frame that is taken."""


class ChildError(Exception):
    """The producer raised something in its process, or the process ended."""


def isolate(name: str, args: dict[str, Any], python: str) -> Any:
    """The producer `name` of the environment of interpreter `python`. Raises `ProducerError` as `load` does."""
    link = Link(name, args, python)
    try:
        about = link.call("load", _loading(name, args), LOAD_S)
    except (ChildError, DataError, OSError, TimeoutError) as error:
        link.end()
        raise ProducerError(f"producer {name!r} in {python}: {error or type(error).__name__}") from error
    try:
        check_contract(name, about["contract"])
    except ProducerError:
        link.end()
        raise
    if about["multi"] or about["single"]:
        kinds = (IsolatedMulti if about["multi"] else IsolatedSingle, about["started"])
        return _KINDS[kinds](link, about["contract"])
    link.end()
    raise ProducerError(f"producer {name!r} in {python} needs `tasks` and either `prompt` and `score` or `rollout`")


async def loaded(config: ProducerConfig, load: Callable[[str, dict[str, Any]], Any]) -> Any:
    """The producer of a recipe: by `load`, or in a process of its own. Raises `ProducerError`."""
    if config.python is None:
        return load(config.name, config.args)
    return await asyncio.to_thread(isolate, config.name, dict(config.args), config.python)


def _loading(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """What the child is told to load."""
    file, kind = SHIPPED.get(name, (None, None))
    return {"name": name, "args": args, "file": None if file is None else str(file), "kind": kind}


class Link:
    """The child process and the requests that are open."""

    def __init__(self, name: str, args: dict[str, Any], python: str) -> None:
        self._load = _loading(name, args)
        self._python = python
        self._loop = asyncio.new_event_loop()
        self._process: asyncio.subprocess.Process | None = None
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._sessions: dict[int, tuple[Session, asyncio.AbstractEventLoop]] = {}
        self._last = 0
        self._place: Place | None = None
        self._starting: asyncio.Lock | None = None
        threading.Thread(target=self._loop.run_forever, name=f"producer-{name}", daemon=True).start()

    # --- from any thread ---

    def call(self, do: str, args: dict[str, Any], timeout: float | None = None) -> Any:
        """The answer, waited for in this thread."""
        return self._submit(do, args).result(timeout)

    async def ask(self, do: str, args: dict[str, Any], session: Session | None = None) -> Any:
        """The answer, awaited on the caller's loop, where the session's turns are taken too."""
        return await asyncio.wrap_future(self._submit(do, args, session, asyncio.get_running_loop()))

    def end(self) -> None:
        """Kill the child and stop the thread."""
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._kill(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _submit(self, do: str, args: dict[str, Any], session: Any = None, loop: Any = None) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(self._request(do, args, session, loop), self._loop)

    # --- on the link's own loop ---

    async def _request(self, do: str, args: dict[str, Any], session: Any, loop: Any) -> Any:
        await self._alive(do)
        if do == "start":
            self._place = msgspec.convert(args["place"], Place)
        return await self._exchange(do, args, session, loop)

    async def _alive(self, do: str) -> None:
        """A child that has the producer, and has started it if it ever was."""
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            again = self._process is not None
            await self._spawn()
            if again and do != "load":
                await self._exchange("load", self._load, None, None)
                if self._place is not None:
                    await self._exchange("start", {"place": msgspec.to_builtins(self._place)}, None, None)

    async def _spawn(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        self._process = await asyncio.create_subprocess_exec(
            self._python, str(CHILD), str(CONTRACTS), self._load["name"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, limit=LIMIT,
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read(self._process))

    async def _exchange(self, do: str, args: dict[str, Any], session: Any, loop: Any) -> Any:
        self._last += 1
        number = self._last
        future = self._open[number] = self._loop.create_future()
        if session is not None:
            self._sessions[number] = (session, loop)
        try:
            self._send({"id": number, "do": do, "args": args})
            return await future
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            del self._open[number]
            self._sessions.pop(number, None)

    def _send(self, frame: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        data = msgspec.json.encode(frame)
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(len(data).to_bytes(4, "little") + data)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while True:
                size = int.from_bytes(await process.stdout.readexactly(4), "little")
                if size > LIMIT:
                    process.kill()
                    break
                self._take(msgspec.json.decode(await process.stdout.readexactly(size)))
        except asyncio.IncompleteReadError:
            pass
        status = await process.wait()
        for future in self._open.values():
            if not future.done():
                future.set_exception(ChildError(f"the producer's process ended with status {status}"))

    def _take(self, frame: dict[str, Any]) -> None:
        if "ask" in frame:
            self._turn(frame)
            return
        future = self._open.get(frame["answer"])
        if future is None or future.done():
            return
        if "error" in frame:
            future.set_exception((DataError if frame["data"] else ChildError)(frame["error"]))
        else:
            future.set_result(frame["value"])

    def _turn(self, frame: dict[str, Any]) -> None:
        """Take one turn of a rollout on the loop of its session, and answer the child."""
        number = frame["ask"]
        held = self._sessions.get(frame["rollout"])
        if held is None:
            self._send({"answer": number, "error": "the rollout is over", "data": False})
            return
        session, loop = held
        work = getattr(session, frame["turn"])(**frame["args"])

        def answer(done: Future[Any]) -> None:
            error = done.exception() if not done.cancelled() else ChildError("the rollout was cut off")
            if error is None:
                said = {"answer": number, "value": msgspec.to_builtins(done.result())}
            else:
                data = isinstance(error, DataError)
                said = {"answer": number, "error": f"{type(error).__name__}: {error}", "data": data}
            self._loop.call_soon_threadsafe(self._send, said)

        asyncio.run_coroutine_threadsafe(work, loop).add_done_callback(answer)

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class _Isolated:
    def __init__(self, link: Link, contract: int) -> None:
        self.contract = contract
        self._link = link

    async def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]:
        number = await self._link.ask("tasks", {"cursor": cursor, "seed": seed, "split": split})
        while (task := await self._link.ask("next", {"tasks": number})) is not None:
            yield Task(**task)


class IsolatedSingle(_Isolated):
    """`contracts.producer.SingleTurn` of another process."""

    def prompt(self, task: Task) -> Any:
        return self._link.call("prompt", {"task": msgspec.to_builtins(task)})

    def score(self, task: Task, completion: str) -> Any:
        return _outcome(self._link.call("score", {"task": msgspec.to_builtins(task), "completion": completion}))


class IsolatedMulti(_Isolated):
    """`contracts.producer.MultiTurn` of another process."""

    async def rollout(self, task: Task, session: Session) -> Any:
        return _outcome(await self._link.ask("rollout", {"task": msgspec.to_builtins(task)}, session))


class _StartedHere:
    _link: Link

    async def start(self, place: Place) -> None:
        await self._link.ask("start", {"place": msgspec.to_builtins(place)})

    async def close(self) -> None:
        try:
            await self._link.ask("close", {})
        finally:
            self._link.end()


class StartedSingle(IsolatedSingle, _StartedHere):
    """`IsolatedSingle` that is `Started` too."""


class StartedMulti(IsolatedMulti, _StartedHere):
    """`IsolatedMulti` that is `Started` too."""


_KINDS = {
    (IsolatedSingle, False): IsolatedSingle,
    (IsolatedMulti, False): IsolatedMulti,
    (IsolatedSingle, True): StartedSingle,
    (IsolatedMulti, True): StartedMulti,
}


def _outcome(answer: dict[str, Any]) -> Any:
    """An `Outcome`, or whatever else the producer answered."""
    return Outcome(**answer["outcome"]) if "outcome" in answer else answer["value"]
