"""`replay.index` in a run's directory: what earlier looks at its archive found out, so that a later one need not again.

Nothing in it is believed for its name or its age. The file counts as a whole if its digest is that of its content, and
if the code and the settings are those by which it was made; what a plug-in decided is not kept. Within it, what is
known of a file of the archive stands under the digest of that file, and a state under the digest of all files that its
inputs came from. So a look with it answers what a look without it does, and it can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import platform
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
import zstandard

from actors import atomic
from actors.buffer.samplers import SAMPLERS
from contracts.core import Core
from pipeline import rundir
from pipeline.replay import journals
from pipeline.replay.blocks import Block
from pipeline.rundir import RunDir
from pipeline.runtime.journal import Journal

NAME = "replay.index"
EVERY = 2048
"""Inputs of an actor between two of its states that are kept, at least."""
SHARE = 8
"""Bytes of archived journals that a byte of kept states must be worth."""
LEAST = 1 << 20
"""Bytes of states that are kept however small the journals are."""
BUFFER = "buffer"
"""The actor whose decisions may be those of a plug-in, its sampler."""


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The state of an actor after step `seq`. `chain`: of the journals up to the end of the file that holds it."""

    seq: int
    chain: bytes
    state: bytes


class Checked(msgspec.Struct, frozen=True, array_like=True):
    """All steps of an actor up to `seq` answer as recorded, given these files of journals and of events.

    `last_event`: the last block of events that was looked at. `absent` as in a `Verdict`.
    """

    seq: int
    journals: bytes
    events: bytes
    absent: tuple[str, ...]


class Content(msgspec.Struct):
    """What the file holds. `key`: of code and settings; `events`, `journals`: digest of a file -> its blocks."""

    key: bytes
    events: dict[bytes, list[Block]] = {}
    journals: dict[bytes, list[Block]] = {}
    states: dict[str, list[Mark]] = {}
    checked: dict[str, Checked] = {}


_decoder = msgspec.msgpack.Decoder(Content)


class Index:
    """The index of one run. `notes`: what a person should know of it, a line each."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._path = run, run / NAME
        self._key = _key(run)
        self.notes: list[str] = []
        self._read = b""
        self.content = self._load()

    def _load(self) -> Content:
        try:
            self._read = self._path.read_bytes()
            found = _opened(self._read)
        except FileNotFoundError:
            return Content(self._key)
        except (OSError, ValueError) as error:
            self.notes.append(f"{self._path} can't be used and is made anew: {error}")
            return Content(self._key)
        if found.key != self._key:
            self.notes.append(f"{self._path} was made by other code or for other settings: it is made anew")
            return Content(self._key)
        return found

    def save(self) -> None:
        """Keep what is known now, if that is more; states up to a share of the journals' size. A failure is noted."""
        if _plugged(self._run):
            self.content.states.pop(BUFFER, None)
            self.content.checked.pop(BUFFER, None)
        size = sum(file.stat().st_size for file in self._run.path.glob("journals/*.zst"))
        most = max(LEAST, size // SHARE)
        states = self.content.states
        while sum(len(mark.state) for marks in states.values() for mark in marks) > most:
            for actor, marks in states.items():
                states[actor] = marks[1::2]
        data = _sealed(self.content)
        if data == self._read:
            return
        try:
            atomic.write(self._path, data)
        except OSError as error:
            self.notes.append(f"{self._path} can't be written, so the next look begins anew: {error.strerror}")


class Known:
    """States of one actor in the index. `chain_of`: of the journals up to the file of a step; None if it is open."""

    def __init__(self, content: Content, actor: str, core: Core[Any], chain_of: Callable[[int], bytes | None]) -> None:
        self._reader, self._journal = journals.Reader(core), Journal(core)
        self._chain_of = chain_of
        marks = (mark for mark in content.states.get(actor, ()) if mark.chain == chain_of(mark.seq))
        self._marks = content.states[actor] = sorted(marks, key=attrgetter("seq"))

    def before(self, count: int) -> tuple[int, Any] | None:
        """The last state of those after at most so many steps, and after how many."""
        for mark in reversed(self._marks[: bisect_right(self._marks, count, key=attrgetter("seq"))]):
            state = self._reader.state(zstandard.decompress(mark.state))
            if state is not None:
                return mark.seq, state
        return None

    def offer(self, seq: int, state: Any) -> None:
        """Keep a state if none is near, and if its journal is archived for good."""
        chain = self._chain_of(seq)
        place = bisect_left(self._marks, seq, key=attrgetter("seq"))
        below = self._marks[place - 1].seq if place else 0
        above = self._marks[place].seq if place < len(self._marks) else seq + EVERY
        if chain is not None and seq - below >= EVERY <= above - seq:
            self._marks.insert(place, Mark(seq, chain, zstandard.compress(self._journal.snapshot(state))))


def _key(run: RunDir) -> bytes:
    """Of everything but the archive that decides what a fold of it comes to, and how it is written down."""
    info = run.info()
    made = [rundir.code(), platform.python_version(), msgspec.__version__, info.config, info.eras]
    return hashlib.blake2b(msgspec.msgpack.encode(made), digest_size=16).digest()


def _plugged(run: RunDir) -> bool:
    """Whether batches were chosen by a plug-in: `rundir.code` leaves it out, and nobody can tell if it has changed."""
    info = run.info()
    names = {config.get("buffer", {}).get("sampler") for config in (info.config, *(era.config for era in info.eras))}
    return not names <= {None, *SAMPLERS}


def _sealed(content: Content) -> bytes:
    data = msgspec.msgpack.encode(content)
    return hashlib.blake2b(data, digest_size=16).digest() + data


def _opened(data: bytes) -> Content:
    """Raises `ValueError` for what `_sealed` did not make."""
    if hashlib.blake2b(data[16:], digest_size=16).digest() != data[:16]:
        raise ValueError("it is damaged")
    return _decoder.decode(data[16:])
