"""Of each event only what is drawn: most of what an event holds is skipped, which costs less than to decode it.

An event of which another part can't be read passes here. Whoever folds what is drawn so compares notes with one who
decodes all of it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import msgspec

from actors.recorder.ordering import numbers
from contracts import events as ev
from contracts.core import Entry
from contracts.envelope import SCHEMA, STREAM_OF
from pipeline.eventlog import Batch
from pipeline.ui._timeline import Timeline


class Source(msgspec.Struct, frozen=True, gc=False):
    version: int


class Finished(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="trajectory.finished"):
    """What `Timeline` and `Samples` look at of a `TrajectoryFinished`."""

    index: int
    completion_tokens: int
    reward: float
    sources: tuple[Source, ...]
    seconds: float
    split: ev.Split = "train"


def _slim(kind: type) -> type:
    if kind is ev.TrajectoryFinished:
        return Finished
    if kind in Timeline().kinds:
        return kind
    return msgspec.defstruct(kind.__name__, (), tag_field="kind", tag=kind.__struct_config__.tag, frozen=True, gc=False)


SLIM = {_slim(kind): kind for kind in STREAM_OF}
"""What stands in for each kind."""
_STREAMS = {slim: STREAM_OF[kind] for slim, kind in SLIM.items()}
_Head = msgspec.defstruct(
    "Head",
    (
        ("id", str),
        ("actor", str),
        ("wall_ns", int),
        ("body", functools.reduce(operator.or_, SLIM)),
        ("causation_id", str | None, None),
        ("schema", int, SCHEMA),
    ),
    frozen=True,
    gc=False,
    kw_only=True,
)
_decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[_Head])  # pyright: ignore[reportInvalidTypeForm]


def slimmed(entries: Sequence[Entry], behind: int) -> Batch | None:
    """The batch of these entries; None if one does not lie behind the one before it, or can't be read."""
    positions = numbers(entries)
    if not entries or positions[0] <= behind or not all(map(operator.lt, positions, positions[1:])):
        return None
    try:
        data = [entry.data for entry in entries]
        found = _decoder.decode(b"".join((b"\xdd", len(data).to_bytes(4, "big"), *data)))
    except msgspec.DecodeError:
        return None
    streams = [entry.stream for entry in entries]
    if [_STREAMS[type(each.body)] for each in found] != streams or max([each.schema for each in found]) > SCHEMA:
        return None
    return Batch(entries, found, positions)
