"""A run as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

A process per actor: a track with one mark an event, tracks with what it did (steps, checkpoints, drains, loads, refit
epochs with their phases), tracks with its waits, and rollouts as asynchronous spans. Arrows lead from each event to
those that it caused. Times are microseconds since the first event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from actors import registry
from contracts import events as ev
from contracts.envelope import Envelope
from contracts.events import kind

MARK_US = 1.0
"""Longest mark of an event."""
EVENTS, DOES, WAITS = 1, 100, 200
"""First thread numbers of an actor's tracks."""
BESIDE_US = 1e6
"""How much of the time before and after a refit is shown with it."""


class Span(msgspec.Struct, frozen=True):
    """Something that an actor did from `start` to `end`, in microseconds."""

    actor: str
    track: int
    name: str
    start: float
    end: float
    args: dict[str, Any] = {}


class Rollout(msgspec.Struct, frozen=True):
    """One sample under way."""

    actor: str
    index: int
    sample: int
    start: float
    end: float
    args: dict[str, Any]


class Spans:
    """Folds events into what actors did and waited for. `zero_ns`: the first event's time.

    `spans` and `rollouts` get what is over; a subclass may take it elsewhere by overriding `add` and `rolled`.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.rollouts: list[Rollout] = []
        self.zero_ns: int | None = None
        self._waits: dict[tuple[str, str], tuple[float, ev.WaitStarted]] = {}
        self._epoch: dict[str, Any] = {}
        self._last = 0.0
        self._handlers: dict[type, Callable[[str, Any, float], None]] = {
            ev.TrajectoryFinished: self._rollout,
            ev.StepFinished: lambda actor, body, at: self._did(
                actor, f"step {body.step}", at, body.seconds, version=body.version, batch=body.batch
            ),
            ev.CheckpointSaved: lambda actor, body, at: self._did(
                actor, f"checkpoint {body.step}", at, body.seconds, path=body.path
            ),
            ev.TransferFinished: self._sent,
            ev.EngineDrained: lambda actor, body, at: self._did(actor, f"drain epoch {body.epoch}", at, body.seconds),
            ev.EngineReleased: lambda actor, body, at: self._did(
                actor, f"release epoch {body.epoch}", at, body.seconds, tags=",".join(body.tags)
            ),
            ev.EngineLoaded: self._loaded,
            ev.EngineReady: lambda actor, body, at: self._did(actor, "start server", at, body.seconds, boot=body.boot),
            ev.GateClosed: lambda actor, body, at: self._did(
                actor, f"close gate, epoch {body.epoch}", at, body.seconds, held=body.held
            ),
            ev.WaitStarted: self._wait,
            ev.WaitEnded: lambda actor, body, at: self._wait_ends(body.actor, body.on, at, over=True),
            ev.ActorBooted: self._boot,
            ev.RefitRequested: self._refit,
            ev.TransferStarted: lambda actor, body, at: self._phase("transfer", at),
            ev.RefitCommitted: lambda actor, body, at: self._end_refit(at, "committed"),
            ev.RefitFailed: lambda actor, body, at: self._end_refit(at, f"failed in {body.phase}: {body.reason}"),
        }

    def apply(self, envelope: Envelope[Any]) -> float:
        """Consume the next event of the log; answers its time in microseconds since the first."""
        if self.zero_ns is None:
            self.zero_ns = envelope.wall_ns
        at = (envelope.wall_ns - self.zero_ns) / 1e3
        self._last = max(self._last, at)
        handler = self._handlers.get(type(envelope.body))
        if handler is not None:
            handler(envelope.actor, envelope.body, at)
        return at

    def add(self, span: Span) -> None:
        """A span is over."""
        self.spans.append(span)

    def rolled(self, rollout: Rollout) -> None:
        """A rollout is over."""
        self.rollouts.append(rollout)

    def close(self) -> None:
        """What is still open ends with the log."""
        for actor, on in list(self._waits):
            self._wait_ends(actor, on, self._last, over=False)
        self._end_refit(self._last, "open")

    def _rollout(self, actor: str, body: ev.TrajectoryFinished, at: float) -> None:
        args = {"reward": body.reward, "tokens": body.completion_tokens, "attempt": body.attempt}
        self.rolled(Rollout(actor, body.index, body.sample, at - body.seconds * 1e6, at, args))

    def _sent(self, actor: str, body: ev.TransferFinished, at: float) -> None:
        self._did(actor, f"send epoch {body.epoch}", at, body.seconds, bytes=body.bytes)
        self._phase("verify", at)

    def _loaded(self, actor: str, body: ev.EngineLoaded, at: float) -> None:
        """The load, and within it its phases, one behind the other; what no phase is of comes last."""
        said = {"receiver": body.receiver, "fallback": body.fallback}
        args = {"digest": body.digest} | {name: value for name, value in said.items() if value}
        self._did(actor, f"load epoch {body.epoch}", at, body.seconds, **args)
        start = max(0.0, at - body.seconds * 1e6)
        for phase in body.phases:
            end = min(at, start + phase.seconds * 1e6)
            self.add(Span(actor, DOES, phase.name, start, end, {"epoch": body.epoch}))
            start = end

    def _wait(self, actor: str, body: ev.WaitStarted, at: float) -> None:
        self._waits[body.actor, body.on] = (at, body)

    def _boot(self, actor: str, body: ev.ActorBooted, at: float) -> None:
        for waiter, on in [key for key in self._waits if key[0] == body.actor]:
            self._wait_ends(waiter, on, at, over=False)

    def _did(self, actor: str, name: str, at: float, seconds: float, **args: Any) -> None:
        self.add(Span(actor, DOES, name, max(0.0, at - seconds * 1e6), at, args))

    def _wait_ends(self, actor: str, on: str, at: float, *, over: bool) -> None:
        begun = self._waits.pop((actor, on), None)
        if begun is not None:
            args = {"cause": begun[1].cause, "over": over}
            self.add(Span(actor, WAITS, f"waits for {on}", begun[0], max(at, begun[0]), args))

    def _refit(self, actor: str, body: ev.RefitRequested, at: float) -> None:
        self._end_refit(at, "cut off")
        self._epoch = {"actor": actor, "begin": at, "body": body, "phases": [("drain", at)]}

    def _phase(self, name: str, at: float) -> None:
        if self._epoch:
            self._epoch["phases"].append((name, at))

    def _end_refit(self, at: float, how: str) -> None:
        if not self._epoch:
            return
        actor, body, begin = self._epoch["actor"], self._epoch["body"], self._epoch["begin"]
        at = max(at, *(start for _, start in self._epoch["phases"]))
        args = {"epoch": body.epoch, "version": body.version, "end": how}
        self.add(Span(actor, DOES, f"refit {body.epoch}", begin, at, args))
        phases = self._epoch["phases"]
        ends = [start for _, start in phases[1:]] + [at]
        for (name, start), end in zip(phases, ends, strict=True):
            self.add(Span(actor, DOES, name, start, end, {"epoch": body.epoch}))
        self._epoch = {}


class Tracer(Spans):
    """Keeps every event too, for the marks of a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, float, Envelope[Any]]] = []

    def apply(self, envelope: Envelope[Any]) -> float:
        at = super().apply(envelope)
        self.events.append((envelope.actor, at, envelope))
        return at

    def cut(self, epoch: int) -> None:
        """Leave only the refit of `epoch`, and what was about it. Raises `LookupError` when there is none."""
        found = [span for span in self.spans if span.name == f"refit {epoch}"]
        if not found:
            epochs = sorted(span.args["epoch"] for span in self.spans if "version" in span.args and "end" in span.args)
            there = f"{epochs[0]} to {epochs[-1]}" if epochs else "none"
            raise LookupError(f"no refit {epoch} in the log; epochs there: {there}")
        begin, end = found[0].start - BESIDE_US, found[-1].end + BESIDE_US
        self.spans = [span for span in self.spans if span.start <= end and span.end >= begin]
        self.rollouts = [each for each in self.rollouts if each.start <= end and each.end >= begin]
        self.events = [event for event in self.events if begin <= event[1] <= end]

    def finish(self, epoch: int | None = None) -> list[dict[str, Any]]:
        """The trace events, or those about one refit; what is still open ends with the log."""
        self.close()
        if epoch is not None:
            self.cut(epoch)
        actors = {actor for actor, _, _ in self.events} | {span.actor for span in self.spans}
        pids = {actor: pid for pid, actor in enumerate(sorted(actors, key=_order), 1)}
        return [
            *_names(pids),
            *self._marks(pids),
            *_slices(self.spans, pids),
            *_async(self.rollouts, pids),
        ]

    def _marks(self, pids: Mapping[str, int]) -> Iterator[dict[str, Any]]:
        """One mark an event, and arrows between those of different actors."""
        moments: dict[str, list[float]] = {}
        for actor, at, _ in self.events:
            moments.setdefault(actor, []).append(at)
        for times in moments.values():
            times.sort()
        rank: dict[str, int] = {}
        where: dict[str, tuple[str, float]] = {}
        arrows: list[dict[str, Any]] = []
        for actor, at, envelope in sorted(self.events, key=lambda event: event[1]):
            place = rank[actor] = rank.get(actor, -1) + 1
            times = moments[actor]
            gap = times[place + 1] - at if place + 1 < len(times) else MARK_US
            body = envelope.body
            args = {"id": envelope.id, "epoch": envelope.epoch, "correlation": envelope.correlation_id}
            yield _slice(kind(body), at, max(0.0, min(MARK_US, gap)), pids[actor], EVENTS, args)
            where[envelope.id] = (actor, at)
        for number, (actor, at, envelope) in enumerate(self.events, 1):
            cause = where.get(envelope.causation_id or "")
            if cause is not None and cause[0] != actor:
                name = {"cat": "cause", "name": "causes", "id": number}
                arrows.append({**name, "ph": "s", "ts": cause[1], "pid": pids[cause[0]], "tid": EVENTS})
                arrows.append(
                    {**name, "ph": "f", "bp": "e", "ts": max(at, cause[1]), "pid": pids[actor], "tid": EVENTS}
                )
        yield from arrows


