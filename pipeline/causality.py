"""What an event is, independent of time, and which events it follows from: the order that two runs share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from contracts import events as ev
from contracts.envelope import Envelope

Key = tuple[Any, ...]
"""The kind of an event and what names it among others of its kind, e.g. `("engine.drained", 17, "engine-3")`."""

NAMED_BY: dict[type, tuple[str, ...]] = {
    ev.TaskIssued: ("index",),
    ev.TrajectoryFinished: ("index", "sample"),
    ev.SampleFailed: ("index", "sample"),
    ev.BatchReady: ("batch",),
    ev.GroupDropped: ("index", "reason"),
    ev.TrajectoryRejected: ("index", "sample"),
    ev.BatchRejected: ("batch",),
    ev.EvalFinished: ("version",),
    ev.PolicyReady: ("version",),
    ev.StepFinished: ("version",),
    ev.CheckpointSaved: ("version",),
    ev.TrainingFinished: ("version",),
    ev.MemoryWanted: ("step", "trainer_boot"),
    ev.RefitRequested: ("epoch",),
    ev.GateClosed: ("epoch", "gateway"),
    ev.EngineDrained: ("epoch", "engine"),
    ev.TransferOffered: ("epoch",),
    ev.TransferStarted: ("epoch",),
    ev.TransferFinished: ("epoch",),
    ev.TransferFailed: ("epoch",),
    ev.EngineLoaded: ("epoch", "engine"),
    ev.EngineFailed: ("epoch", "engine"),
    ev.RefitCommitted: ("epoch",),
    ev.EngineQuarantined: ("epoch", "engine"),
    ev.RefitFailed: ("epoch",),
    ev.ReleaseRequested: ("epoch",),
    ev.EngineReleased: ("epoch", "engine"),
    ev.ReleaseFinished: ("epoch",),
    ev.ActorBooted: ("actor", "boot"),
    ev.EngineReady: ("engine", "boot"),
    ev.GatewayReady: ("gateway", "boot"),
    ev.EngineDead: ("engine", "boot"),
    ev.DataExhausted: (),
    ev.FleetScaled: ("engines",),
    ev.ActorFailed: ("actor", "error"),
    ev.DataLost: ("stream", "entries"),
    ev.RunStarted: (),
}
"""Kinds that two runs have in common, and the fields that name one. Waits, depths and credit depend on timing alone."""

FOLLOWS: dict[type, tuple[type, ...]] = {
    ev.GateClosed: (ev.RefitRequested, ev.ReleaseRequested),
    ev.EngineDrained: (ev.RefitRequested,),
    ev.TransferOffered: (ev.RefitRequested,),
    ev.TransferStarted: (ev.GateClosed, ev.EngineDrained, ev.TransferOffered),
    ev.TransferFinished: (ev.TransferStarted,),
    ev.TransferFailed: (ev.TransferStarted,),
    ev.EngineLoaded: (ev.TransferStarted,),
    ev.RefitCommitted: (ev.TransferFinished, ev.EngineLoaded),
    ev.RefitFailed: (ev.RefitRequested,),
    ev.EngineReleased: (ev.ReleaseRequested,),
    ev.ReleaseFinished: (ev.ReleaseRequested, ev.EngineReleased),
}
"""What an event of an epoch follows from within it."""


class Node(msgspec.Struct, frozen=True):
    """One event of a run: its place, and the keys that it follows from."""

    key: Key
    position: int
    envelope: Envelope[Any]
    parents: tuple[Key, ...]

    @property
    def at(self) -> float:
        return self.envelope.wall_ns / 1e9


def key_of(body: Any) -> Key | None:
    """None for kinds that depend on timing alone."""
    names = NAMED_BY.get(type(body))
    return None if names is None else (body.__struct_config__.tag, *(getattr(body, name) for name in names))


def spoken(key: Key) -> str:
    """`engine.drained(17, engine-3)`."""
    kind, *names = key
    return f"{kind}({', '.join(map(str, names))})" if names else str(kind)


def graph(log: Iterable[tuple[int, Envelope[Any]]]) -> dict[Key, Node]:
    """The events of a run by key, in log order; of several with one key the first counts."""
    nodes: dict[Key, Node] = {}
    keys: dict[str, Key] = {}
    epochs: dict[tuple[type, int], list[Key]] = {}
    started: Key | None = None
    for position, envelope in log:
        key = key_of(envelope.body)
        if key is None:
            cause = keys.get(envelope.causation_id or "")
            if cause is not None:
                keys[envelope.id] = cause
            continue
        keys[envelope.id] = key
        if key in nodes:
            continue
        parents = dict.fromkeys(_parents(envelope, keys, nodes, epochs))
        if not parents and started is not None:
            parents = {started: None}
        nodes[key] = Node(key, position, envelope, tuple(parents))
        if isinstance(envelope.body, ev.RunStarted):
            started = key
        epoch = getattr(envelope.body, "epoch", None)
        if epoch is not None:
            epochs.setdefault((type(envelope.body), epoch), []).append(key)
    return nodes


def _parents(
    envelope: Envelope[Any], keys: dict[str, Key], nodes: dict[Key, Node], epochs: dict[tuple[type, int], list[Key]]
) -> Iterator[Key]:
    """The event that the emitting step consumed, and what must have come before by the protocol."""
    cause = keys.get(envelope.causation_id or "")
    if cause is not None:
        yield cause
    body = envelope.body
    named: Sequence[Key] = ()
    match body:
        case ev.TrajectoryFinished() | ev.SampleFailed():
            named = [("task.issued", body.index)]
        case ev.BatchReady():
            named = [
                ("trajectory.finished", group.index, each.sample) for group in body.groups for each in group.samples
            ]
        case ev.StepFinished():
            named = [("batch.ready", body.batch)]
        case ev.RefitRequested():
            before = [(kind, body.epoch - 1) for kind in ("refit.committed", "refit.failed", "release.finished")]
            members = [("engine.ready", member.actor, member.boot) for member in body.engines]
            named = [("step.finished", body.version), ("policy.ready", body.version), *before, *members]
        case ev.CheckpointSaved():
            named = [("step.finished", body.version)]
    yield from (key for key in named if key in nodes)
    for kind in FOLLOWS.get(type(body), ()):
        yield from epochs.get((kind, getattr(body, "epoch", 0)), ())
