"""What an event is, independent of time, and which events it follows from: the order that two runs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, TypeVar

from contracts import events as ev
from contracts.envelope import Envelope

K = TypeVar("K")
V = TypeVar("V")
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
EPOCHAL = frozenset(chain.from_iterable(FOLLOWS.values()))
"""Kinds that others of their epoch follow from."""


_fields = {of: tuple(map(attrgetter, names)) for of, names in NAMED_BY.items()}
_tags: dict[type, Any] = {of: of.__struct_config__.tag for of in NAMED_BY}


def key_of(body: Any) -> Key | None:
    """None for kinds that depend on timing alone."""
    of = type(body)
    fields = _fields.get(of)
    return None if fields is None else (_tags[of], *[field(body) for field in fields])


def spoken(key: Key) -> str:
    """`engine.drained(17, engine-3)`."""
    kind, *names = key
    return f"{kind}({', '.join(map(str, names))})" if names else str(kind)


class Order:
    """The events of one run, read in log order: what each is, and what it follows from.

    `has`: whether the run has had the event of that key, so far. Of causes, and of epochs, the newest are remembered:
    `kept` at least. What follows from one long before those follows from it no more.
    """

    def __init__(self, has: Callable[[Key], bool], kept: int) -> None:
        self._has = has
        self._keys = Recent[str, Key](kept)
        self._epochs = Recent[tuple[type, int], list[Key]](kept)
        self._started: Key | None = None

    def read(self, envelope: Envelope[Any]) -> Key | None:
        """What the next event is; None for kinds that depend on timing alone: what they cause follows from theirs."""
        key = key_of(envelope.body)
        found = key or self._keys.get(envelope.causation_id or "")
        if found is not None:
            self._keys.new[envelope.id] = found
        return key

    def turn(self) -> None:
        """Forget what lies too far back."""
        self._keys.turn()
        self._epochs.turn()

    def parents(self, envelope: Envelope[Any], key: Key) -> tuple[Key, ...]:
        """What an event follows from; asked once for the first of its key, right after it was read."""
        found = dict.fromkeys(parent for parent in self._parents(envelope) if parent != key)
        if not found and self._started is not None:
            found = {self._started: None}
        return tuple(found)

    def add(self, body: Any, key: Key) -> None:
        """From now on other events may follow from this one, the first of its key."""
        if isinstance(body, ev.RunStarted):
            self._started = key
        elif type(body) in EPOCHAL:
            place = (type(body), body.epoch)
            self._epochs.new[place] = [*(self._epochs.get(place) or ()), key]

    def _parents(self, envelope: Envelope[Any]) -> Iterator[Key]:
        """The event that the emitting step consumed, and what must have come before by the protocol."""
        cause = self._keys.get(envelope.causation_id or "")
        if cause is not None:
            yield cause
        body = envelope.body
        yield from filter(self._has, _named(body))
        for kind in FOLLOWS.get(type(body), ()):
            yield from self._epochs.get((kind, getattr(body, "epoch", 0))) or ()


def _named(body: Any) -> Sequence[Key]:
    """Events that one must come after, by their names."""
    match body:
        case ev.TrajectoryFinished() | ev.SampleFailed():
            return [("task.issued", body.index)]
        case ev.BatchReady():
            return [
                ("trajectory.finished", group.index, each.sample) for group in body.groups for each in group.samples
            ]
        case ev.StepFinished():
            return [("batch.ready", body.batch)]
        case ev.RefitRequested():
            before = [(kind, body.epoch - 1) for kind in ("refit.committed", "refit.failed", "release.finished")]
            members = [("engine.ready", member.actor, member.boot) for member in body.engines]
            return [("step.finished", body.version), ("policy.ready", body.version), *before, *members]
        case ev.CheckpointSaved():
            return [("step.finished", body.version)]
    return ()


class Recent(Generic[K, V]):
    """A mapping that forgets: what was put into `new` or asked for last stays, `kept` entries at least.

    `turn`, called every now and then, lets go of what is older.
    """

    def __init__(self, kept: int) -> None:
        self.new: dict[K, V] = {}
        self._old: dict[K, V] = {}
        self._kept = kept

    def __len__(self) -> int:
        return len(self.new) + len(self._old)

    def get(self, key: K) -> V | None:
        found = self.new.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.new[key] = found
        return found

    def turn(self) -> None:
        if len(self.new) >= self._kept:
            self._old, self.new = self.new, {}
