"""The loop that runs any actor: inputs in, one commit a batch of steps, then the shell's commands.

Invariants: a command is performed only after the step that asked for it is committed; a state that was not committed
is never observed; a broadcast event that was in the store before a work entry was added is fed to the core before it;
the process ends at the first unexpected error, and its successor goes on from snapshot and journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from contracts.core import (
    Ack,
    Booted,
    Clock,
    Delivered,
    Emit,
    Entry,
    LeaseLost,
    Raise,
    Ref,
    Release,
    Shell,
    Tick,
)
from contracts.envelope import STREAM_OF, ContractError, Envelope, encode
from contracts.envelope import decode as decode_envelope
from contracts.events import ActorBooted, DataLost, kind
from pipeline.bus import Bus, Commit, Lease, LeaseLostError, Position, WorkEntry
from pipeline.runtime.context import ActorContext
from pipeline.runtime.journal import Journal

BATCH = 64
"""Inputs committed in one script at most."""
SNAPSHOT_EVERY = 2000
"""Inputs between snapshots of a core's state."""
LEASE_S = 30.0
"""Idle time after which another reader may take over a work entry; renewed at a quarter of it."""
DELIVERIES = 8
"""Times a work entry is handed out before it goes to the dead-letter stream."""
GROUP = "readers"
"""Consumer group of every work stream."""


