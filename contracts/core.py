"""What a pure core and its shell share: inputs, commands and the protocols between them.

A core decides: `step(state, input, now) -> (state, commands)`. It reads no clock, no randomness and no network; `now`
is handed in. States are immutable, so that a step whose commit failed is undone by dropping the new state. The runtime
journals every input and commits the stream effects of a step (emit, ack, raise) in one script; only then does the shell
perform the other commands, and their results come back as inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from contracts.envelope import Envelope
from contracts.events import Event

# --- inputs common to all cores --------------------------------------------------------------------------------------


class Ref(msgspec.Struct, frozen=True, gc=False):
    """An entry of a stream."""

    stream: str
    entry: str


class Delivered(msgspec.Struct, frozen=True, gc=False, tag="delivered"):
    """A stream event. `deliveries` > 1 marks a work entry that was handed out before."""

    ref: Ref
    envelope: Envelope[Event]
    deliveries: int = 1


class Booted(msgspec.Struct, frozen=True, tag="booted"):
    """The first input after every start of the process: whatever was being performed outside Redis is lost."""

    boot: int


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """`wake(state)` has come."""


class LeaseLost(msgspec.Struct, frozen=True, tag="lease_lost"):
    """Work entries that this actor held now belong to another reader: drop what was done for them."""

    refs: tuple[Ref, ...]


# --- commands common to all cores ------------------------------------------------------------------------------------


class Emit(msgspec.Struct, frozen=True):
    """Append `event` to its stream.

    `payload` names bytes the shell holds (`Shell.payload`); they are stored under the event's `payload.key` in the same
    script. With `lease`, the whole step is refused unless that work entry is still ours.
    """

    event: Event
    payload: str | None = None
    lease: Ref | None = None
    correlation: str | None = None


class Ack(msgspec.Struct, frozen=True):
    """This work entry is done."""

    ref: Ref


class Raise(msgspec.Struct, frozen=True):
    """Set a register of the store to a greater value; if it isn't greater, the step is refused and the actor ends."""

    register: str
    value: int


ARCHIVED_CHECKPOINT = "archived_checkpoint"
"""Register: version of the newest checkpoint whose announcement is in the archive, by which a lost store is rebuilt."""


class Release(msgspec.Struct, frozen=True):
    """Nobody needs these payloads any more: they are deleted once the log up to this step is archived.

    Emitted by the last one that needs them: the buffer for what is never trained, the trainer in the step that
    announces the checkpoint covering what was. Keys are never used again.
    """

    keys: tuple[str, ...]


# --- protocols -------------------------------------------------------------------------------------------------------

State = TypeVar("State")
Step = tuple[State, Sequence[Any]]


class Core(Protocol[State]):
    """The deciding half of an actor.

    A core that gets many local inputs one by one may have `pace_s`: so far apart at least are the commits of such
    inputs. A commit costs the same for one input and for many. Events of the log never wait, nor what came before.

    A core that keeps work entries unacked over many boots, by design, has `holds(state, ref)`: whether it has taken the
    entry. Such an entry is handed out again by each boot, and is never given up for that: a core whose work may be what
    its crashes come from counts them itself.
    """

    state_type: type[State]
    """A frozen msgspec Struct; snapshots are its msgpack."""
    local_type: Any
    """Union of the actor's own input Structs (results of its commands), for the journal."""
    work: tuple[str, ...]
    """Work streams it consumes."""
    watch: tuple[str, ...]
    """Broadcast streams it follows."""

    def initial(self) -> State:
        """The state before the first input of a run."""
        ...

    def step(self, state: State, input: Any, now: float) -> Step[State]:
        """Consume one input. Pure."""
        ...

    def wake(self, state: State) -> float | None:
        """When a `Tick` is due, on the clock of `now`; None for never."""
        ...

    def intake(self, state: State) -> Mapping[str, int]:
        """How many more entries of each work stream it will take now; absent or 0 means none."""
        ...

    def done(self, state: State) -> bool:
        """After `run.stopping`: nothing is left in hand and the process may leave."""
        ...


class Clock(Protocol):
    """The run's clock."""

    def now(self) -> float:
        """Seconds since the Unix epoch, read once from the wall and carried on by the monotonic clock."""
        ...

    def monotonic_ns(self) -> int:
        """The host's monotonic clock in nanoseconds."""
        ...


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A raw entry of a stream: `data` is an encoded `Envelope` (in `journal:*` streams an encoded journal record)."""

    stream: str
    entry: str
    data: bytes


class Store(Protocol):
    """Read access to the whole log, for the recorder."""

    async def read_after(self, cursors: Mapping[str, str], count: int, block_ms: int) -> list[Entry]:
        """Up to `count` entries a stream behind each cursor (`0` from the start), in stream order."""
        ...

    async def trim(self, stream: str, floor: str) -> int:
        """Delete entries below `floor` that every reader is done with; answers how many."""
        ...

    async def discard(self, upto: str) -> int:
        """Delete the payloads released at or before entry `upto`, up to which the log is archived; answers how many."""
        ...


class Context(Protocol):
    """What the runtime gives a shell."""

    run: str
    actor: str
    boot: int
    clock: Clock
    log: Any
    config: Any
    run_dir: str
    """Where the run keeps its files; on a cluster, a directory of this node unless it is shared."""

    @property
    def store(self) -> Store: ...

    def deliver(self, input: Any) -> None:
        """Hand a local input to the core; callable from any thread."""
        ...

    def state(self) -> Any:
        """The core's last committed state."""
        ...

    async def payloads(self, keys: Sequence[str]) -> list[bytes]:
        """Fetch payloads. Raises `PayloadGone` if one is missing, naming it."""
        ...

    async def register(self, name: str) -> int:
        """Read a register of the store, 0 if never raised."""
        ...


class Shell(Protocol):
    """The performing half of an actor."""

    core: Core[Any]

    async def start(self, context: Context) -> None:
        """Acquire what the actor needs (ports, processes, models), before `Booted`."""
        ...

    async def perform(self, command: Any) -> Any | None:
        """Perform one command of the core; a returned value is delivered as an input. Runs concurrently with others."""
        ...

    def payload(self, handle: str) -> bytes:
        """The bytes that `Emit.payload` names; called once, when the step is committed."""
        ...

    async def close(self) -> None:
        """Release everything; called once, also after a failure."""
        ...


class Fatal(Exception):
    """Raised by a shell: the run can't go on, and a restart would not help. The message names the cause and the fix."""


class Overdue(Exception):
    """Raised by a shell: a thread of this process is beyond its deadline and can't be ended, so the process has to.

    Its successor goes on. The message names what was not done, and the setting that bounds it.
    """


class PayloadGone(Exception):
    """A payload is not in the store: it was released, or never committed. `key` names it."""

    key: str
