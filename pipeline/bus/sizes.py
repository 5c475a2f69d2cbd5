"""What a commit must fulfil before it is sent: the same for every store."""

from __future__ import annotations

from pipeline.bus.errors import TooLarge
from pipeline.bus.model import Commit, Limits


def check_commit(commit: Commit, limits: Limits) -> None:
    """Raises ValueError if sequence numbers and journal don't fit together, `TooLarge` naming what is above a limit."""
    if commit.seq_to - commit.seq_from != len(commit.journal) or not commit.journal:
        raise ValueError(
            f"commit {commit.seq_from} -> {commit.seq_to} has {len(commit.journal)} journal records: "
            "it needs one for each number after seq_from, and at least one"
        )
    for record in commit.journal:
        check_size("a journal record", record, limits.entry)
    for stream, data in commit.adds:
        check_size(f"an entry of {stream}", data, limits.entry)
    for id, data in commit.payloads:
        check_size(f"payload {id}", data, limits.payload)
    if commit.snapshot is not None:
        check_size("the snapshot", commit.snapshot, limits.snapshot)


def check_size(what: str, data: bytes, limit: int) -> None:
    """Raises `TooLarge`."""
    if len(data) > limit:
        raise TooLarge(what, len(data), limit)
