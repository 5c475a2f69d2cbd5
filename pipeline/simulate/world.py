"""Virtual time, a store, and actors whose every delay is drawn from one seeded generator: same seed, same log."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Protocol

import msgspec

from contracts.core import Booted, Core, Delivered, LeaseLost, Ref, Tick
from contracts.envelope import decode
from pipeline.bus import LeaseLostError
from pipeline.runtime.journal import Journal
from pipeline.runtime.loop import BATCH, LEASE_S
from pipeline.runtime.machine import Attempt, Identity, Machine
from pipeline.simulate.store import MemoryStore

START = 1_700_000_000.0
"""When every simulated run begins, seconds since the Unix epoch."""


class Pace(msgspec.Struct, frozen=True):
    """Ranges of the delays, in seconds."""

    hop: tuple[float, float] = (0.0005, 0.003)
    """From a commit to the turn of an actor that it concerns, and each way of a request."""
    restart: tuple[float, float] = (0.5, 2.0)
    server_start: tuple[float, float] = (1.0, 3.0)
    generate: tuple[float, float] = (0.05, 0.4)
    score: tuple[float, float] = (0.001, 0.02)
    train: tuple[float, float] = (0.2, 0.4)
    save: tuple[float, float] = (0.01, 0.05)
    load: tuple[float, float] = (0.2, 0.5)
    transfer: tuple[float, float] = (0.01, 0.03)


class SimShell(Protocol):
    """Performs commands by scheduling their results."""

    core: Core[Any]

    def perform(self, actor: SimActor, command: Any) -> None: ...

    def killed(self, actor: SimActor) -> None:
        """The process is gone, and all that it did outside the store."""
        ...

    def payload(self, handle: str) -> bytes: ...


class World:
    """The clock, the store and the actors. Also the `contracts.core.Clock` of all cores."""

    def __init__(self, seed: int, pace: Pace | None = None) -> None:
        self.random = Random(seed)
        self.pace = pace or Pace()
        self.store = MemoryStore()
        self.actors: dict[str, SimActor] = {}
        self.run_id = f"sim-{seed}"
        self._time = START
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def now(self) -> float:
        return self._time

    def monotonic_ns(self) -> int:
        return int((self._time - START) * 1e9)

    def draw(self, bounds: tuple[float, float]) -> float:
        return self.random.uniform(*bounds)

    def later(self, delay: float, work: Callable[[], None]) -> None:
        """Do `work` after `delay` seconds of virtual time."""
        self._count += 1
        heapq.heappush(self._queue, (self._time + delay, self._count, work))

    def add(self, name: str, shell: SimShell) -> None:
        self.actors[name] = SimActor(self, name, shell)

    def start(self) -> None:
        for actor in self.actors.values():
            self.later(self.draw(self.pace.hop), actor.boot)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Go on until `until()` or `limit_s` of virtual time; answers whether `until` came true."""
        end = self._time + limit_s
        while self._queue and not until():
            at, _, work = heapq.heappop(self._queue)
            if at > end:
                self._time = end
                return False
            self._time = self.store.now = at
            work()
        return until()

    def post(self, event: Any, name: str) -> None:
        """Append an event from outside, as the driver does."""
        from contracts.envelope import STREAM_OF, Envelope, encode

        envelope = Envelope(
            id=f"driver:{name}",
            run=self.run_id,
            stream=STREAM_OF[type(event)],
            actor="driver",
            boot=0,
            epoch=0,
            wall_ns=int(self._time * 1e9),
            mono_ns=self.monotonic_ns(),
            body=event,
        )
        self.store.add(envelope.stream, encode(envelope))
        self.ring({envelope.stream})

    def ring(self, streams: Iterable[str]) -> None:
        """Wake the readers of streams that got something."""
        fresh = set(streams)
        for actor in self.actors.values():
            if fresh & actor.reads:
                actor.schedule(self.draw(self.pace.hop))


