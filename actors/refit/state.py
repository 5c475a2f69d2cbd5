"""What the refit coordinator remembers, what comes back from its shell, and what it asks of it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from contracts.core import Emit
from contracts.events import Event, Health, Member, Rank, WaitEnded, WaitStarted

Phase = Literal["idle", "opening", "draining", "transferring", "releasing"]

# --- inputs and commands of its own ----------------------------------------------------------------------------------


class HighWritten(msgspec.Struct, frozen=True, tag="high_written"):
    """The high-water mark `epoch` is on disk."""

    epoch: int


class Missed(msgspec.Struct, frozen=True, tag="missed"):
    """A watched member has not answered its last `misses` probes."""

    name: str
    boot: int
    misses: int
    reason: str


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """A watched member answers again."""

    name: str
    boot: int


Local = HighWritten | Missed | Heard


class Watch(msgspec.Struct, frozen=True):
    """From now on probe boot `boot` of the member at `url`, and no other boot of it; None: no boot at all."""

    name: str
    boot: int
    url: str | None


class FsyncHigh(msgspec.Struct, frozen=True):
    """Write `epoch` durably to the run directory before anything carries it."""

    epoch: int


class Log(msgspec.Struct, frozen=True):
    """Write one line to the run's log."""

    text: str
    fields: dict[str, Any]
    warning: bool = False


# --- state -----------------------------------------------------------------------------------------------------------


class Trainer(msgspec.Struct, frozen=True):
    """The newest boot of the trainer. `versions` are its (version, step) pairs since the last request, newest last."""

    boot: int
    versions: tuple[tuple[int, int], ...] = ()
    """Empty until `policy.ready`."""
    run: str = ""

    def step_of(self, version: int) -> int | None:
        """Optimizer step of a version of this boot, None while its event has not been read."""
        return dict(self.versions).get(version)


class Engine(msgspec.Struct, frozen=True):
    """The newest known boot of one engine. `actor_boot` is the boot of the process that announced it."""

    boot: int
    actor_boot: int
    ranks: int
    up: bool = True
    serving: bool = False
    strikes: int = 0
    """Faults since its last commit, over boots."""
    eligible_at: float = 0.0
    """Takes part in no refit before, as long as another engine can."""
    url: str = ""
    health: Health = "uncertain"
    trusted: Health = "uncertain"
    """What a suspect was before it was suspected."""
    restarts: int = 0
    """Restarts that were ordered since it last served."""
    restart_at: float | None = None
    """When a dead engine is to be restarted, and a restarting one counts as dead again."""


class Gateway(msgspec.Struct, frozen=True):
    """The newest known boot of one gateway. `up`: it listens; `open`: the last commit was written after that."""

    boot: int
    up: bool
    open: bool = False
    url: str = ""
    silent: bool = False
    """It answers no probe: no refit waits for it."""


class Seat(msgspec.Struct, frozen=True):
    """An engine's part in the current epoch."""

    engine: str
    boot: int
    ranks: int
    drained: bool = False
    loaded: bool = False
    probe: tuple[float, ...] = ()
    fingerprint: str = ""


class Gate(msgspec.Struct, frozen=True):
    """A gateway's part in the current epoch: closed once this boot, or a newer one, said so.

    One that is `silent` is not waited for: what it may have sent runs on no engine that has drained, and engines refuse
    what was sent under an older epoch.
    """

    gateway: str
    boot: int
    closed_by: int = -1
    silent: bool = False

    @property
    def closed(self) -> bool:
        return self.silent or self.closed_by >= self.boot


class Group(msgspec.Struct, frozen=True):
    """A weight-update group; equal groups of one name hold the same processes."""

    name: str
    members: tuple[Rank, ...]
    trainer_boot: int


class Offer(msgspec.Struct, frozen=True):
    """What the trainer is ready to send."""

    version: int
    bytes: int
    digest: str


class Barrier(msgspec.Struct, frozen=True):
    """One epoch, from `refit.requested` to its end. Engines that were expelled have left `seats`."""

    epoch: int
    version: int
    step: int
    trainer_boot: int
    requested_at: float
    drain_at: float
    deadline_at: float
    seats: tuple[Seat, ...]
    gates: tuple[Gate, ...]
    offer: Offer | None = None
    started_at: float | None = None
    group: Group | None = None
    transfer_s: float | None = None
    """Set once the trainer sent everything."""


class Wanted(msgspec.Struct, frozen=True):
    """The trainer waits for memory before this step."""

    step: int
    trainer_boot: int


