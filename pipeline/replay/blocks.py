"""An archive as blocks: what lies where in it, so that a part is read without the rest.

What a block holds follows from the bytes of its file alone, so a table of the blocks of a file that is written to its
end is kept under the digest of these bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from actors.recorder import archive
from actors.recorder.ordering import numbers
from contracts.core import Entry
from pipeline.errors import Exit, PipelineError
from pipeline.replay.apart import hands, shared, side_by_side
from pipeline.replay.journals import JOURNAL

SIZE = 4096
"""Records of a block at least, where its file has as many."""
HELD = 6
"""Blocks that stay decoded."""
ALONE = 16 << 20
"""Bytes of files that this process looks through by itself."""

Made = TypeVar("Made")


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Whole frames that follow each other: bytes `start` to `end` of a file.

    `spans`: actor -> the first and the last of its steps that the block is about. In a log of events also the lowest
    and highest place, the latest time, and the ids that name no step; `first` is above `last` where it is not in order.
    In journals `gap`: actor -> the record that is missing and the one that was met instead.
    """

    start: int
    end: int
    records: int
    spans: dict[str, tuple[int, int]]
    first: int = 0
    last: int = 0
    latest_ns: int = 0
    strangers: tuple[str, ...] = ()
    gap: dict[str, tuple[int, int]] = {}


class Head(msgspec.Struct, frozen=True, gc=False):
    """What of an event says where it belongs."""

    id: str
    actor: str
    wall_ns: int


_heads = msgspec.msgpack.Decoder(list[Head])
_decoder = msgspec.msgpack.Decoder(dict[str, list[Block]])
Scan = Callable[[Sequence[Entry], int, int], Block]
"""A block of the records that lie between two places of a file."""


def step_of(id: str, actor: str) -> int | None:
    """The step that emitted an event, by its id; None if it names none."""
    name, _, rest = id.rpartition(":")
    seq, _, ordinal = rest.partition(".")
    return int(seq) if name == actor and seq.isdigit() and ordinal.isdigit() else None


def heads(entries: Sequence[Entry]) -> list[Head]:
    """The heads of events, by one call of the decoder, which costs less. Raises `msgspec.DecodeError`."""
    return _heads.decode(b"".join((b"\xdd", len(entries).to_bytes(4, "big"), *[entry.data for entry in entries])))


def of_events(entries: Sequence[Entry], start: int, end: int) -> Block:
    """A block of a log."""
    places = numbers(entries)
    try:
        found = heads(entries)
    except msgspec.DecodeError:  # whoever reads the whole log says what is wrong with it
        return Block(start, end, len(entries), {}, 1, 0)
    steps: defaultdict[str, list[int]] = defaultdict(list)
    strangers: list[str] = []
    for head in found:
        seq = step_of(head.id, head.actor)
        if seq is None:
            strangers.append(head.id)
        else:
            steps[head.actor].append(seq)
    spans = {actor: (min(seqs), max(seqs)) for actor, seqs in steps.items()}
    first, last = (places[0], places[-1]) if all(map(int.__lt__, places, places[1:])) else (1, 0)
    latest = max(head.wall_ns for head in found)
    return Block(start, end, len(entries), spans, first, last, latest, tuple(strangers))


