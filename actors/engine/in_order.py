"""POSTs that a server performs one after another, the next of which is there before the one before is answered.

All go over one connection: HTTP/1.1 has what comes on one answered in order, and a server performs a POST only after it
has answered the one before. So no two of them can change places, as they could on two connections.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

HEAD_LIMIT = 65536
"""Bytes of an answer's head."""


class Broken(Exception):
    """The connection ended, or what came is no answer that can be read."""


class Answer(NamedTuple):
    status: int
    body: bytes


async def post(
    url: str,
    path: str,
    bodies: Iterable[bytes],
    ahead: int,
    timeout: float,
    limit: int,
    check: Callable[[Answer], None],
) -> None:
    """POST JSON `bodies` in order within `timeout` seconds, and `check` each answer; what that raises ends it.

    `ahead` of them are written before the one before them is answered; an answer has up to `limit` bytes. Raises
    `Broken`, `OSError` and `TimeoutError`. A body that has left may be performed even if this ends with an error.
    """
    target = urllib.parse.urlsplit(url)
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(target.hostname, target.port or 80, limit=HEAD_LIMIT)
        try:
            rest = iter(bodies)
            under_way = _write(writer, target.netloc, path, rest, ahead + 1)
            while under_way:
                answer, closes = await _next_answer(reader, limit)
                check(answer)
                under_way += _write(writer, target.netloc, path, rest, 1) - 1
                if closes and under_way:
                    raise Broken("the server closes the connection before it has answered everything")
        finally:
            writer.transport.abort()  # what is not sent by now shall not be


def _write(writer: asyncio.StreamWriter, host: str, path: str, bodies: Iterator[bytes], most: int) -> int:
    """Write up to `most` of them; how many there were. Nothing waits: a server need not read ahead."""
    count = 0
    while count < most and (body := next(bodies, None)) is not None:
        fields = f"host: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode() + body)
        count += 1
    return count


async def _next_answer(reader: asyncio.StreamReader, limit: int) -> tuple[Answer, bool]:
    """The next one, and whether the connection ends with it."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, status = lines[0].partition(" ")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        size = int(fields["content-length"])
        if version != "HTTP/1.1" or not 0 <= size <= limit:
            raise ValueError(f"{lines[0]!r} with {size} bytes, of at most {limit}")
        answer = Answer(int(status[:3]), await reader.readexactly(size))
    except asyncio.IncompleteReadError as error:
        raise Broken("the server closed the connection") from error
    except (asyncio.LimitOverrunError, ValueError, KeyError) as error:
        raise Broken(f"an answer that can't be read: {type(error).__name__}: {error}") from error
    return answer, fields.get("connection", "").lower() == "close"
