"""One boot of a core: steps through inputs, and turns what comes out into one commit. No input or output of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from actors.recorder.ordering import START
from contracts.core import Ack, Booted, Clock, Core, Delivered, Emit, Raise, Ref, Release
from contracts.envelope import STREAM_OF, Envelope, encode
from contracts.events import ActorBooted
from pipeline.bus import Commit, Lease, Position
from pipeline.runtime.journal import Journal

GROUP = "readers"
"""Consumer group of every work stream."""
SNAPSHOT_EVERY = 2000
"""Most inputs between snapshots of a core's state."""
SNAPSHOT_BYTES = 1 << 20
"""Most bytes of journal between them, unless the state itself is large."""
SNAPSHOT_SHARE = 4
"""Bytes of journal that a byte of snapshot must be worth."""


class Identity(msgspec.Struct, frozen=True):
    """Who emits."""

    run: str
    actor: str
    boot: int
    host: str
    pid: int


class Machine:
    """The committed state of a core and how it is advanced.

    `state` and `seq` are what the store knows; an `Attempt` that is not settled leaves no trace. `cursors` may be ahead
    of the store's, `stored`, over events that were ignored. `payload` answers the bytes of an `Emit.payload` handle.
    """

    def __init__(
        self, core: Core[Any], identity: Identity, clock: Clock, payload: Callable[[str], bytes], seq: int, state: Any
    ) -> None:
        self.core = core
        self.identity = identity
        self.clock = clock
        self.payload = payload
        self.journal = Journal(core)
        self.seq = seq
        self.state = state
        self.epoch = 0
        self.snapshot_seq = 0
        self.snapshot_bytes = 0
        """Size of the last snapshot."""
        self.journal_bytes = 0
        """Of the journal behind it."""
        self.cursors: dict[str, str] = dict.fromkeys(core.watch, START)
        self.stored: dict[str, str] = {}
        """Cursors that are in the store for certain."""

    def settle(self, attempt: Attempt) -> None:
        """The commit of `attempt` was applied."""
        self.state, self.seq, self.cursors = attempt.state, attempt.seq, attempt.cursors
        if attempt.journalled:
            self.stored = attempt.cursors
        self.journal_bytes += sum(map(len, attempt.commit.journal))
        if attempt.commit.snapshot is not None:
            self.snapshot_seq, self.snapshot_bytes = attempt.seq, len(attempt.commit.snapshot)
            self.journal_bytes = 0

    def restored(self, snapshot: tuple[int, bytes] | None, records: Sequence[bytes]) -> None:
        """The state was folded from these."""
        if snapshot is not None:
            self.snapshot_seq, self.snapshot_bytes = snapshot[0], len(snapshot[1])
        self.journal_bytes = sum(map(len, records))

    def snapshot_due(self, seq: int, records: Sequence[bytes]) -> bool:
        """Whether the state after `seq` is to be saved, with `records` about to be journalled."""
        size = self.journal_bytes + sum(map(len, records))
        large = size >= max(SNAPSHOT_BYTES, SNAPSHOT_SHARE * self.snapshot_bytes)
        return large or seq - self.snapshot_seq >= SNAPSHOT_EVERY

    def envelope(self, id: str, event: Any, cause: str | None = None, correlation: str | None = None) -> Envelope[Any]:
        """The envelope of an event that this boot emits now."""
        return Envelope(
            id=id,
            run=self.identity.run,
            stream=STREAM_OF[type(event)],
            actor=self.identity.actor,
            boot=self.identity.boot,
            epoch=max(self.epoch, getattr(event, "epoch", 0)),
            wall_ns=int(self.clock.now() * 1e9),
            mono_ns=self.clock.monotonic_ns(),
            body=event,
            causation_id=cause,
            correlation_id=correlation,
        )


class Attempt:
    """The outcome of stepping through a batch of inputs, not yet committed.

    `commands` are left for the shell, in order. `handles` are the payload handles in the commit, `acked` the entries
    it acks, `taken` how many work entries of each stream the batch held. With `journalled` False nothing changed.
    """

    def __init__(self, machine: Machine, inputs: Sequence[Any]) -> None:
        self._machine = machine
        self.state = machine.state
        self.seq = machine.seq
        self.cursors = dict(machine.cursors)
        self.commands: list[Any] = []
        self.acked: list[Ref] = []
        self.handles: list[str] = []
        self.taken: dict[str, int] = {}
        self._journal: list[bytes] = []
        self._adds: list[tuple[str, bytes]] = []
        self._leases: dict[Ref, None] = {}
        self._registers: list[tuple[str, int]] = []
        self._blobs: list[tuple[str, bytes]] = []
        self._releases: list[str] = []
        for input in inputs:
            self._step(input)
        self.commit = self._build()

    @property
    def journalled(self) -> bool:
        return bool(self._journal)

    def _step(self, input: Any) -> None:
        machine = self._machine
        now = machine.clock.now()
        before = self.state
        self.state, commands = machine.core.step(before, input, now)
        if isinstance(input, Delivered):
            self._passed(input)
        extra: tuple[Any, ...] = ()
        if isinstance(input, Booted):
            who = machine.identity
            extra = (Emit(ActorBooted(actor=who.actor, boot=who.boot, pid=who.pid, host=who.host)),)
        elif not commands and (self.state is before or self.state == before):
            return
        self.seq += 1
        self._journal.append(machine.journal.record(self.seq, now, input, commands))
        for ordinal, command in enumerate((*commands, *extra)):
            self._sort(command, ordinal, input)

    def _passed(self, input: Delivered) -> None:
        machine, ref = self._machine, input.ref
        epoch = getattr(input.envelope.body, "epoch", 0)
        if epoch > machine.epoch:
            machine.epoch = epoch
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
        machine = self._machine
        name = f"{machine.identity.actor}:{self.seq}.{ordinal}"
        cause = input.envelope.id if isinstance(input, Delivered) else None
        envelope = machine.envelope(name, command.event, cause, command.correlation)
        self._adds.append((envelope.stream, encode(envelope)))
        if command.lease is not None:
            self._leases[command.lease] = None
        if command.payload is not None:
            event: Any = command.event
            self._blobs.append((event.payload.key, machine.payload(command.payload)))
            self.handles.append(command.payload)

    def _build(self) -> Commit:
        machine = self._machine
        snapshot = None
        if machine.snapshot_due(self.seq, self._journal):
            snapshot = machine.journal.snapshot(self.state)
        return Commit(
            boot=machine.identity.boot,
            seq_from=machine.seq,
            seq_to=self.seq,
            leases=[Lease(ref.stream, GROUP, ref.entry) for ref in self._leases],
            registers=self._registers,
            payloads=self._blobs,
            adds=self._adds,
            acks=[Lease(ref.stream, GROUP, ref.entry) for ref in self.acked],
            cursors=[Position(s, c) for s, c in self.cursors.items() if c != machine.stored.get(s, START)],
            journal=self._journal,
            releases=self._releases,
            snapshot=snapshot,
        )
