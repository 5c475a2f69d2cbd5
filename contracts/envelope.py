"""The envelope around every event, and its encoding.

An entry of a Redis stream holds one msgpack-encoded `Envelope`. Decoding is typed by stream: an event kind that does
not belong to the stream, or that this version does not know, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from contracts import events
from contracts.events import Event

SCHEMA = 1
"""Version of the envelope and of the event kinds; a reader refuses a newer one."""

Body = TypeVar("Body")


class ContractError(ValueError):
    """An entry can't be read as an event of its stream: says stream, entry and what is wrong with it."""


class Envelope(msgspec.Struct, Generic[Body], frozen=True, kw_only=True, gc=False):
    """One event and where it comes from.

    `id` is `<actor>:<seq>.<ordinal>`: the actor's journal sequence number of the input that caused the event, and the
    event's place among that input's outputs. It is never reused, over restarts either. `causation_id` names the event
    that the emitting step consumed, `correlation_id` the task or refit that it belongs to. `wall_ns` is
    nanoseconds since the Unix epoch, `mono_ns` the emitting host's monotonic clock.
    """

    id: str
    run: str
    stream: str
    actor: str
    boot: int
    epoch: int
    wall_ns: int
    mono_ns: int
    body: Body
    causation_id: str | None = None
    correlation_id: str | None = None
    schema: int = SCHEMA


STREAMS: Mapping[str, Any] = {
    "tasks": events.TasksEvent,
    "trajectories": events.TrajectoriesEvent,
    "batches": events.BatchesEvent,
    "ledger": events.LedgerEvent,
    "policy": events.PolicyEvent,
    "refit": events.RefitEvent,
    "fleet": events.FleetEvent,
    "control": events.ControlEvent,
    "waits": events.WaitsEvent,
}
"""Stream name -> union of the event kinds that it carries."""

WORK_STREAMS = ("tasks", "trajectories", "batches")
"""Streams read through consumer groups: each entry is work for one reader."""

BROADCAST_STREAMS = tuple(name for name in STREAMS if name not in WORK_STREAMS)
"""Streams that every reader sees whole, at its own cursor."""

_encoder = msgspec.msgpack.Encoder()
_all_decoder = msgspec.msgpack.Decoder(list[Envelope[Event]])
_decoders = {name: msgspec.msgpack.Decoder(Envelope[union]) for name, union in STREAMS.items()}  # pyright: ignore[reportInvalidTypeForm]


def _members(union: Any) -> tuple[type, ...]:
    return getattr(union, "__args__", (union,))


STREAM_OF: Mapping[type, str] = {kind: name for name, union in STREAMS.items() for kind in _members(union)}
"""Event kind -> the one stream it travels on."""


def encode(envelope: Envelope[Any]) -> bytes:
    """Encode to msgpack. Raises `ContractError` when the body's kind does not belong to `envelope.stream`."""
    home = STREAM_OF.get(type(envelope.body))
    if home != envelope.stream:
        raise ContractError(f"{type(envelope.body).__name__} belongs to stream {home!r}, not {envelope.stream!r}")
    return _encoder.encode(envelope)


def decode_all(streams: list[str], data: Sequence[bytes]) -> list[Envelope[Event]]:
    """What `decode` answers for each entry, by one call of the decoder, which costs less.

    Raises `ContractError` as `decode` does for the first that can't be read.
    """
    if not data:
        return []
    try:
        found = _all_decoder.decode(b"".join((b"\xdd", len(data).to_bytes(4, "big"), *data)))
    except msgspec.DecodeError:
        return [decode(stream, each) for stream, each in zip(streams, data, strict=True)]
    if [STREAM_OF[type(each.body)] for each in found] != streams or max(each.schema for each in found) > SCHEMA:
        return [decode(stream, each) for stream, each in zip(streams, data, strict=True)]
    return found


def decode(stream: str, data: bytes) -> Envelope[Event]:
    """Decode one entry of `stream`.

    Raises `ContractError` for an unknown stream, an unknown or foreign kind, a malformed body, or a newer schema.
    """
    if stream not in _decoders:
        raise ContractError(f"unknown stream {stream!r}; streams are {', '.join(STREAMS)}")
    try:
        envelope = _decoders[stream].decode(data)
    except msgspec.DecodeError as error:
        raise ContractError(f"stream {stream!r}: not an event of this stream: {error}") from error
    if envelope.schema > SCHEMA:
        raise ContractError(
            f"stream {stream!r}: event {envelope.id} has schema {envelope.schema}, newest known is {SCHEMA}"
        )
    return envelope
