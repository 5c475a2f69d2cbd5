"""The order of a run's log: entry `<n>-0` of any stream is its n-th event. A journal numbers its own records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from contracts.core import Entry

START = "0-0"
"""Cursor before the first entry."""


def number(entry: str) -> int:
    """`<n>-0` -> n."""
    return int(entry.partition("-")[0])


def numbers(entries: Iterable[Entry]) -> list[int]:
    """The place of each in the log; cheaper than `number` of each."""
    return [int(entry.entry[:-2]) for entry in entries]


def settled(entries: Sequence[Entry], page: int) -> list[Entry]:
    """One reading of several streams in the order of commits.

    A stream that answered a full `page` may have more, so what other streams hold beyond its end waits for the next
    reading.
    """
    streams: defaultdict[str, list[int]] = defaultdict(list)
    for entry in entries:
        streams[entry.stream].append(number(entry.entry))
    horizon = min((max(found) for found in streams.values() if len(found) >= page), default=None)
    kept = (entry for entry in entries if horizon is None or number(entry.entry) <= horizon)
    return sorted(kept, key=lambda entry: number(entry.entry))


def advance(cursors: Mapping[str, str], entries: Iterable[Entry]) -> dict[str, str]:
    """`cursors` moved behind `entries`."""
    return {**cursors, **{entry.stream: entry.entry for entry in entries}}
