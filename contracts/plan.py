"""What a transfer consists of, as it is kept beside the stream: `transfer.offered` names it, engines fetch it once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from contracts.events import Bucket

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Bucket, ...])


def encode(buckets: Sequence[Bucket]) -> bytes:
    """The payload of a plan; the same buckets make the same bytes."""
    return _encoder.encode(buckets)


def decode(data: bytes) -> tuple[Bucket, ...]:
    """The buckets of a plan, in order. Raises `ValueError` if it is none."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"no plan of a transfer: {error}") from error
