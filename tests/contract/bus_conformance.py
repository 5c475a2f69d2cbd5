"""What the bus promises, whatever server is behind it: what a commit does, and the rest.

Imported by the test modules, which provide `store` as `commit_conformance` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pipeline.bus import (
    Bus,
    BusError,
    Claimed,
    Commit,
    Depth,
    Fenced,
    Gap,
    Lease,
    LeaseLostError,
    Letter,
    Position,
    client,
    letters,
    reading,
)
from tests.contract.commit_conformance import *  # noqa: F403 - its tests are part of the suite
from tests.contract.commit_conformance import GROUP, START, Store, booted, step, working

# --- cursors ---


async def test_advance_moves_cursors_forward_only_and_is_fenced(store: Store) -> None:
    bus, boot = await booted(store, "a")
    await bus.commit(step(boot, 0, cursors=[Position("news", "5-1")]))
    await bus.advance(boot, {"news": "4-9", "fleet": "3-0"})
    assert await bus.cursors() == {"news": "5-1", "fleet": "3-0"}
    await bus.advance(boot, {"never": START})
    assert (await bus.cursors())["never"] == START
    await bus.advance(boot, {"news": "5-0", "fleet": "3-1", "never": START})
    assert await bus.cursors() == {"news": "5-1", "fleet": "3-1", "never": START}
    await bus.advance(boot, {"news": "6-0"})
    assert (await bus.cursors())["news"] == "6-0"
    new, _ = await booted(store, "a")
    with pytest.raises(Fenced):
        await bus.advance(boot, {"news": "9-9"})
    assert (await new.cursors())["news"] == "6-0"


# --- work ---


async def test_a_group_starts_at_the_first_entry_and_is_made_once(store: Store) -> None:
    bus = await store.bus("a")
    await bus.post("tasks", b"early")
    await bus.ensure_group("tasks", GROUP)
    assert [e.data for e in await bus.read_work({"tasks": 5}, GROUP, block_ms=None)] == [b"early"]
    await bus.ensure_group("tasks", GROUP)
    assert await bus.read_work({"tasks": 5}, GROUP, block_ms=None) == []


async def test_a_key_of_another_type_is_an_error_that_says_what_to_do(store: Store) -> None:
    bus = await store.bus("a")
    await store.command("SET", "{tasks}", "x")
    with pytest.raises(BusError, match="choose another run name or database"):
        await bus.ensure_group("tasks", GROUP)
    with pytest.raises(BusError, match="choose another run name or database"):
        await bus.depths(["news", "tasks"])


async def test_a_missing_group_is_an_error_that_says_what_to_do(store: Store) -> None:
    bus = await store.bus("a")
    with pytest.raises(BusError, match="store was emptied under the run"):
        await bus.read_work({"tasks": 1}, GROUP, block_ms=None)
    await bus.ensure_group("tasks", GROUP)
    await bus.read_work({"tasks": 1}, GROUP, block_ms=None)
    await store.command("XGROUP", "DESTROY", "{tasks}", GROUP)
    with pytest.raises(BusError, match="store was emptied under the run"):
        await bus.read_work({"tasks": 1}, GROUP, block_ms=None)


async def test_after_a_boot_own_unfinished_entries_come_first(store: Store) -> None:
    _, _, tasks = await working(store, "a", entries=3)
    again = await store.bus("a")
    await again.post("tasks", b"new")
    first = await again.read_work({"tasks": 2}, GROUP, block_ms=None)
    second = await again.read_work({"tasks": 2}, GROUP, block_ms=None)
    third = await again.read_work({"tasks": 2}, GROUP, block_ms=None)
    assert [e.entry for e in first + second] == tasks
    assert all(e.deliveries > 1 for e in first + second)
    assert [(e.data, e.deliveries) for e in third] == [(b"new", 1)]


async def test_deliveries_are_counted_over_boots_and_apart_from_other_readers(store: Store) -> None:
    _, _, (task,) = await working(store, "a")
    other = await store.bus("b")
    await other.post("tasks", b"another's")
    await other.read_work({"tasks": 5}, GROUP, block_ms=None)
    for deliveries in (2, 3):
        again = await (await store.bus("a")).read_work({"tasks": 5}, GROUP, block_ms=None)
        assert [(e.entry, e.deliveries) for e in again] == [(task, deliveries)]


async def test_unfinished_entries_come_again_however_many_there_are(store: Store) -> None:
    _, _, tasks = await working(store, "a", entries=230)
    again = await store.bus("a")
    taken = await again.read_work({"tasks": 220}, GROUP, block_ms=None)
    taken += await again.read_work({"tasks": 220}, GROUP, block_ms=None)
    assert [e.entry for e in taken] == tasks


async def test_streams_with_no_room_are_not_read(store: Store) -> None:
    bus, _, _ = await working(store, "a")
    await bus.post("tasks", b"x")
    assert await bus.read_work({"tasks": 0}, GROUP, block_ms=None) == []


async def test_several_work_streams_are_read_at_once(store: Store) -> None:
    bus = await store.bus("a")
    for stream in ("tasks", "batches"):
        await bus.ensure_group(stream, GROUP)
        await bus.post(stream, stream.encode())
    taken = await bus.read_work({"tasks": 2, "batches": 1}, GROUP, block_ms=None)
    assert {(e.stream, e.data) for e in taken} == {("tasks", b"tasks"), ("batches", b"batches")}


async def test_a_blocked_read_of_work_wakes(store: Store) -> None:
    bus, _, _ = await working(store, "a")
    reading = asyncio.create_task(bus.read_work({"tasks": 1}, GROUP, block_ms=5000))
    await asyncio.sleep(0)
    await (await store.bus("b")).post("tasks", b"late")
    assert [e.data for e in await reading] == [b"late"]


async def test_an_entry_whose_delivery_was_lost_comes_with_the_next_reading(store: Store) -> None:
    bus, _, (held,) = await working(store, "a")
    await bus.post("tasks", b"lost")
    await store.command("XREADGROUP", "GROUP", GROUP, "a", "STREAMS", "{tasks}", ">")
    assert await bus.read_work({"tasks": 5}, GROUP, block_ms=None) == []
    reading = asyncio.create_task(bus.read_work({"tasks": 5}, GROUP, block_ms=5000))
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    (entry,) = await bus.read_work({"tasks": 5}, GROUP, block_ms=None)
    assert (entry.data, entry.deliveries) == (b"lost", 2)
    assert entry.entry != held


async def age(store: Store, actor: str, entry: str, idle_ms: int = 60_000) -> None:
    """Make the entry look as if it had not been renewed for long."""
    await store.command("XCLAIM", "{tasks}", GROUP, actor, 0, entry, "IDLE", idle_ms, "JUSTID")


async def test_entries_left_idle_are_taken_over_up_to_the_count(store: Store) -> None:
    _, _, (first, second, third, fresh) = await working(store, "a", entries=4)
    for entry in (first, second, third):
        await age(store, "a", entry)
    b = await store.bus("b")
    claimed = await b.claim_idle("tasks", GROUP, 30_000, 2)
    assert [(e.entry, e.data, e.deliveries) for e in claimed.entries] == [(first, b"task 0", 2), (second, b"task 1", 2)]
    assert [e.entry for e in (await b.claim_idle("tasks", GROUP, 30_000, 9)).entries] == [third]
    assert await b.claim_idle("tasks", GROUP, 30_000, 9) == Claimed([], [])
    assert (await store.command("XPENDING", "{tasks}", GROUP, fresh, fresh, 1))[0][1] == b"a"


async def test_entries_in_hand_are_not_handed_out_again_when_idle(store: Store) -> None:
    bus, _, (task,) = await working(store, "a")
    await age(store, "a", task)
    assert await bus.claim_idle("tasks", GROUP, 30_000, 9) == Claimed([], [])


async def test_entries_deleted_while_owed_are_reported_once(store: Store) -> None:
    _, _, (gone, kept) = await working(store, "a", entries=2)
    await store.command("XDEL", "{tasks}", gone)
    again = await store.bus("a")
    assert [e.entry for e in await again.read_work({"tasks": 5}, GROUP, block_ms=None)] == [kept]
    assert await again.claim_idle("tasks", GROUP, 0, 9) == Claimed([], [gone])
    assert await again.claim_idle("tasks", GROUP, 0, 9) == Claimed([], [])


async def test_an_entry_that_is_gone_does_not_hide_the_next(store: Store) -> None:
    _, _, (gone, kept) = await working(store, "a", entries=2)
    await store.command("XDEL", "{tasks}", gone)
    claimed = await (await store.bus("b")).claim_idle("tasks", GROUP, 0, 1)
    assert ([e.entry for e in claimed.entries], claimed.deleted) == ([kept], [gone])


async def test_renewing_keeps_entries_from_being_taken_over(store: Store) -> None:
    bus, _, (mine, taken, gone) = await working(store, "a", entries=3)
    await age(store, "a", mine)
    await store.command("XCLAIM", "{tasks}", GROUP, "b", 0, taken)
    await store.command("XDEL", "{tasks}", gone)
    assert await bus.renew("tasks", GROUP, [mine, taken, gone, "9-9"]) == [taken, gone, "9-9"]
    ((_, owner, idle, deliveries),) = await store.command("XPENDING", "{tasks}", GROUP, mine, mine, 1)
    assert (owner, deliveries) == (b"a", 1)
    assert idle < 30_000


async def test_a_buried_entry_is_in_the_dead_letter_stream_and_acked(store: Store) -> None:
    bus, _, (task, gone) = await working(store, "a", entries=2)
    await store.command("XDEL", "{tasks}", gone)
    with pytest.raises(LeaseLostError):
        await (await store.bus("b")).bury("tasks", GROUP, task, reason="not mine", now=12.0)
    buried = await bus.bury("tasks", GROUP, task, reason="too often", now=12.5)
    await bus.bury("tasks", GROUP, gone, reason="gone", now=13.0)
    first, second = await store.command("XRANGE", "{dead:tasks}", "-", "+")
    assert first[0].decode() == buried
    fields = [b"e", b"task 0", b"origin", task.encode(), b"reason", b"too often", b"at", b"12.5", b"deliveries", b"1"]
    assert first[1] == fields
    assert second[1][:4] == [b"e", b"", b"origin", gone.encode()]
    assert (await bus.depths(["tasks"], GROUP))["tasks"].pending == 0
    with pytest.raises(LeaseLostError):
        await bus.bury("tasks", GROUP, task, reason="again", now=14.0)
    assert await store.command("XLEN", "{dead:tasks}") == 2


async def test_a_dead_letter_is_requeued_or_dropped_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "PAGE", 2)
    bus, _, tasks = await working(store, "a", entries=3)
    for number, task in enumerate(tasks):
        await bus.bury("tasks", GROUP, task, reason=f"reason {number}", now=2.5)
    first, second, third = await bus.dead.read("tasks")
    assert first == Letter("tasks", first.entry, tasks[0], "reason 0", 2.5, 1, b"task 0")
    again = await bus.dead.requeue("tasks", first.entry, b"changed")
    assert again == "4-0", "it has its place in the order of the log"
    assert [(e.entry, e.data) for e in await bus.read_work({"tasks": 9}, GROUP, block_ms=None)] == [(again, b"changed")]
    assert await bus.dead.requeue("tasks", first.entry, b"changed") is None
    assert await bus.read_work({"tasks": 9}, GROUP, block_ms=None) == []
    assert (await bus.dead.drop("tasks", second.entry), await bus.dead.drop("tasks", second.entry)) == (True, False)
    assert await bus.dead.read("tasks") == [third]
    await store.command("XDEL", "{tasks}", tasks[2])
    assert await bus.tails(["tasks"]) == {"tasks": again}
    gap = Gap("tasks", tasks[1], tasks[2])
    assert (await bus.follow({"tasks": tasks[1]}, block_ms=None, count=9)).gaps == [gap]


async def test_a_dead_letter_stream_keeps_the_newest(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "DEAD", 2)
    bus, _, tasks = await working(store, "a", entries=4)
    for task in tasks:
        await bus.bury("tasks", GROUP, task, reason="x", now=1.0)
    kept = await store.command("XRANGE", "{dead:tasks}", "-", "+")
    assert [fields[1] for _, fields in kept] == [b"task 2", b"task 3"]


# --- broadcast ---


async def test_broadcast_entries_are_read_behind_the_cursors(store: Store) -> None:
    bus = await store.bus("a")
    ids = [await bus.post("news", f"{n}".encode()) for n in range(4)]
    first = await bus.read_after({"news": START}, block_ms=None, count=3)
    assert [(e.stream, e.entry, e.data) for e in first] == [("news", ids[n], f"{n}".encode()) for n in range(3)]
    assert [e.entry for e in await bus.read_after({"news": ids[2]}, block_ms=10, count=3)] == ids[3:]
    assert await bus.read_after({"news": ids[3]}, block_ms=10, count=3) == []
    assert await bus.read_after({}, block_ms=10, count=3) == []


async def test_streams_are_merged_in_the_order_of_commits(store: Store) -> None:
    bus = await store.bus("a")
    for number, stream in enumerate(["news", "fleet", "news", "fleet"]):
        await store.command("XADD", f"{{{stream}}}", f"{number + 1}-0", "e", f"{number}")
    found = await bus.read_after({"fleet": START, "news": START}, block_ms=None, count=9)
    assert [e.data for e in found] == [b"0", b"1", b"2", b"3"]


async def test_a_deleted_entry_is_missed_when_a_later_one_is_read(store: Store) -> None:
    bus, boot = await booted(store, "a")
    first = await bus.post("news", b"1")
    done = await bus.commit(step(boot, 0, adds=[("news", b"2"), ("fleet", b"3"), ("news", b"4")]))
    second, _, third = done.entries
    fourth = await bus.post("news", b"5")

    async def gaps(cursor: str) -> list[Gap]:
        return (await bus.follow({"news": cursor, "fleet": START}, block_ms=None, count=9)).gaps

    assert await gaps(START) == []
    await store.command("XDEL", "{news}", third)
    assert await gaps(START) == [Gap("news", START, third)]
    assert await gaps(second) == [Gap("news", second, third)]
    assert await gaps(third) == [], "it was read in time"
    await store.command("XTRIM", "{news}", "MINID", third)
    assert await gaps(START) == [Gap("news", START, third)]
    assert await gaps(first) == [Gap("news", first, third)]
    assert (await bus.follow({}, block_ms=None, count=9)).gaps == []
    assert [e.entry for e in await bus.read_after({"news": START}, block_ms=None, count=9)] == [fourth]


async def test_each_entry_of_a_commit_is_missed(store: Store) -> None:
    bus, boot = await booted(store, "a")
    await bus.commit(step(boot, 0, adds=[("news", b"1")]))
    for seq in (1, 2):
        adds = [("news", b"x"), ("fleet", b"y"), ("news", b"z")]
        first, _, last = (await bus.commit(step(boot, seq, adds=adds))).entries
        before = (await bus.read_after({"news": START}, block_ms=None, count=9))[-3].entry
        await store.command("XDEL", "{news}", before)
        assert (await bus.follow({"news": START}, block_ms=None, count=1)).gaps == [Gap("news", START, before)]
        await store.command("XDEL", "{news}", first)
        assert (await bus.follow({"news": before}, block_ms=None, count=9)).gaps == [Gap("news", before, first)]
        assert (await bus.follow({"news": first}, block_ms=None, count=9)).gaps == []
        assert await bus.tails(["news"]) == {"news": last}


async def test_the_end_of_a_stream_is_known_after_it_was_deleted(store: Store) -> None:
    bus, boot = await booted(store, "a")
    await bus.commit(step(boot, 0, adds=[("news", b"1"), ("news", b"2")]))
    last = await bus.post("news", b"3")
    await store.command("XDEL", "{news}", last)
    assert await bus.tails(["news", "fleet"]) == {"news": last, "fleet": START}
    assert await bus.tails([]) == {}
    after = await bus.post("news", b"4")
    assert await bus.tails(["news"]) == {"news": after}
    assert (await bus.follow({"news": "2-0"}, block_ms=None, count=9)).gaps == [Gap("news", "2-0", last)]


async def test_a_new_reader_begins_behind_what_was_trimmed_and_misses_nothing(store: Store) -> None:
    bus = await store.bus("a")
    ids = [await bus.post("news", b"x") for _ in range(3)]
    assert await bus.starts(["news", "fleet"]) == {"news": START, "fleet": START}
    await store.command("XTRIM", "{news}", "MINID", ids[2])
    begun = await bus.starts(["news"])
    assert begun == {"news": ids[1]}
    found = await bus.follow(begun, block_ms=None, count=9)
    assert ([e.entry for e in found.entries], found.gaps) == (ids[2:], [])
    await store.command("XTRIM", "{news}", "MAXLEN", 0)
    assert await bus.starts(["news"]) == {"news": ids[2]}
    assert await bus.starts([]) == {}


async def test_entries_that_name_no_predecessor_are_read_without_a_word(store: Store) -> None:
    bus = await store.bus("a")
    await store.command("XADD", "{news}", "3-0", "e", "rebuilt")
    await store.command("XADD", "{news}", "7-0", "e", "rebuilt")
    await store.command("SET", "{order}", 7)
    assert (await bus.follow({"news": "2-0"}, block_ms=None, count=9)).gaps == []
    assert await bus.starts(["news"]) == {"news": START}
    await bus.post("news", b"first of its kind")
    assert (await bus.follow({"news": "3-0"}, block_ms=None, count=9)).gaps == []


# --- more than one reply holds ---


class Trips:
    """Counts what is sent together by a bus, and does `then()` behind the first of it."""

    def __init__(self, bus: Bus, then: Callable[[], Awaitable[Any]] | None = None) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.largest = 0
        """Of the replies, in characters of their text."""
        self._once, self._then = bus._link.once, then
        bus._link.once = self.once  # type: ignore[method-assign]

    async def once(self, *commands: Any) -> list[Any]:
        replies = await self._once(*commands)
        self.sent.append(tuple(command[0].replace("EVALSHA", "EVAL") for command in commands))
        self.largest = max(self.largest, *(len(repr(reply)) for reply in replies))
        if self._then is not None and len(self.sent) == 1:
            await self._then()
        return replies


async def backlog(store: Store, monkeypatch: pytest.MonkeyPatch, news: int, fleet: int = 0) -> tuple[Bus, list[str]]:
    """A reader that is certain of what it holds, a page of 3, and so many events before one task; answers their ids."""
    monkeypatch.setattr(reading, "PAGE", 3)
    bus, _, _ = await working(store, "a")
    await bus.read_work({"tasks": 1}, GROUP, block_ms=None)
    ids = [await bus.post("news", f"news {number}".encode()) for number in range(news)]
    ids += [await bus.post("fleet", f"fleet {number}".encode()) for number in range(fleet)]
    ids += [await bus.post("news", b"the last")]
    await bus.post("tasks", b"behind them")
    return bus, ids


BOTH = ("XREADGROUP", "XREAD")


@pytest.mark.parametrize(
    ("news", "fleet", "pages"), [(1, 2, 0), (2, 0, 1), (4, 0, 1), (5, 0, 2), (7, 3, 2), (1, 3, 1), (9, 9, 3)]
)
async def test_work_comes_with_all_events_before_it_however_many_in_one_round_trip_for_a_page(
    store: Store, monkeypatch: pytest.MonkeyPatch, news: int, fleet: int, pages: int
) -> None:
    bus, ids = await backlog(store, monkeypatch, news, fleet)
    trips = Trips(bus)
    received = await bus.receive({"tasks": 9}, GROUP, {"news": START, "fleet": START}, block_ms=None)
    assert [e.entry for e in received.news.entries] == ids
    assert received.news.gaps == []
    assert [e.data for e in received.work] == [b"behind them"]
    assert trips.sent == [BOTH, *[("EVAL",)] * pages]


async def test_what_one_reply_holds_is_bounded_in_bytes_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FIRST", 2)
    monkeypatch.setattr(reading, "ROOM", 4000)
    bus = await store.bus("a")
    streams = [*["news", "fleet"] * 20, "fleet"]
    ids = [await bus.post(stream, bytes([65 + n]) * 1000) for n, stream in enumerate(streams)]
    small = await bus.post("small", b"in between")
    ids += [small, *[await bus.post("news", b"x") for _ in range(30)]]
    everything = {"news": START, "fleet": START, "small": START}
    trips = Trips(bus)
    found = await bus.catch_up(everything)
    assert [entry.entry for entry in found.entries] == ids
    assert len(trips.sent) > 5
    assert 3000 < trips.largest < 8000, "room, and an entry of each stream more"

    cursors, read, turns = everything, [], 0
    while found := (await bus.follow(cursors, block_ms=None, count=99)).entries:
        read += [entry.entry for entry in found]
        cursors = {**cursors, **{entry.stream: entry.entry for entry in found}}
        turns += 1
    assert read == ids, "each reading ends everywhere at one event"
    assert turns > 5
    assert trips.largest < 8000
    assert len(await bus.read_after({"small": START, "news": ids[-9]}, block_ms=None, count=3)) == 4


async def test_a_journal_is_read_in_pages_bounded_in_bytes_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FIRST", 2)
    for module in (reading, client):
        monkeypatch.setattr(module, "ROOM", 5000)
    bus, boot = await booted(store, "a")
    records = [bytes([65 + n]) * 1000 for n in range(20)]
    await bus.commit(Commit(boot=boot, seq_from=0, seq_to=20, journal=records))
    trips = Trips(bus)
    assert await bus.journal() == records
    assert await bus.journal(after=7) == records[7:]
    assert trips.largest < 8000
    cut = [await bus.read_after({"journal:a": f"{n}-0"}, block_ms=None, count=99) for n in (0, 15, 20)]
    assert [[entry.data for entry in each] for each in cut] == [records[:7], records[15:], []]


async def test_all_behind_the_cursors_is_read_in_pages_and_gaps_in_any_of_them_are_told(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, ids = await backlog(store, monkeypatch, 7)
    await store.command("XDEL", "{news}", ids[5])
    found = await bus.catch_up({"news": ids[0], "fleet": START})
    assert [e.entry for e in found.entries] == [*ids[1:5], *ids[6:]]
    assert found.gaps == [Gap("news", ids[0], ids[5])]
    assert (await bus.catch_up({})).entries == []


async def test_events_that_come_between_two_pages_are_read_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    bus, ids = await backlog(store, monkeypatch, 3)
    other = await store.bus("b")
    Trips(bus, lambda: other.post("news", b"meanwhile"))
    received = await bus.receive({"tasks": 9}, GROUP, {"news": START}, block_ms=None)
    assert [e.entry for e in received.news.entries][:-1] == ids
    assert received.news.entries[-1].data == b"meanwhile"


async def test_of_no_stream_is_read_what_came_behind_events_of_another_that_are_not_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What actors are handed is in the order of commits, over all streams and over readings too."""
    bus, ids = await backlog(store, monkeypatch, 3)
    other = await store.bus("b")

    async def meanwhile() -> None:
        ids.append(await other.post("fleet", b"one"))
        ids.append(await other.post("news", b"two"))

    Trips(bus, meanwhile)
    received = await bus.receive({"tasks": 9}, GROUP, {"news": START, "fleet": START}, block_ms=None)
    assert [e.entry for e in received.news.entries] == ids


