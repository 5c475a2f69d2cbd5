"""Every guard of the bus's Lua scripts has a test that fails without it: `python -m tests.mutation.lua [SCRIPT...]`.

Each mutant takes one guard out of one script and runs the tests that should notice. It takes a minute or two; it is
no part of the test suite. Exit code 1 and a list of the survivors if a test misses a guard.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.bus import scripts

TESTS = Path(__file__).parent.parent / "unit" / "bus" / "test_bus_fake.py"


class Mutant(msgspec.Struct, frozen=True):
    """`old` becomes `new` in the source of `script`; some test whose name holds one of `tests` must fail."""

    script: str
    guards: str
    old: str
    new: str
    tests: str


COMMIT = "commit or fenced or emptied or racing or lease or register or snapshot or boot or ack or payload"
MUTANTS = (
    Mutant(
        "boot", "each boot gets a number", "redis.call('HINCRBY', fences, actor .. '/boot', 1)", "1", "fenced or boot"
    ),
    Mutant("boot", "the last sequence is known", "redis.call('HGET', fences, actor .. '/seq')", "nil", "boot"),
    # commit: checks
    Mutant("commit", "fence", "if current ~= tonumber(boot) then", "if false then", COMMIT),
    Mutant(
        "commit",
        "emptied store",
        "stored[1] or 0",
        "stored[1] or boot",
        COMMIT,
    ),
    Mutant("commit", "repeated commit", "if last == tonumber(seq_to) then", "if false then", COMMIT),
    Mutant("commit", "repeated, not overtaken", "table.remove(reply, 1) == seq_from", "table.remove(reply, 1)", COMMIT),
    Mutant("commit", "sequence", "if last ~= tonumber(seq_from) then", "if false then", COMMIT),
    Mutant("commit", "lease", "if owner(lease) ~= actor then", "if false then", COMMIT),
    Mutant("commit", "lease of nobody", "owner(lease) ~= actor", "(owner(lease) or actor) ~= actor", COMMIT),
    Mutant("commit", "ack of another's", "if held and held ~= actor then", "if false then", COMMIT),
    Mutant("commit", "ack of nobody's", "if held and held ~= actor then", "if held ~= actor then", COMMIT),
    Mutant("commit", "positions of acks", "#leases + i", "i", COMMIT),
    Mutant("commit", "lost refuses", "if #lost > 0 then", "if false then", COMMIT),
    Mutant("commit", "register rises", "if value <= stored then", "if false then", COMMIT),
    Mutant("commit", "register equal", "value <= stored", "value < stored", COMMIT),
    Mutant("commit", "register twice", "raised[name] or tonumber(", "tonumber(", COMMIT),
    # commit: writes
    Mutant("commit", "journal numbering", "string.format('%.0f-0', seq_from + i)", "'*'", "journal or " + COMMIT),
    Mutant("commit", "one order", "string.format('%.0f-0', before + i)", "'*'", "archived or merged"),
    Mutant("commit", "one order for all writers", "redis.call('INCRBY', order, #adds)", "#adds", "missed or archived"),
    Mutant("commit", "predecessor", "redis.call('HGET', tails, add[1]) or '0-0'", "'0-0'", "missed"),
    Mutant("commit", "predecessor in the commit", "ends[add[1]] or redis.call('HGET'", "redis.call('HGET'", "missed"),
    Mutant("commit", "tail", "redis.call('HSET', tails, stream, id)", "", "missed or end_of"),
    Mutant("commit", "ack", "redis.call('XACK', ack[1], ack[2], ack[3])", "", COMMIT),
    Mutant("commit", "cursor", "redis.call('HSET', cursors, actor", "redis.call('HGET', cursors, actor", COMMIT),
    Mutant("commit", "payload", "redis.call('SET', payload[1], payload[2])", "", COMMIT),
    Mutant("commit", "sequence kept", "actor .. '/seq', seq_to, ", "", COMMIT),
    Mutant("commit", "answer kept", "table.concat(added, ' ')", "''", COMMIT),
    Mutant("commit", "release below archive", "redis.call('GET', order) or 0", "0", "payload"),
    Mutant("commit", "release before events", "redis.call('GET', order) or 0", "redis.call('GET', order)", "payload"),
    Mutant(
        "commit", "snapshot numbering", "'seq', seq_to, 'state'", "'seq', seq_from, 'state'", "snapshot or " + COMMIT
    ),
    # post
    Mutant("post", "one order", "redis.call('INCR', order)", "0", "broadcast or work"),
    Mutant("post", "predecessor", "redis.call('HGET', tails, stream) or '0-0'", "'0-0'", "missed or end_of"),
    Mutant("post", "tail", "redis.call('HSET', tails, stream, id)", "", "end_of"),
    # advance
    Mutant("advance", "fence", "if current ~= tonumber(boot) then", "if false then", "advance"),
    Mutant("advance", "first cursor", "not stored or ms", "ms", "advance or trimming"),
    Mutant(
        "advance",
        "forward only",
        "not stored or ms > stored_ms or (ms == stored_ms and seq > stored_seq)",
        "true",
        "advance",
    ),
    Mutant("advance", "second part", "(ms == stored_ms and seq > stored_seq)", "false", "advance"),
    Mutant(
        "advance", "second part only if equal", "(ms == stored_ms and seq > stored_seq)", "seq > stored_seq", "advance"
    ),
    # page
    Mutant("page", "bytes", "left = left - #entry[2][2]", "", "reply_holds or journal_is_read"),
    Mutant("page", "bytes of each entry", "if left <= 0 then ended = false break end", "", "reply_holds"),
    Mutant("page", "what was cut is told", "then ended = false break end", "then break end", "reply_holds"),
    Mutant("page", "behind the cursor", "'(' .. cursor", "cursor", "reply_holds or all_behind"),
    Mutant("page", "count", "'COUNT', asked", "'COUNT', 4", "reply_holds"),
    Mutant("page", "a full one may go on", "ended and 0 or 1", "0", "reply_holds or work_comes"),
    # redeliver
    Mutant("redeliver", "not what is held", "not skip[id] and ", "", "unfinished or lost"),
    Mutant("redeliver", "count", "if #out == room then return out end", "", "unfinished or boot"),
    Mutant("redeliver", "gone entries stay", "if entry then", "if true then", "deleted"),
    Mutant("redeliver", "deliveries are counted", "item[4] + 1", "item[4]", "unfinished or counted"),
    Mutant("redeliver", "deliveries are stored", "'RETRYCOUNT', deliveries, ", "", "unfinished or counted"),
    Mutant("redeliver", "all pages", "if #page < 100 then return out end", "do return out end", "unfinished"),
    Mutant("redeliver", "own entries only", "100, consumer)", "100)", "unfinished or counted"),
    # claim
    Mutant("claim", "only idle", "consumer, min_idle_ms, from", "consumer, 0, from", "idle or taken"),
    Mutant("claim", "count", "'COUNT', room - #entries", "'COUNT', 100", "idle"),
    Mutant("claim", "all pages", "until from == '0-0' or #entries == room", "until true", "idle or deleted or hide"),
    Mutant("claim", "deleted ones are told", "deleted[#deleted + 1] = id", "", "deleted"),
    # renew
    Mutant("renew", "own entries only", "id, id, 1, consumer)", "id, id, 1)", "renew"),
    Mutant("renew", "gone entries are told", " and redis.call('XRANGE', stream, id, id)[1]", "", "renew"),
    Mutant(
        "renew", "idle time is reset", "redis.call('XCLAIM', stream, group, consumer, 0, id, 'JUSTID')", "", "renew"
    ),
    Mutant("renew", "deliveries stay", ", id, 'JUSTID')", ", id)", "renew"),
    # bury
    Mutant("bury", "own entries only", "id, id, 1, consumer)[1]", "id, id, 1)[1]", "buried"),
    Mutant("bury", "once", "if not pending then return false end", "pending = pending or {0, 0, 0, 0}", "buried"),
    Mutant("bury", "gone entries too", "entry and entry[2][2] or ''", "entry[2][2]", "buried"),
    Mutant("bury", "ack", "redis.call('XACK', stream, group, id)", "", "buried"),
    Mutant("bury", "bounded", "'MAXLEN', '=', keep, ", "", "dead_letter"),
    # requeue
    Mutant(
        "requeue",
        "once",
        "if redis.call('XDEL', dead, id) == 0 then return false end",
        "redis.call('XDEL', dead, id)",
        "dead_letter",
    ),
    Mutant("requeue", "moved", "redis.call('XDEL', dead, id) == 0", "false", "dead_letter"),
    Mutant("requeue", "one order", "string.format('%.0f-0', redis.call('INCR', order))", "'*'", "dead_letter"),
    Mutant("requeue", "predecessor", "redis.call('HGET', tails, stream) or '0-0'", "'0-0'", "dead_letter"),
    Mutant("requeue", "tail", "redis.call('HSET', tails, stream, new)", "", "dead_letter"),
    # trim
    Mutant("trim", "no such stream", "if redis.call('EXISTS', stream) == 0 then return {0, ''} end", "", "trimming"),
    Mutant("trim", "floor", "ms, seq = tonumber(ms), tonumber(seq) or 0", "ms, seq = 2^52, 0", "trimming"),
    Mutant("trim", "lowest wins", "if m < ms or (m == ms and s < seq) then", "if true then", "trimming"),
    Mutant("trim", "pending", "if pending[1] > 0 then hold(pending[2], 0) else", "if true then", "trimming"),
    Mutant("trim", "undelivered", "else hold(group['last-delivered-id'], 1) end", "end", "trimming"),
    Mutant(
        "trim",
        "up to the delivered",
        "hold(group['last-delivered-id'], 1)",
        "hold(group['last-delivered-id'], 0)",
        "trimming",
    ),
    Mutant("trim", "cursors", "hold(stored[i + 1], 1)", "", "trimming"),
    Mutant("trim", "up to the cursor", "hold(stored[i + 1], 1)", "hold(stored[i + 1], 0)", "trimming"),
    Mutant(
        "trim",
        "this stream's cursors",
        "local mine = stored[i]:sub(-#suffix) == suffix",
        "local mine = true",
        "trimming",
    ),
    Mutant("trim", "of the readers", "(#readers == 0 or counts[stored[i]])", "true", "trimming"),
    Mutant("trim", "of anybody", "(#readers == 0 or counts[stored[i]])", "counts[stored[i]]", "trimming"),
    Mutant("trim", "snapshot", "for _, key in ipairs(snapshots) do", "for _, key in ipairs({}) do", "trimming"),
    Mutant("trim", "up to the snapshot", "'seq') or 0) + 1)", "'seq') or 0) + 2)", "trimming"),
    Mutant("trim", "second part", "(m == ms and s < seq)", "false", "trimming"),
)


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The mutant stands in for its script."""
    script: Any = getattr(scripts, mutant.script)
    source, sha = script.source, script.sha
    if source.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.script}: {mutant.guards}: {source.count(mutant.old)} x {mutant.old!r} in the source")
    script.source = source.replace(mutant.old, mutant.new)
    script.sha = hashlib.sha1(script.source.encode(), usedforsecurity=False).hexdigest()
    try:
        yield
    finally:
        script.source, script.sha = source, sha


def survives(mutant: Mutant) -> bool:
    """Whether no test fails. No test at all is an error of the list."""
    words = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--timeout=20", str(TESTS), "-k", mutant.tests]
    with planted(mutant), contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(words)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"{mutant.script}: {mutant.guards}: pytest ended with {code!r}\n{output.getvalue()[-2000:]}")
    return code == pytest.ExitCode.OK


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.script in names]
    survivors = []
    for mutant in chosen:
        alive = survives(mutant)
        print(f"{'SURVIVES' if alive else 'caught':<9} {mutant.script}: {mutant.guards}", flush=True)
        survivors += [mutant] if alive else []
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
