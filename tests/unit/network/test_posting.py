"""Answers over kept-alive connections: whole, in pieces, cut off, and such as are no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from actors import posting
from actors.posting import Disconnected, Poster, TooLong

WAIT_S = 30.0
OK = b"HTTP/1.1 200 OK\r\nX-Name: v\r\ncontent-type: text/event-stream; charset=x\r\ncontent-length: 3\r\n\r\nabc"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Speak = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Service:
    """Answers each request with the next of `answers`: bytes, or a coroutine that writes."""

    def __init__(self) -> None:
        self.answers: list[bytes | Speak] = []
        self.heads: list[bytes] = []
        self.accepted = 0
        self.open: set[asyncio.StreamWriter] = set()

    async def start(self) -> Service:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def close(self) -> None:
        self._server.close()
        for writer in self.open:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.open.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                await reader.readexactly(int(head.partition(b"content-length: ")[2].strip()))
                answer = self.answers.pop(0)
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.open.discard(writer)
            writer.close()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    found = await Service().start()
    yield found
    found.close()


@pytest.fixture
async def poster() -> AsyncIterator[Poster]:
    found = Poster(WAIT_S)
    yield found
    found.close()


async def ask(poster: Poster, service: Service, limit: int = 1000, headers: dict[str, str] | None = None) -> bytes:
    async with asyncio.timeout(WAIT_S), poster.post(service.url, "/x y", b"{}", headers) as reply:
        return await reply.whole(limit)


async def test_an_answer_is_the_same_wherever_its_bytes_are_split(poster: Poster, service: Service):
    for at in range(1, len(OK)):

        async def split(writer: asyncio.StreamWriter, at: int = at) -> None:
            writer.write(OK[:at])
            await asyncio.sleep(0)
            writer.write(OK[at:])

        service.answers = [split]
        async with poster.post(service.url, "/", b"") as reply:
            assert (reply.status, reply.headers["x-name"], reply.content_type) == (200, "v", "text/event-stream")
            assert await reply.whole(3) == b"abc"
    assert service.accepted == 1


async def test_a_request_carries_its_headers_and_an_escaped_path(poster: Poster, service: Service):
    service.answers = [OK]
    assert await ask(poster, service, headers={"x-a": "1"}) == b"abc"
    lines = service.heads[0].split(b"\r\n")
    assert lines[0] == b"POST /x%20y HTTP/1.1"
    assert b"x-a: 1" in lines
    assert b"host: " + service.url.removeprefix("http://").encode() in lines


async def test_as_many_connections_are_used_as_requests_run_at_a_time(poster: Poster, service: Service):
    async def both(writer: asyncio.StreamWriter) -> None:
        while service.accepted < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        writer.write(OK)

    service.answers = [both, both, OK, OK]
    assert await asyncio.gather(ask(poster, service), ask(poster, service)) == [b"abc", b"abc"]
    assert [await ask(poster, service), await ask(poster, service)] == [b"abc", b"abc"]
    assert service.accepted == 2


@pytest.mark.parametrize("why", ["idle for long", "closed by the server", "told to close"])
async def test_a_connection_that_is_of_no_use_any_more_is_not_used(
    poster: Poster, service: Service, monkeypatch: pytest.MonkeyPatch, why: str
):
    service.answers = [OK.replace(b"X-Name: v", b"connection: close") if why == "told to close" else OK, OK]
    await ask(poster, service)
    if why == "idle for long":
        monkeypatch.setattr(posting, "KEEPALIVE_S", -1.0)
    elif why == "closed by the server":
        for writer in service.open:
            writer.close()
        async with asyncio.timeout(WAIT_S):
            while any(poster._idle.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    assert await ask(poster, service) == b"abc"
    assert service.accepted == 2


async def test_a_continue_comes_before_the_answer_and_is_none(poster: Poster, service: Service):
    service.answers = [b"HTTP/1.1 100 Continue\r\nx-name: w\r\n\r\n" + OK]
    async with poster.post(service.url, "/", b"") as reply:
        assert (reply.status, reply.headers["x-name"], await reply.whole(3)) == (200, "v", b"abc")


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.write(OK[:-1])
    writer.close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (closed, "closed before the end"),
        (b"nonsense\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", "no length"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000, "head of the answer exceeds"),
        (CHUNKED + b"nonsense", "no HTTP"),
    ],
)
async def test_what_is_no_whole_answer_is_an_error(poster: Poster, service: Service, answer: bytes | Speak, says: str):
    service.answers = [answer, OK]
    with pytest.raises(Disconnected, match=says):
        await ask(poster, service)
    assert await ask(poster, service) == b"abc"
    assert service.accepted == 2


async def test_what_follows_an_answer_is_never_taken_for_the_next(poster: Poster, service: Service):
    service.answers = [OK + OK.replace(b"abc", b"bad")[:-1], OK]
    assert await ask(poster, service) == b"abc"
    assert await ask(poster, service) == b"abc"

    async def later(writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await asyncio.sleep(0.01)
        writer.write(OK.replace(b"abc", b"bad"))

    service.answers = [later, OK]
    assert await ask(poster, service) == b"abc"
    async with asyncio.timeout(WAIT_S):
        while any(poster._idle.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await ask(poster, service) == b"abc"


async def test_an_answer_beyond_its_limit_or_left_unread_ends_its_connection(poster: Poster, service: Service):
    service.answers = [OK, CHUNKED + b"3\r\nabc\r\n", OK]
    with pytest.raises(TooLong, match="exceeds 2 bytes"):
        await ask(poster, service, limit=2)
    async with poster.post(service.url, "/", b"") as reply:
        assert reply.status == 200
    assert await ask(poster, service) == b"abc"
    assert service.accepted == 2  # the first answer was all there, the second was not


async def test_a_stream_is_read_no_faster_than_its_reader(
    poster: Poster, service: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(posting, "BACKLOG", 10)
    sent = 0

    async def stream(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED)
        while sent < 200:
            writer.write(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
            await writer.drain()
            sent += 1
        writer.write(b"0\r\n\r\n")

    service.answers = [stream, stream]
    async with asyncio.timeout(WAIT_S), poster.post(service.url, "/", b"") as reply:
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 200
        assert sum([len(chunk) async for chunk in reply.chunks()]) == 200 * 65_536
    sent = 0
    assert len(await ask(poster, service, limit=2**30)) == 200 * 65_536
    assert service.accepted == 1


async def test_a_stream_that_breaks_is_an_error_behind_what_came(poster: Poster, service: Service):
    async def broken(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"3\r\nabc\r\n")
        writer.close()

    service.answers = [broken]
    found = []

    async def read() -> None:
        async with asyncio.timeout(WAIT_S), poster.post(service.url, "/", b"") as reply:
            async for chunk in reply.chunks():
                found.append(chunk)

    with pytest.raises(Disconnected):
        await read()
    assert found == [b"abc"]


async def test_a_caller_that_is_cancelled_leaves_its_connection(poster: Poster, service: Service):
    asked = asyncio.Event()

    async def silent(writer: asyncio.StreamWriter) -> None:
        asked.set()

    service.answers = [silent]
    task = asyncio.create_task(ask(poster, service))
    async with asyncio.timeout(WAIT_S):
        await asked.wait()
        task.cancel()
        while service.open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert task.cancelled()


async def test_a_server_that_accepts_nobody_is_given_up(service: Service, monkeypatch: pytest.MonkeyPatch):
    async def never(*args: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    with pytest.raises(Disconnected, match="accepts no connection within"):
        await ask(Poster(0.02), service)


@pytest.mark.parametrize("base", ["https://a:1", "a:1", "http://a:1/v1", "http://"])
async def test_only_plain_servers_can_be_asked(poster: Poster, base: str):
    with pytest.raises(ValueError, match="http://HOST:PORT is due"):
        async with poster.post(base, "/", b""):
            pass


async def test_a_header_can_not_break_out_of_its_line(poster: Poster, service: Service):
    with pytest.raises(ValueError, match="can't stand in the head"):
        await ask(poster, service, headers={"x-a": "1\r\nx-b: 2"})