def of_journals(entries: Sequence[Entry], start: int, end: int) -> Block:
    """A block of journals; what else is archived beside them is left out."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for entry, seq in zip(entries, numbers(entries), strict=True):
        found[entry.stream].append(seq)
    steps = {name.removeprefix(JOURNAL): seqs for name, seqs in found.items() if name.startswith(JOURNAL)}
    spans = {actor: (seqs[0], seqs[-1]) for actor, seqs in steps.items()}
    gaps = {actor: next(((a + 1, b) for a, b in pairwise(seqs) if b != a + 1), None) for actor, seqs in steps.items()}
    return Block(start, end, len(entries), spans, gap={actor: gap for actor, gap in gaps.items() if gap is not None})


class Blocks(Generic[Made]):
    """The blocks of the archive in `folder`, in order. `make` is what is made of the entries of a block that is read.

    `known`: tables of earlier looks, by the digest of a file; `tables`: those of the files that there are and that are
    written to their end. Raises `PipelineError` if a file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        scan: Scan,
        make: Callable[[list[Entry]], Made],
        known: Mapping[bytes, list[Block]],
    ) -> None:
        with reading():
            parts = archive.parts(folder)
        digests = [None if part.bytes is None else _digest(part.path, part.bytes) for part in parts]
        new = [part for part, digest in zip(parts, digests, strict=True) if digest is None or digest not in known]
        made = _made(new, scan)
        self.tables: dict[bytes, list[Block]] = {}
        self._where: list[Path] = []
        self.blocks: list[Block] = []
        self.chains: list[bytes | None] = []
        """For each block, a digest of all that the archive holds up to the end of its file; None in an open one."""
        chain = b""
        for part, digest in zip(parts, digests, strict=True):
            table = made[part.path] if part.path in made else known[digest or b""]
            if digest is not None:
                self.tables[digest] = table
                chain = hashlib.blake2b(chain + digest, digest_size=16).digest()
            self._where += [part.path] * len(table)
            self.blocks += table
            self.chains += [None if digest is None else chain] * len(table)
        self.at = lru_cache(HELD)(lambda number: make(self._read(number)))
        """What was made of a block, by its number."""

    @property
    def closed(self) -> int:
        """How many blocks, the first ones, are of files that are written to their end."""
        return len(self.chains) - self.chains.count(None)

    def _read(self, number: int) -> list[Entry]:
        block, path = self.blocks[number], self._where[number]
        with reading():
            found = list(archive.between(path, block.start, block.end))
        if len(found) != block.records:
            raise PipelineError(f"{path} was changed while it was read: ask again", Exit.FAILED)
        return found

    def behind(self, actor: str) -> Reached:
        """How far the steps of an actor reach at the end of each block."""
        return Reached([block.spans.get(actor, (0, 0))[1] for block in self.blocks])


class Reached:
    """The last step of one actor at the end of each block; `numbers` may be 0 where a block has none."""

    def __init__(self, last: Sequence[int]) -> None:
        self._last = list(accumulate(last, max))

    @property
    def end(self) -> int:
        return self._last[-1] if self._last else 0

    def at(self, number: int) -> int:
        """The last step up to the end of this block."""
        return self._last[number]

    def block_of(self, seq: int) -> int:
        """The first block at whose end a step has been."""
        return bisect_left(self._last, seq)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Damage of an archive is told as people are told."""
    try:
        yield
    except archive.ArchiveError as error:
        raise PipelineError(str(error), Exit.FAILED) from error


def _digest(path: Path, size: int) -> bytes:
    """Of the bytes of a file that count; of a file that is missing, none that any has: reading it says so."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while size and (data := file.read(min(size, 1 << 20))):
                digest.update(data)
                size -= len(data)
    except FileNotFoundError:
        digest.update(b"missing")
    return digest.digest()


def _made(parts: Sequence[archive.Part], scan: Scan) -> dict[Path, list[Block]]:
    """The blocks of files that nothing is known of; many are shared out to several processes."""
    sizes = {number: part.bytes or 0 for number, part in enumerate(parts)}
    groups = shared(sizes, hands(sum(sizes.values()), ALONE)) if parts else []
    works = [partial(_tables, [parts[number] for number in group], scan) for group in groups]
    return {Path(path): table for data in side_by_side(works) for path, table in _decoder.decode(data).items()}


def _tables(parts: Sequence[archive.Part], scan: Scan) -> bytes:
    with reading():
        return msgspec.msgpack.encode({str(part.path): list(_cut(part, scan)) for part in parts})


def _cut(part: archive.Part, scan: Scan) -> Iterator[Block]:
    """The blocks of one file."""
    held: list[Entry] = []
    start = end = 0
    for records, end in part.frames():
        held += records
        if len(held) >= SIZE:
            yield scan(held, start, end)
            held, start = [], end
    if held:
        yield scan(held, start, end)
