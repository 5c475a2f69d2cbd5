"""The bus client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from contracts.core import Entry
from pipeline.bus import scripts, sizes
from pipeline.bus.errors import (
    BusError,
    Fenced,
    LeaseLostError,
    PayloadMissing,
    RegisterStale,
    SequenceConflict,
)
from pipeline.bus.keys import Keys
from pipeline.bus.letters import DeadLetters
from pipeline.bus.link import Link
from pipeline.bus.lua import Key
from pipeline.bus.model import Claimed, Commit, Committed, Depth, Followed, Lease, Limits, Received, Trimmed, WorkEntry
from pipeline.bus.packing import pack, unpack
from pipeline.bus.reading import ROOM, Reader, predecessor

DEFAULT_LIMITS = Limits()
FETCH = 32
"""Payloads asked for in one command."""
JOURNAL_PAGE = 1000
DEAD = 10_000
"""Entries that a dead-letter stream keeps."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[str]).decode


class Bus:
    """One actor's access to the store of one run.

    Safe for concurrent use by the tasks of one event loop. Every method waits out an outage of the store for
    `outage_s` and then raises BusUnavailable; what the store refuses for good is a BusError. `block_ms` is how long a
    read waits for something to arrive; None or 0 doesn't wait.
    """

    def __init__(self, link: Link, run: str, actor: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self.actor = actor
        self.keys = Keys(run)
        self.limits = limits
        self._link = link
        self._reader = Reader(link, self.keys, actor)
        self.dead = DeadLetters(link, self.keys)
        self._places = {
            "fences": Key(self.keys.fences),
            "cursors": Key(self.keys.cursors),
            "registers": Key(self.keys.registers),
            "order": Key(self.keys.order),
            "tails": Key(self.keys.tails),
            "released": Key(self.keys.released),
            "journal": Key(self.keys.journal(actor)),
            "snapshot": Key(self.keys.snapshot(actor)),
        }
        """Keys of every commit."""

    @classmethod
    async def connect(
        cls,
        url: str,
        run: str,
        *,
        actor: str,
        outage_s: float = 60.0,
        connect_s: float = 10.0,
        limits: Limits = DEFAULT_LIMITS,
    ) -> Bus:
        """Connect to `url` (a REDIS_URL, see `address.FORMS`).

        Raises BusError naming REDIS_URL without its password, the cause and the fix: a malformed URL, a refused login,
        a server older than 7.0 or one that evicts keys; BusUnavailable if it didn't answer within `connect_s`.
        """
        return cls(await Link.open(url, run, actor, outage_s, connect_s), run, actor, limits)

    async def close(self) -> None:
        await self._link.close()

    # --- writing ---

    async def boot(self) -> tuple[int, int]:
        """Start a boot of the actor: (its number, from 1; the last committed sequence number). Fences earlier ones."""
        boot, seq = await self._link.call(scripts.boot(Key(self.keys.fences), self.actor))
        return boot, seq

    async def commit(self, commit: Commit) -> Committed:
        """Write all of `commit` or nothing; exactly once, also if the connection is cut and the script sent again.

        Raises Fenced, SequenceConflict, LeaseLostError (with all lost leases), RegisterStale, in this order of
        checks; TooLarge before anything is sent; ValueError if the sequence numbers and journal don't fit.
        """
        sizes.check_commit(commit, self.limits)
        reply = await self._link.call(self._script(commit))
        match reply:
            case [b"FENCED", current]:
                raise Fenced(self.actor, commit.boot, current)
            case [b"CONFLICT", current]:
                raise SequenceConflict(self.actor, commit.seq_from, commit.seq_to, current)
            case [b"LOST", positions]:
                held = [*commit.leases, *commit.acks]
                lost = tuple(dict.fromkeys(held[position - 1] for position in positions))
                self._release(lost)
                raise LeaseLostError(self.actor, lost)
            case [b"STALE", name, value, current]:
                raise RegisterStale(name.decode(), value, current)
        answer, entries = reply
        self._release(commit.acks)
        return Committed(tuple(entry.decode() for entry in entries), answer == b"ALREADY")

    def _script(self, commit: Commit) -> Any:
        keys = self.keys
        return scripts.commit(
            **self._places,
            actor=self.actor,
            boot=commit.boot,
            seq_from=commit.seq_from,
            seq_to=commit.seq_to,
            leases=[self._lease(lease) for lease in commit.leases],
            acks=[self._lease(lease) for lease in commit.acks],
            raises=commit.registers,
            payloads=[(Key(keys.payload(id)), pack(data)) for id, data in commit.payloads],
            adds=[(Key(keys.stream(stream)), data) for stream, data in commit.adds],
            positions=[(position.stream, position.entry) for position in commit.cursors],
            records=commit.journal,
            releases=[_encode(commit.releases)] if commit.releases else [],
            states=[] if commit.snapshot is None else [commit.snapshot],
        )

    def _lease(self, lease: Lease) -> tuple[Key, str, str]:
        return Key(self.keys.stream(lease.stream)), lease.group, lease.entry

    def _release(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self._reader.release(lease.stream, lease.group, [lease.entry])

    async def advance(self, boot: int, cursors: Mapping[str, str]) -> None:
        """Store cursors without a step: new ones, and those that moved on over what was read and ignored.

        An actor stores its cursors before it says that it has booted, so that `trim` spares what it has yet to read.
        Raises Fenced.
        """
        keys = self.keys
        call = scripts.advance(Key(keys.fences), Key(keys.cursors), self.actor, boot, list(cursors.items()))
        current = await self._link.call(call)
        if current != boot:
            raise Fenced(self.actor, boot, current)

    async def post(self, stream: str, data: bytes) -> str:
        """Append one entry, for writers that are no actor (command line, driver); answers its id.

        At least once: if the connection is cut, the entry may appear twice.
        """
        sizes.check_size(f"an entry of {stream}", data, self.limits.entry)
        keys = self.keys
        call = scripts.post(Key(keys.order), Key(keys.tails), Key(keys.stream(stream)), data)
        return (await self._link.call(call)).decode()

    # --- work ---

    async def ensure_group(self, stream: str, group: str) -> None:
        """Create the consumer group, from the stream's first entry on, unless it exists."""
        try:
            await self._link.command("XGROUP", "CREATE", self.keys.stream(stream), group, "0", "MKSTREAM")
        except BusError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read_work(self, counts: Mapping[str, int], group: str, *, block_ms: int | None) -> list[WorkEntry]:
        """Take up to `counts[stream]` entries of each stream; with several streams, the smallest count holds for each.

        Own entries that this process never saw come first (after a boot, a cut connection, a cancelled call), with
        `deliveries` > 1; then new ones. Entries that are gone from the stream are left for `claim_idle` to report.
        """
        return (await self.receive(counts, group, {}, block_ms=block_ms)).work

    async def receive(
        self, counts: Mapping[str, int], group: str, cursors: Mapping[str, str], *, block_ms: int | None
    ) -> Received:
        """As `read_work`, and all that lies behind `cursors` of broadcast streams at the moment when the work is ours.

        So every broadcast event that was stored before a work entry is in `news`, or before `cursors`.
        """
        return await self._reader.work(counts, group, cursors, block_ms or 0)

    async def claim_idle(self, stream: str, group: str, min_idle_ms: int, count: int) -> Claimed:
        """Take over up to `count` entries that nobody renewed for `min_idle_ms`, and learn which are gone for good.

        Entries in this process's own hands are not handed out again.
        """
        return await self._reader.claim(stream, group, min_idle_ms, count)

    async def renew(self, stream: str, group: str, entries: Sequence[str]) -> list[str]:
        """Reset the idle time of entries in hand; answers those that are no longer ours or gone from the stream."""
        call = scripts.renew(Key(self.keys.stream(stream)), group, self.actor, entries)
        lost = [id.decode() for id in await self._link.call(call)]
        self._reader.release(stream, group, lost)
        return lost

    async def bury(self, stream: str, group: str, entry: str, *, reason: str, now: float) -> str:
        """Move an entry in hand to the dead-letter stream `dead:<stream>` and ack it; answers its id there.

        The newest 10,000 are kept there; an older one is left in the archive, under its `origin`.
        Its fields there: `e` (the data), `origin` (the id), `reason`, `at` (`now`, seconds), `deliveries`. Raises
        LeaseLostError if the entry is not ours, which is also the answer to a repeated call.
        """
        key, dead = Key(self.keys.stream(stream)), Key(self.keys.dead(stream))
        buried = await self._link.call(scripts.bury(key, dead, group, self.actor, entry, reason, now, DEAD))
        self._reader.release(stream, group, [entry])
        if buried is None:
            raise LeaseLostError(self.actor, [Lease(stream, group, entry)])
        return buried.decode()

    # --- broadcast ---

    async def read_after(self, cursors: Mapping[str, str], *, block_ms: int | None, count: int) -> list[Entry]:
        """Up to `count` entries of each stream behind its cursor (`0-0`: from the start), in the order of commits."""
        return (await self.follow(cursors, block_ms=block_ms, count=count)).entries

    async def follow(self, cursors: Mapping[str, str], *, block_ms: int | None, count: int) -> Followed:
        """As `read_after`, and what was deleted from the streams before this reader came to it.

        A deletion is seen as soon as a later entry of the stream is read; for the last one, see `tails`.
        """
        return await self._reader.after(cursors, block_ms or 0, count)

    async def catch_up(self, cursors: Mapping[str, str]) -> Followed:
        """All that lies behind the cursors now, read in pages: what one reply holds is bounded."""
        return await self._reader.behind(cursors)

    async def tails(self, streams: Sequence[str]) -> dict[str, str]:
        """The last id that each stream was ever given, whether or not it is still there; `0-0` for none."""
        if not streams:
            return {}
        found = await self._link.command("HMGET", self.keys.tails, *(self.keys.stream(stream) for stream in streams))
        return {s: tail.decode() if tail else "0-0" for s, tail in zip(streams, found, strict=True)}

    async def starts(self, streams: Sequence[str]) -> dict[str, str]:
        """Cursors just before the first entry that each stream still has: where a new reader begins."""
        tails = await self.tails(streams)
        rows = await self._link.pipeline(
            [["XRANGE", self.keys.stream(stream), "-", "+", "COUNT", 1] for stream in streams]
        )
        return {s: predecessor(row[0][1]) if row else tails[s] for s, row in zip(streams, rows, strict=True)}

    async def trim(self, stream: str, floor: str, readers: Sequence[str] = ()) -> Trimmed:
        """Delete entries below `floor` that every reader is done with.

        What stays: from each group's oldest pending (else next) entry on; what lies behind the stored cursor of any of
        the actors `readers` (none named: of any actor); a journal's records after its actor's snapshot.
        """
        keys = self.keys
        actor = stream.removeprefix("journal:")
        snapshots = [Key(keys.snapshot(actor))] if actor != stream else []
        call = scripts.trim(Key(keys.stream(stream)), Key(keys.cursors), f"/{stream}", floor, readers, snapshots)
        removed, first = await self._link.call(call)
        return Trimmed(removed, first.decode() or None)

    async def discard(self, upto: str) -> int:
        """Delete the payloads whose release lies at or before entry `upto` of the log; answers how many there were.

        To be called once everything up to `upto` is archived, with the payloads. May be cut short and repeated: a
        payload's id is never used again.
        """
        deleted, last = 0, upto.partition("-")[0]
        while True:
            page = await self._link.command("XRANGE", self.keys.released, "-", last, "COUNT", FETCH)
            if not page:
                return deleted
            ids = [id for _, fields in page for id in _decode(fields[1])]
            deleted += await self._link.command("UNLINK", *(self.keys.payload(id) for id in ids))
            await self._link.command("XDEL", self.keys.released, *(entry for entry, _ in page))

    # --- state ---

    async def payloads(self, keys: Sequence[str]) -> list[bytes]:
        """Payloads in the order of `keys`; the store holds them compressed.

        Raises PayloadMissing naming the first that is not there, BusError naming one that is damaged.
        """
        found: list[bytes] = []
        for start in range(0, len(keys), FETCH):
            part = keys[start : start + FETCH]
            values = await self._link.command("MGET", *(self.keys.payload(id) for id in part))
            for id, value in zip(part, values, strict=True):
                if value is None:
                    raise PayloadMissing(id)
                found.append(unpack(id, value))
        return found

    async def register(self, name: str) -> int:
        """A register's value, 0 if it was never raised."""
        return int(await self._link.command("HGET", self.keys.registers, name) or 0)

    async def snapshot(self, actor: str | None = None) -> tuple[int, bytes] | None:
        """(sequence number, state) of an actor's last snapshot, of this one by default; None if there is none."""
        key = self.keys.snapshot(actor or self.actor)
        seq, state = await self._link.command("HMGET", key, "seq", "state")
        return None if seq is None else (int(seq), state)

    async def journal(self, actor: str | None = None, *, after: int = 0) -> list[bytes]:
        """An actor's journal records, of this one by default, with sequence numbers above `after`, in order."""
        key = Key(self.keys.journal(actor or self.actor))
        records: list[bytes] = []
        last, more = f"{after}-0", 1
        while more:
            ((page, more),) = await self._link.call(scripts.page([(key, last, JOURNAL_PAGE)], ROOM))
            records += [fields[1] for _, fields in page]
            last = page[-1][0].decode() if page else last
        return records

    async def cursors(self, actor: str | None = None) -> dict[str, str]:
        """Stream -> id of the last broadcast entry that an actor, this one by default, has committed to have read."""
        mine = f"{actor or self.actor}/"
        stored = await self._link.command("HGETALL", self.keys.cursors)
        pairs = zip(stored[::2], stored[1::2], strict=True)
        texts = ((field.decode(), entry.decode()) for field, entry in pairs)
        return {field.removeprefix(mine): entry for field, entry in texts if field.startswith(mine)}

    async def put_config(self, data: bytes) -> None:
        """Store the run's configuration."""
        await self._link.command("SET", self.keys.config, data)

    async def get_config(self) -> bytes:
        """The run's configuration. Raises BusError if the store holds none."""
        data = await self._link.command("GET", self.keys.config)
        if data is None:
            raise BusError(f"{self.keys.config} is not set: the run was never started in this store, or was emptied")
        return data

    async def check_writable(self) -> None:
        """Raises BusError if the store takes no writes, as when its disk is full; changes nothing."""
        await self._link.command("SETRANGE", self.keys.config, 0, b"")

    async def memory(self) -> tuple[int, int]:
        """Bytes that the store uses, and its limit (0: none)."""
        info = await self._link.command("INFO", "memory")
        text = info.decode() if isinstance(info, bytes) else str(info)
        facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return int(facts.get("used_memory", 0)), int(facts.get("maxmemory", 0))

    async def depths(self, streams: Sequence[str], group: str | None = None) -> dict[str, Depth]:
        """How full the streams are and, with a group, how far behind it is (0 where it doesn't exist)."""
        lengths = await self._link.pipeline([["XLEN", self.keys.stream(stream)] for stream in streams])
        filled = [stream for stream, length in zip(streams, lengths, strict=True) if length and group]
        replies = await self._link.pipeline([["XINFO", "GROUPS", self.keys.stream(stream)] for stream in filled])
        behind = {stream: _behind(reply, group) for stream, reply in zip(filled, replies, strict=True)}
        return {s: Depth(length, *behind.get(s, (0, 0))) for s, length in zip(streams, lengths, strict=True)}


def _behind(reply: Sequence[Any], group: str | None) -> tuple[int, int | None]:
    """(pending, lag) of the group in a reply of XINFO GROUPS."""
    for item in reply:
        facts = dict(zip(item[::2], item[1::2], strict=True))
        if facts[b"name"].decode() == group:
            return facts[b"pending"], facts.get(b"lag")
    return 0, 0
