"""What `pipeline replay` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from pipeline.replay import telling
from pipeline.replay.check import Verdict
from pipeline.replay.states import outline
from pipeline.replay.telling import Telling, clock
from pipeline.replay.tracks import Course, Place, Track, describe
from pipeline.replay.whatif import WhatIf


def moment(course: Course, place: Place, actor: str | None) -> Iterator[str]:
    """One actor's state at a place, or a line on each actor."""
    envelope = course.log.envelope(place.position)
    assert envelope is not None
    yield f"at entry {place.position} ({envelope.id}), {clock(envelope.wall_ns / 1e9)}"
    for track in course.chosen(actor):
        count = track.count_at(place)
        last = describe(track.input(track.records[count - 1])) if count else "nothing yet"
        yield f"{track.name}: {count} of {len(track.records)} inputs taken, the last one {last}"
    if actor is not None:
        yield from (f"  {line}" for line in outline(course.states_at(place, actor)[actor][1]))


def between(
    course: Course, first: Place, second: Place, actor: str | None, tell: Telling = telling.WORDS
) -> Iterator[str]:
    """How states differ between two places."""
    one, two = course.states_at(first, actor), course.states_at(second, actor)
    for name, (count, before) in one.items():
        until, after = two[name]
        yield from tell.change(name, (count, until), before, after)


def steps(course: Course, place: Place, actor: str | None, count: int, tell: Telling = telling.WORDS) -> Iterator[str]:
    """The next `count` steps after a place, of one actor or of all by time: input, commands, change of state."""
    upcoming, counts = [], {}
    for track in course.chosen(actor):
        start = counts[track.name] = track.count_at(place)
        upcoming += [(record.now, track.name) for record in track.records[start : start + count]]
    wanted = Counter(name for _, name in sorted(upcoming)[:count])
    begun = course.states_after({name: counts[name] for name in wanted})
    shown: list[tuple[float, list[str]]] = []
    for name, (start, state) in begun.items():
        shown += _steps(course.tracks[name], start, state, wanted[name], tell)
    for _, lines in sorted(shown, key=lambda item: item[0]):
        yield from lines


def _steps(track: Track, start: int, before: Any, count: int, tell: Telling) -> Iterator[tuple[float, list[str]]]:
    for record, input, state, commands in islice(track.steps(start, before), count):
        yield record.now, list(tell.step(track.name, record, input, commands, before, state))
        before = state


def verdict(found: Verdict) -> Iterator[str]:
    """The outcome of a check."""
    for place, each in enumerate(found.divergences):
        yield f"{'DIVERGES' if not place else 'also'}: {each.actor} step {each.seq} at {clock(each.now)}: {each.why}"
        yield f"  input     {each.input}"
        yield from (f"  recorded  {line}" for line in each.recorded)
        yield from (f"  now       {line}" for line in each.answered)
    if found.absent:
        yield f"written by an older version, whose events have no {', '.join(found.absent)}: compared without"
    if found.divergences and found.other_code:
        yield "the run was started by other code than this (`code` in its run.json): its cores may decide otherwise"
    same = "all as recorded" if not found.divergences else f"{len(found.divergences)} actors diverge"
    yield f"{found.actors} actors, {found.steps} steps, {found.events} events: {same}"


def other_courses(found: Sequence[WhatIf]) -> Iterator[str]:
    """The outcome of a what-if, and where it ends."""
    for each in found:
        yield from _other_course(each)
    names = ", ".join(each.actor for each in found)
    yield f"the answer ends at {names}: what other actors would have done upon that is not followed"


def _other_course(found: WhatIf) -> Iterator[str]:
    yield f"{found.actor} without {found.event}, or with it late:"
    if not found.changes:
        yield "  does the same"
    for change in found.changes:
        yield f"  {clock(change.now)} {change.input}"
        yield from (f"    no longer  {line}" for line in change.missing)
        yield from (f"    instead    {line}" for line in change.new)
    if found.unheard:
        yield f"  {found.unheard} inputs left out: their events follow from what is no longer done"
