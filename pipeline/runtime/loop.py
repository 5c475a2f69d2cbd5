"""The loop that runs any actor: inputs in, one commit a batch of steps, then the shell's commands.

Invariants: a command is performed only after the step that asked for it is committed; a state that was not committed
is never observed; a broadcast event that was in the store before a work entry was added is fed to the core before it;
the process ends at the first unexpected error, and its successor goes on from snapshot and journal.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from actors.recorder.ordering import START, number
from contracts.core import Booted, Clock, Delivered, Entry, Fatal, LeaseLost, Ref, Shell, Tick
from contracts.envelope import STREAM_OF, WORK_STREAMS, ContractError, encode
from contracts.envelope import decode as decode_envelope
from contracts.events import DataLost, kind
from pipeline.bus import Bus, Followed, Gap, LeaseLostError, TooLarge, WorkEntry
from pipeline.runtime.context import ActorContext
from pipeline.runtime.journal import Journal
from pipeline.runtime.machine import GROUP, Attempt, Identity, Machine

BATCH = 64
"""Inputs committed in one script at most."""
LEASE_S = 30.0
"""Idle time after which another reader may take over a work entry; renewed at a quarter of it."""
DELIVERIES = 8
"""Times a work entry is handed out before it goes to the dead-letter stream, unless the core holds it."""


class Runtime:
    """One boot of one actor."""

    def __init__(
        self, shell: Shell, bus: Bus, run: str, actor: str, config: Any, run_dir: str, clock: Clock, log: Any
    ) -> None:
        self.shell = shell
        self.core = shell.core
        self.bus = bus
        self.run_id = run
        self.actor = actor
        self.config = config
        self.run_dir = run_dir
        self.clock = clock
        self.log = log
        self.machine: Machine
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._inputs: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._wants = asyncio.Event()
        self._queued: dict[str, int] = dict.fromkeys(self.core.work, 0)
        self._held: set[Ref] = set()
        self._seen: dict[str, str] = {}
        self._missed: dict[str, str] = {}
        self._announced = 0
        self._payloads: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._pace_s: float = getattr(self.core, "pace_s", 0.0)
        self._holds: Callable[[Any, Ref], bool] = getattr(self.core, "holds", lambda state, ref: False)
        self._paced_until = 0.0
        self._urgent = asyncio.Event()

    # --- life ---

    async def run(self) -> None:
        """Run until the core is done after `run.stopping`. Raises what ended it otherwise."""
        self.machine = await self._recover()
        for stream in self.core.work:
            await self.bus.ensure_group(stream, GROUP)
        try:
            await self.shell.start(ActorContext(self))
            await self._commit([Booted(self.machine.identity.boot)])
            self._spawn(self._follow())
            self._spawn(self._keep())
            if self.core.work:
                self._spawn(self._work())
            while not (self.core.done(self.machine.state) and not self._inputs):
                await self._turn()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=5)
            await self.shell.close()

    async def _recover(self) -> Machine:
        """Fence the predecessor, then fold snapshot and journal."""
        boot, committed = await self.bus.boot()
        snapshot = await self.bus.snapshot()
        start = 0 if snapshot is None else snapshot[0]
        records = await self.bus.journal(after=start)
        seq, state = Journal(self.core).fold(snapshot, records)
        if seq != committed:
            raise RuntimeError(f"journal of {self.actor} ends at {seq}, the store committed {committed}")
        identity = Identity(self.run_id, self.actor, boot, socket.gethostname(), os.getpid())
        machine = Machine(self.core, identity, self.clock, self._payload, seq, state)
        machine.restored(snapshot, records)
        stored = await self.bus.cursors()
        machine.cursors.update(await self.bus.starts([stream for stream in self.core.watch if stream not in stored]))
        machine.cursors.update({stream: entry for stream, entry in stored.items() if stream in machine.cursors})
        self._seen = dict(machine.cursors)
        await self.bus.advance(boot, machine.cursors)
        machine.stored = dict(machine.cursors)
        return machine

    async def _turn(self) -> None:
        """Wait for inputs or the core's next deadline, then commit one batch."""
        self._wants.set()
        wake = self.core.wake(self.machine.state)
        if not self._inputs:
            await _set_within(self._arrived, None if wake is None else wake - self.clock.now())
        await self._let_come(wake)
        if self._failure is not None:
            raise self._failure
        inputs = [self._inputs.popleft() for _ in range(min(BATCH, len(self._inputs)))]
        if not self._inputs:
            self._arrived.clear()
            self._urgent.clear()
        if wake is not None and wake <= self.clock.now():
            inputs.append(Tick())
        if inputs:
            await self._commit(inputs)

    async def _let_come(self, wake: float | None) -> None:
        """Let more local inputs come before a commit that follows the last one too soon (`Core.pace_s`)."""
        left = self._paced_until - self._loop.time()
        if wake is not None:
            left = min(left, wake - self.clock.now())
        if left > 0 and len(self._inputs) < BATCH:
            await _set_within(self._urgent, left)

    async def _commit(self, inputs: list[Any]) -> None:
        """Step through `inputs` and commit the outcome; when leases were lost, step again knowing so."""
        self._paced_until = self._loop.time() + self._pace_s
        lost_before: set[Ref] = set()
        while True:
            attempt = Attempt(self.machine, inputs)
            if not attempt.journalled:
                break
            try:
                await self.bus.commit(attempt.commit)
                break
            except LeaseLostError as lost:
                refs = tuple(Ref(lease.stream, lease.entry) for lease in lost.leases)
                if lost_before.issuperset(refs):
                    raise
                lost_before.update(refs)
                self._held.difference_update(refs)
                self.log.warning("lease lost", entries=[f"{ref.stream}/{ref.entry}" for ref in refs])
                inputs = [LeaseLost(refs), *inputs]
            except TooLarge as error:  # it would be so again after a restart
                raise Fatal(f"{self.actor} can't commit what came of {_named(inputs)}: {error}") from error
        self.machine.settle(attempt)
        self._held.difference_update(attempt.acked)
        for handle in attempt.handles:
            self._payloads.pop(handle, None)
        for stream, count in attempt.taken.items():
            self._queued[stream] -= count
        for command in attempt.commands:
            self._spawn(self._perform(command))

    def _payload(self, handle: str) -> bytes:
        if handle not in self._payloads:
            self._payloads[handle] = self.shell.payload(handle)
        return self._payloads[handle]

    async def _perform(self, command: Any) -> None:
        result = await self.shell.perform(command)
        if result is not None:
            self.push([result])

    # --- inputs ---

    def push(self, inputs: Iterable[Any]) -> None:
        """Queue inputs; on the loop's thread."""
        self._inputs.extend(inputs)
        if self._inputs:
            self._arrived.set()

    def push_threadsafe(self, input: Any) -> None:
        """Queue one input from any thread."""
        if threading.get_ident() == self._thread:
            self.push([input])
        else:
            self._loop.call_soon_threadsafe(self.push, [input])

    async def _follow(self) -> None:
        """Feed broadcast events."""
        while self._seen:
            await self._found(await self.bus.follow(self._seen, count=256, block_ms=5000))
            await asyncio.sleep(0)  # the core takes these before the store is asked for more

    async def _found(self, found: Followed) -> None:
        await self.report(gap for gap in found.gaps if number(gap.upto) > number(self._seen[gap.stream]))
        self._feed(found.entries)

    async def report(self, gaps: Iterable[Gap]) -> None:
        """Announce events that this actor was to read and never will; each once a boot."""
        for gap in gaps:
            if number(gap.upto) > number(self._missed.get(gap.stream, START)):
                self._missed[gap.stream] = gap.upto
                reason = f"deleted from the stream before it was read, maybe with others behind {gap.after}"
                await self._announce(DataLost(stream=gap.stream, entries=(gap.upto,), reason=reason))

    async def _look_for_ends(self) -> None:
        """Report the ends of streams that were deleted before they were read, which no later entry gives away."""
        tails = await self.bus.tails(list(self._seen))
        if any(number(tail) > number(self._seen[stream]) for stream, tail in tails.items()):
            await self._catch_up()
            ahead = [(stream, tail) for stream, tail in tails.items() if number(tail) > number(self._seen[stream])]
            await self.report(Gap(stream, self._seen[stream], tail) for stream, tail in ahead)

    def _feed(self, entries: Sequence[Entry]) -> None:
        fresh = []
        for entry in entries:
            if number(entry.entry) > number(self._seen[entry.stream]):
                self._seen[entry.stream] = entry.entry
                try:
                    envelope = decode_envelope(entry.stream, entry.data)
                except ContractError as error:
                    if entry.stream not in WORK_STREAMS:
                        raise
                    # Its own readers bury it and say so.
                    self.log.warning("unreadable", stream=entry.stream, entry=entry.entry, reason=str(error))
                    continue
                fresh.append(Delivered(Ref(entry.stream, entry.entry), envelope))
        self.push(fresh)
        if fresh:
            self._urgent.set()

    def _intake(self) -> dict[str, int]:
        wanted = self.core.intake(self.machine.state)
        return {stream: n - self._queued[stream] for stream, n in wanted.items() if n > self._queued[stream]}

    async def _work(self) -> None:
        """Feed work entries as the core has room for them, own unfinished ones first."""
        while True:
            counts = self._intake()
            if not counts:
                self._wants.clear()
                await self._wants.wait()
                continue
            received = await self.bus.receive(counts, GROUP, dict(self._seen), block_ms=1000)
            await self._found(received.news)
            await self._take(received.work)
            await asyncio.sleep(0)

    async def _catch_up(self) -> None:
        """Feed every broadcast event that is in the store by now."""
        if self._seen:
            await self._found(await self.bus.catch_up(dict(self._seen)))

    async def _take(self, entries: Sequence[WorkEntry]) -> None:
        for item in entries:
            ref = Ref(item.stream, item.entry)
            if item.deliveries > DELIVERIES and not self._holds(self.machine.state, ref):
                await self._bury(item, f"delivered {item.deliveries} times without an ack")
                continue
            try:
                envelope = decode_envelope(item.stream, item.data)
            except ContractError as error:
                await self._bury(item, str(error))
                continue
            self._held.add(ref)
            self._queued[item.stream] += 1
            self.push([Delivered(ref, envelope, item.deliveries)])
            self._urgent.set()

    async def _bury(self, item: WorkEntry, reason: str) -> None:
        await self.bus.bury(item.stream, GROUP, item.entry, reason=reason, now=self.clock.now())
        await self._announce(DataLost(stream=item.stream, entries=(item.entry,), reason=reason))

    async def _announce(self, event: Any) -> None:
        """Append an event that no step of the core asked for."""
        self._announced += 1
        envelope = self.machine.envelope(f"{self.actor}:{self.machine.identity.boot}+{self._announced}", event)
        self.log.warning("announced", kind=kind(event), **msgspec.structs.asdict(event))
        await self.bus.post(STREAM_OF[type(event)], encode(envelope))

    async def _keep(self) -> None:
        """Renew leases on entries in hand, take over those that others left, look for lost ends, store idle cursors."""
        while True:
            await asyncio.sleep(LEASE_S / 4)
            for stream in self.core.work:
                mine = [ref.entry for ref in self._held if ref.stream == stream]
                lost = await self.bus.renew(stream, GROUP, mine) if mine else []
                refs = tuple(ref for entry in lost if (ref := Ref(stream, entry)) in self._held)
                if refs:
                    self._held.difference_update(refs)
                    self.push([LeaseLost(refs)])
                room = self._intake().get(stream, 0)
                if room:
                    await self._claim(stream, room)
            await self._look_for_ends()
            if self.machine.cursors != self.machine.stored:
                cursors = dict(self.machine.cursors)
                await self.bus.advance(self.machine.identity.boot, cursors)
                self.machine.stored.update(cursors)

    async def _claim(self, stream: str, room: int) -> None:
        claimed = await self.bus.claim_idle(stream, GROUP, int(LEASE_S * 1000), room)
        await self._catch_up()
        if claimed.deleted:
            reason = "deleted from the stream while owed to a reader"
            await self._announce(DataLost(stream=stream, entries=tuple(claimed.deleted), reason=reason))
        await self._take(claimed.entries)

    # --- tasks ---

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._failure is None:
            self._failure = task.exception()
            self._arrived.set()
            self._urgent.set()


def _named(inputs: Iterable[Any]) -> str:
    """Kinds of inputs."""
    names = [kind(i.envelope.body) if isinstance(i, Delivered) else type(i).__name__ for i in inputs]
    return ", ".join(dict.fromkeys(names))


async def _set_within(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until `event` is set, or set it after so long; None for never."""
    timer = None if seconds is None else asyncio.get_running_loop().call_later(max(0.0, seconds), event.set)
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()
