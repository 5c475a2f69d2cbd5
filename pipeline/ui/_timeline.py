"""The timeline: spans in lanes, as columns, and the part of them that a window of so many pixels can show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors import registry
from contracts import events as ev
from contracts.envelope import Envelope
from pipeline.trace import Span, Spans
from pipeline.ui._barriers import Barriers, Phase, Stretch
from pipeline.ui._columns import Columns, Row
from pipeline.ui._index import Index

SPANS = 240
"""Spans of a lane that are sent one by one; more are sent as bins, but for the longest."""
ALL_SPANS = 8_000
"""Spans that are sent, of all lanes."""
FEWEST = 30
MARKS = 1500
"""Events of a window that are sent one by one, with arrows from cause to effect; more are counted in bins."""
ROUNDING_S = 1e-6
BIN_PX = 3
BINS = 800

LANES = {"barrier": 0, "does": 1, "waits": 2, "rollouts": 3}
"""Tracks of an actor, from top to bottom."""
KINDS = (
    "drain", "hold", "transfer", "verify", "quarantined", "failed", "step", "checkpoint", "send", "server", "gate",
    "wait", "rollout",
)  # fmt: skip
"""What a span can be: its colour. `failed` is any phase of a barrier that did not end well."""
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
FIRST_WORDS = {
    "step": "step",
    "checkpoint": "checkpoint",
    "send": "send",
    "start": "server",
    "close": "gate",
    "release": "drain",
}
"""First word of a span's name in a trace -> what it is. Others are parts of a refit, which the barrier lanes show."""
WELL = ("done", "committed", "open")
ROLLOUT, WAIT = NUMBERS["rollout"], NUMBERS["wait"]
SHOWN_OTHERWISE = (
    ev.EngineDrained,
    ev.EngineLoaded,
    ev.RefitRequested,
    ev.TransferStarted,
    ev.RefitCommitted,
    ev.RefitFailed,
)
"""Kinds whose spans the barrier lanes stand for."""


class TimelinePart(msgspec.Struct, frozen=True, array_like=True):
    """What `Timeline.drain` hands on: the lanes' new rows and new names; all that is under way, and the latest time."""

    zero_ns: int | None
    last: float
    names: list[str]
    lanes: list[tuple[str, str, list[bytes]]]
    waits: list[tuple[str, str, float, ev.WaitStarted]]
    barriers: dict[str, tuple[Phase, int, float]]


class Lane:
    """Spans of one track of one actor. Times in seconds since the run's first event; `rows`: the event that ended each;
    `names`: index into the names of the timeline."""

    def __init__(self, actor: str, track: str) -> None:
        self.actor = actor
        self.track = track
        self._columns = Columns("ddBIi")
        self.put = self._columns.append
        """Take a span: (start, end, kind, row, name)."""
        self.extend = self._columns.rows
        """Take spans."""
        self.drain = self._columns.drain
        self.merge = self._columns.merge

    @property
    def starts(self) -> Any:
        return self._columns.column(0)

    @property
    def ends(self) -> Any:
        return self._columns.column(1)

    @property
    def kinds(self) -> Any:
        return self._columns.column(2)

    @property
    def rows(self) -> Any:
        return self._columns.column(3)

    @property
    def names(self) -> Any:
        return self._columns.column(4)


