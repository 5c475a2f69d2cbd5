"""The journal: the order in which a core took its inputs, and what came out.

A journal record is what makes a restart possible (snapshot + journal) and a replay exact: it names the sequence number,
the `now` the core was given, the input, and a hash of the commands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from contracts.core import Booted, Core, Delivered, LeaseLost, Tick


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One input of a core. `commands` is the hash of what the step answered; `input` is its msgpack."""

    seq: int
    now: float
    commands: bytes
    input: msgspec.Raw


class JournalDiverged(RuntimeError):
    """Folding the journal gave other commands than were recorded: the core changed, or it is not pure."""


_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: repr(value))


def fingerprint(commands: Sequence[Any], written: Sequence[Any] | None = None) -> bytes:
    """8-byte hash of a step's commands: type names and fields, in order; `written`: what to encode in their stead."""
    digest = hashlib.blake2b(digest_size=8)
    for command, value in zip(commands, commands if written is None else written, strict=True):
        digest.update(type(command).__name__.encode())
        digest.update(_encoder.encode(value))
    return digest.digest()


class Journal:
    """Encodes and folds the inputs of one core."""

    def __init__(self, core: Core[Any]) -> None:
        self._core = core
        self._records = msgspec.msgpack.Decoder(Record)
        self._inputs = msgspec.msgpack.Decoder(Delivered | Booted | Tick | LeaseLost | core.local_type)
        self._states = msgspec.msgpack.Decoder(core.state_type)

    def record(self, seq: int, now: float, input: Any, commands: Sequence[Any]) -> bytes:
        """Encode one record."""
        raw = msgspec.Raw(_encoder.encode(input))
        return _encoder.encode(Record(seq, now, fingerprint(commands), raw))

    def read(self, data: bytes) -> tuple[Record, Any]:
        """A record and its decoded input."""
        record = self._records.decode(data)
        return record, self._inputs.decode(record.input)

    def snapshot(self, state: Any) -> bytes:
        return _encoder.encode(state)

    def fold(self, snapshot: tuple[int, bytes] | None, records: Iterable[bytes]) -> tuple[int, Any]:
        """The sequence number and state after `records`, starting from `snapshot` (sequence number, state).

        Raises `JournalDiverged` if a record is missing or a step answers other commands than it did.
        """
        seq, state = (0, self._core.initial()) if snapshot is None else (snapshot[0], self._states.decode(snapshot[1]))
        for data in records:
            record, input = self.read(data)
            if record.seq <= seq:
                continue
            if record.seq != seq + 1:
                raise JournalDiverged(f"journal jumps from {seq} to {record.seq}")
            state, commands = self._core.step(state, input, record.now)
            if fingerprint(commands) != record.commands:
                raise JournalDiverged(f"step {record.seq} ({type(input).__name__}) answers other commands than it did")
            seq = record.seq
        return seq, state
