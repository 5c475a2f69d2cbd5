"""Where two runs part: the first event, by causes and not by time, that one has and the other ought to have."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from actors.recorder import archive
from contracts import events as ev
from contracts.envelope import Envelope
from contracts.events import kind
from pipeline import eventlog
from pipeline.causality import Key, Node, graph, spoken
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
    """`common`: events that both runs have. `parting` None: nothing is overdue. `next_*`: what each did from there."""

    common: int
    parting: Parting | None
    next_first: tuple[Happening, ...] = ()
    next_second: tuple[Happening, ...] = ()
    others: tuple[Parting, ...] = ()


Log = Iterable[tuple[int, Envelope[Any]]]


def compare(first: Log, second: Log, end: float = 0.0) -> Difference:
    """Where `second` (the one that went wrong) leaves the way of `first`. Both in log order.

    `end`: until when nothing more came in the second run, if that is later than its last event.
    """
    first, second = list(first), list(second)
    one, two = graph(first), graph(second)
    end = max(end, *(envelope.wall_ns / 1e9 for _, envelope in second)) if second else end
    due = [*_missing(one, two, end), *_extra(one, two)]
    due.sort(key=lambda item: item[0])
    found = [parting for _, parting in due]
    common = len(one.keys() & two.keys())
    if not found:
        return Difference(common=common, parting=None)
    chosen = found[0]
    return Difference(
        common=common,
        parting=chosen,
        next_first=_next(first, chosen.first, one, two, chosen),
        next_second=_next(second, chosen.second, two, one, chosen),
        others=tuple(found[1 : 1 + OTHERS]),
    )


def end_of(run: RunDir) -> float:
    """Until when a run's archive tells of it: the present while it is written, else when it was closed.

    Raises `PipelineError` if its index is damaged.
    """
    if archive.has_writer(run.events):
        return time.time()
    return max((segment.closed_at for segment in eventlog.segments(run)), default=0.0)


def _missing(one: Mapping[Key, Node], two: Mapping[Key, Node], end: float) -> Iterable[tuple[float, Parting]]:
    """(when it was due in the second run, the event) for each that is overdue there."""
    for key, node in one.items():
        if key in two or isinstance(node.envelope.body, TROUBLE):
            continue
        if ("sample.failed", *key[1:]) in two or not node.parents or any(parent not in two for parent in node.parents):
            continue
        took = node.at - max(one[parent].at for parent in node.parents)
        waited = end - max(two[parent].at for parent in node.parents)
        if waited < max(TIMES * took, took + LEAST_S):
            continue
        yield (
            end - waited + took,
            Parting(
                how="missing",
                key=spoken(key),
                after=tuple(map(spoken, node.parents)),
                first=happening(node.position, node.envelope),
                second=None,
                took_s=took,
                waited_s=waited,
            ),
        )


def _extra(one: Mapping[Key, Node], two: Mapping[Key, Node]) -> Iterable[tuple[float, Parting]]:
    """(when it came, the event) for trouble that only the second run has."""
    for key, node in two.items():
        if key in one or not isinstance(node.envelope.body, TROUBLE):
            continue
        parting = Parting(
            how="extra",
            key=spoken(key),
            after=tuple(spoken(parent) for parent in node.parents if parent in one),
            first=None,
            second=happening(node.position, node.envelope),
        )
        yield node.at - HEAD_START_S, parting


def _next(
    log: list[tuple[int, Envelope[Any]]],
    at: Happening | None,
    mine: Mapping[Key, Node],
    other: Mapping[Key, Node],
    parting: Parting,
) -> tuple[Happening, ...]:
    """The events from the parting on; in the run that lacks it, those after the last of its causes."""
    if at is not None:
        start = at.entry
    else:
        causes = [node.position for node in mine.values() if spoken(node.key) in parting.after]
        start = max(causes, default=0) + 1
    return tuple([happening(position, envelope) for position, envelope in log if position >= start][:NEXT])


def happening(position: int, envelope: Envelope[Any]) -> Happening:
    """An event in a line."""
    fields = msgspec.to_builtins(envelope.body, builtin_types=(bytes,), str_keys=True)
    shown = [f"{name}={value}" for name, value in fields.items() if isinstance(value, str | int | float)]
    text = f"{kind(envelope.body)} {' '.join(part for part in shown if not part.startswith('kind='))}"
    return Happening(position, envelope.id, envelope.actor, text[:200], envelope.wall_ns / 1e9)


def lines(found: Difference, names: tuple[str, str]) -> Iterable[str]:
    """The comparison for a terminal."""
    if found.parting is None:
        yield f"the runs do not part: {found.common} events in common, and {names[1]} lacks none that is overdue"
        return
    parting = found.parting
    yield f"the runs part at {parting.key}, after {found.common} events in common"
    yield f"  it follows from {', '.join(parting.after[:6]) or 'nothing'}, which both have"
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
