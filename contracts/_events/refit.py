"""The barrier: how weights get from the trainer to the engines, and memory from the engines to the trainer."""

from __future__ import annotations

from typing import Literal

import msgspec

from contracts._events.base import Member, PayloadRef, Record
from contracts.weights import Checksum

DrainPolicy = Literal["finish", "interrupt", "in_flight"]


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One tensor of the export stream, in transfer dtype (`float32`, `bfloat16`, ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Bucket(msgspec.Struct, frozen=True, gc=False):
    """Tensors that travel in one flattened broadcast, in order. `size` in bytes."""

    tensors: tuple[TensorSpec, ...]
    size: int


class RefitRequested(Record, frozen=True, kw_only=True, tag="refit.requested"):
    """Coordinator -> all, before any side effect: the barrier of `epoch` begins.

    Gateways close their gates and drain, engines stop admitting and drain, the trainer offers the weights of
    `version`. `deadline_at` ends the whole refit.
    """

    epoch: int
    version: int
    step: int
    engines: tuple[Member, ...]
    gateways: tuple[Member, ...]
    drain: DrainPolicy
    deadline_at: float


class GateClosed(Record, frozen=True, kw_only=True, tag="gate.closed"):
    """Gateway -> coordinator: admits nothing since, and none of its requests runs on an engine any more.

    Under drain policy in_flight `running` calls stay on their engines, which hold them still while weights change.
    """

    epoch: int
    gateway: str
    boot: int
    held: int
    interrupted: int
    seconds: float
    running: int = 0


class EngineDrained(Record, frozen=True, kw_only=True, tag="engine.drained"):
    """Engine -> coordinator: no request runs, proved by a cache flush that answered success.

    Under drain policy in_flight generation is paused instead, and `held` sequences go on after the commit.
    """

    epoch: int
    engine: str
    boot: int
    seconds: float
    held: int = 0


class TransferOffered(Record, frozen=True, kw_only=True, tag="transfer.offered"):
    """Trainer -> coordinator and engines: a frozen copy of `version` is ready to be sent.

    `payload` holds its plan, the buckets in order (`contracts.plan`): written with the first offer that names it, and
    released when another takes its place. `digest` is `contracts.weights.digest` of the copy, over `checksum`s of its
    tensors. Receivers meet rank 0 at `address:port`.
    """

    epoch: int
    version: int
    trainer_boot: int
    address: str
    port: int
    bytes: int
    digest: str
    checksum: Checksum = "xxh3_128"
    payload: PayloadRef = PayloadRef("", 0)
    """Empty in logs of runs whose offers held the buckets themselves."""
    nccl: tuple[str, ...] = ()
    """Over NCCL, `NAME=value` of the trainer's settings that all ranks have to share."""


class Rank(msgspec.Struct, frozen=True, gc=False):
    """A receiver's first rank in the weight-update group, and how many it holds (tensor parallel)."""

    engine: str
    boot: int
    offset: int
    ranks: int


class TransferStarted(Record, frozen=True, kw_only=True, tag="transfer.started"):
    """Coordinator -> trainer and engines: everything is drained; broadcast now.

    With `fresh`, `group` is a new weight-update group that all members first join; otherwise it exists.
    """

    epoch: int
    version: int
    group: str
    fresh: bool
    members: tuple[Rank, ...]
    world_size: int


class TransferFinished(Record, frozen=True, kw_only=True, tag="transfer.finished"):
    """Trainer -> coordinator: every bucket left rank 0. Says nothing about the receivers."""

    epoch: int
    version: int
    seconds: float
    bytes: int


class TransferFailed(Record, frozen=True, kw_only=True, tag="transfer.failed"):
    """Trainer -> coordinator: the transfer ended in an error or at its deadline; the communicator is aborted."""

    epoch: int
    phase: str
    error: str
    reason: str


class Phase(msgspec.Struct, frozen=True, gc=False):
    """A part of something that took `seconds` in all."""

    name: str
    seconds: float


class EngineLoaded(Record, frozen=True, kw_only=True, tag="engine.loaded"):
    """Engine -> coordinator: all buckets loaded, cache flushed. `digest` of what it holds, empty if it can't tell.

    `probe`: log-probabilities of what it generates greedily for a fixed prompt, with refit.verify=probe. `phases`:
    what `seconds` were spent on, in order. `receiver` is what took the weights, where there is a choice
    (refit.receiver); `fallback` says why it was not the one that was asked for. `fingerprint`: digest of SGLang's own
    checksums of what its ranks hold, with refit.verify=fleet where there is no `digest`: engines of one layout agree.
    """

    epoch: int
    engine: str
    boot: int
    digest: str
    seconds: float
    probe: tuple[float, ...] = ()
    phases: tuple[Phase, ...] = ()
    receiver: str = ""
    fallback: str = ""
    fingerprint: str = ""


class EngineFailed(Record, frozen=True, kw_only=True, tag="engine.failed"):
    """Engine -> coordinator: this engine can't go on with the epoch; it is UNCERTAIN from now on."""

    epoch: int
    engine: str
    boot: int
    phase: str
    error: str
    reason: str


class RefitCommitted(Record, frozen=True, kw_only=True, tag="refit.committed"):
    """Coordinator -> all: `engines` serve `version`; gates open. At most one commit an epoch.

    `pause_s` runs from refit.requested to this event, `transfer_s` is the broadcast alone.
    """

    epoch: int
    version: int
    step: int
    engines: tuple[Member, ...]
    world_size: int
    pause_s: float
    drain_s: float
    transfer_s: float
    bytes: int


class EngineQuarantined(Record, frozen=True, kw_only=True, tag="engine.quarantined"):
    """Coordinator -> all: this boot of the engine may not serve. A complete load in a later epoch lets it rejoin."""

    epoch: int
    engine: str
    boot: int
    reason: str


class RefitFailed(Record, frozen=True, kw_only=True, tag="refit.failed"):
    """Coordinator -> all: the epoch ended without a commit; nothing serves; a new epoch follows by itself."""

    epoch: int
    version: int
    phase: str
    reason: str


class ReleaseRequested(Record, frozen=True, kw_only=True, tag="release.requested"):
    """Coordinator -> gateways and engines, before any side effect: memory is wanted for `step` of the trainer.

    An epoch of its own, in which nothing is transferred: gateways close their gates, engines drain as for a refit, give
    their memory back, and serve no more until the commit of a later epoch. `deadline_at` as in `refit.requested`.
    """

    epoch: int
    step: int
    engines: tuple[Member, ...]
    drain: DrainPolicy
    deadline_at: float


class EngineReleased(Record, frozen=True, kw_only=True, tag="engine.released"):
    """Engine -> coordinator: nothing runs, and what `tags` name of its memory is given back.

    `seconds` from the request, `release_s` of the call to its server alone. An engine that can't is killed and says
    `engine.dead`, which gives its memory back too.
    """

    epoch: int
    engine: str
    boot: int
    tags: tuple[str, ...]
    seconds: float
    release_s: float


class ReleaseFinished(Record, frozen=True, kw_only=True, tag="release.finished"):
    """Coordinator -> trainer: train `step` now. `engines` gave their memory back; the others are dead or quarantined.

    Until the refit that follows the step, no engine takes its memory again.
    """

    epoch: int
    step: int
    trainer_boot: int
    engines: tuple[Member, ...]
    seconds: float


RefitEvent = (
    RefitRequested
    | GateClosed
    | EngineDrained
    | TransferOffered
    | TransferStarted
    | TransferFinished
    | TransferFailed
    | EngineLoaded
    | EngineFailed
    | RefitCommitted
    | EngineQuarantined
    | RefitFailed
    | ReleaseRequested
    | EngineReleased
    | ReleaseFinished
)