async def test_work_whose_events_could_not_all_be_read_comes_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, ids = await backlog(store, monkeypatch, 7)

    async def cut() -> None:
        raise asyncio.CancelledError

    Trips(bus, cut)
    with pytest.raises(asyncio.CancelledError):
        await bus.receive({"tasks": 9}, GROUP, {"news": START}, block_ms=None)
    received = await bus.receive({"tasks": 9}, GROUP, {"news": START}, block_ms=None)
    assert [(e.data, e.deliveries) for e in received.work] == [(b"behind them", 2)]
    assert [e.entry for e in received.news.entries] == ids


# --- trimming ---


async def test_trimming_stops_at_the_floor_and_at_every_reader(store: Store) -> None:
    bus, boot, tasks = await working(store, "a", entries=6)
    await store.command("XGROUP", "CREATE", "{tasks}", "slow", 0)
    assert (await bus.trim("tasks", "9999999999999-0")).removed == 0
    await store.command("XREADGROUP", "GROUP", "slow", "s", "COUNT", 5, "STREAMS", "{tasks}", ">")
    await store.command("XACK", "{tasks}", "slow", *tasks[:5])
    await bus.commit(step(boot, 0, acks=[Lease("tasks", GROUP, tasks[n]) for n in (0, 1, 2, 4)]))
    trimmed = await bus.trim("tasks", tasks[1])
    assert (trimmed.removed, trimmed.first) == (1, tasks[1])
    trimmed = await bus.trim("tasks", "9999999999999")
    assert (trimmed.removed, trimmed.first) == (2, tasks[3])
    await bus.commit(step(boot, 1, acks=[Lease("tasks", GROUP, tasks[n]) for n in (3, 5)]))
    assert (await bus.trim("tasks", "9999999999999")).first == tasks[5]
    await store.command("XREADGROUP", "GROUP", "slow", "s", "COUNT", 5, "STREAMS", "{tasks}", ">")
    assert (await bus.trim("tasks", "9999999999999")).first == tasks[5], "one reader has acked it, another holds it"


