"""What the bus takes and gives. Entries, payloads, journal records and snapshots are bytes, whatever they mean."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from contracts import limits
from contracts.core import Entry


class Limits(msgspec.Struct, frozen=True):
    """Sizes checked before anything is sent, in bytes."""

    entry: int = limits.ENTRY
    """One stream entry or journal record."""
    payload: int = limits.PAYLOAD
    snapshot: int = limits.SNAPSHOT


class WorkEntry(msgspec.Struct, frozen=True):
    """An entry of a work stream, now owned by this actor. `deliveries` counts this delivery too, so it is >= 1."""

    stream: str
    entry: str
    data: bytes
    deliveries: int


class Lease(msgspec.Struct, frozen=True):
    """A work entry as a consumer group's member holds it."""

    stream: str
    group: str
    entry: str


class Position(msgspec.Struct, frozen=True):
    """How far this actor has read a broadcast stream."""

    stream: str
    entry: str


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One transaction of an actor: all of it is written, or nothing.

    Invariants: `seq_to > seq_from`, and `journal` holds one record for each of `seq_from + 1 .. seq_to`. An acked entry
    that another actor owns counts as a lost lease; one that nobody owns is ignored.
    """

    boot: int
    seq_from: int
    """The last committed sequence number, as this actor knows it."""
    seq_to: int
    journal: Sequence[bytes]
    leases: Sequence[Lease] = ()
    """Entries that must still be this actor's."""
    registers: Sequence[tuple[str, int]] = ()
    """Registers to raise, each above its stored value; values below 2**53."""
    payloads: Sequence[tuple[str, bytes]] = ()
    adds: Sequence[tuple[str, bytes]] = ()
    """(stream, entry) in the order of the streams."""
    acks: Sequence[Lease] = ()
    cursors: Sequence[Position] = ()
    releases: Sequence[str] = ()
    """Payloads that nobody needs any more; `Bus.discard` deletes them once the log up to here is archived."""
    snapshot: bytes | None = None
    """The state after `seq_to`."""


class Committed(msgspec.Struct, frozen=True):
    """`entries` are the ids of `Commit.adds`, in order. `again`: an earlier try had already been applied."""

    entries: tuple[str, ...]
    again: bool


class Claimed(msgspec.Struct, frozen=True):
    """Work taken over from idle readers. `deleted`: ids that were owed but are gone from the stream; data was lost."""

    entries: list[WorkEntry]
    deleted: list[str]


class Gap(msgspec.Struct, frozen=True):
    """Entries of `stream` behind `after` were deleted before they were read; `upto` is the last of them."""

    stream: str
    after: str
    upto: str


class Followed(msgspec.Struct, frozen=True):
    """What lies behind the cursors of a reader; `gaps`: what lay there and is gone, at most one a stream."""

    entries: list[Entry]
    gaps: list[Gap]


class Received(msgspec.Struct, frozen=True):
    """Work that is now ours, and what lay behind the cursors then."""

    work: list[WorkEntry]
    news: Followed


class Trimmed(msgspec.Struct, frozen=True):
    """`removed` entries; `first` is the id of the oldest one left, None if the stream is empty."""

    removed: int
    first: str | None


class Depth(msgspec.Struct, frozen=True):
    """`length` entries in the stream; of the group, `pending` unacked and `lag` undelivered ones (None: unknown)."""

    length: int
    pending: int
    lag: int | None
