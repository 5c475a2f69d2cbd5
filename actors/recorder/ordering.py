"""The order in which events of several streams were committed.

Entry ids are the store's milliseconds and a counter within their stream, so ids of two streams that share a millisecond
have no order. Then the emitter's clock decides: an event is stamped after the one that caused it was read.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from contracts.core import Entry

_stamp = msgspec.msgpack.Decoder(msgspec.defstruct("_Stamp", [("wall_ns", int, 0)]))


def order(entry: str) -> tuple[int, int]:
    """Sort key of an entry id `<ms>-<seq>` within its stream; journals count `<seq>-0`."""
    first, _, second = entry.partition("-")
    return int(first), int(second or 0)


def settled(entries: Sequence[Entry], page: int) -> list[Entry]:
    """Merge one reading of several streams into the order of commits, keeping the order within each stream.

    A stream that answered a full `page` may have more, so what other streams hold beyond its end waits for the next
    reading.
    """
    streams: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        streams[entry.stream].append(entry)
    horizon = min((order(found[-1].entry)[0] for found in streams.values() if len(found) >= page), default=None)
    kept = ([e for e in found if horizon is None or order(e.entry)[0] <= horizon] for found in streams.values())
    return list(heapq.merge(*kept, key=_key))


def advance(cursors: Mapping[str, str], entries: Iterable[Entry]) -> dict[str, str]:
    """`cursors` moved behind `entries`."""
    return {**cursors, **{entry.stream: entry.entry for entry in entries}}


def _key(entry: Entry) -> tuple[int, int]:
    try:
        stamp: int = getattr(_stamp.decode(entry.data), "wall_ns", 0)
    except msgspec.MsgspecError:
        stamp = 0
    return order(entry.entry)[0], stamp
