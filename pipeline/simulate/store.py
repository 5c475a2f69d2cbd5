"""The store of a simulated run: the bus's semantics in plain Python, on virtual time.

`commit` answers and refuses exactly like the bus's (tests/contract/commit_conformance.py is run against both).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping

from actors.recorder import ordering
from contracts.core import Entry
from pipeline.bus import (
    Commit,
    Committed,
    Fenced,
    Lease,
    LeaseLostError,
    Limits,
    RegisterStale,
    SequenceConflict,
    WorkEntry,
    check_commit,
)
from pipeline.bus.sizes import check_size

LIMITS = Limits()


class Pending:
    """An entry that a consumer holds."""

    def __init__(self, consumer: str, since: float, deliveries: int = 1) -> None:
        self.consumer, self.since, self.deliveries = consumer, since, deliveries


class MemoryStream:
    """One stream and its consumer group."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, bytes]] = []
        self.next_new = 0
        self.pending: dict[int, Pending] = {}

    def copy(self) -> MemoryStream:
        other = MemoryStream()
        other.entries, other.next_new = list(self.entries), self.next_new
        for number, held in self.pending.items():
            other.pending[number] = Pending(held.consumer, held.since, held.deliveries)
        return other

    def after(self, entry: int) -> list[int]:
        """Numbers of the entries behind `entry`."""
        if not self.entries or self.entries[-1][0] <= entry:
            return []
        start = bisect_right(self.entries, entry, key=_number)
        return [number for number, _ in self.entries[start:]]


def _number(item: tuple[int, bytes]) -> int:
    return item[0]


