"""The sidecar's side of a colocated transfer: takes places of buckets from the trainer and has its server load them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from actors.engine.client import CallError
from actors.engine.state import Receive
from contracts.handles import LINE_LIMIT, Filled, Hello, Message, Refused, Taken, line, parse

SCHEME = "unix:"


class TransferBroke(Exception):
    """The trainer isn't there, went away, or says what can't be: names the bucket."""


async def take(
    command: Receive,
    engine: str,
    boot: int,
    count: int,
    load: Callable[[Sequence[str], float], Awaitable[None]],
    timeout: float,
) -> None:
    """`load` (parts, one a rank; seconds) `count` buckets of `command` within `timeout` seconds.

    Raises `TransferBroke`, `CallError` when the server refuses a bucket (the trainer is told), and `TimeoutError`.
    """
    give_up_at = time.monotonic() + timeout
    async with asyncio.timeout(timeout):
        reader, writer = await _connect(command.address)
        try:
            await _say(writer, Hello(engine, boot, command.epoch))
            for index in range(count):
                filled = await _filled(reader, index)
                try:
                    await load(filled.parts, give_up_at - time.monotonic())
                except CallError as error:
                    await _say(writer, Refused(index, str(error)))
                    raise
                await _say(writer, Taken(index))
        except OSError as error:
            raise TransferBroke(f"the trainer went away: {error}") from error
        finally:
            writer.close()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    path = address.removeprefix(SCHEME)
    if path == address:
        raise TransferBroke(f"the trainer offers weights at {address}: it has another refit.transport than ipc")
    try:
        return await asyncio.open_unix_connection(path, limit=LINE_LIMIT)
    except OSError as error:
        raise TransferBroke(
            f"no trainer at {path} ({error}): refit.transport=ipc needs trainer and engines on one host, as one user"
        ) from error


async def _say(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(line(message))
    await writer.drain()


async def _filled(reader: asyncio.StreamReader, index: int) -> Filled:
    try:
        data = await reader.readuntil(b"\n")
        message = parse(data)
    except asyncio.IncompleteReadError as error:
        raise TransferBroke(f"the trainer went away before bucket {index}") from error
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise TransferBroke(f"bucket {index}: not a message of the trainer: {error}") from error
    if not isinstance(message, Filled) or message.index != index:
        raise TransferBroke(f"the trainer said {type(message).__name__} where bucket {index} was due")
    return message
