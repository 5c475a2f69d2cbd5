"""Another process that folds an archive into parts of a `Drawing`, while this one folds what else there is.

`python -m pipeline.ui._ahead FOLDER DESCRIPTOR` writes each part to a pipe, behind its length; a length of 0 says that
the archive was read to its end, or up to what can't be read, which the reader finds too. It ends when nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from actors.recorder import archive
from actors.startup import uncollected
from pipeline.eventlog import BATCH, readable
from pipeline.ui._drawing import Drawing, Part
from pipeline.ui._slim import SLIM, slimmed

PROGRAM = ("-P", "-m", "pipeline.ui._ahead")
EVENTS = 8192
"""Events of a part."""
LONGEST = 1 << 28
"""Bytes of a part; more is none of ours."""
PIPE = 1 << 20
PART_S = 60.0
"""Longest time until the next part."""
END_S = 5.0

_length = struct.Struct("<Q")


class Ended(Exception):
    """The process is gone, or says nothing any more, and had not said that it was done."""


@contextlib.asynccontextmanager
async def ahead(folder: Path) -> AsyncIterator[AsyncIterator[Part]]:
    """The parts of the archive in `folder`, made by a process that ends with this context.

    The iterator raises `Ended`; so does entering, if no process can be started.
    """
    reading, writing = os.pipe()
    with contextlib.suppress(OSError, AttributeError):  # Linux has bigger pipes, of which a user may have only so much
        fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, PIPE)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *PROGRAM, str(folder), str(writing)),
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        os.close(reading)
        raise Ended(f"no process could be started: {error}") from error
    finally:
        os.close(writing)
    stream = asyncio.StreamReader(limit=PIPE)
    pipe = os.fdopen(reading, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        yield _parts(stream)
    finally:
        transport.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        async with asyncio.timeout(END_S):
            await process.wait()


async def _parts(stream: asyncio.StreamReader) -> AsyncIterator[Part]:
    decoder = msgspec.msgpack.Decoder(Part)
    try:
        while True:
            async with asyncio.timeout(PART_S):
                (length,) = _length.unpack(await stream.readexactly(_length.size))
                if not length:
                    return
                if length > LONGEST:
                    raise Ended(f"it wrote a part of {length} bytes")
                data = await stream.readexactly(length)
            yield decoder.decode(data)
    except asyncio.IncompleteReadError as error:
        raise Ended("it ended before the log did") from error
    except TimeoutError as error:
        raise Ended(f"it wrote nothing for {PART_S:g} s") from error
    except msgspec.DecodeError as error:
        raise Ended(f"it wrote what is no part: {error}") from error


# --- the process ---


def parts(folder: Path, events: int = EVENTS) -> Iterator[Part]:
    """The archive in `folder`, folded, `events` at a time; ends in front of what is damaged."""
    drawing, position, drained = Drawing(SLIM), 0, 0
    bad: list[int] = []
    try:
        for entries in archive.batches(archive.frames(folder), BATCH):
            batch = slimmed(entries, position)
            if batch is None:
                batch, unreadable = readable(entries, position)
                bad += unreadable
            position = max([position, *batch.positions[-1:], *bad[-1:]])
            drawing.extend(batch)
            if len(drawing.index) - drained >= events:
                drained = len(drawing.index)
                yield drawing.drain(position, bad)
                bad = []
    except (archive.ArchiveError, msgspec.DecodeError, OSError):
        pass  # the reader comes to it too, and says so
    yield drawing.drain(position, bad)


def main() -> None:
    folder, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    encoder = msgspec.msgpack.Encoder()
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as out, uncollected():
        for part in parts(folder):
            data = encoder.encode(part)
            out.write(_length.pack(len(data)) + data)
            out.flush()
        out.write(_length.pack(0))
        out.flush()


if __name__ == "__main__":
    main()