class Timeline(Spans):
    """Folds events; `window` answers what is to be drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: dict[tuple[str, str], Lane] = {}
        self._rolled: defaultdict[str, list[Row]] = defaultdict(list)
        """Actor -> its rollouts among the events that are being consumed. By far the most spans of a run: their names
        are read from their events when they are shown."""
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._drained = 0
        """Names that were handed on."""
        self._row = 0
        self._refits = Barriers(self._stretch)
        for kind in (*SHOWN_OTHERWISE, ev.TrajectoryFinished):
            del self._handlers[kind]
        refits = self._refits.handlers
        kinds = {**self._handlers, **refits}
        self._table = {kind: (self._handlers.get(kind), refits.get(kind)) for kind in kinds}
        self.kinds = frozenset(kinds)
        """Kinds of which spans are made, besides those of `samples`."""
        self.samples: tuple[type, ...] = (ev.TrajectoryFinished,)
        """Kinds that tell of a sample."""

    def extend(self, first: int, envelopes: Sequence[Envelope[Any]]) -> list[int]:
        """Consume the next events, which stand in the rows from `first` on; answers the rows of finished samples."""
        if not envelopes:
            return []
        if self.zero_ns is None:
            self.zero_ns = envelopes[0].wall_ns
        zero_ns, handlers_of, rolled, samples_of = self.zero_ns, self._table.get, self._rolled, self.samples
        samples: list[int] = []
        for row, envelope in enumerate(envelopes, first):
            body = envelope.body
            kind = type(body)
            if kind in samples_of:
                samples.append(row)
                end = (envelope.wall_ns - zero_ns) / 1e9
                begin = end - body.seconds
                rolled[envelope.actor].append((begin if begin > 0.0 else 0.0, end, ROLLOUT, row, -1))
                continue
            handlers = handlers_of(kind)
            if handlers is None:
                continue
            self._row, at = row, (envelope.wall_ns - zero_ns) / 1e3
            handler, refit = handlers
            if handler is not None:
                handler(envelope.actor, body, at)
            if refit is not None:
                refit(body, at)
        self._last = max(self._last, (max([envelope.wall_ns for envelope in envelopes]) - zero_ns) / 1e3)
        for actor, rolled in self._rolled.items():
            self._lane_of(actor, "rollouts").extend(rolled)
        self._rolled.clear()
        return samples

    def drain(self) -> TimelinePart:
        """Let go of the spans since the last time. What is left can only be extended and drained."""
        names, self._drained = self._names[self._drained :], len(self._names)
        lanes = [(lane.actor, lane.track, lane.drain()) for lane in self.lanes.values()]
        waits = [(actor, on, since, body) for (actor, on), (since, body) in self._waits.items()]
        return TimelinePart(self.zero_ns, self._last, names, lanes, waits, dict(self._refits.under_way))

    def merge(self, part: TimelinePart) -> None:
        """Take what another timeline, which began where this one ends, was drained of."""
        self.zero_ns, self._last = part.zero_ns, part.last
        for name in part.names:
            self._name(name)
        for actor, track, columns in part.lanes:
            self._lane_of(actor, track).merge(columns)
        self._waits = {(actor, on): (since, body) for actor, on, since, body in part.waits}
        self._refits.under_way = dict(part.barriers)

    @property
    def length(self) -> float:
        """Seconds from the first event to the latest."""
        return self._last / 1e6

    def zero(self) -> float:
        """The first event's time, in seconds since the Unix epoch."""
        return (self.zero_ns or 0) / 1e9

    # --- folds ---

    def add(self, span: Span) -> None:
        what = FIRST_WORDS.get(span.name.partition(" ")[0])
        if what is not None:
            self._put(span.actor, "does", NUMBERS[what], self._name(span.name), span.start, span.end)

    def _wait_ends(self, actor: str, on: str, at: float, *, over: bool) -> None:
        begun = self._waits.pop((actor, on), None)
        if begun is not None:
            self._put(actor, "waits", WAIT, self._name(f"waits for {on}"), begun[0], max(at, begun[0]))

    def _stretch(self, found: Stretch) -> None:
        well = found.end in WELL
        kind = found.phase if well else "failed"
        name = f"{found.phase}, epoch {found.epoch}"
        if not well:
            name += f": {found.end} {found.reason}".rstrip()
        elif found.end == "committed":
            name += ": committed"
        self._put(found.engine, "barrier", NUMBERS[kind], self._name(name), found.start, found.stop)

    def _put(self, actor: str, track: str, kind: int, name: int, start: float, end: float) -> None:
        self._lane_of(actor, track).put((max(0.0, start / 1e6), end / 1e6, kind, self._row, name))

    def _lane_of(self, actor: str, track: str) -> Lane:
        lane = self.lanes.get((actor, track))
        if lane is None:
            lane = self.lanes[actor, track] = Lane(actor, track)
        return lane

    def _name(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        return number

    # --- views ---

    def window(self, index: Index, begin: float, end: float, width: int) -> dict[str, Any]:
        """What lies between `begin` and `end`, in seconds since the first event, for a drawing `width` pixels wide.

        A lane holds `spans`, each `[start, end, kind, row, name]`, and `bins`, each `[bin, kind, spans, share of the
        bin that they cover]`; `levels` of rollouts is how many were under way in each bin.
        """
        bins = max(1, min(width // BIN_PX, BINS))
        most = max(FEWEST, min(SPANS, ALL_SPANS // max(1, len(self.lanes))))
        lanes = [self._lane(lane, index, begin, end, bins, most) for lane in self._ordered()]
        return {
            "begin": begin,
            "end": end,
            "length": self.length,
            "zero": self.zero(),
            "bins": bins,
            "kinds": KINDS,
            "actors": sorted({*index.actors, *(actor for actor, _ in self.lanes)}, key=order),
            "lanes": lanes,
            "open": self._open_ends(begin, end),
            **self._marks(index, begin, end, bins),
        }

    def _ordered(self) -> list[Lane]:
        return sorted(self.lanes.values(), key=lambda lane: (order(lane.actor), LANES[lane.track]))

    def _lane(self, lane: Lane, index: Index, begin: float, end: float, bins: int, most: int) -> dict[str, Any]:
        starts, ends, kinds = np.array(lane.starts), np.array(lane.ends), np.array(lane.kinds)
        inside = np.nonzero((starts <= end) & (ends >= begin))[0]
        shown: dict[str, Any] = {"actor": lane.actor, "track": lane.track, "total": len(starts), "spans": []}
        if len(inside) <= most:
            shown["spans"] = [self._span(lane, index, int(n)) for n in inside]
            return shown
        if lane.track == "rollouts":
            shown["levels"] = levels(starts[inside], ends[inside], begin, end, bins)
            return shown
        wide = (end - begin) / bins
        lengths = ends[inside] - starts[inside]
        longest = np.argsort(-lengths, kind="stable")[:most]
        longest = longest[lengths[longest] > 2 * wide]
        rest = np.delete(inside, longest)
        shown["spans"] = [self._span(lane, index, int(n)) for n in np.sort(inside[longest])]
        shown["bins"] = binned(starts[rest], ends[rest], kinds[rest], begin, end, bins)
        return shown

    def _span(self, lane: Lane, index: Index, n: int) -> list[Any]:
        number, row = lane.names[n], lane.rows[n]
        name = self._names[number] if number >= 0 else sample_name(index.envelope(row).body)
        return [lane.starts[n], lane.ends[n], lane.kinds[n], row, name]

    def _open_ends(self, begin: float, end: float) -> list[list[Any]]:
        """What is under way at the log's end: `[actor, track, start, kind, name]`."""
        found = [
            [each.engine, "barrier", each.start / 1e6, NUMBERS[each.phase], f"{each.phase}, epoch {each.epoch}"]
            for each in self._refits.open(self._last)
        ]
        found += [
            [actor, "waits", since / 1e6, WAIT, f"waits for {on}: {body.cause}"]
            for (actor, on), (since, body) in self._waits.items()
        ]
        return [each for each in found if each[2] <= end and self.length >= begin]

    def _marks(self, index: Index, begin: float, end: float, bins: int) -> dict[str, Any]:
        """The events of the window, and arrows between those of different actors; or how many there are in each bin."""
        times = (index.column("walls") - (self.zero_ns or 0)) / 1e9
        inside = np.nonzero((times >= begin - ROUNDING_S) & (times <= end + ROUNDING_S))[0]
        actors = index.column("actors")
        if len(inside) > MARKS:
            place = np.clip(((times[inside] - begin) / (end - begin) * bins).astype(np.int64), 0, bins - 1)
            counts = np.bincount(actors[inside] * bins + place, minlength=len(index.actors) * bins)
            lines = counts.reshape(len(index.actors), bins)
            return {"density": {name: lines[n].tolist() for n, name in enumerate(index.actors)}, "events": len(inside)}
        causes = index.causes(inside)
        marks = [[int(row), float(times[row]), index.actor(int(row)), index.kind(int(row))] for row in inside]
        arrows = [
            [
                int(cause),
                int(row),
                float(times[cause]),
                float(times[row]),
                index.actor(int(cause)),
                index.actor(int(row)),
            ]
            for cause, row in zip(causes, inside, strict=True)
            if cause >= 0 and actors[cause] != actors[row]
        ]
        return {"marks": marks, "arrows": arrows, "events": len(inside)}


def sample_name(body: Any) -> str:
    if not isinstance(body, ev.TrajectoryFinished):
        return "rollout"
    return f"group {body.index}, sample {body.sample}: reward {body.reward:g}, {body.completion_tokens} tokens"


def binned(
    starts: NDArray[Any], ends: NDArray[Any], kinds: NDArray[Any], begin: float, end: float, bins: int
) -> list[list[Any]]:
    """`[bin, kind, spans, share covered]` of every bin that has some; spans lie in the bin where they start."""
    wide = (end - begin) / bins
    place = np.clip(((starts - begin) / wide).astype(np.int64), 0, bins - 1)
    key = place * len(KINDS) + kinds
    size = bins * len(KINDS)
    counts = np.bincount(key, minlength=size)
    covered = np.bincount(key, weights=np.minimum(ends - starts, wide), minlength=size) / wide
    return [
        [int(n // len(KINDS)), int(n % len(KINDS)), int(counts[n]), round(min(float(covered[n]), 1.0), 3)]
        for n in np.nonzero(counts)[0]
    ]


def levels(starts: NDArray[Any], ends: NDArray[Any], begin: float, end: float, bins: int) -> list[int]:
    """How many spans are under way at the middle of each bin."""
    middles = begin + (np.arange(bins) + 0.5) * (end - begin) / bins
    begun = np.searchsorted(np.sort(starts), middles, "right")
    over = np.searchsorted(np.sort(ends), middles, "right")
    return (begun - over).tolist()


def order(actor: str) -> tuple[int, str, int]:
    """Actors as a run starts them; engines by number."""
    kind = registry.kind_of(actor)
    known = registry.KINDS.index(kind) if kind in registry.KINDS else -1
    tail = actor.rpartition("-")[2]
    return known, kind, int(tail) if tail.isdigit() else 0
