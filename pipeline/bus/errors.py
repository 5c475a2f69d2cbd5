"""What the bus raises. Every message names the value and the fix."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.core import PayloadGone
from pipeline.bus.model import Lease


class BusError(Exception):
    """The store can't be used as asked; retrying won't help."""


class BusUnavailable(BusError):
    """The store could not be reached within the deadline. Safe to try again: nothing is half done."""


class Fenced(BusError):
    """A later boot of this actor has taken over; this process must end.

    `boot` is ours, `current` the store's (0: the store was emptied).
    """

    def __init__(self, actor: str, boot: int, current: int) -> None:
        self.actor, self.boot, self.current = actor, boot, current
        why = f"boot {current} has taken over" if current else "the store knows no boot of it, so it was emptied"
        super().__init__(f"{actor} boot {boot} is fenced: {why}; end this process")


class SequenceConflict(BusError):
    """The commit does not continue what the store holds. `current` is the store's last sequence number."""

    def __init__(self, actor: str, seq_from: int, seq_to: int, current: int) -> None:
        self.actor, self.seq_from, self.seq_to, self.current = actor, seq_from, seq_to, current
        super().__init__(
            f"{actor} commits {seq_from} -> {seq_to} but the store holds {current}: "
            "restart the actor from its snapshot and journal"
        )


class LeaseLostError(BusError):
    """Work entries named by a commit are not (or no longer) this actor's. Nothing was written."""

    def __init__(self, actor: str, leases: Sequence[Lease]) -> None:
        self.actor, self.leases = actor, tuple(leases)
        names = ", ".join(f"{lease.stream}/{lease.entry}" for lease in self.leases)
        super().__init__(f"{actor} no longer owns {names}: drop what was done for them and commit the rest")


class RegisterStale(BusError):
    """A register was to be raised to a value that is not above the stored one. Nothing was written."""

    def __init__(self, register: str, value: int, current: int) -> None:
        self.register, self.value, self.current = register, value, current
        super().__init__(f"register {register} is {current}, it can't be raised to {value}: another writer is ahead")


class PayloadMissing(BusError, PayloadGone):
    """A payload is not in the store: it was released, or never committed."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"payload {key} is not in the store: it was released, or never committed")


class TooLarge(BusError):
    """An entry, a payload or a snapshot is above the bus's limit; nothing was sent."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(
            f"{what} has {size:,} bytes, limit {limit:,}: make it smaller; docs/reference/limits.md says how"
        )
