"""The run itself: its start and end, what went wrong, and who waits for whom."""

from __future__ import annotations

from contracts._events.base import Record


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
