"""Payloads as the store holds them: zstd, level 1. Masks and small numbers in wide fields cost next to nothing so."""

from __future__ import annotations

import zstandard

from pipeline.bus.errors import BusError

LEVEL = 1


def pack(data: bytes) -> bytes:
    """What `data` becomes in the store."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def unpack(id: str, data: bytes) -> bytes:
    """The payload that was packed. Raises BusError naming it if it is damaged."""
    try:
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise BusError(f"payload {id} is damaged in the store: {error}") from error