class MemoryStore:
    """Streams, registers, journals, payloads of one run. Entry ids are `<n>-0`, n counting all entries of the run."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.streams: dict[str, MemoryStream] = defaultdict(MemoryStream)
        self.boots: dict[str, int] = defaultdict(int)
        self.seqs: dict[str, int] = defaultdict(int)
        self.registers: dict[str, int] = defaultdict(int)
        self.raised_at: dict[str, float] = {}
        """When each register rose last."""
        self.journals: dict[str, list[bytes]] = defaultdict(list)
        self.snapshots: dict[str, tuple[int, bytes]] = {}
        self.cursors: dict[str, dict[str, str]] = defaultdict(dict)
        self.payloads: dict[str, bytes] = {}
        self.archived: dict[str, bytes] = {}
        """Every payload that ever was."""
        self.replies: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.log: list[Entry] = []
        self.now = 0.0

    def copy(self) -> MemoryStore:
        """The store as it is now, as a file that was made durable at this moment."""
        other = MemoryStore(self.limits)
        for name, stream in self.streams.items():
            other.streams[name] = stream.copy()
        for field in ("boots", "seqs", "registers", "raised_at", "snapshots", "payloads", "archived", "replies"):
            getattr(other, field).update(getattr(self, field))
        for actor, records in self.journals.items():
            other.journals[actor] = list(records)
        for actor, cursors in self.cursors.items():
            other.cursors[actor] = dict(cursors)
        other.log, other.now = list(self.log), self.now
        return other

    def boot(self, actor: str) -> tuple[int, int]:
        """As `Bus.boot`."""
        self.boots[actor] += 1
        return self.boots[actor], self.seqs[actor]

    def commit(self, actor: str, commit: Commit) -> Committed:
        """As `Bus.commit`."""
        check_commit(commit, self.limits)
        boot, last = self.boots.get(actor, 0), self.seqs.get(actor, 0)
        if boot != commit.boot:
            raise Fenced(actor, commit.boot, boot)
        if last == commit.seq_to and self.replies[actor][0] == commit.seq_from:
            return Committed(entries=self.replies[actor][1], again=True)
        if last != commit.seq_from:
            raise SequenceConflict(actor, commit.seq_from, commit.seq_to, last)
        lost = [lease for lease in commit.leases if not self._owns(actor, lease)]
        lost += [ack for ack in commit.acks if self._owner(ack) not in (None, actor)]
        if lost:
            raise LeaseLostError(actor, tuple(dict.fromkeys(lost)))
        raised: dict[str, int] = {}
        for name, value in commit.registers:
            current = raised.get(name, self.registers.get(name, 0))
            if value <= current:
                raise RegisterStale(name, value, current)
            raised[name] = value
        self._apply(actor, commit)
        entries = tuple(self.add(stream, data) for stream, data in commit.adds)
        self.replies[actor] = (commit.seq_from, entries)
        return Committed(entries=entries, again=False)

    def _apply(self, actor: str, commit: Commit) -> None:
        self.seqs[actor] = commit.seq_to
        self.registers.update(commit.registers)
        self.raised_at.update((name, self.now) for name, _ in commit.registers)
        self.payloads.update(commit.payloads)
        self.archived.update(commit.payloads)
        for key in commit.releases:
            self.payloads.pop(key, None)
        for ack in commit.acks:
            self.streams[ack.stream].pending.pop(ordering.number(ack.entry), None)
        for position in commit.cursors:
            self.cursors[actor][position.stream] = position.entry
        self.journals[actor].extend(commit.journal)
        if commit.snapshot is not None:
            self.snapshots[actor] = (commit.seq_to, commit.snapshot)

    def add(self, stream: str, data: bytes) -> str:
        """Append one entry. Raises `TooLarge`."""
        check_size(f"an entry of {stream}", data, self.limits.entry)
        number = len(self.log) + 1
        self.streams[stream].entries.append((number, data))
        entry = f"{number}-0"
        self.log.append(Entry(stream, entry, data))
        return entry

    def _owner(self, lease: Lease) -> str | None:
        held = self.streams[lease.stream].pending.get(ordering.number(lease.entry))
        return None if held is None else held.consumer

    def _owns(self, actor: str, lease: Lease) -> bool:
        return self._owner(lease) == actor

    def read_after(self, cursors: Mapping[str, str]) -> list[Entry]:
        """Entries behind the cursors, in the order they were written."""
        found: list[int] = []
        for stream, cursor in cursors.items():
            found += self.streams[stream].after(ordering.number(cursor))
        return [self.log[number - 1] for number in sorted(found)]

    def read_own(self, stream: str, actor: str) -> list[WorkEntry]:
        """What `actor` holds, oldest first, as a new boot finds it."""
        data = dict(self.streams[stream].entries)
        held = sorted(n for n, pending in self.streams[stream].pending.items() if pending.consumer == actor)
        return [WorkEntry(stream, f"{n}-0", data[n], self.streams[stream].pending[n].deliveries) for n in held]

    def waiting(self, stream: str) -> int:
        """Entries that nobody got yet."""
        return len(self.streams[stream].entries) - self.streams[stream].next_new

    def read_new(self, stream: str, actor: str, count: int) -> list[WorkEntry]:
        """Up to `count` entries that nobody got yet."""
        source = self.streams[stream]
        taken = source.entries[source.next_new : source.next_new + count]
        source.next_new += len(taken)
        for number, _ in taken:
            source.pending[number] = Pending(actor, self.now)
        return [WorkEntry(stream, f"{number}-0", data, 1) for number, data in taken]

    def claim(self, stream: str, actor: str, idle_s: float, count: int) -> list[WorkEntry]:
        """Take over entries of other consumers that were idle for `idle_s`."""
        source, claimed = self.streams[stream], []
        data = dict(source.entries)
        for number, pending in sorted(source.pending.items()):
            if len(claimed) < count and pending.consumer != actor and self.now - pending.since >= idle_s:
                pending.consumer, pending.since = actor, self.now
                pending.deliveries += 1
                claimed.append(WorkEntry(stream, f"{number}-0", data[number], pending.deliveries))
        return claimed

    def hand_over(self, stream: str, entry: int, actor: str) -> WorkEntry:
        """Deliver an entry that somebody holds to `actor`: as after a lease that ran out, or a cut connection."""
        source = self.streams[stream]
        held = source.pending[entry]
        held.consumer, held.since, held.deliveries = actor, self.now, held.deliveries + 1
        return WorkEntry(stream, f"{entry}-0", dict(source.entries)[entry], held.deliveries)

    def renew(self, stream: str, actor: str) -> None:
        """Reset the idle time of everything `actor` holds."""
        for pending in self.streams[stream].pending.values():
            if pending.consumer == actor:
                pending.since = self.now