class Runtime:
    """One boot of one actor."""

    def __init__(
        self, shell: Shell, bus: Bus, run: str, actor: str, config: Any, run_dir: str, clock: Clock, log: Any
    ) -> None:
        self.run_dir = run_dir
        self.shell = shell
        self.core = shell.core
        self.bus = bus
        self.run_id = run
        self.actor = actor
        self.clock = clock
        self.log = log
        self.config = config
        self._journal = Journal(self.core)
        self._inputs: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._wants = asyncio.Event()
        self._queued: dict[str, int] = dict.fromkeys(self.core.work, 0)
        self._held: set[Ref] = set()
        self._cursors: dict[str, str] = dict.fromkeys(self.core.watch, "0-0")
        self._seen: dict[str, str] = {}
        self._stored: dict[str, str] = {}
        self._announced = 0
        self._payloads: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self.epoch = 0
        self.boot = 0
        self.seq = 0
        self._snapshot_seq = 0
        self.state: Any = None

    # --- life ---

    async def run(self) -> None:
        """Run until the core is done after `run.stopping`. Raises what ended it otherwise."""
        self.boot, seq = await self.bus.boot()
        await self._recover(seq)
        for stream in self.core.work:
            await self.bus.ensure_group(stream, GROUP)
        context = ActorContext(self)
        try:
            await self.shell.start(context)
            await self._commit([Booted(self.boot)])
            self._spawn(self._follow())
            self._spawn(self._keep())
            if self.core.work:
                self._spawn(self._work())
            while not (self.core.done(self.state) and not self._inputs):
                await self._turn()
        finally:
            for task in self._tasks:
                task.cancel()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), 5)
            await self.shell.close()

    async def _recover(self, seq: int) -> None:
        snapshot = await self.bus.snapshot()
        records = await self.bus.journal(after=0 if snapshot is None else snapshot[0])
        self.seq, self.state = self._journal.fold(snapshot, records)
        self._snapshot_seq = 0 if snapshot is None else snapshot[0]
        if self.seq != seq:
            raise RuntimeError(f"journal of {self.actor} ends at {self.seq}, the store committed {seq}")
        stored = await self.bus.cursors()
        self._cursors.update({s: c for s, c in stored.items() if s in self._cursors})
        self._seen, self._stored = dict(self._cursors), dict(self._cursors)

    async def _turn(self) -> None:
        """Wait for inputs or the core's next deadline, then commit one batch."""
        self._wants.set()
        wake = self.core.wake(self.state)
        if not self._inputs:
            timeout = None if wake is None else max(0.0, wake - self.clock.now())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), timeout)
        if self._failure is not None:
            raise self._failure
        inputs = [self._inputs.popleft() for _ in range(min(BATCH, len(self._inputs)))]
        if not self._inputs:
            self._arrived.clear()
        if wake is not None and wake <= self.clock.now():
            inputs.append(Tick())
        if inputs:
            await self._commit(inputs)

    # --- one commit ---

    async def _commit(self, inputs: list[Any]) -> None:
        """Step through `inputs` and commit the outcome; when leases were lost, step again without the lost work."""
        while True:
            attempt = Attempt(self, inputs)
            if not attempt.journal:
                break
            try:
                await self.bus.commit(attempt.commit)
            except LeaseLostError as lost:
                refs = tuple(Ref(lease.stream, lease.entry) for lease in lost.leases)
                self._held.difference_update(refs)
                self.log.warning("lease lost", entries=[f"{r.stream}/{r.entry}" for r in refs])
                inputs = [LeaseLost(refs), *inputs]
                continue
            break
        self._settle(attempt)

    def _settle(self, attempt: Attempt) -> None:
        self.state, self.seq = attempt.state, attempt.seq
        if attempt.commit.snapshot is not None:
            self._snapshot_seq = attempt.seq
        self._cursors = attempt.cursors
        self._held.difference_update(attempt.acked)
        for handle in attempt.handles:
            self._payloads.pop(handle, None)
        for stream, count in attempt.taken.items():
            self._queued[stream] -= count
        for command in attempt.commands:
            self._spawn(self._perform(command))

    def payload(self, handle: str) -> bytes:
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
        self._loop.call_soon_threadsafe(self.push, [input])

    async def _follow(self) -> None:
        """Feed broadcast events."""
        if not self._seen:
            return
        while True:
            self._feed(await self.bus.read_after(self._seen, count=256, block_ms=5000))

    def _feed(self, entries: Sequence[Entry]) -> None:
        fresh = []
        for entry in entries:
            if order(entry.entry) > order(self._seen[entry.stream]):
                self._seen[entry.stream] = entry.entry
                envelope = decode_envelope(entry.stream, entry.data)
                fresh.append(Delivered(Ref(entry.stream, entry.entry), envelope))
        self.push(fresh)

    def _intake(self) -> dict[str, int]:
        wanted = self.core.intake(self.state)
        return {s: n - self._queued[s] for s, n in wanted.items() if n > self._queued[s]}

    async def _work(self) -> None:
        """Feed work entries as the core has room for them, own unfinished ones first."""
        while True:
            counts = self._intake()
            if not counts:
                self._wants.clear()
                await self._wants.wait()
                continue
            entries = await self.bus.read_work(counts, GROUP, block_ms=1000)
            if self._seen and entries:
                self._feed(await self.bus.read_after(self._seen, count=1_000_000, block_ms=None))
            await self._take(entries)

    async def _take(self, entries: Sequence[WorkEntry]) -> None:
        for item in entries:
            if item.deliveries > DELIVERIES:
                await self._bury(item, f"delivered {item.deliveries} times without an ack")
                continue
            try:
                envelope = decode_envelope(item.stream, item.data)
            except ContractError as error:
                await self._bury(item, str(error))
                continue
            ref = Ref(item.stream, item.entry)
            self._held.add(ref)
            self._queued[item.stream] += 1
            self.push([Delivered(ref, envelope, item.deliveries)])

    async def _bury(self, item: WorkEntry, reason: str) -> None:
        await self.bus.bury(item.stream, GROUP, item.entry, reason=reason, now=self.clock.now())
        await self.announce(DataLost(stream=item.stream, entries=(item.entry,), reason=reason))

    async def announce(self, event: Any) -> None:
        """Append an event that no step of the core asked for."""
        self._announced += 1
        name = f"{self.actor}:{self.boot}+{self._announced}"
        self.log.warning("announced", **{"kind": kind(event), **msgspec.to_builtins(event)})
        await self.bus.post(STREAM_OF[type(event)], encode(self.envelope(name, event)))

    def envelope(self, id: str, event: Any, cause: str | None = None, correlation: str | None = None) -> Envelope[Any]:
        """The envelope of an event that this boot emits now."""
        return Envelope(
            id=id,
            run=self.run_id,
            stream=STREAM_OF[type(event)],
            actor=self.actor,
            boot=self.boot,
            epoch=max(self.epoch, getattr(event, "epoch", 0)),
            wall_ns=int(self.clock.now() * 1e9),
            mono_ns=self.clock.monotonic_ns(),
            body=event,
            causation_id=cause,
            correlation_id=correlation,
        )

    async def _keep(self) -> None:
        """Renew the leases on entries in hand, and take over those that others left."""
        while True:
            await asyncio.sleep(LEASE_S / 4)
            for stream in self.core.work:
                mine = [ref.entry for ref in self._held if ref.stream == stream]
                lost = await self.bus.renew(stream, GROUP, mine) if mine else []
                if lost:
                    refs = tuple(Ref(stream, entry) for entry in lost)
                    self._held.difference_update(refs)
                    self.push([LeaseLost(refs)])
                room = self._intake().get(stream, 0)
                if room:
                    await self._claim(stream, room)
            if self._cursors != self._stored:
                await self.bus.advance(self.boot, self._cursors)
                self._stored = dict(self._cursors)

    async def _claim(self, stream: str, room: int) -> None:
        claimed = await self.bus.claim_idle(stream, GROUP, int(LEASE_S * 1000), room)
        if claimed.deleted:
            reason = "deleted from the stream while owed to a reader"
            await self.announce(DataLost(stream=stream, entries=tuple(claimed.deleted), reason=reason))
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


