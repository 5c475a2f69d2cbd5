"""One Struct per event kind, one tagged union per stream.

Each docstring says who emits the event, when, and what follows. Times are seconds; `*_at` are readings of the run's
clock (see `contracts.core.Clock`). Kinds are tagged `<noun>.<verb>` in the log.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from contracts.weights import Checksum

FailureKind = Literal["infra", "data", "timeout", "noncontiguous"]
"""Why a rollout ended without a usable trajectory. Each kind has a budget of attempts; none is ever reward 0."""

Split = Literal["train", "eval"]


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind"):
    """Base of all events: immutable, keyword-only, tagged by `kind`."""


class Member(msgspec.Struct, frozen=True, gc=False):
    """One boot of an actor. A restarted process is another member."""

    actor: str
    boot: int


class PayloadRef(msgspec.Struct, frozen=True, gc=False):
    """Bytes kept in a payload key beside the stream. `size` in bytes."""

    key: str
    size: int


# --- tasks -----------------------------------------------------------------------------------------------------------


class TaskIssued(Record, frozen=True, kw_only=True, tag="task.issued"):
    """Source -> one collector: roll out one prompt group of `samples` samples.

    Emitted when credit allows. `index` is dense and never reused; `task` is the producer's stable id. `payload` is the
    producer's JSON. The collector acks the entry in the script that emits the last sample's result. Held-out tasks are
    issued without credit, at indexes below 0: evaluation `r` has `eval.groups` of them, from `-1 - r * eval.groups`
    downwards. `data_epoch`: the pass over the producer's tasks that it belongs to, from 0.

    With `only`, the buffer issues a task again for those of its samples that have no result, under
    `buffer.group_policy=replace`; their attempts count from `first_attempt`.
    """

    task: str
    index: int
    samples: int
    payload: bytes
    producer: str
    seed: int
    split: Split = "train"
    data_epoch: int = 0
    only: tuple[int, ...] = ()
    first_attempt: int = 1


TasksEvent = TaskIssued

# --- trajectories ----------------------------------------------------------------------------------------------------


class Provenance(msgspec.Struct, frozen=True, gc=False):
    """One source of sampled tokens in a trajectory: which version, on which boot of which engine, under which epoch."""

    version: int
    engine: str
    boot: int


class TrajectoryFinished(Record, frozen=True, kw_only=True, tag="trajectory.finished"):
    """Collector -> buffer: one sample of a group is rolled out and scored.

    `payload` holds the encoded `contracts.trajectory.Trajectory`. `valid` is False when the sample must enter neither
    baseline nor loss, `mask_reason` says why. `sources` lists the provenance of every sampled token, oldest first.
    The id of a trajectory is (task, sample): the first result wins.
    """

    task: str
    index: int
    sample: int
    attempt: int
    samples: int
    reward: float
    components: dict[str, float]
    valid: bool
    payload: PayloadRef
    prompt_tokens: int
    completion_tokens: int
    sources: tuple[Provenance, ...]
    seconds: float
    split: Split = "train"
    mask_reason: str | None = None
    stop_reason: str = "stop"


class SampleFailed(Record, frozen=True, kw_only=True, tag="sample.failed"):
    """Collector -> buffer: a sample failed for good, the budget of its `failure` spent. Its group goes on without."""

    task: str
    index: int
    sample: int
    attempt: int
    samples: int
    failure: FailureKind
    reason: str
    split: Split = "train"


TrajectoriesEvent = TrajectoryFinished | SampleFailed

# --- batches ---------------------------------------------------------------------------------------------------------


class SampleRef(msgspec.Struct, frozen=True, gc=False):
    """One trajectory of a batch. `lag`: optimizer steps between the trained version and its oldest trainable token."""

    sample: int
    reward: float
    valid: bool
    payload: PayloadRef
    lag: int


class GroupRef(msgspec.Struct, frozen=True, gc=False):
    """The samples of one task that are trained together; the baseline is taken over the valid ones."""

    task: str
    index: int
    samples: tuple[SampleRef, ...]


class BatchReady(Record, frozen=True, kw_only=True, tag="batch.ready"):
    """Buffer -> trainer: the groups of one optimizer step.

    `batch` counts from 1 and is never reused. The trainer acks the entry once two durable checkpoints cover the step.
    One that is still pending after a crash is trained again, in order, unless the checkpoint that is loaded covers it.
    """

    batch: int
    groups: tuple[GroupRef, ...]


BatchesEvent = BatchReady

# --- ledger ----------------------------------------------------------------------------------------------------------


class CreditGranted(Record, frozen=True, kw_only=True, tag="credit.granted"):
    """Buffer -> source: train tasks with `index < total` may be issued. Cumulative, so a repeat is harmless."""

    total: int


class GroupDropped(Record, frozen=True, kw_only=True, tag="group.dropped"):
    """Buffer -> all: a group will never be trained, and why. Its credit returns to the source."""

    task: str
    index: int
    reason: str
    samples: int


class TrajectoryRejected(Record, frozen=True, kw_only=True, tag="trajectory.rejected"):
    """Buffer -> all: one delivered trajectory was not admitted (duplicate, uncommitted source, closed group, ...)."""

    task: str
    index: int
    sample: int
    reason: str


class BatchRejected(Record, frozen=True, kw_only=True, tag="batch.rejected"):
    """Trainer -> all: a batch was handed to it once more, under another entry, and is not trained again."""

    batch: int
    reason: str


class EvalFinished(Record, frozen=True, kw_only=True, tag="eval.finished"):
    """Buffer -> all: held-out rewards of one version."""

    version: int
    step: int
    mean_reward: float
    samples: int


class BufferDepth(Record, frozen=True, kw_only=True, tag="buffer.depth"):
    """Buffer -> all, with each batch: groups left after the pick, and its staleness histogram (lag -> samples).

    `ready` are complete, `open` are issued and not complete.
    """

    batch: int
    ready: int
    open: int
    lags: dict[int, int]
    flat_groups: int


LedgerEvent = CreditGranted | GroupDropped | TrajectoryRejected | BatchRejected | EvalFinished | BufferDepth

# --- policy ----------------------------------------------------------------------------------------------------------


class PolicyReady(Record, frozen=True, kw_only=True, tag="policy.ready"):
    """Trainer -> all: weights of `version` are in memory, at start or after a restore.

    After a restore, versions above `parent_version` in the old lineage are abandoned: `abandoned` lists them.
    The coordinator refits the engines to `version` before anything is generated.
    """

    version: int
    step: int
    parent_version: int | None
    trainer_boot: int
    abandoned: tuple[int, ...] = ()


class StepFinished(Record, frozen=True, kw_only=True, tag="step.finished"):
    """Trainer -> all: one optimizer step done. `version` is new, never reused, and derived from `parent_version`.

    `metrics` are scalars by name; `seconds` is the step alone, `waited_s` the time the trainer had no batch.
    """

    version: int
    parent_version: int
    step: int
    trainer_boot: int
    batch: int
    metrics: dict[str, float]
    seconds: float
    waited_s: float
    tokens: int
    tasks: tuple[int, ...]


class CheckpointSaved(Record, frozen=True, kw_only=True, tag="checkpoint.saved"):
    """Trainer -> all: a durable checkpoint of `version` at `path` covers every batch up to and including `batch`.

    The batches that the checkpoint before it covered are acked in the same script, and their payloads released: should
    this one turn out to be damaged, the trainer falls back on that one.
    """

    version: int
    step: int
    batch: int
    path: str
    bytes: int
    seconds: float


class TrainingFinished(Record, frozen=True, kw_only=True, tag="training.finished"):
    """Trainer -> driver: the configured number of steps is trained and covered by a checkpoint."""

    version: int
    step: int


class MemoryWanted(Record, frozen=True, kw_only=True, tag="memory.wanted"):
    """Trainer -> coordinator: it has the batch of `step`, and trains once the engines gave their memory back.

    With engine.release alone. `release.finished` for this step and boot is the answer.
    """

    step: int
    trainer_boot: int


PolicyEvent = PolicyReady | StepFinished | CheckpointSaved | TrainingFinished | MemoryWanted

# --- refit -----------------------------------------------------------------------------------------------------------

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

# --- fleet -----------------------------------------------------------------------------------------------------------


class ActorBooted(Record, frozen=True, kw_only=True, tag="actor.booted"):
    """Any actor -> all: a process took over `actor` as boot `boot`; every earlier boot is fenced off."""

    actor: str
    boot: int
    pid: int
    host: str


class ActorLeft(Record, frozen=True, kw_only=True, tag="actor.left"):
    """Any actor but the recorder -> driver: after run.stopping, it has finished what was in hand and is gone."""

    actor: str
    boot: int


class EngineReady(Record, frozen=True, kw_only=True, tag="engine.ready"):
    """Engine -> coordinator and gateways: its server answers, holding unknown weights: UNCERTAIN until a commit."""

    engine: str
    boot: int
    url: str
    ranks: int
    seconds: float


class GatewayReady(Record, frozen=True, kw_only=True, tag="gateway.ready"):
    """Gateway -> coordinator and collectors: it listens at `url`, its gate closed until the next commit it sees."""

    gateway: str
    boot: int
    url: str


class EngineDead(Record, frozen=True, kw_only=True, tag="engine.dead"):
    """Engine -> all: its server process ended or stopped answering; the boot that ran it is gone."""

    engine: str
    boot: int
    reason: str


Health = Literal["uncertain", "healthy", "suspect", "quarantined", "dead", "restarting", "retired"]


class EngineHealth(Record, frozen=True, kw_only=True, tag="engine.health"):
    """Coordinator -> all: what is known of an engine changed from `was` to `health`.

    With `ordered`, whoever starts the engine's process ends that of `boot`, if it still runs, and starts another.
    """

    engine: str
    boot: int
    was: Health
    health: Health
    reason: str
    ordered: bool = False


FleetEvent = ActorBooted | ActorLeft | EngineReady | GatewayReady | EngineDead | EngineHealth

# --- control ---------------------------------------------------------------------------------------------------------


class RunStarted(Record, frozen=True, kw_only=True, tag="run.started"):
    """Driver -> all: the run begins, or goes on when `resumed`."""

    config_digest: str
    resumed: bool = False


class RunStopping(Record, frozen=True, kw_only=True, tag="run.stopping"):
    """Driver -> all: finish what is in hand, save, and leave."""

    reason: str


class RunFinished(Record, frozen=True, kw_only=True, tag="run.finished"):
    """Driver -> recorder: the last event of a run; nothing follows it."""

    reason: str


class DataExhausted(Record, frozen=True, kw_only=True, tag="data.exhausted"):
    """Source -> all: the producer has no more tasks; `issued` train tasks went out."""

    issued: int


class ActorFailed(Record, frozen=True, kw_only=True, tag="actor.failed"):
    """Any actor -> driver: something went wrong that a person should see. With `fatal` the run ends with an error."""

    actor: str
    error: str
    message: str
    fatal: bool


class DataLost(Record, frozen=True, kw_only=True, tag="bus.data_lost"):
    """Any actor -> all: entries that were owed to a reader are gone from the stream, or could not be read.

    `entries` are their ids; unreadable ones are kept in the stream's dead-letter stream. Of a stream that its readers
    follow at a cursor, `entries` is the last one that this actor missed, and the reason names the cursor.
    """

    stream: str
    entries: tuple[str, ...]
    reason: str


class FleetScaled(Record, frozen=True, kw_only=True, tag="fleet.scaled"):
    """Command line -> coordinator, engines and driver: from now on the run has engines 0 to `engines` - 1.

    New ones are started by whoever starts processes; the others serve until a commit without them, then leave.
    """

    engines: int


class WaitStarted(Record, frozen=True, kw_only=True, tag="wait.started"):
    """Any actor -> recorder, driver and tools: it can't go on until `on` acts.

    Every wait has a deadline (None: bounded by the run).
    """

    actor: str
    on: str
    cause: str
    deadline_at: float | None = None


class WaitEnded(Record, frozen=True, kw_only=True, tag="wait.ended"):
    """Any actor -> recorder, driver and tools: the wait that it announced is over."""

    actor: str
    on: str
    seconds: float


ControlEvent = RunStarted | RunStopping | RunFinished | DataExhausted | ActorFailed | DataLost | FleetScaled

# Many, and no actor's business: on a stream of their own they wake nobody who is at work.
WaitsEvent = WaitStarted | WaitEnded

Event = (
    TasksEvent
    | TrajectoriesEvent
    | BatchesEvent
    | LedgerEvent
    | PolicyEvent
    | RefitEvent
    | FleetEvent
    | ControlEvent
    | WaitsEvent
)


def kind(event: Any) -> str:
    """The tag of an event, e.g. `refit.committed`."""
    return type(event).__struct_config__.tag
