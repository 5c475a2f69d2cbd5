"""How weights travel from the trainer's rank 0 to the engines. This module and `plan` are free of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from contracts.events import Bucket, TransferStarted
from contracts.weights import Checksum


class Offer(msgspec.Struct, frozen=True):
    """A frozen copy that can be sent: what `transfer.offered` says of it. `bytes` over all buckets.

    `digest` combines a `checksum` of each tensor. `note` is for the log.
    """

    address: str
    port: int
    buckets: tuple[Bucket, ...]
    bytes: int
    digest: str
    checksum: Checksum = "xxh3_128"
    note: str = ""


class Sent(msgspec.Struct, frozen=True):
    """Every bucket left rank 0. `seconds` of the broadcasts alone."""

    seconds: float
    bytes: int


class TransferError(Exception):
    """A transfer ended without success and its communicator is gone. `phase`: `offer`, `join` or `send`."""

    def __init__(self, phase: str, reason: str) -> None:
        super().__init__(reason)
        self.phase = phase
        self.reason = reason


class Sender(Protocol):
    """Rank 0 of a weight-update group. One transfer at a time; calls may come from any thread."""

    def offer(self, tensors: Iterable[tuple[str, Any]]) -> Offer:
        """Take (name, tensor) pairs that nobody changes any more, and open a meeting point for receivers.

        An earlier offer is replaced and a transfer that still runs is aborted. Raises `TransferError`.
        """
        ...

    def send(self, started: TransferStarted, timeout: float) -> Sent:
        """Join the group, or go on with the one that exists, and broadcast the offered buckets, in order.

        Blocks for at most `timeout` seconds, and one more for an abort. Raises `TransferError`; the group can't be
        used again then.
        """
        ...

    def abandon(self, epoch: int | None = None, reason: str = "") -> None:
        """Abort the transfer that runs, if it belongs to an epoch up to `epoch` (None: any). Idle groups stay.

        `reason` is why the epoch failed, where it did: an engine without memory for buckets is sent smaller ones.
        """
        ...

    def close(self) -> None:
        """Abort what runs and give everything back."""
        ...