def chrome(log: Iterable[Envelope[Any]], epoch: int | None = None) -> dict[str, Any]:
    """The trace as one JSON object, whole or of one refit. Raises `LookupError` when there is no such refit."""
    tracer = Tracer()
    run = ""
    for envelope in log:
        run = run or envelope.run
        tracer.apply(envelope)
    return {"traceEvents": tracer.finish(epoch), "displayTimeUnit": "ms", "otherData": {"run": run}}


def _order(actor: str) -> tuple[int, str]:
    name = registry.kind_of(actor)
    return (registry.KINDS.index(name) if name in registry.KINDS else -1, actor)


def _names(pids: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for actor, pid in pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": actor}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for tid, name in ((EVENTS, "events"), (DOES, "does"), (WAITS, "waits")):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, ts: float, dur: float, pid: int, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "cat": "run", "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def _slices(spans: Iterable[Span], pids: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Spans on tracks such that those of one track nest; one that would cross another goes to a track of its own."""
    lanes: dict[tuple[str, int], list[list[float]]] = {}
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        tracks = lanes.setdefault((span.actor, span.track), [])
        number = next((n for n, ends in enumerate(tracks) if _fits(ends, span)), len(tracks))
        if number == len(tracks):
            tracks.append([])
        tracks[number].append(span.end)
        yield _slice(span.name, span.start, span.end - span.start, pids[span.actor], span.track + number, span.args)


def _fits(ends: list[float], span: Span) -> bool:
    """Whether a span nests on a track whose open spans end at `ends`; those that are over are taken out."""
    while ends and ends[-1] <= span.start:
        ends.pop()
    return not ends or span.end <= ends[-1]


def _async(rollouts: Iterable[Rollout], pids: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for each in rollouts:
        base = {
            "cat": "rollout",
            "name": f"task {each.index}",
            "id": f"{each.index}.{each.sample}.{each.args['attempt']}",
            "pid": pids[each.actor],
            "tid": EVENTS,
        }
        yield {**base, "ph": "b", "ts": max(0.0, each.start), "args": {"sample": each.sample, **each.args}}
        yield {**base, "ph": "e", "ts": each.end}
