"""Calls of buckets are there ahead of their turn, and no server can perform them in another order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from actors.engine import in_order
from actors.engine.client import CallError, HttpEngineClient
from contracts.events import TensorSpec

BUCKETS = [(TensorSpec(name, "float32", (number + 1,)),) for number, name in enumerate("abcde")]
DONE = b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"success":true}'


@contextlib.asynccontextmanager
async def serving(handle: Callable[..., Awaitable[None]]) -> AsyncIterator[str]:
    """A server of `handle`, and its URL."""
    tasks: set[asyncio.Task[None]] = set()

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handle(reader, writer)
        writer.close()

    server = await asyncio.start_server(handled, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def request(reader: asyncio.StreamReader) -> dict[str, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return msgspec.json.decode(await reader.readexactly(size))


async def receive_all(url: str, flush: bool = False) -> None:
    client = HttpEngineClient(url)
    try:
        await client.receive_all(BUCKETS, "g", "7", 20.0, flush, 1)
    finally:
        await client.close()


class Swaps:
    """Performs the later one of two calls wherever it may: each connection's are answered in order."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.performed: list[dict[str, Any]] = []
        self._pending: list[tuple[asyncio.StreamWriter, dict[str, Any]]] = []
        self._came = asyncio.Lock()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            body = await request(reader)
            async with self._came:
                self._pending.append((writer, body))
                if len(self._pending) < 2 and len(self.performed) + 1 < self.total:
                    continue
                later = self._pending[-1][0]
                self._perform(next(call for call in self._pending if call[0] is later))
                while self._pending and len(self.performed) + len(self._pending) == self.total:
                    self._perform(self._pending[0])

    def _perform(self, call: tuple[asyncio.StreamWriter, dict[str, Any]]) -> None:
        self._pending.remove(call)
        self.performed.append(call[1])
        call[0].write(DONE)


async def test_a_server_that_swaps_what_it_can_loads_buckets_in_order() -> None:
    server = Swaps(len(BUCKETS))
    async with serving(server.handle) as url:
        await receive_all(url, flush=True)
    assert [call["names"] for call in server.performed] == [[name] for name in "abcde"]
    assert [call["flush_cache"] for call in server.performed] == [False] * 4 + [True]
    assert {(call["weight_version"], call["group_name"]) for call in server.performed} == {("7", "g")}


async def test_on_two_connections_that_server_does_swap() -> None:
    server = Swaps(2)
    async with serving(server.handle) as url:
        client = HttpEngineClient(url)
        first = asyncio.create_task(client.receive(BUCKETS[0], "g", "7", 20.0))
        while not server._pending:  # noqa: ASYNC110 - it is there before the second is sent
            await asyncio.sleep(0)
        await client.receive(BUCKETS[1], "g", "7", 20.0)
        await first
        await client.close()
    assert [call["names"] for call in server.performed] == [["b"], ["a"]]


@pytest.mark.parametrize("ahead", [0, 1, 2])
async def test_exactly_so_many_calls_are_there_before_the_one_before_them_is_answered(ahead: int) -> None:
    written = 0
    seen: list[tuple[int, int]] = []

    def bodies() -> Any:
        nonlocal written
        for number in range(5):
            written = number + 1
            yield str(number).encode()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: list[Any] = []
        for number in range(5):
            while len(there) < min(5, number + 1 + ahead):
                there.append(await request(reader))
            seen.append((there[number], written))
            writer.write(DONE)

    async with serving(handle) as url:
        await in_order.post(url, "/p", bodies(), ahead, 20.0, 100, lambda _: None)
    assert seen == [(number, min(5, number + 1 + ahead)) for number in range(5)]


async def test_the_first_refusal_ends_it_with_what_the_server_said() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        text = b'{"success":false,"message":"CUDA out of memory"}'
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))
        await reader.read()

    async with serving(handle) as url:
        with pytest.raises(CallError, match="CUDA out of memory") as caught:
            await receive_all(url)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{"success":false}', "false"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", "Expected `object`"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}", "can't be read"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "KeyError: 'content-length'"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 999999999\r\n\r\n", "999999999 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "-1 bytes"),
        (b"HTTP/1.1 x\r\ncontent-length: 0\r\n\r\n", "can't be read"),
        (b"h" * (in_order.HEAD_LIMIT + 1) + b"\r\n\r\n", "can't be read"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "closed the connection"),
        (b"", "closed the connection"),
        (DONE.replace(b"\r\n\r\n", b"\r\nConnection: Close\r\n\r\n"), "before it has answered everything"),
    ],
)
async def test_an_answer_that_is_none_and_a_connection_that_ends_are_told(answer: bytes, reason: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(answer)
        await writer.drain()

    async with serving(handle) as url:
        with pytest.raises(CallError, match=reason):
            await receive_all(url)


async def test_a_server_that_is_not_there_or_says_nothing_is_told_by_the_deadline() -> None:
    with pytest.raises(CallError, match="ConnectionRefusedError"):
        await receive_all("http://127.0.0.1:1")

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(silent) as url:
        client = HttpEngineClient(url)
        with pytest.raises(CallError, match=r"deadline of 0\.1 s"):
            await client.receive_all(BUCKETS, "g", "7", 0.1, flush=False, ahead=1)
        await client.close()


async def test_what_is_not_sent_when_it_ends_is_never_sent() -> None:
    """A bucket behind one that was refused would have the server wait in a collective that nobody else enters."""
    body, size, over, ended = b"x" * 2**25, 0, asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal size
        try:
            await over.wait()
            while data := await reader.read(2**20):
                size += len(data)
        finally:
            ended.set()

    async with serving(handle) as url:
        with pytest.raises(TimeoutError):
            await in_order.post(url, "/p", [body], 0, 0.2, 100, lambda _: None)
        over.set()
        await asyncio.wait_for(ended.wait(), 20)
    assert size < len(body)
