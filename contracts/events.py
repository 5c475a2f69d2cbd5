"""One Struct per event kind, one tagged union per stream.

Each docstring says who emits the event, when, and what follows. Times are seconds; `*_at` are readings of the run's
clock (see `contracts.core.Clock`). Kinds are tagged `<noun>.<verb>` in the log.

They are written down in `contracts/_events`, by stream; everybody imports them from here.
"""

from __future__ import annotations

from typing import Any

from contracts._events.base import (
    FailureKind,
    Member,
    PayloadRef,
    Record,
    Split,
)
from contracts._events.control import (
    ActorFailed,
    ControlEvent,
    DataExhausted,
    DataLost,
    FleetScaled,
    RunFinished,
    RunStarted,
    RunStopping,
    WaitEnded,
    WaitsEvent,
    WaitStarted,
)
from contracts._events.fleet import (
    ActorBooted,
    ActorLeft,
    EngineDead,
    EngineHealth,
    EngineReady,
    FleetEvent,
    GatewayReady,
    Health,
)
from contracts._events.ledger import (
    BatchRejected,
    BufferDepth,
    CreditGranted,
    EvalFinished,
    GroupDropped,
    LedgerEvent,
    TrajectoryRejected,
)
from contracts._events.policy import (
    CheckpointSaved,
    MemoryWanted,
    PolicyEvent,
    PolicyReady,
    StepFinished,
    TrainingFinished,
)
from contracts._events.refit import (
    Bucket,
    DrainPolicy,
    EngineDrained,
    EngineFailed,
    EngineLoaded,
    EngineQuarantined,
    EngineReleased,
    GateClosed,
    Phase,
    Rank,
    RefitCommitted,
    RefitEvent,
    RefitFailed,
    RefitRequested,
    ReleaseFinished,
    ReleaseRequested,
    TensorSpec,
    TransferFailed,
    TransferFinished,
    TransferOffered,
    TransferStarted,
)
from contracts._events.work import (
    BatchesEvent,
    BatchReady,
    GroupRef,
    Provenance,
    SampleFailed,
    SampleRef,
    TaskIssued,
    TasksEvent,
    TrajectoriesEvent,
    TrajectoryFinished,
)

__all__ = [
    "ActorBooted",
    "ActorFailed",
    "ActorLeft",
    "BatchReady",
    "BatchRejected",
    "BatchesEvent",
    "Bucket",
    "BufferDepth",
    "CheckpointSaved",
    "ControlEvent",
    "CreditGranted",
    "DataExhausted",
    "DataLost",
    "DrainPolicy",
    "EngineDead",
    "EngineDrained",
    "EngineFailed",
    "EngineHealth",
    "EngineLoaded",
    "EngineQuarantined",
    "EngineReady",
    "EngineReleased",
    "EvalFinished",
    "Event",
    "FailureKind",
    "FleetEvent",
    "FleetScaled",
    "GateClosed",
    "GatewayReady",
    "GroupDropped",
    "GroupRef",
    "Health",
    "LedgerEvent",
    "Member",
    "MemoryWanted",
    "PayloadRef",
    "Phase",
    "PolicyEvent",
    "PolicyReady",
    "Provenance",
    "Rank",
    "Record",
    "RefitCommitted",
    "RefitEvent",
    "RefitFailed",
    "RefitRequested",
    "ReleaseFinished",
    "ReleaseRequested",
    "RunFinished",
    "RunStarted",
    "RunStopping",
    "SampleFailed",
    "SampleRef",
    "Split",
    "StepFinished",
    "TaskIssued",
    "TasksEvent",
    "TensorSpec",
    "TrainingFinished",
    "TrajectoriesEvent",
    "TrajectoryFinished",
    "TrajectoryRejected",
    "TransferFailed",
    "TransferFinished",
    "TransferOffered",
    "TransferStarted",
    "WaitEnded",
    "WaitStarted",
    "WaitsEvent",
    "kind",
]

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
