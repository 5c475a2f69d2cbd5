"""What the engine's core takes, asks for and remembers."""

from __future__ import annotations

from typing import Literal

import msgspec

from contracts.events import Phase, TransferOffered
from contracts.weights import Checksum

Mode = Literal[
    "starting",
    "uncertain",
    "draining",
    "drained",
    "loading",
    "loaded",
    "resuming",
    "serving",
    "lapsed",
    "releasing",
    "dead",
]

BARRIER = ("draining", "drained", "loading", "loaded", "resuming", "releasing")
"""Modes in which this boot has a part in the newest epoch."""
SERVED = ("serving", "lapsed")
"""Modes that a commit led to."""

# --- local inputs ----------------------------------------------------------------------------------------------------


class ServerReady(msgspec.Struct, frozen=True, tag="server_ready"):
    """Result of `StartServer`: it answers, and the sidecar passes requests on from `url`."""

    url: str
    ranks: int
    seconds: float
    nccl: tuple[str, ...] = ()


class ServerDead(msgspec.Struct, frozen=True, tag="server_dead"):
    """The server ended, or does not answer any more."""

    reason: str


class ServerSilent(msgspec.Struct, frozen=True, tag="server_silent"):
    """The server did not answer a probe; nobody gives it up yet."""

    reason: str


class ServerHeard(msgspec.Struct, frozen=True, tag="server_heard"):
    """After `ServerSilent`, it answered one."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Result of `Drain`: nothing runs, or `held` sequences are held still."""

    epoch: int
    seconds: float
    held: int = 0


class DrainFailed(msgspec.Struct, frozen=True, tag="drain_failed"):
    """Result of `Drain`: its deadline passed, or the server refused."""

    epoch: int
    error: str
    reason: str


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Result of `Receive`, for `contracts.events.EngineLoaded`.

    `digest` is empty when the server can't tell, `probe` and `fingerprint` when it was not asked.
    """

    epoch: int
    digest: str
    seconds: float
    probe: tuple[float, ...] = ()
    phases: tuple[Phase, ...] = ()
    receiver: str = ""
    fallback: str = ""
    fingerprint: str = ""


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """Result of `Receive`. `phase`: `plan`, `manifest`, `pause`, `join`, `receive`, `flush`, `retake` or `verify`."""

    epoch: int
    phase: str
    error: str
    reason: str


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """Result of `Resume`: generation may go on."""

    epoch: int


class LeaseLapsed(msgspec.Struct, frozen=True, tag="lease_lapsed"):
    """For the length of a lease no reading confirmed the served epoch; what ran under it is being aborted."""

    epoch: int


class LeaseRenewed(msgspec.Struct, frozen=True, tag="lease_renewed"):
    """After a lapse, a reading says that the served epoch is still committed and that no other has begun."""

    epoch: int


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Result of `Release`, for `contracts.events.EngineReleased`; where that failed, it is `ServerDead`."""

    epoch: int
    tags: tuple[str, ...]
    seconds: float
    release_s: float


Local = (
    ServerReady
    | ServerDead
    | ServerSilent
    | ServerHeard
    | Drained
    | DrainFailed
    | Loaded
    | LoadFailed
    | Resumed
    | LeaseLapsed
    | LeaseRenewed
    | Released
)

# --- commands --------------------------------------------------------------------------------------------------------


class StartServer(msgspec.Struct, frozen=True):
    """Start the server after `delay_s`: `ServerReady` or `ServerDead`."""

    delay_s: float


class Watch(msgspec.Struct, frozen=True):
    """From now on renew the lease and watch the server: `ServerDead` when it is gone."""


class Drain(msgspec.Struct, frozen=True):
    """Wait until nothing runs, aborting what runs from `abort_at` on; the cache is flushed unless the load does it.

    With `hold`, pause generation between two steps instead: what runs keeps its cache, and waits.
    """

    epoch: int
    abort_at: float
    deadline_at: float
    hold: bool = False


class Release(msgspec.Struct, frozen=True):
    """Drain, then give memory back (engine.release): `Released`, or `ServerDead` once the server is killed."""

    epoch: int
    abort_at: float
    deadline_at: float


class Receive(msgspec.Struct, frozen=True):
    """Join `group` if `fresh` (leaving group `leave` before), pause, receive the buckets, flush, verify.

    `plan` is the key of the payload that says what the buckets are. With `hold` sequences are held still, whose cache
    can't be flushed.
    """

    epoch: int
    version: int
    group: str
    fresh: bool
    leave: str | None
    offset: int
    world_size: int
    address: str
    port: int
    plan: str
    deadline_at: float
    hold: bool = False
    checksum: Checksum = "xxh3_128"
    nccl: tuple[str, ...] = ()


class Resume(msgspec.Struct, frozen=True):
    """Take up the lease on `epoch` and let the server generate: `Resumed` or `ServerDead`."""

    epoch: int


class Abandon(msgspec.Struct, frozen=True):
    """Give up what is performed for `epoch`: abort what runs, leave `group`; `ServerDead` if the server hangs."""

    epoch: int
    group: str | None


class Exit(msgspec.Struct, frozen=True):
    """End the process so that it is restarted as a new boot; with `fatal`, so that the run ends."""

    reason: str
    fatal: bool


# --- state -----------------------------------------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True):
    """This boot's part in the newest epoch. `version` is set when the transfer starts.

    `hold`: sequences are held still over it, and go on after the commit.
    """

    deadline_at: float
    hold: bool = False
    offer: TransferOffered | None = None
    version: int | None = None


class Waiting(msgspec.Struct, frozen=True):
    """An announced wait."""

    on: str
    since: float


class EngineState(msgspec.Struct, frozen=True):
    """Everything the engine decides from."""

    mode: Mode = "starting"
    boot: int = 0
    epoch: int = 0
    """Newest epoch heard of, over all boots."""
    version: int | None = None
    """What is served; set exactly in the modes of `SERVED`."""
    part: Part | None = None
    """Set exactly in the modes of `BARRIER`."""
    group: str | None = None
    """Weight-update group that the server may be in."""
    unserved: int = 0
    """Boots in a row, this one included, that have not served."""
    waiting: Waiting | None = None
    """For the coordinator or the store."""
    silent: str | None = None
    """Why the last probe of the server was not answered."""
    unanswered: Waiting | None = None
    """For the server."""
    stopping: bool = False
    retiring: bool = False
    """The run was scaled down by this engine: it leaves once it serves no more."""


class Lease(msgspec.Struct, frozen=True):
    """A reading of the store's registers. `seen_at`: the monotonic clock, in seconds, before they were asked for."""

    committed_epoch: int
    newest_epoch: int
    seen_at: float

    def confirms(self, epoch: int) -> bool:
        """`epoch` is committed, and no refit began after it."""
        return self.committed_epoch == self.newest_epoch == epoch
