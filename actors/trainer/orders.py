"""What the trainer tells its other ranks, and how: msgpack frames over a pair of pipes that nobody else holds.

A rank answers each order with one reply. The end of either pipe is the end of the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

import msgspec
import numpy as np

from actors.trainer.backend import Job, World
from actors.trainer.packing import Sample

LIMIT = 1 << 31
"""Bytes of one frame at most."""
_PREFIX = 8


class WireSample(msgspec.Struct, frozen=True, array_like=True):
    """A `Sample` as bytes."""

    ids: bytes
    loss_mask: bytes
    behaviour: bytes
    advantage: float
    lag: int
    group: int
    temperature: float


class Build(msgspec.Struct, frozen=True, tag="build"):
    """First order: make your part of the policy."""

    job: Job
    world: World


class Step(msgspec.Struct, frozen=True, tag="step"):
    samples: tuple[WireSample, ...]


class Score(msgspec.Struct, frozen=True, tag="score"):
    samples: tuple[WireSample, ...]


class Export(msgspec.Struct, frozen=True, tag="export"):
    pass


class Save(msgspec.Struct, frozen=True, tag="save"):
    path: str


class Load(msgspec.Struct, frozen=True, tag="load"):
    path: str


Order = Build | Step | Score | Export | Save | Load


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The order was carried out."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It was not, and this rank is of no use any more."""

    reason: str


Reply = Done | Failed

_encoder = msgspec.msgpack.Encoder()


def send(pipe: IO[bytes], message: Order | Reply) -> None:
    """Write one frame. Raises `OSError` if the other side is gone, `ValueError` if the frame is too long."""
    data = _encoder.encode(message)
    if len(data) > LIMIT:
        raise ValueError(f"an order of {len(data)} bytes exceeds {LIMIT}")
    pipe.write(len(data).to_bytes(_PREFIX, "big") + data)
    pipe.flush()


def orders(pipe: IO[bytes]) -> Order:
    """Read one order. Raises `EOFError` when the other side is gone."""
    return msgspec.msgpack.decode(_frame(pipe), type=Order)


def replies(pipe: IO[bytes]) -> Reply:
    """Read one reply. Raises `EOFError` when the other side is gone."""
    return msgspec.msgpack.decode(_frame(pipe), type=Reply)


def packed(samples: Sequence[Sample]) -> tuple[WireSample, ...]:
    """Samples as they travel."""
    return tuple(
        WireSample(
            sample.ids.astype("<i4").tobytes(),
            sample.loss_mask.astype(np.uint8).tobytes(),
            sample.behaviour.astype("<f4").tobytes(),
            sample.advantage,
            sample.lag,
            sample.group,
            sample.temperature,
        )
        for sample in samples
    )


def unpacked(samples: Sequence[WireSample]) -> list[Sample]:
    """What `packed` was given."""
    return [
        Sample(
            ids=np.frombuffer(sample.ids, dtype="<i4"),
            loss_mask=np.frombuffer(sample.loss_mask, dtype=np.uint8),
            behaviour=np.frombuffer(sample.behaviour, dtype="<f4"),
            advantage=sample.advantage,
            lag=sample.lag,
            group=sample.group,
            temperature=sample.temperature,
        )
        for sample in samples
    ]


def _frame(pipe: IO[bytes]) -> bytes:
    length = int.from_bytes(_exactly(pipe, _PREFIX), "big")
    if length > LIMIT:
        raise ValueError(f"a frame of {length} bytes exceeds {LIMIT}")
    return _exactly(pipe, length)


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError("the other side is gone")
    return data
