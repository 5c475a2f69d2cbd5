"""What a commit promises, whatever is behind it. Imported by the test modules, which provide `store`.

Store: `bus(actor, **limits)` opens a bus on the test's run; `command(*args)` runs a raw command, with `{name}` in place
of the full key of `name`; `keys()` answers all that the run has in it.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pipeline.bus import (
    Bus,
    Commit,
    Depth,
    Fenced,
    Lease,
    LeaseLostError,
    Limits,
    PayloadMissing,
    Position,
    RegisterStale,
    SequenceConflict,
    TooLarge,
)

GROUP = "readers"
_NAME = re.compile(r"\{(.+?)\}")
START = "0-0"


class Store:
    """A run in a store."""

    def __init__(self, opening: Callable[..., Awaitable[Bus]], raw: Any, prefix: str) -> None:
        self.bus = opening
        self._raw = raw
        self._prefix = prefix

    async def command(self, *args: Any) -> Any:
        words = (_NAME.sub(rf"{self._prefix}\1", word) if isinstance(word, str) else word for word in args)
        return await self._raw.execute_command(*words)

    async def keys(self) -> dict[bytes, Any]:
        """Everything the run has in the store."""
        keys = await self._raw.execute_command("KEYS", self._prefix + "*")
        return {key: await self._raw.execute_command("DUMP", key) for key in keys}


def step(boot: int, seq: int, **fields: Any) -> Commit:
    """A commit of one step, from `seq`."""
    return Commit(boot=boot, seq_from=seq, seq_to=seq + 1, journal=[f"record {seq + 1}".encode()], **fields)


async def booted(store: Store, actor: str) -> tuple[Bus, int]:
    bus = await store.bus(actor)
    return bus, (await bus.boot())[0]


async def working(store: Store, actor: str, entries: int = 1) -> tuple[Bus, int, list[str]]:
    """A booted actor that owns the first entries of `tasks`."""
    bus, boot = await booted(store, actor)
    await bus.ensure_group("tasks", GROUP)
    for number in range(entries):
        await bus.post("tasks", f"task {number}".encode())
    taken = await bus.read_work({"tasks": entries}, GROUP, block_ms=None)
    return bus, boot, [entry.entry for entry in taken]


async def refused(store: Store, bus: Bus, commit: Commit, error: type[Exception]) -> Any:
    """The error that `commit` raises; nothing in the store may change."""
    before = await store.keys()
    with pytest.raises(error) as raised:
        await bus.commit(commit)
    assert await store.keys() == before
    return raised.value


async def test_a_commit_writes_all_its_parts(store: Store) -> None:
    bus, boot, (task,) = await working(store, "a")
    await bus.commit(step(boot, 0, payloads=[("old", b"1")]))
    lease = Lease("tasks", GROUP, task)
    adds = [("out", b"one"), ("news", b"two"), ("out", b"three")]
    done = await bus.commit(
        Commit(
            boot=boot,
            seq_from=1,
            seq_to=3,
            journal=[b"second", b"third"],
            leases=[lease],
            acks=[lease],
            registers=[("version", 7), ("epoch", 2), ("version", 8)],
            payloads=[("p", b"\x00\xff")],
            adds=adds,
            cursors=[Position("news", "5-1")],
            releases=["old"],
            snapshot=b"state",
        )
    )
    assert not done.again
    found = await bus.read_after({"out": START, "news": START}, block_ms=None, count=10)
    assert {(e.stream, e.entry, e.data) for e in found} == {
        (stream, entry, data)
        for (stream, data), entry in zip(
            [("out", b"one"), ("news", b"two"), ("out", b"three")], done.entries, strict=True
        )
    }
    assert await bus.payloads(["p"]) == [b"\x00\xff"]
    assert [await bus.register(name) for name in ("version", "epoch", "never")] == [8, 2, 0]
    assert await bus.cursors() == {"news": "5-1"}
    assert await bus.snapshot() == (3, b"state")
    assert await bus.journal() == [b"record 1", b"second", b"third"]
    assert await bus.depths(["tasks"], GROUP) == {"tasks": Depth(length=1, pending=0, lag=0)}
    await bus.discard(done.entries[-1])
    with pytest.raises(PayloadMissing, match="payload old is not in the store"):
        await bus.payloads(["p", "old"])


async def test_a_commit_sent_again_is_applied_once_and_answers_the_first_ids(store: Store) -> None:
    bus, boot = await booted(store, "a")
    commit = step(boot, 0, adds=[("out", b"x"), ("out", b"y")], registers=[("version", 1)])
    first = await bus.commit(commit)
    before = await store.keys()
    second = await bus.commit(commit)
    assert (second.entries, second.again) == (first.entries, True)
    assert await store.keys() == before
    empty = step(boot, 1)
    assert (await bus.commit(empty)).entries == (await bus.commit(empty)).entries == ()


async def test_a_commit_of_an_earlier_boot_is_fenced(store: Store) -> None:
    old, boot = await booted(store, "a")
    new, later = await booted(store, "a")
    assert later == boot + 1
    error = await refused(store, old, step(boot, 0, adds=[("out", b"x")]), Fenced)
    assert (error.boot, error.current) == (boot, later)
    assert "boot 2 has taken over" in str(error)
    await new.commit(step(later, 0))
    error = await refused(store, old, step(boot, 0), Fenced)
    assert error.current == later


async def test_an_emptied_store_fences_everybody(store: Store) -> None:
    bus, boot = await booted(store, "a")
    await store.command("DEL", "{fences}")
    assert "it was emptied" in str(await refused(store, bus, step(boot, 0), Fenced))


async def test_of_two_boots_racing_only_the_later_one_writes(store: Store) -> None:
    old, first = await booted(store, "a")
    new = await store.bus("a")

    async def reboot() -> int:
        boot, seq = await new.boot()
        done = await new.commit(step(boot, seq, adds=[("out", f"{boot}".encode())]))
        return len(done.entries)

    async def go_on() -> int:
        for count in itertools.count():
            try:
                await old.commit(step(first, count, adds=[("out", f"{first}".encode())]))
            except Fenced:
                return count
        raise AssertionError

    wrote, added = await asyncio.gather(go_on(), reboot())
    found = await new.read_after({"out": START}, block_ms=None, count=10_000)
    assert [entry.data for entry in found] == [b"1"] * wrote + [b"2"] * added
    assert len(await new.journal()) == wrote + added


@pytest.mark.parametrize(("seq_from", "records"), [(0, 1), (0, 3), (1, 1), (3, 1)])
async def test_a_commit_that_does_not_continue_the_store_is_refused(store: Store, seq_from: int, records: int) -> None:
    bus, boot = await booted(store, "a")
    await bus.commit(Commit(boot=boot, seq_from=0, seq_to=2, journal=[b"1", b"2"]))
    commit = Commit(boot=boot, seq_from=seq_from, seq_to=seq_from + records, journal=[b"x"] * records)
    error = await refused(store, bus, commit, SequenceConflict)
    assert error.current == 2
    assert "the store holds 2" in str(error)


@pytest.mark.parametrize("journal", [[], [b"1"], [b"1", b"2", b"3"]])
async def test_a_journal_that_does_not_fit_the_sequence_is_refused_unsent(store: Store, journal: list[bytes]) -> None:
    bus, boot = await booted(store, "a")
    await refused(store, bus, Commit(boot=boot, seq_from=0, seq_to=2, journal=journal), ValueError)
    await refused(store, bus, Commit(boot=boot, seq_from=0, seq_to=0, journal=[]), ValueError)


async def test_lost_leases_refuse_the_commit_and_are_all_named(store: Store) -> None:
    a, boot, (mine, taken, acked, other) = await working(store, "a", entries=4)
    b = await store.bus("b")
    await store.command("XCLAIM", "{tasks}", GROUP, "b", 0, taken)
    await store.command("XCLAIM", "{tasks}", GROUP, "b", 0, other)
    await store.command("XACK", "{tasks}", GROUP, acked)
    commit = step(
        boot,
        0,
        adds=[("out", b"x")],
        leases=[Lease("tasks", GROUP, entry) for entry in (mine, taken, acked, "9-9")],
        acks=[Lease("tasks", GROUP, entry) for entry in (mine, taken, other)],
    )
    error = await refused(store, a, commit, LeaseLostError)
    assert [lease.entry for lease in error.leases] == [taken, acked, "9-9", other]
    assert f"tasks/{taken}" in str(error)
    await a.commit(step(boot, 0, leases=[Lease("tasks", GROUP, mine)]))
    await b.boot()
    await b.commit(step(1, 0, acks=[Lease("tasks", GROUP, taken)]))


async def test_an_ack_of_an_entry_that_nobody_owns_is_ignored(store: Store) -> None:
    bus, boot, (task,) = await working(store, "a")
    ack = Lease("tasks", GROUP, task)
    await bus.commit(step(boot, 0, acks=[ack]))
    await bus.commit(step(boot, 1, acks=[ack]))
    assert (await bus.depths(["tasks"], GROUP))["tasks"].pending == 0


@pytest.mark.parametrize("value", [4, 5])
async def test_a_register_only_rises(store: Store, value: int) -> None:
    bus, boot = await booted(store, "a")
    await bus.commit(step(boot, 0, registers=[("version", 5)]))
    error = await refused(store, bus, step(boot, 1, registers=[("epoch", 1), ("version", value)]), RegisterStale)
    assert (error.register, error.value, error.current) == ("version", value, 5)
    twice = step(boot, 1, registers=[("version", 9), ("version", 8)])
    assert (await refused(store, bus, twice, RegisterStale)).current == 9
    assert await bus.register("version") == 5


async def test_checks_come_in_the_order_fence_sequence_lease_register(store: Store) -> None:
    old, _ = await booted(store, "a")
    bus, boot, _ = await working(store, "a")
    await bus.commit(step(boot, 0, registers=[("version", 5)]))
    broken: dict[str, Any] = {"leases": [Lease("tasks", GROUP, "9-9")], "registers": [("version", 5)]}
    await refused(store, old, step(boot - 1, 7, **broken), Fenced)
    await refused(store, bus, step(boot, 7, **broken), SequenceConflict)
    await refused(store, bus, step(boot, 1, **broken), LeaseLostError)
    del broken["leases"]
    await refused(store, bus, step(boot, 1, **broken), RegisterStale)


async def test_a_snapshot_leaves_the_journal_to_the_archive(store: Store) -> None:
    bus, boot = await booted(store, "a")
    await bus.commit(step(boot, 0))
    await bus.commit(step(boot, 1, snapshot=b"two"))
    assert (await bus.snapshot(), len(await bus.journal())) == ((2, b"two"), 2)


async def test_a_boot_learns_the_last_committed_sequence(store: Store) -> None:
    bus, boot = await booted(store, "a")
    assert await bus.snapshot() is None
    assert await bus.journal() == []
    await bus.commit(Commit(boot=boot, seq_from=0, seq_to=2, journal=[b"1", b"2"]))
    assert await bus.boot() == (2, 2)


async def test_what_is_too_large_is_refused_unsent(store: Store) -> None:
    bus = await store.bus("a", limits=Limits(entry=10, payload=20, snapshot=30))
    boot, _ = await bus.boot()
    long, longer, longest = b"x" * 11, b"x" * 21, b"x" * 31
    cases: list[tuple[Commit, str]] = [
        (Commit(boot=boot, seq_from=0, seq_to=1, journal=[long]), "a journal record has 11 bytes, limit 10"),
        (step(boot, 0, adds=[("out", long)]), "an entry of out has 11 bytes, limit 10: make it smaller"),
        (step(boot, 0, payloads=[("p", longer)]), "payload p has 21 bytes, limit 20: make it smaller"),
        (step(boot, 0, snapshot=longest), "the snapshot has 31 bytes, limit 30: make it smaller; docs/"),
    ]
    for commit, text in cases:
        error = await refused(store, bus, commit, TooLarge)
        assert text in str(error)
    with pytest.raises(TooLarge):
        await bus.post("out", long)
    await bus.commit(step(boot, 0, adds=[("out", b"x" * 10)], payloads=[("p", b"x" * 20)], snapshot=b"x" * 30))