async def test_trimming_keeps_what_lies_behind_a_stored_cursor(store: Store) -> None:
    bus, boot = await booted(store, "a")
    ids = [await bus.post("news", b"x") for _ in range(4)]
    await bus.commit(step(boot, 0, cursors=[Position("news", ids[1]), Position("old_news", START)]))
    trimmed = await bus.trim("news", "9999999999999")
    assert (trimmed.removed, trimmed.first) == (2, ids[2])
    await bus.advance(boot, {"news": ids[3]})
    trimmed = await bus.trim("news", "9999999999999")
    assert (trimmed.removed, trimmed.first) == (2, None)


async def test_trimming_spares_an_actor_that_has_read_nothing_and_forgets_one_that_is_no_more(store: Store) -> None:
    bus, boot = await booted(store, "a")
    gone, left = await booted(store, "gone-1")
    ids = [await bus.post("news", b"x") for _ in range(2)]
    await bus.advance(boot, {"news": ids[1]})
    await gone.advance(left, {"news": START})
    assert (await bus.trim("news", "99-0")).removed == 0
    assert (await bus.trim("news", "99-0", ["a", "gone-1"])).removed == 0
    assert (await bus.trim("news", "99-0", ["a", "gone"])).removed == 2


async def test_a_payload_outlives_its_release_until_the_log_is_archived_so_far(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FETCH", 2)
    bus, boot = await booted(store, "a")
    first = await bus.commit(step(boot, 0, payloads=[("p", b"1")], adds=[("out", b"names p")]))
    await bus.commit(step(boot, 1, releases=["p"]))
    second = await bus.commit(step(boot, 2, payloads=[("q", b"2"), ("r", b"3")], adds=[("out", b"q, r")]))
    for seq in range(3, 6):
        await bus.commit(step(boot, seq, releases=["q", "never"] if seq == 4 else [f"r{seq}"]))
    assert await bus.discard("0-0") == 0
    assert await bus.payloads(["p", "q", "r"]) == [b"1", b"2", b"3"]
    assert await bus.discard(first.entries[0]) == 1
    assert await bus.payloads(["q", "r"]) == [b"2", b"3"]
    assert await bus.discard(second.entries[0]) == 1
    assert await bus.payloads(["r"]) == [b"3"]
    assert await bus.discard(second.entries[0]) == 0
    assert await store.command("XLEN", "{released}") == 0


async def test_a_payload_may_be_released_before_the_first_event(store: Store) -> None:
    bus, boot = await booted(store, "a")
    await bus.commit(step(boot, 0, payloads=[("p", b"1")]))
    await bus.commit(step(boot, 1, releases=["p"]))
    assert await bus.discard("0-0") == 1


async def test_trimming_keeps_the_journal_behind_the_snapshot(store: Store) -> None:
    bus, boot = await booted(store, "a")
    await bus.commit(step(boot, 0))
    assert (await bus.trim("journal:a", "99-0")).removed == 0
    await bus.commit(step(boot, 1, snapshot=b"two"))
    await bus.commit(step(boot, 2))
    trimmed = await bus.trim("journal:a", "99-0")
    assert (trimmed.removed, trimmed.first) == (2, "3-0")
    assert await bus.journal(after=2) == [b"record 3"]


async def test_trimming_a_stream_that_does_not_exist_does_nothing(store: Store) -> None:
    trimmed = await (await store.bus("a")).trim("nothing", "5-0")
    assert (trimmed.removed, trimmed.first) == (0, None)


# --- state ---


async def test_payloads_come_in_the_order_asked_however_many(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FETCH", 2)
    bus, boot = await booted(store, "a")
    pairs = [(f"p{n}", f"{n}".encode()) for n in range(5)]
    await bus.commit(step(boot, 0, payloads=pairs))
    keys = [key for key, _ in reversed(pairs)]
    assert await bus.payloads(keys) == [data for _, data in reversed(pairs)]
    assert await bus.payloads([]) == []


async def test_a_payload_is_compressed_and_one_that_is_damaged_is_named(store: Store) -> None:
    bus, boot = await booted(store, "a")
    data = b"mask" * 1000
    await bus.commit(step(boot, 0, payloads=[("p", data), ("empty", b"")]))
    assert await bus.payloads(["p", "empty"]) == [data, b""]
    assert await store.command("STRLEN", "{payload:p}") < 100
    await store.command("SET", "{payload:p}", "something else")
    with pytest.raises(BusError, match="payload p is damaged in the store"):
        await bus.payloads(["empty", "p"])


async def test_any_number_of_calls_may_run_at_once(store: Store) -> None:
    bus = await store.bus("a")
    await asyncio.gather(*(bus.post("news", b"x") for _ in range(300)))
    assert (await bus.depths(["news"]))["news"].length == 300


async def test_a_journal_is_read_whole_and_from_anywhere(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "JOURNAL_PAGE", 2)
    bus, boot = await booted(store, "a")
    records = [f"{n}".encode() for n in range(1, 6)]
    await bus.commit(Commit(boot=boot, seq_from=0, seq_to=5, journal=records))
    other = await store.bus("other")
    assert await other.journal("a") == records
    assert await other.journal("a", after=3) == records[3:]
    assert await other.journal() == []
    found = await other.read_after({"journal:a": START}, block_ms=None, count=9)
    assert [e.data for e in found] == records


async def test_cursors_of_actors_with_like_names_are_kept_apart(store: Store) -> None:
    for actor in ("a", "ab", "b"):
        bus, boot = await booted(store, actor)
        await bus.commit(step(boot, 0, cursors=[Position("news", f"1-{len(actor)}")]))
    assert await bus.cursors("a") == {"news": "1-1"}
    assert await bus.cursors("ab") == {"news": "1-2"}
    assert await bus.cursors("c") == {}


async def test_the_configuration_is_stored_or_missed_by_name(store: Store) -> None:
    bus = await store.bus("a")
    with pytest.raises(BusError, match="config is not set"):
        await bus.get_config()
    await bus.put_config(b"\x01config")
    assert await bus.get_config() == b"\x01config"


async def test_asking_whether_the_store_takes_writes_changes_nothing(store: Store) -> None:
    bus = await store.bus("a")
    await bus.check_writable()
    with pytest.raises(BusError, match="config is not set"):
        await bus.get_config()
    await bus.put_config(b"config")
    await bus.check_writable()
    assert await bus.get_config() == b"config"


async def test_depths_say_how_far_a_group_is_behind(store: Store) -> None:
    bus, _, _ = await working(store, "a", entries=2)
    await bus.post("tasks", b"x")
    await bus.post("news", b"x")
    assert await bus.depths(["tasks", "news", "none"], GROUP) == {
        "tasks": Depth(length=3, pending=2, lag=1),
        "news": Depth(length=1, pending=0, lag=0),
        "none": Depth(length=0, pending=0, lag=0),
    }
    assert await bus.depths(["tasks"]) == {"tasks": Depth(length=3, pending=0, lag=0)}
    assert (await bus.depths(["tasks"], "nobody"))["tasks"].pending == 0
