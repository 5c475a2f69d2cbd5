"""Where two runs part: the first event, by causes and not by time, that one has and the other ought to have."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal

import msgspec

from actors.recorder import archive
from actors.startup import uncollected
from contracts import events as ev
from contracts.envelope import Envelope
from contracts.events import kind
from pipeline import eventlog
from pipeline.causality import Key, Order, Recent, spoken
from pipeline.replay.states import worded
from pipeline.rundir import RunDir

TROUBLE: tuple[type, ...] = (
    ev.SampleFailed,
    ev.TransferFailed,
    ev.EngineFailed,
    ev.EngineQuarantined,
    ev.RefitFailed,
    ev.EngineDead,
    ev.ActorBooted,
    ev.ActorFailed,
    ev.DataLost,
    ev.DataExhausted,
)
"""Kinds that a healthy run does not owe: one that only the other run has is where they part."""
TIMES, LEAST_S = 3.0, 2.0
"""An event is missing when its causes are so many times, and so many seconds, older than it took in the first run."""
HEAD_START_S = 0.5
"""Trouble is looked at so much earlier: what is missing at the same time is missing because of it."""
NEXT = 6
"""Events shown of what each run did next."""
OTHERS = 10
KEPT = 1 << 16
"""Events that both runs have, and that others may still follow from, are remembered so far back at least."""
CHUNK, AHEAD = 256, 4096
"""Events that are read of one run at a time, and how many more of the second one."""
MOST = 4096
"""Partings that are held at a time, to find those that were due first."""


class Happening(msgspec.Struct, frozen=True):
    """One event in words."""

    entry: int
    id: str
    actor: str
    text: str
    at: float


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """`missing`: the first run has `key`, the second has all that it follows from and not it. `extra`: the other way
    round, for trouble. `waited_s`: how long the second run went on without it; `took_s`: what the first one took."""

    how: Literal["missing", "extra"]
    key: str
    after: tuple[str, ...]
    first: Happening | None
    second: Happening | None
    took_s: float = 0.0
    waited_s: float = 0.0


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """`common`: events that both runs have, before the parting if there is one. `parting` None: nothing is overdue.
    `next_*`: what each did from there. `settings`: those in which the runs differ."""

    common: int
    parting: Parting | None
    next_first: tuple[Happening, ...] = ()
    next_second: tuple[Happening, ...] = ()
    others: tuple[Parting, ...] = ()
    settings: tuple[dict[str, Any], ...] = ()


Log = Iterable[tuple[int, Envelope[Any]]]
Source = Callable[[int], Log]
"""A run's events in log order, those behind a place: read twice, the second time from the parting on."""


def compare(first: Source, second: Source, end: float = 0.0, settings: Sequence[dict[str, Any]] = ()) -> Difference:
    """Where the run `second`, the one that went wrong, leaves the way of `first`.

    `end`: until when nothing more came in the second run, if that is later than its last event. `settings`: those in
    which the runs differ, as `pipeline.replay.states.changes` tells them.
    """
    with uncollected():
        seen = _Both(end)
        seen.read(first(0), second(0))
        due = seen.due()
    if not due:
        return Difference(common=len(seen.common[0]), parting=None, settings=tuple(settings))
    count, starts = seen.around(due[0])
    told, nexts = [], []
    for side, source in enumerate((first, second)):
        wanted = {each.place for each in due if each.side == side}
        events, following = _again(source, wanted, starts[side])
        told.append(events)
        nexts.append(following)
    partings = [each.told(told[each.side][each.place]) for each in due]
    return Difference(
        common=count,
        parting=partings[0],
        next_first=nexts[0],
        next_second=nexts[1],
        others=tuple(partings[1:]),
        settings=tuple(settings),
    )


def end_of(run: RunDir) -> float:
    """Until when a run's archive tells of it: the present while it is written, else when it was closed.

    Raises `PipelineError` if its index is damaged.
    """
    if archive.has_writer(run.events):
        return time.time()
    return max((segment.closed_at for segment in eventlog.segments(run)), default=0.0)