class SimActor:
    """One actor: `machine` is None while its process is down. `life` numbers processes and the gaps between them."""

    def __init__(self, world: World, name: str, shell: SimShell) -> None:
        self.world = world
        self.name = name
        self.shell = shell
        self.core = shell.core
        self.reads = {*self.core.work, *self.core.watch}
        self.machine: Machine | None = None
        self.life = 0
        self.paused_until = 0.0
        self._inputs: deque[Any] = deque()
        self._seen: dict[str, str] = {}
        self._queued: dict[str, int] = {}
        self._turn_at: float | None = None

    @property
    def state(self) -> Any:
        return None if self.machine is None else self.machine.state

    # --- life ---

    def boot(self) -> None:
        """Start a process: fence, fold the journal, commit `Booted`, take up own pending work."""
        store = self.world.store
        self.life += 1
        number, committed = store.boot(self.name)
        snapshot = store.snapshots.get(self.name)
        seq, state = Journal(self.core).fold(snapshot, store.journals[self.name])
        assert seq == committed, f"{self.name}: journal ends at {seq}, store committed {committed}"
        identity = Identity(self.world.run_id, self.name, number, "sim", number)
        self.machine = Machine(self.core, identity, self.world, self.shell.payload, seq, state)
        self.machine.snapshot_seq = 0 if snapshot is None else snapshot[0]
        self.machine.cursors.update(store.cursors[self.name])
        self._seen = dict(self.machine.cursors)
        self._queued = dict.fromkeys(self.core.work, 0)
        self._inputs.clear()
        self._commit([Booted(number)])
        for stream in self.core.work:
            self._take(store.read_own(stream, self.name))
        self._keep(self.life)
        self.schedule(0.0)

    def kill(self, restart: bool = True) -> None:
        """kill -9; with `restart`, a successor boots after a while."""
        if self.machine is None:
            return
        self.machine = None
        self.life += 1
        self._turn_at = None
        self.shell.killed(self)
        if restart:
            self.world.later(self.world.draw(self.world.pace.restart), self._reboot(self.life))

    def _reboot(self, life: int) -> Callable[[], None]:
        def boot() -> None:
            if self.life == life:
                self.boot()

        return boot

    def pause(self, seconds: float) -> None:
        """SIGSTOP for a while."""
        self.paused_until = self.world.now() + seconds

    def after(self, delay: float, input: Any) -> None:
        """Hand a local input to this process after `delay`, unless it is dead by then."""
        self.do(delay, lambda: self.push(input))

    def do(self, delay: float, work: Callable[[], None]) -> None:
        """Do `work` after `delay` if this process still lives."""
        life = self.life

        def guarded() -> None:
            if self.life == life and self.machine is not None:
                work()

        self.world.later(delay, guarded)

    # --- turns ---

    def push(self, input: Any) -> None:
        self._inputs.append(input)
        self.schedule(0.0)

    def schedule(self, delay: float) -> None:
        """Take a turn after `delay`, or earlier if one is due earlier."""
        at = max(self.world.now() + delay, self.paused_until)
        if self.machine is None or (self._turn_at is not None and self._turn_at <= at):
            return
        self._turn_at = at
        self.do(at - self.world.now(), lambda: self._due(at))

    def _due(self, at: float) -> None:
        if self._turn_at != at:
            return
        self._turn_at = None
        if self.world.now() < self.paused_until:
            self.schedule(0.0)
            return
        self._turn()

    def _turn(self) -> None:
        assert self.machine is not None
        store = self.world.store
        self._follow()
        for stream, wanted in self.core.intake(self.machine.state).items():
            if wanted > self._queued[stream]:
                self._take(store.read_new(stream, self.name, wanted - self._queued[stream]))
        inputs = [self._inputs.popleft() for _ in range(min(BATCH, len(self._inputs)))]
        wake = self.core.wake(self.machine.state)
        if wake is not None and wake <= self.world.now():
            inputs.append(Tick())
        if inputs:
            self._commit(inputs)
        if self.machine is None:
            return
        if self._inputs or self._more():
            self.schedule(self.world.draw(self.world.pace.hop))
        wake = self.core.wake(self.machine.state)
        if wake is not None:
            self.schedule(max(0.0, wake - self.world.now()))

    def _more(self) -> bool:
        """There is work that the core has room for."""
        assert self.machine is not None
        room = self.core.intake(self.machine.state)
        return any(n > self._queued[s] and self.world.store.waiting(s) for s, n in room.items())

    def _follow(self) -> None:
        for entry in self.world.store.read_after(self._seen):
            self._seen[entry.stream] = entry.entry
            self._inputs.append(Delivered(Ref(entry.stream, entry.entry), decode(entry.stream, entry.data)))

    def _take(self, entries: Iterable[Any]) -> None:
        self._follow()
        for item in entries:
            self._queued[item.stream] += 1
            envelope = decode(item.stream, item.data)
            self._inputs.append(Delivered(Ref(item.stream, item.entry), envelope, item.deliveries))

    def _commit(self, inputs: list[Any]) -> None:
        assert self.machine is not None
        while True:
            attempt = Attempt(self.machine, inputs)
            if not attempt.journalled:
                break
            try:
                self.world.store.commit(self.name, attempt.commit)
                break
            except LeaseLostError as lost:
                inputs = [LeaseLost(tuple(Ref(lease.stream, lease.entry) for lease in lost.leases)), *inputs]
        self.machine.settle(attempt)
        for stream, count in attempt.taken.items():
            self._queued[stream] -= count
        self.world.ring(stream for stream, _ in attempt.commit.adds)
        for command in attempt.commands:
            if self.machine is not None:
                self.shell.perform(self, command)

    def _keep(self, life: int) -> None:
        """Renew leases and take over what others left, four times a lease."""

        def keep() -> None:
            if self.life != life or self.machine is None:
                return
            if self.world.now() >= self.paused_until:
                for stream in self.core.work:
                    self.world.store.renew(stream, self.name)
                    room = self.core.intake(self.machine.state).get(stream, 0) - self._queued[stream]
                    self._take(self.world.store.claim(stream, self.name, LEASE_S, room) if room > 0 else ())
                self.schedule(0.0)
            self.world.later(LEASE_S / 4, keep)

        if self.core.work:
            self.world.later(LEASE_S / 4, keep)
