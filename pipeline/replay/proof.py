"""`replay --check` of an archive: block by block of its log, its actors in several processes, and no step a second time
that this code has checked before.

An actor begins where its last check ended, in the state that it ended in. What it compares is the same as `check` of
the whole run in memory does, which answers in its stead when the events of an actor do not follow its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec

from actors.recorder.ordering import number
from config.schema import RunConfig
from contracts.core import Entry
from pipeline.replay.apart import hands, shared, side_by_side
from pipeline.replay.blocks import Block
from pipeline.replay.check import NOWHERE, Divergence, Stretch, Verdict, check, go_on, judged, without_collector
from pipeline.replay.index import Checked, Index, Mark
from pipeline.replay.recorded import Log, Recorded, Whole
from pipeline.replay.sought import Page, Sought, open_course
from pipeline.replay.tracks import Track
from pipeline.rundir import CODE, RunDir

ALONE = 20_000
"""Steps that are checked by this process itself: others would take longer to start."""


class Outcome(msgspec.Struct, frozen=True):
    """What a check of one actor came to. `seq`: its last step checked; `ordered`: its events follow its steps."""

    actor: str
    seq: int
    found: Divergence | None
    absent: tuple[str, ...]
    ordered: bool
    states: list[Mark]


_decoder = msgspec.msgpack.Decoder(list[Outcome])


def check_run(
    run: RunDir, config: RunConfig, index: Index, actor: str | None = None, workers: int | None = None
) -> Verdict:
    """Check an archive; `index` is believed and learns. `workers`: processes at most, else as many as there are cores.

    Raises `PipelineError` if the archive is damaged.
    """
    course = open_course(run, config, index, actor)
    if isinstance(course, Recorded):
        return check(course)
    begun = {name: _begin(course, index.content.checked.get(name), track) for name, track in course.tracks.items()}
    left = {name: len(track.records) - begun[name].seq for name, track in course.tracks.items()}
    processes = hands(sum(left.values()), ALONE) if workers is None else workers
    groups = shared({name: steps for name, steps in left.items() if steps}, processes)
    outcomes = {each.actor: each for each in _outcomes(course, index, begun, groups)}
    if not all(each.ordered for each in outcomes.values()):
        return check(Recorded.read(run, config, actor))
    absent: set[str] = set()
    for name, outcome in outcomes.items():
        index.content.states[name] = outcome.states
        noted = _noted(course, name, outcome) if outcome.found is None else None
        if noted is not None:
            index.content.checked[name] = noted
        absent.update(outcome.absent)
    for name in course.tracks.keys() - outcomes.keys():
        absent.update(index.content.checked[name].absent)
    steps = [outcomes[name].seq if name in outcomes else len(track.records) for name, track in course.tracks.items()]
    found = [outcome.found for outcome in outcomes.values() if outcome.found is not None]
    events = sum(block.records for block in course.events.blocks)
    return judged(run.info().versions.get(CODE), steps, events, found, absent)


# --- what was checked before ---


class Begun(msgspec.Struct, frozen=True):
    """Where the check of an actor begins: after step `seq`, in `state`."""

    seq: int
    state: Any
    absent: tuple[str, ...] = ()


def _begin(course: Sought, before: Checked | None, track: Track) -> Begun:
    """Behind what was checked before, given the same files; what the log has got since may belong to the last step."""
    chains = course.events.chains
    if before is not None and before.events in chains and before.seq <= len(track.records):
        upto = len(chains) - chains[::-1].index(before.events)
        same = course.chain_of(track.name, before.seq) == before.journals
        if same and upto == len(chains) and before.seq == len(track.records):
            return Begun(before.seq, None, before.absent)
        seq = min(before.seq, course.events.behind(track.name).at(upto - 1) - 1)
        spans = (block.spans.get(track.name) for block in course.events.blocks[upto:])
        if same and all(span is None or span[0] > seq for span in spans):
            return Begun(*track.nearest(seq), before.absent)
    return Begun(0, track.core.initial())


def _noted(course: Sought, name: str, outcome: Outcome) -> Checked | None:
    """How much of a check a later one may build on: what files that are written to their end hold."""
    events, journals = course.events.closed, course.journals.closed
    if not events or not journals:
        return None
    seq = min(outcome.seq, course.steps[name].at(journals - 1))
    if events < len(course.events.blocks):
        seq = min(seq, course.events.behind(name).at(events - 1) - 1)
    chain, last = course.chain_of(name, seq), course.events.chains[events - 1]
    return None if chain is None or last is None else Checked(seq, chain, last, outcome.absent)


# --- actor by actor ---


def _outcomes(course: Sought, index: Index, begun: dict[str, Begun], groups: list[list[str]]) -> list[Outcome]:
    works = [partial(_encoded, course, index, begun, group) for group in groups]
    return [outcome for data in side_by_side(works) for outcome in _decoder.decode(data)]


def _encoded(course: Sought, index: Index, begun: dict[str, Begun], names: Sequence[str]) -> bytes:
    return msgspec.msgpack.encode(examine(course, index, begun, names))


def examine(course: Sought, index: Index, begun: dict[str, Begun], names: Sequence[str]) -> list[Outcome]:
    """Check these actors, a block of the log after the other."""
    works = [_Work(course, course.tracks[name], begun[name]) for name in names]
    with without_collector():
        for number, block in enumerate(course.events.blocks):
            for work in works:
                if work.wants(block):
                    work.take(course.events.at(number))
        for work in works:
            work.finish()
    return [work.outcome(index.content.states[work.name]) for work in works]


class _Work:
    """The check of one actor. Its last step by now is held back, for its events may go on in the next block."""

    def __init__(self, course: Sought, track: Track, begun: Begun) -> None:
        self.name = track.name
        self._course, self._track = course, track
        self._stretch = Stretch(begun.seq, begun.state)
        self._absent = set(begun.absent)
        self._last_logged = course.events.behind(track.name).end
        self._whole = Whole(track.name, track.eras, track.records, Log([]))
        self._held: list[tuple[int, Entry]] = []
        self._started = self._over = False
        self._ordered = True

    def wants(self, block: Block) -> bool:
        """Whether a block holds events of steps that are not checked, or is behind one that does."""
        if self._over or self.name not in block.spans:
            return False
        return self._started or block.spans[self.name][1] > self._stretch.seq

    def take(self, page: Page) -> None:
        events = [(step, entry) for _, step, entry in page.steps.get(self.name, ())]
        if not self._started:
            events = [(step, entry) for step, entry in events if step > self._stretch.seq]
            self._started = True
        steps = [step for step, _ in (*self._held, *events)]
        if any(a > b for a, b in pairwise(steps)):
            self._ordered, self._over = False, True
            return
        last = steps[-1]
        self._check([entry for step, entry in (*self._held, *events) if step < last], last - 1)
        self._held = [(step, entry) for step, entry in (*self._held, *events) if step == last]

    def finish(self) -> None:
        if not self._over:
            self._check([entry for _, entry in self._held], len(self._track.records))

    def _check(self, entries: list[Entry], upto: int) -> None:
        """Go on to step `upto`; `entries` are all events of the steps up to it."""
        read = self._course.log.read
        self._whole.turn_to(Log([(number(entry.entry), read(entry)) for entry in entries], lambda: entries))
        go_on(self._stretch, self._whole, upto, self._last_logged, self._absent, self._after)
        self._over = self._stretch.found is not None
        if self._track.states is not None and not self._over:
            self._track.states.offer(self._stretch.seq, self._stretch.state)

    def _after(self, seq: int) -> int:
        found = self._course.log.after(self.name, seq)
        return NOWHERE if found is None else found

    def outcome(self, states: list[Mark]) -> Outcome:
        stretch = self._stretch
        return Outcome(self.name, stretch.seq, stretch.found, tuple(sorted(self._absent)), self._ordered, states)
