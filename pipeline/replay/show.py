"""What `pipeline replay` prints."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.replay import telling
from pipeline.replay.check import Verdict
from pipeline.replay.recorded import Place, Recorded, Track, describe
from pipeline.replay.states import outline
from pipeline.replay.telling import Telling, clock
from pipeline.replay.whatif import WhatIf
from pipeline.runtime.journal import Record


def moment(recorded: Recorded, place: Place, actor: str | None) -> Iterator[str]:
    """One actor's state at a place, or a line on each actor."""
    envelope = recorded.log.by_position[place.position]
    yield f"at entry {place.position} ({envelope.id}), {clock(envelope.wall_ns / 1e9)}"
    for track in _chosen(recorded, actor):
        count = track.count_at(place)
        last = describe(track.input(track.records[count - 1])) if count else "nothing yet"
        yield f"{track.name}: {count} of {len(track.records)} inputs taken, the last one {last}"
        if actor is not None:
            yield from (f"  {line}" for line in outline(track.state_at(place)))


def between(
    recorded: Recorded, first: Place, second: Place, actor: str | None, tell: Telling = telling.WORDS
) -> Iterator[str]:
    """How states differ between two places."""
    for track in _chosen(recorded, actor):
        counts = track.count_at(first), track.count_at(second)
        yield from tell.change(track.name, counts, track.state_at(first), track.state_at(second))


def steps(
    recorded: Recorded, place: Place, actor: str | None, count: int, tell: Telling = telling.WORDS
) -> Iterator[str]:
    """The next `count` steps after a place, of one actor or of all by time: input, commands, change of state."""
    upcoming = []
    for track in _chosen(recorded, actor):
        start = track.count_at(place)
        upcoming += [(record.now, track.name, track, start) for record in track.records[start : start + count]]
    upcoming.sort(key=lambda item: item[:2])
    taken: dict[str, int] = {}
    for _, name, _, _ in upcoming[:count]:
        taken[name] = taken.get(name, 0) + 1
    shown = [
        (record.now, lines)
        for name, wanted in taken.items()
        for record, lines in _steps(recorded.tracks[name], place, wanted, tell)
    ]
    for _, lines in sorted(shown, key=lambda item: item[0]):
        yield from lines


def _steps(track: Track, place: Place, count: int, tell: Telling) -> Iterator[tuple[Record, list[str]]]:
    start = track.count_at(place)
    before = track.state_at(place)
    for record, input, state, commands in track.steps(start, before):
        yield record, list(tell.step(track.name, record, input, commands, before, state))
        before = state
        count -= 1
        if not count:
            return


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


def other_course(found: WhatIf) -> Iterator[str]:
    """The outcome of a what-if."""
    yield f"{found.actor} without {found.event}, or with it late:"
    if not found.changes:
        yield "  does the same"
    for change in found.changes:
        yield f"  {clock(change.now)} {change.input}"
        yield from (f"    no longer  {line}" for line in change.missing)
        yield from (f"    instead    {line}" for line in change.new)
    if found.unheard:
        yield f"  {found.unheard} inputs left out: their events follow from what is no longer done"


def _chosen(recorded: Recorded, actor: str | None) -> list[Track]:
    return list(recorded.tracks.values()) if actor is None else [recorded.tracks[actor]]
