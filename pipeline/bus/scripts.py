"""The bus's Lua scripts. Portable: Redis >= 7.0 and Valkey. Numbers stay below 2**53, where Lua's doubles are exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.bus.lua import Key, script


@script
def boot(fences: Key, actor: str) -> list[int]:
    """
    -- Count a boot of the actor; earlier boots are fenced from now on.
    -- Answers {boot, last committed sequence number}.
    local last = redis.call('HGET', fences, actor .. '/seq')
    return {redis.call('HINCRBY', fences, actor .. '/boot', 1), tonumber(last or 0)}
    """
    ...


@script
def commit(
    fences: Key,
    cursors: Key,
    registers: Key,
    order: Key,
    tails: Key,
    released: Key,
    journal: Key,
    snapshot: Key,
    actor: str,
    boot: int,
    seq_from: int,
    seq_to: int,
    leases: Sequence[tuple[Key, str, str]],
    acks: Sequence[tuple[Key, str, str]],
    raises: Sequence[tuple[str, int]],
    payloads: Sequence[tuple[Key, bytes]],
    adds: Sequence[tuple[Key, bytes]],
    positions: Sequence[tuple[str, str]],
    records: Sequence[bytes],
    releases: Sequence[bytes],
    states: Sequence[bytes],
) -> list[Any]:
    """
    -- One transaction of an actor. All checks come before the first write, so it is all or nothing. Answers
    --   {'FENCED', current boot}        a later boot has taken over, or the store was emptied
    --   {'OK' or 'ALREADY', {ids}}      ids of the added entries; ALREADY: this very commit had been applied
    --   {'CONFLICT', last sequence}     the store is not at seq_from
    --   {'LOST', {positions}}           in leases followed by acks, 1-based: entries that are not the actor's
    --   {'STALE', name, value, current} a register would not rise
    local stored = redis.call('HMGET', fences, actor .. '/boot', actor .. '/seq')
    local current, last = tonumber(stored[1] or 0), tonumber(stored[2] or 0)
    if current ~= tonumber(boot) then return {'FENCED', current} end

    if last == tonumber(seq_to) then
      local reply = {}
      for word in redis.call('HGET', fences, actor .. '/reply'):gmatch('%S+') do reply[#reply + 1] = word end
      if table.remove(reply, 1) == seq_from then return {'ALREADY', reply} end
    end
    if last ~= tonumber(seq_from) then return {'CONFLICT', last} end

    local function owner(lease)
      local pending = redis.call('XPENDING', lease[1], lease[2], lease[3], lease[3], 1)
      return pending[1] and pending[1][2]
    end
    local lost = {}
    for i, lease in ipairs(leases) do
      if owner(lease) ~= actor then lost[#lost + 1] = i end
    end
    for i, ack in ipairs(acks) do
      local held = owner(ack)
      if held and held ~= actor then lost[#lost + 1] = #leases + i end
    end
    if #lost > 0 then return {'LOST', lost} end

    local raised = {}
    for _, raise in ipairs(raises) do
      local name, value = raise[1], tonumber(raise[2])
      local stored = raised[name] or tonumber(redis.call('HGET', registers, name) or 0)
      if value <= stored then return {'STALE', name, value, stored} end
      raised[name] = value
    end

    for i, record in ipairs(records) do
      redis.call('XADD', journal, string.format('%.0f-0', seq_from + i), 'e', record)
    end
    for _, payload in ipairs(payloads) do redis.call('SET', payload[1], payload[2]) end
    local added, ends = {}, {}
    local before = #adds > 0 and redis.call('INCRBY', order, #adds) - #adds
    for i, add in ipairs(adds) do
      local previous = ends[add[1]] or redis.call('HGET', tails, add[1]) or '0-0'
      added[i] = redis.call('XADD', add[1], string.format('%.0f-0', before + i), 'e', add[2], 'p', previous)
      ends[add[1]] = added[i]
    end
    for stream, id in pairs(ends) do redis.call('HSET', tails, stream, id) end
    for _, ack in ipairs(acks) do redis.call('XACK', ack[1], ack[2], ack[3]) end
    for _, position in ipairs(positions) do redis.call('HSET', cursors, actor .. '/' .. position[1], position[2]) end
    for _, raise in ipairs(raises) do redis.call('HSET', registers, raise[1], raise[2]) end
    for _, release in ipairs(releases) do
      -- Under the number of the log's last event: the events that name these payloads are not above it.
      redis.call('XADD', released, string.format('%.0f-*', redis.call('GET', order) or 0), 'e', release)
    end
    for _, state in ipairs(states) do redis.call('HSET', snapshot, 'seq', seq_to, 'state', state) end
    local reply = seq_from .. ' ' .. table.concat(added, ' ')
    redis.call('HSET', fences, actor .. '/seq', seq_to, actor .. '/reply', reply)
    return {'OK', added}
    """
    ...


@script
def post(order: Key, tails: Key, stream: Key, data: bytes) -> bytes:
    """
    -- Append one entry for a writer that is no actor; answers its id.
    local previous = redis.call('HGET', tails, stream) or '0-0'
    local id = redis.call('XADD', stream, string.format('%.0f-0', redis.call('INCR', order)), 'e', data, 'p', previous)
    redis.call('HSET', tails, stream, id)
    return id
    """
    ...


@script
def advance(fences: Key, cursors: Key, actor: str, boot: int, positions: Sequence[tuple[str, str]]) -> int:
    """
    -- Move cursors forward outside a commit; one that is already further stays, for a commit may have overtaken us.
    -- Answers the current boot; nothing is written unless it is the caller's.
    local current = tonumber(redis.call('HGET', fences, actor .. '/boot') or 0)
    if current ~= tonumber(boot) then return current end
    local function parts(id)
      local ms, seq = id:match('^(%d+)-(%d+)$')
      return tonumber(ms), tonumber(seq)
    end
    for _, position in ipairs(positions) do
      local field = actor .. '/' .. position[1]
      local ms, seq = parts(position[2])
      local stored = redis.call('HGET', cursors, field)
      local stored_ms, stored_seq = parts(stored or '0-0')
      if not stored or ms > stored_ms or (ms == stored_ms and seq > stored_seq) then
        redis.call('HSET', cursors, field, position[2])
      end
    end
    return current
    """
    ...


@script
def page(streams: Sequence[tuple[Key, str, int]], room: int) -> list[list[Any]]:
    """
    -- So many entries of each stream behind its cursor; no more of one once those read of it have `room` bytes.
    -- Answers {{{{id, fields}}, 1 if there may be more}} in the order of the streams.
    local out = {}
    for i, stream in ipairs(streams) do
      local rows, cursor, most, left, ended = {}, stream[2], tonumber(stream[3]), tonumber(room), false
      while not ended and #rows < most and left > 0 do
        local asked = math.min(4, most - #rows)
        local found = redis.call('XRANGE', stream[1], '(' .. cursor, '+', 'COUNT', asked)
        ended = #found < asked
        for _, entry in ipairs(found) do
          if left <= 0 then ended = false break end
          cursor = entry[1]
          rows[#rows + 1] = entry
          left = left - #entry[2][2]
        end
      end
      out[i] = {rows, ended and 0 or 1}
    end
    return out
    """
    ...


@script
def redeliver(stream: Key, group: str, consumer: str, held: Sequence[str], count: int) -> list[list[Any]]:
    """
    -- Deliver again up to `count` entries that the consumer owns but does not hold in memory, oldest first.
    -- Answers {{id, data, deliveries}}. An entry that is gone from the stream stays pending: `claim` reports it.
    local skip = {}
    for _, id in ipairs(held) do skip[id] = true end
    local out, from, room = {}, '-', tonumber(count)
    while true do
      local page = redis.call('XPENDING', stream, group, from, '+', 100, consumer)
      for _, item in ipairs(page) do
        if #out == room then return out end
        local id, deliveries = item[1], item[4] + 1
        local entry = not skip[id] and redis.call('XRANGE', stream, id, id)[1]
        if entry then
          redis.call('XCLAIM', stream, group, consumer, 0, id, 'RETRYCOUNT', deliveries, 'JUSTID')
          out[#out + 1] = {id, entry[2][2], deliveries}
        end
        from = '(' .. id
      end
      if #page < 100 then return out end
    end
    """
    ...


@script
def claim(stream: Key, group: str, consumer: str, min_idle_ms: int, count: int) -> list[Any]:
    """
    -- Take over up to `count` entries that nobody renewed for `min_idle_ms`.
    -- Answers {{{id, data, deliveries}}, {ids that were owed but are gone from the stream}}.
    local entries, deleted, from, room = {}, {}, '0-0', tonumber(count)
    repeat
      local page = redis.call('XAUTOCLAIM', stream, group, consumer, min_idle_ms, from, 'COUNT', room - #entries)
      from = page[1]
      for _, entry in ipairs(page[2]) do
        local id = entry[1]
        local pending = redis.call('XPENDING', stream, group, id, id, 1)
        entries[#entries + 1] = {id, entry[2][2], pending[1][4]}
      end
      for _, id in ipairs(page[3]) do deleted[#deleted + 1] = id end
    until from == '0-0' or #entries == room
    return {entries, deleted}
    """
    ...


@script
def renew(stream: Key, group: str, consumer: str, ids: Sequence[str]) -> list[bytes]:
    """
    -- Reset the idle time of entries that the consumer still owns; delivery counters stay.
    -- Answers the ids that it doesn't own any more, or that are gone from the stream.
    local lost = {}
    for _, id in ipairs(ids) do
      local pending = redis.call('XPENDING', stream, group, id, id, 1, consumer)
      if pending[1] and redis.call('XRANGE', stream, id, id)[1] then
        redis.call('XCLAIM', stream, group, consumer, 0, id, 'JUSTID')
      else
        lost[#lost + 1] = id
      end
    end
    return lost
    """
    ...


@script
def bury(
    stream: Key, dead: Key, group: str, consumer: str, id: str, reason: str, now: float, keep: int
) -> bytes | None:
    """
    -- Move an entry that the consumer owns to the dead-letter stream, which keeps the newest `keep`, and ack it.
    -- Answers the id there, or nil if the consumer doesn't own it. `e` is empty if the entry was gone from its stream.
    local pending = redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
    if not pending then return false end
    local entry = redis.call('XRANGE', stream, id, id)[1]
    local data = entry and entry[2][2] or ''
    local buried = redis.call('XADD', dead, 'MAXLEN', '=', keep, '*', 'e', data, 'origin', id, 'reason', reason,
                              'at', now, 'deliveries', pending[4])
    redis.call('XACK', stream, group, id)
    return buried
    """
    ...


@script
def requeue(order: Key, tails: Key, stream: Key, dead: Key, id: str, data: bytes) -> bytes | None:
    """
    -- Move a dead letter back, as a new entry of its stream that holds `data`; answers its id.
    -- Answers nil if the letter is gone: somebody else has requeued or dropped it.
    if redis.call('XDEL', dead, id) == 0 then return false end
    local previous = redis.call('HGET', tails, stream) or '0-0'
    local new = redis.call('XADD', stream, string.format('%.0f-0', redis.call('INCR', order)), 'e', data, 'p', previous)
    redis.call('HSET', tails, stream, new)
    return new
    """
    ...


@script
def trim(
    stream: Key, cursors: Key, suffix: str, floor: str, readers: Sequence[str], snapshots: Sequence[Key]
) -> list[Any]:
    """
    -- Delete the entries below `floor` that every reader is done with: below each group's oldest pending entry, or its
    -- next one if none is pending; not above a stored cursor whose field is one of `readers` (none: anybody's) and
    -- `suffix`; in a journal (`snapshots` names its snapshot) not above the snapshot.
    -- Answers {removed, id of the oldest entry left or ''}.
    if redis.call('EXISTS', stream) == 0 then return {0, ''} end
    local ms, seq = floor:match('^(%d+)-?(%d*)$')
    ms, seq = tonumber(ms), tonumber(seq) or 0
    local function hold(id, after)
      local m, s = id:match('^(%d+)-(%d+)$')
      m, s = tonumber(m), tonumber(s) + after
      if m < ms or (m == ms and s < seq) then ms, seq = m, s end
    end
    for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
      local group = {}
      for i = 1, #info, 2 do group[info[i]] = info[i + 1] end
      local pending = redis.call('XPENDING', stream, group['name'])
      if pending[1] > 0 then hold(pending[2], 0) else hold(group['last-delivered-id'], 1) end
    end
    local counts = {}
    for _, reader in ipairs(readers) do counts[reader .. suffix] = true end
    local stored = redis.call('HGETALL', cursors)
    for i = 1, #stored, 2 do
      local mine = stored[i]:sub(-#suffix) == suffix
      if mine and (#readers == 0 or counts[stored[i]]) then hold(stored[i + 1], 1) end
    end
    for _, key in ipairs(snapshots) do
      hold(string.format('%.0f-0', (redis.call('HGET', key, 'seq') or 0) + 1), 0)
    end
    local removed = redis.call('XTRIM', stream, 'MINID', '=', string.format('%.0f-%.0f', ms, seq))
    local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
    return {removed, first and first[1] or ''}
    """
    ...