class Release(msgspec.Struct, frozen=True):
    """An epoch in which engines give memory back. Those that failed are in neither list."""

    epoch: int
    wanted: Wanted
    requested_at: float
    drain_at: float
    waiting: tuple[Member, ...]
    released: tuple[Member, ...] = ()


class Yielded(msgspec.Struct, frozen=True):
    """The device is the trainer's for this step; no refit begins meanwhile."""

    wanted: Wanted
    since: float
    deadline_at: float


class Committed(msgspec.Struct, frozen=True):
    """The last commit."""

    epoch: int
    version: int
    step: int
    trainer_boot: int


class Wait(msgspec.Struct, frozen=True):
    """An announced wait. `key` tells whether it is still the same one."""

    key: str
    on: str
    since: float
    deadline_at: float


class RefitState(msgspec.Struct, frozen=True):
    """Everything the coordinator decides from."""

    boot: int = 0
    phase: Phase = "idle"
    epoch: int = 0
    """Highest epoch number taken, also when nothing has carried it yet."""
    trainer: Trainer | None = None
    engines: dict[str, Engine] = {}
    gateways: dict[str, Gateway] = {}
    barrier: Barrier | None = None
    wanted: Wanted | None = None
    release: Release | None = None
    """Set exactly in the phase `releasing`."""
    yielded: Yielded | None = None
    committed: Committed | None = None
    group: Group | None = None
    """The group that carried the last commit, if every member of it came through."""
    gathering: bool = True
    """The whole fleet is awaited before the next epoch: at the start, and when a run is resumed."""
    failures: int = 0
    retry_at: float = 0.0
    suspects: tuple[Member, ...] = ()
    """Members of the epoch that failed last, until the next one begins."""
    wait: Wait | None = None
    size: int | None = None
    """How many engines the run was scaled to; None as configured."""
    stopping: bool = False
    halted: bool = False


class Turn:
    """One step in the making: the state so far and the commands in order."""

    __slots__ = ("commands", "now", "state")

    def __init__(self, state: RefitState, now: float) -> None:
        self.state = state
        self.now = now
        self.commands: list[Any] = []

    @property
    def barrier(self) -> Barrier:
        """The current epoch; only called while there is one."""
        assert self.state.barrier is not None
        return self.state.barrier

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **changes)

    def set_barrier(self, **changes: Any) -> None:
        """Change fields of the current epoch."""
        self.state = replace(self.state, barrier=replace(self.barrier, **changes))

    def set_engine(self, name: str, **changes: Any) -> None:
        """Change fields of one engine."""
        engines = self.state.engines
        self.state = replace(self.state, engines={**engines, name: replace(engines[name], **changes)})

    def set_seat(self, name: str, **changes: Any) -> None:
        """Change fields of one engine's part in the epoch."""
        barrier = self.barrier
        seats = tuple([replace(s, **changes) if s.engine == name else s for s in barrier.seats])
        self.state = replace(self.state, barrier=replace(barrier, seats=seats))

    def set_gate(self, gate: Gate) -> None:
        """Change, or add, one gateway's part in the epoch."""
        barrier = self.barrier
        gates = sorted([*[g for g in barrier.gates if g.gateway != gate.gateway], gate], key=lambda g: g.gateway)
        self.state = replace(self.state, barrier=replace(barrier, gates=tuple(gates)))

    def do(self, *commands: Any) -> None:
        """Add commands."""
        self.commands.extend(commands)

    def emit(self, event: Event) -> None:
        """Emit an event of the current epoch."""
        self.do(Emit(event, correlation=f"refit-{self.barrier.epoch}"))

    def log(self, text: str, *, warning: bool = False, **fields: Any) -> None:
        """Log one step of the current epoch."""
        barrier = self.barrier
        self.do(Log(text, {"version": barrier.version, **fields, "epoch": barrier.epoch}, warning))

    def announce(self, actor: str, wanted: Wait | None, cause: str) -> None:
        """Say which wait began or ended with this step."""
        held = self.state.wait
        if (None if held is None else held.key) == (None if wanted is None else wanted.key):
            return
        if held is not None:
            self.do(Emit(WaitEnded(actor=actor, on=held.on, seconds=self.now - held.since)))
        if wanted is not None:
            self.do(Emit(WaitStarted(actor=actor, on=wanted.on, cause=cause, deadline_at=wanted.deadline_at)))
        self.set(wait=wanted)
