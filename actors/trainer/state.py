"""What the trainer's core asks for, takes and remembers."""

from __future__ import annotations

from typing import Literal

import msgspec

from contracts.core import Ref
from contracts.events import BatchReady, PayloadRef, TransferStarted
from contracts.weights import Checksum

# --- commands --------------------------------------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True):
    """Bring the weights of checkpoint `path` (None: the run's initial model) into memory, known as `version`."""

    path: str | None
    version: int


class Train(msgspec.Struct, frozen=True):
    """One optimizer step over `batch`; the result becomes `version`."""

    batch: BatchReady
    step: int
    version: int


class Save(msgspec.Struct, frozen=True):
    """Write a durable checkpoint of the weights in memory, covering batches up to `batch`, which came as `entry`."""

    version: int
    step: int
    batch: int
    entry: str


class Prune(msgspec.Struct, frozen=True):
    """A newer checkpoint is announced: the oldest may go, beside whatever the policy does."""


class Offer(msgspec.Struct, frozen=True):
    """Freeze a copy of `version` for transfer and open a meeting point."""

    epoch: int
    version: int
    timeout: float


class Send(msgspec.Struct, frozen=True):
    """Broadcast the offered copy to the group."""

    started: TransferStarted
    timeout: float


class Abandon(msgspec.Struct, frozen=True):
    """Abort whatever transfer belongs to epochs up to `epoch`. `reason`: why that one failed, where it did."""

    epoch: int
    reason: str = ""


# --- their results ---------------------------------------------------------------------------------------------------


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The weights are in memory."""

    version: int


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The checkpoint is torn or damaged, or of another model."""

    version: int
    reason: str


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    """The step is done; `metrics` are finite scalars."""

    version: int
    metrics: dict[str, float]
    seconds: float
    tokens: int


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """The checkpoint at `path` is durable."""

    version: int
    path: str
    bytes: int
    seconds: float


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """A frozen copy is ready. `plan` is the digest of its encoded plan, and the handle of these `plan_bytes` bytes."""

    epoch: int
    version: int
    address: str
    port: int
    bytes: int
    digest: str
    checksum: Checksum = "xxh3_128"
    plan: str = ""
    plan_bytes: int = 0
    nccl: tuple[str, ...] = ()


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """All buckets are broadcast."""

    epoch: int
    version: int
    seconds: float
    bytes: int


class TransferBroke(msgspec.Struct, frozen=True, tag="transfer_broke"):
    """Offer or broadcast failed; the communicator is aborted."""

    epoch: int
    phase: str
    error: str
    reason: str


class Unpruned(msgspec.Struct, frozen=True, tag="unpruned"):
    """Old checkpoints are not removed after so many seconds, and nobody waits for it any more."""

    seconds: float


Local = Loaded | LoadFailed | Trained | Saved | Offered | Sent | TransferBroke | Unpruned

# --- state -----------------------------------------------------------------------------------------------------------


class Pending(msgspec.Struct, frozen=True):
    """A batch in hand and the entry that holds it."""

    ref: Ref
    batch: BatchReady


class Covered(msgspec.Struct, frozen=True):
    """A durable checkpoint; without a path, the run's initial model.

    `held`: the batches, and `made`: the versions, between the checkpoint before it and this one.
    """

    path: str | None = None
    version: int | None = None
    step: int = 0
    held: tuple[Pending, ...] = ()
    made: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """The plan of the last offer, kept beside the stream. `digest` is empty if the next offer has to write it anew."""

    payload: PayloadRef
    digest: str


class State(msgspec.Struct, frozen=True):
    """`queue` is untrained, `trained` is trained but not yet covered; with `covered.held` they are the entries we hold.

    `covered` is the newest checkpoint, `before` the one to fall back on should it be damaged.
    """

    boot: int = 0
    phase: Literal["off", "loading", "idle", "asking", "training", "saving", "finished"] = "off"
    """`asking`: it has a batch, and engines on its device are to give memory back first (engine.release)."""
    step: int = 0
    version: int = -1
    highest: int = -1
    queue: tuple[Pending, ...] = ()
    trained: tuple[Pending, ...] = ()
    made: tuple[int, ...] = ()
    """Versions trained since the newest checkpoint, oldest first: abandoned if we crash now."""
    covered: Covered = Covered()
    before: Covered | None = None
    epoch: int = 0
    refit_deadline: float = 0.0
    sending: bool = False
    """The weights of `epoch` are being offered or sent: the barrier waits for us."""
    plan: Plan | None = None
    newest: int = 0
    """The greatest number of a batch that was taken."""
    missed: tuple[int, ...] = ()
    """Numbers below it that have not come: what was given up is taken if it is handed out after all."""
    idle_since: float | None = None
    asked_at: float | None = None
    """Set exactly while `asking`."""
    stopping: bool = False
