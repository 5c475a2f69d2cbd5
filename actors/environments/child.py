"""One producer in a process of its own: `python child.py CONTRACTS NAME`, run by the interpreter that has it installed.

That interpreter needs the producer's distribution and msgspec, and nothing else of ours: `contracts` is loaded from the
directory CONTRACTS. Frames are a length of 4 bytes and JSON, requests from stdin and answers to what was stdout; what
the producer prints goes to stderr. The process ends when stdin does.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

# This file's directory comes first on the path, and its modules have the names of packages.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

LIMIT = 64 * 2**20


def load_contracts(directory: Path) -> Any:
    """`contracts.producer` from `directory`, which is not put on the path. Raises `ImportError`."""
    for name, file in (("contracts", "__init__.py"), ("contracts.producer", "producer.py")):
        spec = importlib.util.spec_from_file_location(
            name, directory / file, submodule_search_locations=[str(directory)] if file == "__init__.py" else None
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules["contracts.producer"]


def load_file(file: str, kind: str) -> Any:
    """Class `kind` of a module that is on no path."""
    spec = importlib.util.spec_from_file_location("sluice_producer", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sluice_producer"] = module
    spec.loader.exec_module(module)
    return getattr(module, kind)


class RemoteSession:
    """`contracts.producer.Session` whose turns are taken by the parent."""

    def __init__(self, child: Child, rollout: int) -> None:
        self._child = child
        self._rollout = rollout

    async def generate(self, prompt: str) -> Any:
        return self._child.contract.Completion(**await self._turn("generate", prompt=prompt))

    async def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Any:
        return self._child.contract.Completion(**await self._turn("chat", messages=messages, tools=tools))

    async def endpoint(self) -> Any:
        return self._child.contract.Endpoint(**await self._turn("endpoint"))

    async def _turn(self, turn: str, **args: Any) -> Any:
        return await self._child.ask({"turn": turn, "rollout": self._rollout, "args": args})


class Refused(Exception):
    """The parent's answer to a turn was an error."""


class Child:
    """The loop: one request, one task, one answer; turns of a rollout go the other way."""

    def __init__(self, contract: Any, out: int) -> None:
        self.contract = contract
        self._out = out
        self._producer: Any = None
        self._iterators: dict[int, AsyncIterator[Any]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._last = 0

    async def ask(self, request: dict[str, Any]) -> Any:
        """The parent's answer. Raises `Refused`, or `DataError` as the parent did."""
        self._last += 1
        number = self._last
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send({"ask": number, **request})
        try:
            return await future
        finally:
            del self._asked[number]

    def send(self, frame: dict[str, Any]) -> None:
        data = json.dumps(frame).encode()
        view = memoryview(len(data).to_bytes(4, "little") + data)
        while view:
            view = view[os.write(self._out, view) :]

    def take(self, frame: dict[str, Any]) -> None:
        """One frame of the parent."""
        if "answer" in frame:
            future = self._asked.get(frame["answer"])
            if future is not None and not future.done():
                self._settle(future, frame)
        elif "cancel" in frame:
            task = self._running.get(frame["cancel"])
            if task is not None:
                task.cancel()
        else:
            task = asyncio.ensure_future(self._serve(frame))
            self._running[frame["id"]] = task
            task.add_done_callback(lambda _: self._running.pop(frame["id"], None))

    def _settle(self, future: asyncio.Future[Any], frame: dict[str, Any]) -> None:
        if "error" not in frame:
            future.set_result(frame["value"])
        elif frame["data"]:
            future.set_exception(self.contract.DataError(frame["error"]))
        else:
            future.set_exception(Refused(frame["error"]))

    async def _serve(self, frame: dict[str, Any]) -> None:
        number = frame["id"]
        try:
            value = await getattr(self, f"do_{frame['do']}")(number, **frame["args"])
        except asyncio.CancelledError:
            return
        except Exception as error:
            data = isinstance(error, self.contract.DataError)
            name = "" if data else f"{type(error).__name__}: "
            self.send({"answer": number, "error": f"{name}{error}", "data": data})
            return
        try:
            self.send({"answer": number, "value": value})
        except (TypeError, ValueError) as error:
            self.send({"answer": number, "error": f"answered what is no JSON: {error}", "data": False})

    # --- what the parent may ask ---

    async def do_load(self, number: int, name: str, args: dict[str, Any], file: str | None, kind: str | None) -> Any:
        """The producer that is installed as `name`, else class `kind` of `file`."""
        group = self.contract.GROUP
        found = {entry.value: entry for entry in entry_points(group=group) if entry.name == name}
        if len(found) == 1:
            factory = next(iter(found.values())).load
        elif not found and file is not None and kind is not None:
            factory = functools.partial(load_file, file, kind)
        else:
            known = ", ".join(sorted({entry.name for entry in entry_points(group=group)})) or "none"
            raise LookupError(f"there are {len(found)} producers {name!r} in group {group!r}; it has {known}")
        self._producer = await asyncio.to_thread(lambda: factory()(**args))
        return {
            "contract": getattr(self._producer, "contract", None),
            "single": isinstance(self._producer, self.contract.SingleTurn),
            "multi": isinstance(self._producer, self.contract.MultiTurn),
            "started": isinstance(self._producer, self.contract.Started),
        }

    async def do_start(self, number: int, place: dict[str, Any]) -> None:
        await self._producer.start(self.contract.Place(**place))

    async def do_close(self, number: int) -> None:
        await self._producer.close()

    async def do_tasks(self, number: int, cursor: str | None, seed: int, split: str) -> int:
        self._iterators[number] = aiter(self._producer.tasks(cursor, seed, split))
        return number

    async def do_next(self, number: int, tasks: int) -> Any:
        task = await anext(self._iterators[tasks], None)
        if task is None:
            del self._iterators[tasks]
            return None
        if not isinstance(task, self.contract.Task):
            raise TypeError(f"tasks() yielded {type(task).__name__}, contracts.producer.Task is expected")
        return {"id": task.id, "payload": dict(task.payload), "cursor": task.cursor}

    async def do_forget(self, number: int, tasks: int) -> None:
        self._iterators.pop(tasks, None)

    async def do_prompt(self, number: int, task: dict[str, Any]) -> Any:
        return await asyncio.to_thread(self._producer.prompt, self.contract.Task(**task))

    async def do_score(self, number: int, task: dict[str, Any], completion: str) -> Any:
        return self._outcome(await asyncio.to_thread(self._producer.score, self.contract.Task(**task), completion))

    async def do_rollout(self, number: int, task: dict[str, Any]) -> Any:
        session = RemoteSession(self, number)
        return self._outcome(await self._producer.rollout(self.contract.Task(**task), session))

    def _outcome(self, value: Any) -> Any:
        if not isinstance(value, self.contract.Outcome):
            return {"value": value}
        fields = ("reward", "components", "mask", "info")
        return {"outcome": {name: getattr(value, name) for name in fields}}


async def main(contracts: Path) -> None:
    out = os.dup(1)
    os.dup2(2, 1)
    child = Child(load_contracts(contracts), out)
    reader = asyncio.StreamReader(limit=LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while True:
        try:
            size = int.from_bytes(await reader.readexactly(4), "little")
            child.take(json.loads(await reader.readexactly(size)))
        except asyncio.IncompleteReadError:
            return


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
    # Threads that a producer blocks must not keep the process.
    os._exit(0)
