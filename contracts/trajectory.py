"""A trajectory: what one sample of one task produced, token by token.

Arrays are little-endian bytes, so that a trajectory is encoded once and read anywhere without a copy of the numbers:
`ids` int32, `loss_mask` uint8, `logprobs` float32.
"""

from __future__ import annotations

import math
import struct
from typing import Literal

import msgspec

ENVIRONMENT = -1
"""Policy version of a span that no policy sampled."""


class TrajectoryError(ValueError):
    """A trajectory breaks an invariant: says which sequence, which field and where."""


class TokenSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a sequence that have one origin. Sampled spans name version, engine and its boot."""

    start: int
    end: int
    origin: Literal["sampled", "environment"]
    policy_version: int = ENVIRONMENT
    engine: str = ""
    boot: int = 0


class Sampling(msgspec.Struct, frozen=True):
    """Parameters the tokens were sampled with; the trainer divides its logits by the same temperature."""

    temperature: float
    max_new_tokens: int
    seed: int | None = None


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """One contiguous token sequence.

    `ids`: int32 [length]. `loss_mask`: uint8 [length], 1 where the token was sampled and is trained on. `logprobs`:
    float32 [length], natural log under the sampling distribution, 0 where not sampled. `spans` tile [0, length).
    """

    length: int
    ids: bytes
    loss_mask: bytes
    logprobs: bytes
    spans: tuple[TokenSpan, ...]
    sampling: Sampling
    stop_reason: str


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of one sample: (task, sample) is its identity, `attempt` says which try succeeded."""

    task: str
    index: int
    sample: int
    attempt: int
    reward: float
    components: dict[str, float]
    mask_reason: str | None
    sequences: tuple[Sequence, ...]
    info: dict[str, str] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Trajectory)


def encode(trajectory: Trajectory) -> bytes:
    """Encode to msgpack."""
    return _encoder.encode(trajectory)


def decode(data: bytes) -> Trajectory:
    """Decode and check. Raises `TrajectoryError`."""
    try:
        trajectory = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise TrajectoryError(f"not a trajectory: {error}") from error
    for number, sequence in enumerate(trajectory.sequences):
        check(sequence, f"task {trajectory.task} sample {trajectory.sample} sequence {number}")
    return trajectory


def check(sequence: Sequence, where: str) -> None:
    """Hold a sequence to its invariants: array lengths, spans that tile it, finite logprobs <= 0 where sampled.

    Raises `TrajectoryError` naming the field and the position.
    """
    sizes = {"ids": (sequence.ids, 4), "loss_mask": (sequence.loss_mask, 1), "logprobs": (sequence.logprobs, 4)}
    for name, (data, width) in sizes.items():
        if len(data) != width * sequence.length:
            raise TrajectoryError(f"{where}: {name} has {len(data)} bytes, {width * sequence.length} expected")
    position = 0
    for span in sequence.spans:
        if span.start != position or span.end <= span.start:
            raise TrajectoryError(f"{where}: span [{span.start}, {span.end}) does not continue at {position}")
        position = span.end
    if position != sequence.length:
        raise TrajectoryError(f"{where}: spans end at {position}, the sequence at {sequence.length}")
    _check_sampled(sequence, where)


def _check_sampled(sequence: Sequence, where: str) -> None:
    logprobs = struct.unpack(f"<{sequence.length}f", sequence.logprobs)
    for span in sequence.spans:
        for at in range(span.start, span.end):
            if span.origin == "environment" and sequence.loss_mask[at]:
                raise TrajectoryError(f"{where}: loss_mask is 1 at {at}, a token that no policy sampled")
            if span.origin == "sampled" and not (math.isfinite(logprobs[at]) and logprobs[at] <= 0.0):
                raise TrajectoryError(f"{where}: logprob {logprobs[at]} at {at} is not a finite number <= 0")
