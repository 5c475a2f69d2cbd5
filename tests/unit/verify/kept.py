"""A small log that keeps every promise, to be broken on purpose."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from contracts import events as e
from contracts.envelope import STREAM_OF, Envelope

GROUPS, STALENESS = 2, 1
ENGINES = (e.Member("engine-0", 1), e.Member("engine-1", 1))
ACTORS = {
    "tasks": "source",
    "trajectories": "collector-0",
    "batches": "buffer",
    "ledger": "buffer",
    "policy": "trainer",
}


class Row:
    """One event of a log. `cause` is the label of another; `id` follows from the place unless it is given."""

    def __init__(self, event: e.Event, cause: str | None = None) -> None:
        self.event: Any = event
        self.cause = cause
        self.actor = ACTORS.get(STREAM_OF[type(event)], "refit")
        self.boot = 1
        self.id: str | None = None

    def change(self, **fields: Any) -> None:
        self.event = replace(self.event, **fields)


class Log:
    """Rows by label, in log order."""

    def __init__(self, rows: dict[str, Row]) -> None:
        self.rows = rows

    def __getitem__(self, label: str) -> Row:
        return self.rows[label]

    def number(self, label: str) -> int:
        """Of the event in the log."""
        return list(self.rows).index(label) + 1

    def remove(self, *labels: str) -> None:
        for label in labels:
            del self.rows[label]

    def insert(self, before: str | None, label: str, row: Row) -> None:
        """Put a row in front of another, or at the end."""
        rows = list(self.rows.items())
        at = len(rows) if before is None else list(self.rows).index(before)
        self.rows = dict([*rows[:at], (label, row), *rows[at:]])

    def move(self, label: str, before: str) -> None:
        self.insert(before, label, self.rows.pop(label))

    def envelopes(self) -> list[Envelope[e.Event]]:
        ids = {label: row.id or f"{row.actor}:{n}.0" for n, (label, row) in enumerate(self.rows.items(), 1)}
        return [
            Envelope(
                id=ids[label],
                run="r",
                stream=STREAM_OF[type(row.event)],
                actor=row.actor,
                boot=row.boot,
                epoch=0,
                wall_ns=number,
                mono_ns=number,
                body=row.event,
                causation_id=None if row.cause is None else ids.get(row.cause, row.cause),
            )
            for number, (label, row) in enumerate(self.rows.items(), 1)
        ]


def task(index: int, **fields: Any) -> e.TaskIssued:
    return e.TaskIssued(task=f"t{index}", index=index, samples=2, payload=b"{}", producer="p", seed=0, **fields)


def result(index: int, sample: int, version: int, engine: str = "engine-0", attempt: int = 1) -> e.TrajectoryFinished:
    return e.TrajectoryFinished(
        task=f"t{index}",
        index=index,
        sample=sample,
        attempt=attempt,
        samples=2,
        reward=1.0,
        components={},
        valid=True,
        payload=e.PayloadRef(f"p{index}.{sample}.{attempt}", 1),
        prompt_tokens=1,
        completion_tokens=1,
        sources=(e.Provenance(version, engine, 1),),
        seconds=0.1,
    )


def ref(index: int, sample: int, lag: int = 0) -> e.SampleRef:
    return e.SampleRef(sample, 1.0, True, e.PayloadRef(f"p{index}.{sample}.1", 1), lag)


def group(index: int, *samples: e.SampleRef) -> e.GroupRef:
    return e.GroupRef(f"t{index}", index, samples)


def batch(number: int, *groups: e.GroupRef) -> e.BatchReady:
    return e.BatchReady(batch=number, groups=groups)


def depth(number: int, ready: int, open: int) -> e.BufferDepth:
    return e.BufferDepth(batch=number, ready=ready, open=open, lags={}, flat_groups=0)


def step(number: int, *tasks: int) -> e.StepFinished:
    return e.StepFinished(
        version=number,
        parent_version=number - 1,
        step=number,
        trainer_boot=1,
        batch=number,
        metrics={},
        seconds=0.1,
        waited_s=0.0,
        tokens=1,
        tasks=tasks,
    )


def requested(epoch: int, version: int) -> e.RefitRequested:
    return e.RefitRequested(
        epoch=epoch, version=version, step=version, engines=ENGINES, gateways=(), drain="finish", deadline_at=9.0
    )


def failed(epoch: int) -> e.RefitFailed:
    return e.RefitFailed(epoch=epoch, version=0, phase="transfer", reason="cut")


def committed(epoch: int, version: int, engines: tuple[e.Member, ...] = ENGINES) -> e.RefitCommitted:
    return e.RefitCommitted(
        epoch=epoch,
        version=version,
        step=version,
        engines=engines,
        world_size=3,
        pause_s=0.1,
        drain_s=0.1,
        transfer_s=0.1,
        bytes=1,
    )


def refit(epoch: int, version: int) -> dict[str, Row]:
    """An epoch that commits."""
    offered = e.TransferOffered(
        epoch=epoch, version=version, trainer_boot=1, address="a", port=1, bytes=1, digest=f"d{epoch}"
    )
    loaded = {
        f"load {epoch} {member.actor}": Row(
            e.EngineLoaded(epoch=epoch, engine=member.actor, boot=1, digest=f"d{epoch}", seconds=0.1)
        )
        for member in ENGINES
    }
    rows = {f"request {epoch}": Row(requested(epoch, version)), f"offer {epoch}": Row(offered)}
    return rows | loaded | {f"commit {epoch}": Row(committed(epoch, version))}


def rejected(index: int, sample: int, reason: str) -> e.TrajectoryRejected:
    return e.TrajectoryRejected(task=f"t{index}", index=index, sample=sample, reason=reason)


def dropped(index: int, reason: str) -> e.GroupDropped:
    return e.GroupDropped(task=f"t{index}", index=index, reason=reason, samples=1)


def lost(number: int) -> e.DataLost:
    return e.DataLost(stream="trajectories", entries=(f"{number}-0",), reason="unreadable")


def clean() -> Log:
    """Two steps, a duplicate, dropped groups, a result that is lost, an engine in quarantine, and a group in hand."""
    policy = e.PolicyReady(version=0, step=0, parent_version=None, trainer_boot=1)
    failure = e.SampleFailed(task="t3", index=3, sample=1, attempt=3, samples=2, failure="infra", reason="no answer")
    barred = e.EngineQuarantined(epoch=3, engine="engine-1", boot=1, reason="stuck")
    log = Log(
        {"boot": Row(e.ActorBooted(actor="refit", boot=1, pid=1, host="h")), "policy": Row(policy)}
        | refit(1, version=0)
        | {"credit 1": Row(e.CreditGranted(total=4))}
        | {f"task {index}": Row(task(index)) for index in range(4)}
        | {f"result {i}.{s}": Row(result(i, s, version=0)) for i in (0, 1) for s in (0, 1)}
        | {
            "batch 1": Row(batch(1, group(0, ref(0, 0), ref(0, 1)), group(1, ref(1, 0), ref(1, 1))), "result 1.1"),
            "depth 1": Row(depth(1, ready=0, open=2), "result 1.1"),
            "step 1": Row(step(1, 0, 1), "batch 1"),
        }
        | refit(2, version=1)
        | {
            "credit 2": Row(e.CreditGranted(total=6), "commit 2"),
            "task 4": Row(task(4)),
            "task 5": Row(task(5)),
            "result 2.0": Row(result(2, 0, version=0)),
            "result 2.1": Row(result(2, 1, version=1)),
            "result 3.0": Row(result(3, 0, version=1)),
            "again 3.0": Row(result(3, 0, version=1, attempt=2)),
            "reject 3.0": Row(rejected(3, 0, "duplicate: the sample has a result"), "again 3.0"),
            "failed 3.1": Row(failure),
            "drop 3": Row(dropped(3, "too_few_valid"), "failed 3.1"),
            "credit 3": Row(e.CreditGranted(total=7), "failed 3.1"),
            "task 6": Row(task(6)),
            "result 4.0": Row(result(4, 0, version=1)),
            "result 4.1": Row(result(4, 1, version=1, engine="engine-1")),
            "batch 2": Row(
                batch(2, group(2, ref(2, 0, lag=1), ref(2, 1)), group(4, ref(4, 0), ref(4, 1))), "result 4.1"
            ),
            "depth 2": Row(depth(2, ready=0, open=2), "result 4.1"),
            "step 2": Row(step(2, 2, 4), "batch 2"),
            "result 5.0": Row(result(5, 0, version=1)),
            "request 3": Row(requested(3, 2)),
            "quarantine": Row(barred),
            "result 5.1": Row(result(5, 1, version=1, engine="engine-1")),
            "reject 5.1": Row(rejected(5, 1, "engine-1 boot 1 is quarantined since epoch 3"), "result 5.1"),
            "drop 5": Row(dropped(5, "too_few_valid"), "result 5.1"),
            "fail 3": Row(failed(3)),
        }
        | refit(4, version=2)
        | {"result 6.0": Row(result(6, 0, version=2)), "result 6.1": Row(result(6, 1, version=2))}
    )
    log.rows["lost 6.0"] = Row(lost(log.number("result 6.0")))
    return log