class Attempt:
    """The outcome of stepping through a batch of inputs, not yet committed."""

    def __init__(self, runtime: Runtime, inputs: Sequence[Any]) -> None:
        self._runtime = runtime
        self.state = runtime.state
        self.seq = runtime.seq
        self.cursors = dict(runtime._cursors)
        self.journal: list[bytes] = []
        self.commands: list[Any] = []
        self.acked: list[Ref] = []
        self.handles: list[str] = []
        self.taken: dict[str, int] = {}
        self._adds: list[tuple[str, bytes]] = []
        self._leases: dict[Ref, None] = {}
        self._registers: list[tuple[str, int]] = []
        self._blobs: list[tuple[str, bytes]] = []
        self._releases: list[str] = []
        for input in inputs:
            self._step(input)
        self.commit = self._build()

    def _step(self, input: Any) -> None:
        now = self._runtime.clock.now()
        before = self.state
        self.state, commands = self._runtime.core.step(before, input, now)
        if isinstance(input, Delivered):
            self._passed(input)
        if isinstance(input, Booted):
            booted = ActorBooted(actor=self._runtime.actor, boot=input.boot, pid=os.getpid(), host=socket.gethostname())
            extra: tuple[Any, ...] = (Emit(booted),)
        elif not commands and self.state == before:
            return
        else:
            extra = ()
        self.seq += 1
        self.journal.append(self._runtime._journal.record(self.seq, now, input, commands))
        for ordinal, command in enumerate((*commands, *extra)):
            self._sort(command, ordinal, input)

    def _passed(self, input: Delivered) -> None:
        ref = input.ref
        self._runtime.epoch = max(self._runtime.epoch, getattr(input.envelope.body, "epoch", 0))
        if ref.stream in self.cursors:
            self.cursors[ref.stream] = ref.entry
        else:
            self.taken[ref.stream] = self.taken.get(ref.stream, 0) + 1

    def _sort(self, command: Any, ordinal: int, input: Any) -> None:
        match command:
            case Emit():
                self._emit(command, ordinal, input)
            case Ack():
                self.acked.append(command.ref)
            case Raise():
                self._registers.append((command.register, command.value))
            case Release():
                self._releases.extend(command.keys)
            case _:
                self.commands.append(command)

    def _emit(self, command: Emit, ordinal: int, input: Any) -> None:
        runtime = self._runtime
        name = f"{runtime.actor}:{self.seq}.{ordinal}"
        cause = input.envelope.id if isinstance(input, Delivered) else None
        envelope = runtime.envelope(name, command.event, cause, command.correlation)
        self._adds.append((envelope.stream, encode(envelope)))
        if command.lease is not None:
            self._leases[command.lease] = None
        if command.payload is not None:
            event: Any = command.event
            self._blobs.append((event.payload.key, runtime.payload(command.payload)))
            self.handles.append(command.payload)

    def _build(self) -> Commit:
        runtime = self._runtime
        snapshot = None
        if self.seq - runtime._snapshot_seq >= SNAPSHOT_EVERY:
            snapshot = runtime._journal.snapshot(self.state)
        return Commit(
            boot=runtime.boot,
            seq_from=runtime.seq,
            seq_to=self.seq,
            leases=[Lease(ref.stream, GROUP, ref.entry) for ref in self._leases],
            registers=self._registers,
            payloads=self._blobs,
            adds=self._adds,
            acks=[Lease(ref.stream, GROUP, ref.entry) for ref in self.acked],
            cursors=[Position(s, c) for s, c in self.cursors.items() if c != "0-0"],
            journal=self.journal,
            deletes=self._releases,
            snapshot=snapshot,
            keep_journal=False,
        )


def order(entry: str) -> tuple[int, int]:
    """Sort key of a stream entry id."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)
