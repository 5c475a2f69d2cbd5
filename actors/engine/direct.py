"""The sidecar's side of refit.receiver=direct: what to tell the receiver in SGLang's processes, and what it answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from actors.engine.client import CallError, HttpEngineClient
from actors.engine.manifest import TIED
from contracts.events import Bucket

PREFIX = "sluice:"
CALL = "/update_weights_from_distributed"
MARGIN_S = 1.0
"""How much earlier than its caller the receiver gives up, at most: its answer has to get back."""
HELD = "Held: "
"""How the receiver begins when the scheduler is not through with requests that it has answered."""
HELD_S = 0.002
"""Pause before it is asked again."""


Parts = list[tuple[str, str, int]]
"""Slices of one rank: the tensor's name, which part of it, and that part's elements."""


class Answer(msgspec.Struct):
    """What one rank says. `parts`: its slices; `sums`: the checksum of each, in that order."""

    fallback: str
    phases: dict[str, float] = {}
    parts: Parts = []
    sums: list[str | None] | None = None
    flushed: bool = True


class Direct:
    """Commands to the receivers of one server. Every call raises `CallError`; timeouts are seconds."""

    def __init__(self, client: HttpEngineClient) -> None:
        self._client = client
        self._prepared: tuple[Bucket, ...] | None = None
        self._parts: list[Parts] = []
        self._whole: list[str] | None = None
        self._opened: tuple[str, ...] | None = None
        self.fallback = ""
        """Why the model goes through SGLang's own loader; empty when it doesn't."""

    @property
    def checks(self) -> bool:
        """Whether the receiver is there, and so takes nothing before the scheduler is idle."""
        return self._prepared is not None

    async def prepare(self, buckets: tuple[Bucket, ...], timeout: float) -> None:
        """Have every rank derive where the tensors go, unless that is known."""
        if buckets == self._prepared:
            return
        self._prepared = self._opened = None
        tensors = [spec for bucket in buckets for spec in bucket.tensors]
        told = {"do": "prepare", "counts": [len(bucket.tensors) for bucket in buckets]}
        answers = await self._tell(told, timeout, tensors=tensors)
        self.fallback = next((answer.fallback for answer in answers if answer.fallback), "")
        self._parts = [answer.parts for answer in answers]
        self._whole = whole(self._parts, buckets)
        self._prepared = buckets

    def checksums(self, answers: Sequence[Answer], buckets: Iterable[Bucket]) -> dict[str, str] | None:
        """The checksum of each tensor, of what all ranks say; None where that can't be told."""
        sums = answers[0].sums if self._whole is not None and len(answers) == 1 else None
        if self._whole is not None and sums is not None and len(sums) == len(self._whole):
            told = {name: value for name, value in zip(self._whole, sums, strict=True) if value is not None}
            if len(told) == len(sums):
                return told
        return merged(self._parts, [answer.sums for answer in answers], buckets)

    async def broadcast(self, group: str, version: str, timeout: float) -> list[Answer]:
        """Take everything that rank 0 of `group` broadcasts."""
        return await self._tell_idle({"do": "broadcast"}, timeout, group=group, version=version)

    def has_open(self, places: Sequence[str]) -> bool:
        """Whether every rank has this memory open. What was opened last is."""
        return tuple(places) == self._opened

    async def open(self, places: Sequence[str], timeout: float) -> None:
        """Have every rank open shared memory that it has not seen; nothing is loaded. `places` as in `copy`."""
        self._opened = None
        await self._tell({"do": "open", "places": _raw(places)}, timeout)
        self._opened = tuple(places)

    async def copy(self, places: Sequence[str], version: str, timeout: float) -> list[Answer]:
        """Take everything from shared memory. `places`: JSON, one a rank."""
        told = {"do": "copy", "places": _raw(places)}
        return await self._tell_idle(told, timeout, version=version)

    async def _tell_idle(self, told: Mapping[str, Any], timeout: float, **more: Any) -> list[Answer]:
        """Again and again while requests are held, which no rank has begun anything for."""
        give_up_at, left, held = time.monotonic() + timeout, timeout, None
        while True:
            try:
                return await self._tell({**told, "timeout": inner(left)}, left, **more)
            except CallError as error:
                if HELD not in str(error):
                    raise error if held is None or time.monotonic() < give_up_at else held from error
                held = error
            await asyncio.sleep(HELD_S)
            left = give_up_at - time.monotonic()
            if left <= 0:
                raise held

    async def _tell(self, told: Mapping[str, Any], timeout: float, **more: Any) -> list[Answer]:
        command = PREFIX + msgspec.json.encode(told).decode()
        message = await self._client.command(command, timeout, **more)
        if not message.startswith(PREFIX):
            raise CallError(CALL, 200, f"refit.receiver=direct is not in this server: it answers {message[:200]!r}")
        try:
            # SGLang adds a sentence about the version
            return msgspec.json.decode(message[len(PREFIX) : message.rindex("]") + 1], type=list[Answer])
        except (ValueError, msgspec.DecodeError) as error:
            raise CallError(CALL, 200, f"{error}: {message[:200]!r}") from error


def _raw(places: Sequence[str]) -> list[msgspec.Raw]:
    return [msgspec.Raw(place.encode()) for place in places]


def inner(timeout: float) -> float:
    """The receiver's own deadline for a call of `timeout`."""
    return timeout - min(MARGIN_S, timeout / 4)


def slowest(answers: Iterable[Answer]) -> dict[str, float]:
    """Seconds by phase, of the rank that took longest."""
    return max((answer.phases for answer in answers), key=lambda phases: sum(phases.values()), default={})


def whole(parts: Sequence[Parts], buckets: Iterable[Bucket]) -> list[str] | None:
    """Names of the tensors, in the order of `parts`, if one rank holds each whole and in one part; else None."""
    sizes = {spec.name: math.prod(spec.shape) for bucket in buckets for spec in bucket.tensors}
    if len(parts) != 1 or {name: count for name, _, count in parts[0]} != sizes or len(parts[0]) != len(sizes):
        return None
    return [name for name, _, _ in parts[0]]


def merged(
    parts: Sequence[Parts], sums: Sequence[Sequence[str | None] | None], buckets: Iterable[Bucket]
) -> dict[str, str] | None:
    """The checksum of each tensor from those of its parts on all ranks; None where that can't be told.

    A part that several ranks hold counts once, if they hold the same. Parts of a tensor add up to the whole.
    """
    specs = {spec.name: spec for bucket in buckets for spec in bucket.tensors}
    held: dict[str, dict[str, tuple[int, str]]] = {}
    for slices, values in zip(parts, sums, strict=True):
        if values is None or None in values or len(values) != len(slices):
            return None
        for (name, part, count), value in zip(slices, values, strict=True):
            assert value is not None
            if held.setdefault(name, {}).setdefault(part, (count, value)) != (count, value):
                return {}
    found: dict[str, str] = {}
    for name, own in held.items():
        if sum(count for count, _ in own.values()) == math.prod(specs[name].shape):
            found[name] = f"{sum(int(value, 16) for _, value in own.values()) % 2**64:016x}"
    if TIED[0] in specs and TIED[0] not in found and TIED[1] in found:  # one matrix, loaded under its other name
        found[TIED[0]] = found[TIED[1]]
    return found