class _Met(msgspec.Struct, gc=False):
    """One event as far as the runs have had it: when, and in which place. `parents`: what it follows from in the run
    that had it first, as long as the other lacks it; they lead to earlier ones only, never back."""

    key: Key
    at: list[float | None]
    place: list[int]
    trouble: bool
    parents: tuple[_Met, ...] = ()


class _Due(msgspec.Struct, frozen=True, gc=False):
    """A parting: when it was due, the run that has the event (0 or 1), and its place there."""

    at: float
    side: int
    place: int
    key: Key
    after: tuple[Key, ...]
    took_s: float = 0.0
    waited_s: float = 0.0

    def told(self, event: Happening) -> Parting:
        return Parting(
            how="extra" if self.side else "missing",
            key=spoken(self.key),
            after=tuple(map(spoken, self.after)),
            first=None if self.side else event,
            second=event if self.side else None,
            took_s=self.took_s,
            waited_s=self.waited_s,
        )


class _Both:
    """Two logs, read side by side: what only one of them has had stays, and of what both have had the newest."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.common = (array("Q"), array("Q"))
        """Places of the events that both have, in each run."""
        self._open: dict[Key, _Met] = {}
        """What only one run has had, while the other may still have it."""
        self._known = Recent[Key, _Met](KEPT)
        """What both have had; and what the second will never have, for nothing of that is owed that follows from it."""
        self._done: set[int] = set()
        """Hashes of the keys that both have had: when one comes again, that is nothing new."""
        self._orders = tuple(Order(partial(self._has, side), KEPT) for side in (0, 1))
        self._over = [False, False]
        self._due: list[_Due] = []

    def read(self, first: Log, second: Log) -> None:
        """The second run is read a little ahead, so that of most events it is known at once that both have them."""
        logs, counts = (iter(first), iter(second)), [0, 0]
        while not all(self._over):
            side = 1 if self._over[0] or (not self._over[1] and counts[1] < counts[0] + AHEAD) else 0
            events = list(islice(logs[side], CHUNK))
            counts[side] += len(events)
            self._take(side, events)
            if side == 1 and events:
                self.end = max(self.end, *(envelope.wall_ns / 1e9 for _, envelope in events))
            if not events:
                self._over[side] = True
        for met in self._open.values():
            self._judge(met)

    def due(self) -> list[_Due]:
        """The partings that were due first."""
        self._due.sort(key=lambda each: (each.at, each.side, each.place))
        del self._due[1 + OTHERS :]
        return self._due

    def around(self, due: _Due) -> tuple[int, tuple[int, int]]:
        """How many common events precede a parting, and the places from which each run goes on: the one that has the
        event with it, the other behind the last common event before it."""
        here, there = self.common[due.side], self.common[1 - due.side]
        before = [pair for pair in zip(here, there, strict=True) if pair[0] < due.place]
        other = max(before, default=(0, 0))[1] + 1
        return len(before), (other, due.place) if due.side else (due.place, other)

    def _take(self, side: int, events: Log) -> None:
        order, held, done, over = self._orders[side], self._open, self._done, self._over[1 - side]
        for place, envelope in events:
            key = order.read(envelope)
            if key is None:
                continue
            met = held.get(key)
            if met is None:
                if hash(key) in done or (over and self._has(side, key)):
                    continue
                self._begin(side, place, envelope, key)
            elif met.at[side] is None:
                met.at[side], met.place[side], met.parents = envelope.wall_ns / 1e9, place, ()
                del held[key]
                self._known.new[key] = met
                done.add(hash(key))
                self.common[0].append(met.place[0])
                self.common[1].append(met.place[1])
            else:
                continue
            order.add(envelope.body, key)
        order.turn()
        self._known.turn()

    def _begin(self, side: int, place: int, envelope: Envelope[Any], key: Key) -> None:
        """An event that the other run has not had yet."""
        trouble = isinstance(envelope.body, TROUBLE)
        at = envelope.wall_ns / 1e9
        met = _Met(key, [None, at], [0, place], trouble) if side else _Met(key, [at, None], [place, 0], trouble)
        if trouble is bool(side):
            parents = map(self._find, self._orders[side].parents(envelope, key))
            met.parents = tuple(parent for parent in parents if parent is not None)
        if not self._over[1 - side] or trouble:
            self._open[key] = met
        elif side == 0:
            self._judge(met)
            met.parents = ()
            self._known.new[key] = met

    def _find(self, key: Key) -> _Met | None:
        return self._open.get(key) or self._known.get(key)

    def _has(self, side: int, key: Key) -> bool:
        met = self._find(key)
        return met is not None and met.at[side] is not None

    def _judge(self, met: _Met) -> None:
        """Of an event that one run alone has: does the other owe it, or is it trouble?"""
        one, two = met.at
        found = None
        if one is None and two is not None and met.trouble:
            after = tuple(parent.key for parent in met.parents if parent.at[0] is not None)
            found = _Due(two - HEAD_START_S, 1, met.place[1], met.key, after)
        elif one is not None and not met.trouble:
            found = self._missing(met, one)
        if found is None:
            return
        self._due.append(found)
        if len(self._due) > MOST:
            self.due()

    def _missing(self, met: _Met, at: float) -> _Due | None:
        """It is, when the second run has all that it follows from, and went on for much longer than the first took."""
        firsts = [parent.at[0] for parent in met.parents]
        seconds = [parent.at[1] for parent in met.parents]
        ends = [each for each in seconds if each is not None]
        if not ends or len(ends) < len(seconds) or self._has(1, ("sample.failed", *met.key[1:])):
            return None
        took = at - max(each for each in firsts if each is not None)
        waited = self.end - max(ends)
        if waited < max(TIMES * took, took + LEAST_S):
            return None
        after = tuple(parent.key for parent in met.parents)
        return _Due(max(ends) + took, 0, met.place[0], met.key, after, took, waited)


def _again(source: Source, wanted: set[int], start: int) -> tuple[dict[int, Happening], tuple[Happening, ...]]:
    """The events in these places by place, and the first few from `start` on."""
    events: dict[int, Happening] = {}
    following: list[Happening] = []
    for place, envelope in source(min([start, *wanted]) - 1):
        if place in wanted:
            events[place] = happening(place, envelope)
        if place >= start and len(following) < NEXT:
            following.append(happening(place, envelope))
        if len(events) == len(wanted) and len(following) == NEXT:
            break
    return events, tuple(following)


def happening(position: int, envelope: Envelope[Any]) -> Happening:
    """An event in a line."""
    fields = msgspec.to_builtins(envelope.body, builtin_types=(bytes,), str_keys=True)
    shown = [f"{name}={value}" for name, value in fields.items() if isinstance(value, str | int | float)]
    text = f"{kind(envelope.body)} {' '.join(part for part in shown if not part.startswith('kind='))}"
    return Happening(position, envelope.id, envelope.actor, text[:200], envelope.wall_ns / 1e9)


def lines(found: Difference, names: tuple[str, str]) -> Iterable[str]:
    """The comparison for a terminal."""
    if found.settings:
        yield "the runs have other settings, so they may part without a fault"
        yield from (f"  {line}" for line in map(worded, found.settings))
    if found.parting is None:
        yield f"the runs do not part: {found.common} events in common, and {names[1]} lacks none that is overdue"
        return
    parting = found.parting
    yield f"the runs part at {parting.key}, after {found.common} events in common"
    if parting.after:
        yield f"  it follows from {', '.join(parting.after[:6])}, which both have"
    if parting.how == "missing":
        took, waited = f"{parting.took_s:.3f} s later", f"for {parting.waited_s:.1f} s without it"
        yield f"  {names[0]} has it {took}; {names[1]} has gone on {waited}"
    else:
        yield f"  only {names[1]} has it"
    for name, events in ((names[0], found.next_first), (names[1], found.next_second)):
        yield f"{name} goes on with"
        yield from (f"  {each.entry:>7} {each.actor}: {each.text}" for each in events)
        if not events:
            yield "  nothing"
    if found.others:
        yield "further differences"
        yield from (f"  {each.how} {each.key}" for each in found.others)
