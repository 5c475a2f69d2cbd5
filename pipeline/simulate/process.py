"""A simulated process: what `pipeline.runtime.loop` does for an actor, on virtual time, and how it can go wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec.structs import replace

from contracts.core import Booted, Core, Delivered, LeaseLost, Ref, Tick
from pipeline.bus import Fenced, LeaseLostError, RegisterStale, SequenceConflict
from pipeline.runtime.journal import Journal
from pipeline.runtime.loop import BATCH, LEASE_S
from pipeline.runtime.machine import Attempt, Identity, Machine

if TYPE_CHECKING:
    from pipeline.simulate.world import World

START = 1_700_000_000.0
"""When every simulated run begins, seconds since the Unix epoch."""
TICK_S = 0.001
"""How late a deadline is noticed at least: clocks of actors differ from the world's by less than a float can tell."""

Trap = Literal["unread", "uncommitted", "unperformed", "unanswered"]
"""Where the next commit of an actor ends: killed before it (the delivery was read and is lost), killed after it
(nothing was performed), or its answer is lost and it is sent again."""


class Broken(AssertionError):
    """A simulated component saw the protocol break a safety property."""


class SimShell(Protocol):
    """Performs commands by scheduling their results."""

    core: Core[Any]

    def perform(self, actor: SimActor, command: Any) -> None: ...

    def killed(self, actor: SimActor) -> None:
        """The process is gone, and all that it did outside the store."""
        ...

    def payload(self, handle: str) -> bytes: ...

    def booting(self, actor: SimActor) -> None:
        """The process has read its state and is about to commit its boot; may halt the world."""
        ...


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
        self.deaf_until = 0.0
        self.skew = 0.0
        self.leapt = 0.0
        self._trap: Trap | None = None
        self._asking = False
        self._inputs: deque[Any] = deque()
        self._seen: dict[str, str] = {}
        self._queued: dict[str, int] = {}
        self._turn_at: float | None = None

    @property
    def state(self) -> Any:
        return None if self.machine is None else self.machine.state

    def now(self) -> float:
        """This process's clock, `contracts.core.Clock`: off the world's by what the wall was off at its start."""
        return self.world.now() + self.leapt + self.skew

    def monotonic_ns(self) -> int:
        return int((self.world.now() - START + self.leapt) * 1e9)

    # --- life ---

    def boot(self) -> None:
        """Start a process: fence, fold the journal, commit `Booted`, take up own pending work."""
        world, store = self.world, self.world.store
        if world.down:
            world.later(world.back_at - world.now() + world.draw(world.pace.hop), self._reboot(self.life))
            return
        self.life += 1
        if world.skew_s:
            self.skew = world.random.uniform(-world.skew_s, world.skew_s)
        number, committed = store.boot(self.name)
        snapshot = store.snapshots.get(self.name)
        seq, state = Journal(self.core).fold(snapshot, store.journals[self.name])
        assert seq == committed, f"{self.name}: journal ends at {seq}, store committed {committed}"
        identity = Identity(self.world.run_id, self.name, number, "sim", number)
        self.machine = Machine(self.core, identity, self, self.shell.payload, seq, state)
        self.machine.restored(snapshot, store.journals[self.name])
        self.machine.cursors.update(store.cursors[self.name])
        self._seen = dict(self.machine.cursors)
        self._queued = dict.fromkeys(self.core.work, 0)
        self._inputs.clear()
        self._asking = False
        self.shell.booting(self)
        if world.halted is not None:
            return
        self._commit([Booted(number)])
        if self.machine is None:
            return
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

    def perish(self) -> None:
        """kill -9, and nobody starts a successor."""
        self.kill(restart=False)
        self.life += 1

    def boot_again(self) -> Callable[[], None]:
        """Starts a process, unless one was started, or killed, since."""
        return self._reboot(self.life)

    def _reboot(self, life: int) -> Callable[[], None]:
        def boot() -> None:
            if self.life == life:
                self.boot()

        return boot

    def haunt(self) -> None:
        """kill, as far as anybody can tell; but the process goes on when its successor is up, and must be refused."""
        old, losses = self.machine, self.world.losses
        if old is None:
            return
        self.kill()

        def wake() -> None:
            if self.world.losses > losses:
                return
            if self.machine is None or self.world.down:
                self.world.later(1.0, wake)
                return
            try:
                self.world.store.commit(self.name, Attempt(old, [Booted(old.identity.boot)]).commit)
            except Fenced:
                return
            raise Broken(f"{self.name}: boot {old.identity.boot} committed after boot {self.machine.identity.boot}")

        self.world.later(self.world.pace.restart[1], wake)

    def pause(self, seconds: float) -> None:
        """SIGSTOP for a while."""
        self.paused_until = max(self.paused_until, self.world.now() + seconds)

    def deafen(self, seconds: float) -> None:
        """What the store has for this process arrives late; what it does outside the store goes on."""
        self.deaf_until = max(self.deaf_until, self.world.now() + seconds)
        self.world.later(seconds, lambda: self.schedule(0.0))

    def set_trap(self, trap: Trap) -> None:
        """The next commit goes wrong."""
        self._trap = trap

    def leap(self, seconds: float) -> None:
        """Its monotonic clock jumps ahead, as on a machine that was suspended."""
        self.leapt += seconds
        self.schedule(0.0)

    @property
    def stopped(self) -> bool:
        return self.world.now() < self.paused_until

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
        if self.machine is None:
            return
        now = self.world.now()
        at = max(now + delay, self.paused_until)
        if self._turn_at is None or at < self._turn_at:
            self._turn_at = at
            self.do(at - now, lambda: self._due(at))

    def _due(self, at: float) -> None:
        if self._turn_at != at:
            return
        self._turn_at = None
        if self.stopped or self._asking:
            self.schedule(TICK_S)
        elif self.world.down:
            self.schedule(self.world.back_at - self.world.now() + self.world.draw(self.world.pace.hop))
        else:
            self._turn()

    def _turn(self) -> None:
        assert self.machine is not None
        store = self.world.store
        self._follow()
        room = {} if self._deaf else self.core.intake(self.machine.state)
        for stream, wanted in room.items():
            if wanted > self._queued[stream]:
                self._take(store.read_new(stream, self.name, wanted - self._queued[stream]))
        if len(self._inputs) <= BATCH:
            inputs = list(self._inputs)
            self._inputs.clear()
        else:
            inputs = [self._inputs.popleft() for _ in range(BATCH)]
        wake = self.core.wake(self.machine.state)
        if wake is not None and wake <= self.now():
            inputs.append(Tick())
        if inputs:
            self._commit(inputs)
        if self.machine is None:
            return
        if self._inputs or self._more():
            self.schedule(self.world.draw(self.world.pace.hop))
        wake = self.core.wake(self.machine.state)
        if wake is not None:
            late = TICK_S if wake <= self.now() else 0.0
            self.schedule(max(late, wake - self.now()))

    def _more(self) -> bool:
        """There is work that the core has room for."""
        assert self.machine is not None
        room = {} if self._deaf else self.core.intake(self.machine.state)
        return any(n > self._queued[s] and self.world.store.waiting(s) for s, n in room.items())

    @property
    def _deaf(self) -> bool:
        return self.world.now() < self.deaf_until

    def _follow(self) -> None:
        if self._deaf:
            return
        for entry in self.world.store.read_after(self._seen):
            self._seen[entry.stream] = entry.entry
            self._inputs.append(self.world.delivered(entry))

    def _take(self, entries: Iterable[Any]) -> None:
        self._follow()
        for item in entries:
            self._queued[item.stream] += 1
            first = self.world.delivered(item)
            self._inputs.append(first if item.deliveries == 1 else replace(first, deliveries=item.deliveries))

    def redeliver(self, stream: str, entry: int) -> None:
        """Hand a work entry to this process although it, or another, has it; not one that still waits for its turn."""
        waiting = {item.ref.entry for item in self._inputs if isinstance(item, Delivered) and item.ref.stream == stream}
        if self.machine is not None and not self.stopped and not self._deaf and f"{entry}-0" not in waiting:
            self._take([self.world.store.hand_over(stream, entry, self.name)])
            self.schedule(0.0)

    def _commit(self, inputs: list[Any]) -> None:
        """One commit, as the runtime does it; `trap` decides how it may go wrong."""
        assert self.machine is not None
        trap, self._trap = self._trap, None
        if trap == "unread" or (trap == "uncommitted" and Attempt(self.machine, inputs).journalled):
            self.kill()
            return
        while True:
            attempt = Attempt(self.machine, inputs)
            if not attempt.journalled:
                break
            try:
                self.world.store.commit(self.name, attempt.commit)
                break
            except LeaseLostError as lost:
                inputs = [LeaseLost(tuple(Ref(lease.stream, lease.entry) for lease in lost.leases)), *inputs]
            except (Fenced, SequenceConflict, RegisterStale) as refused:
                self.world.halt(f"{self.name} is ahead of the store: {refused}")
                return
        self.world.ring(stream for stream, _ in attempt.commit.adds)
        if trap == "unperformed":
            self.kill()
        elif trap == "unanswered" and attempt.journalled:
            self._ask_again(attempt)
        else:
            self._settle(attempt)

    def _ask_again(self, attempt: Attempt) -> None:
        """The store applied the commit and the answer was lost: until the next try this process knows nothing."""
        self._asking = True

        def again() -> None:
            if self.world.down or self.stopped:
                self.do(max(self.world.back_at, self.paused_until) - self.world.now() + TICK_S, again)
                return
            try:
                if not self.world.store.commit(self.name, attempt.commit).again:
                    raise Broken(f"a commit of {self.name} was applied twice")
            except (Fenced, SequenceConflict) as refused:
                self.world.halt(f"{self.name} is ahead of the store: {refused}")
                return
            self._asking = False
            self._settle(attempt)
            self.schedule(0.0)

        self.do(self.world.draw(self.world.pace.reconnect), again)

    def _settle(self, attempt: Attempt) -> None:
        assert self.machine is not None
        self.machine.settle(attempt)
        for stream, count in attempt.taken.items():
            self._queued[stream] -= count
        for command in attempt.commands:
            if self.machine is not None:
                self.shell.perform(self, command)

    def _keep(self, life: int) -> None:
        """Renew leases and take over what others left, four times a lease."""

        def keep() -> None:
            if self.life != life or self.machine is None:
                return
            if not (self.stopped or self.world.down or self._deaf):
                for stream in self.core.work:
                    self.world.store.renew(stream, self.name)
                    room = self.core.intake(self.machine.state).get(stream, 0) - self._queued[stream]
                    self._take(self.world.store.claim(stream, self.name, LEASE_S, room) if room > 0 else ())
                self.schedule(0.0)
            self.world.later(LEASE_S / 4, keep)

        if self.core.work:
            self.world.later(LEASE_S / 4, keep)
