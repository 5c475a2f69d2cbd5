"""Requests of HTTP/1.1 as they come over the wire: whole, in pieces, too large, malformed, abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from actors import answering
from actors.answering import Answering, Request

WAIT_S = 30.0
LIMIT = 1000


class Server:
    """Answers with what it was asked; `script` says what else to do at a path."""

    def __init__(self) -> None:
        self.unread_s = WAIT_S
        self.http = Answering(self.handle, LIMIT, lambda status, reason: reason.encode(), lambda: self.unread_s)
        self.seen: list[str] = []
        self.began, self.ended, self.go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(self, request: Request) -> None:
        name = request.path[-1]
        self.seen.append(name)
        match name:
            case "hang":
                self.began.set()
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    self.ended.set()
                    raise
                request.answer(200, b"went")
            case "fail":
                raise ValueError("on purpose")
            case "fail late":
                request.begin(200, "text/plain")
                raise ValueError("on purpose")
            case "flood":
                request.begin(200, "text/plain")
                try:
                    while True:
                        await request.write(b"x" * 65_536)
                finally:
                    self.ended.set()
            case "stream":
                request.begin(200, "text/plain")
                await request.write(b"ab")
                await request.write(b"")
                await request.write(b"c")
                await request.end()
            case _:
                request.answer(200, f"{request.method} {request.path} ".encode() + request.body)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    found.port = await found.http.start("127.0.0.1", 0)  # pyright: ignore[reportAttributeAccessIssue]
    yield found
    await found.http.close()


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port: int = server.port  # pyright: ignore[reportAttributeAccessIssue]
    return await asyncio.open_connection("127.0.0.1", port)


def request(path: str, body: bytes = b"", method: str = "POST", version: str = "1.1", more: str = "") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nhost: x\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body


LAST = "connection: close\r\n"


async def talk(server: Server, *pieces: bytes) -> bytes:
    """Send pieces one by one; everything that comes until the server closes."""
    reader, writer = await connect(server)
    async with asyncio.timeout(WAIT_S):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        found = await reader.read()
    writer.close()
    return found


def bodies(found: bytes) -> list[bytes]:
    """The bodies of answers with a length."""
    result = []
    while found:
        head, _, found = found.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        result.append(found[:length])
        found = found[length:]
    return result


async def test_a_request_is_the_same_wherever_its_bytes_are_split(server: Server):
    whole = request("/a%20b/c%2Fd?q=1", b"hello", more=LAST)
    for at in range(1, len(whole)):
        assert bodies(await talk(server, whole[:at], whole[at:])) == [b"POST ['', 'a b', 'c/d'] hello"]


async def test_requests_of_one_connection_are_answered_in_order_also_when_sent_at_once(server: Server):
    found = await talk(server, request("/1", b"a") + request("/2", b"b") + request("/3", b"c", more=LAST))
    assert [body[-1:] for body in bodies(found)] == [b"a", b"b", b"c"]
    found = await talk(server, request("/stream") + request("/4", b"d", more=LAST))
    head, _, rest = found.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert rest.startswith(b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\nHTTP/1.1 200 OK")


async def test_a_body_in_chunks_is_put_together(server: Server):
    head = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert bodies(await talk(server, head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")) == [b"POST ['', 'x'] abcde"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit_is_refused_before_all_of_it_has_come(server: Server, chunked: bool):
    if chunked:
        head = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        pieces = [head, *[b"400\r\n" + b"x" * 1024 + b"\r\n"] * 50]
    else:
        pieces = [request("/x", b"x" * 100_000)[:5000], *[b"x" * 1024] * 50]
    found = await talk(server, *pieces)
    assert found.startswith(b"HTTP/1.1 413 ")
    assert bodies(found) == [b"the body exceeds 1000 bytes"]
    assert server.seen == []


async def test_a_caller_that_asks_first_is_told_to_go_on(server: Server):
    reader, writer = await connect(server)
    async with asyncio.timeout(WAIT_S):
        writer.write(b"POST /x HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ab")
        assert (await reader.readuntil(b"ab")).startswith(b"HTTP/1.1 200 OK")
    writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"POST /x HTTP/1.1\r\ncontent-length: many\r\n\r\n", b"400"),
        (b"POST * HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", b"400"),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        (b"POST /x HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000, b"431"),
    ],
)
async def test_what_is_no_proper_request_is_answered_and_ends_the_connection(
    server: Server, sent: bytes, status: bytes
):
    assert (await talk(server, sent)).split(b" ")[1] == status
    assert server.seen == []


async def test_http_1_0_gets_no_chunks_and_a_head_no_body(server: Server):
    found = await talk(server, request("/stream", version="1.0"))
    assert found.partition(b"\r\n\r\n")[2] == b"abc"
    found = await talk(server, request("/x", method="HEAD", more=LAST))
    assert found.partition(b"\r\n\r\n")[2] == b""
    assert b"content-length: 15" in found


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_another_protocol_that_a_caller_offers_is_not_taken(server: Server, method: str):
    offer = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    body = b"ab" if method == "POST" else b""
    first = request("/x", body, method, more=offer)
    found = await talk(server, first + request("/y", b"c", more=LAST))
    assert bodies(found) == [f"{method} ['', 'x'] ".encode() + body, b"POST ['', 'y'] c"]


async def test_a_handler_that_fails_is_an_error_of_its_own_request_alone(server: Server):
    found = await talk(server, request("/fail") + request("/x", b"a", more=LAST))
    assert found.startswith(b"HTTP/1.1 500 ")
    assert bodies(found)[1] == b"POST ['', 'x'] a"
    assert b"0\r\n\r\n" not in await talk(server, request("/fail%20late"))


async def test_a_caller_that_sends_far_ahead_waits_and_is_answered_in_full(server: Server):
    reader, writer = await connect(server)
    async with asyncio.timeout(WAIT_S):
        writer.write(request("/hang") + b"".join(request(f"/{k}", b"x" * 100) for k in range(100)))
        writer.write(request("/last", more=LAST))
        await server.began.wait()
        (connection,) = server.http.connections
        while not connection._paused:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        server.go.set()
        found = bodies(await reader.read())
    assert len(found) == 102
    writer.close()


async def test_a_caller_that_hangs_up_ends_its_handler(server: Server):
    _, writer = await connect(server)
    writer.write(request("/hang") + request("/never"))
    async with asyncio.timeout(WAIT_S):
        await server.began.wait()
        writer.close()
        await server.ended.wait()
        while server.http.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert server.seen == ["hang"]


async def test_a_caller_that_does_not_read_is_cut_off(server: Server):
    server.unread_s = 0.1
    _, writer = await connect(server)
    writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
    writer.write(request("/flood"))
    async with asyncio.timeout(WAIT_S):
        await server.ended.wait()
    writer.close()


async def test_connections_that_are_idle_or_never_finish_their_request_are_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(answering, "IDLE_S", 0.0)
    monkeypatch.setattr(answering, "ARRIVE_S", 0.0)
    reader, writer = await connect(server)
    other, half = await connect(server)
    half.write(request("/x", b"abc")[:-1])
    _, busy = await connect(server)
    busy.write(request("/hang"))
    async with asyncio.timeout(WAIT_S):
        await server.began.wait()
        while len(server.http.connections) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        server.http._sweep()
        for each in (reader, other):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await each.readexactly(1)
    assert len(server.http.connections) == 1
    for each in (writer, half, busy):
        each.close()


async def test_the_end_of_the_server_lets_a_handler_finish(server: Server):
    reader, writer = await connect(server)
    writer.write(request("/hang"))
    async with asyncio.timeout(WAIT_S):
        await server.began.wait()
        closing = asyncio.create_task(server.http.close())
        await asyncio.sleep(0)
        server.go.set()
        assert (await reader.read()).endswith(b"went")
        await closing
    writer.close()


async def test_the_end_of_the_server_does_not_wait_for_ever(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(answering, "CLOSE_S", 0.05)
    _, writer = await connect(server)
    writer.write(request("/hang"))
    async with asyncio.timeout(WAIT_S):
        await server.began.wait()
        await server.http.close()
        await server.ended.wait()
    writer.close()
