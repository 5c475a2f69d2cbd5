"""A run's events folded into what the page shows, as plain data. Pure: reads no clock; `now` is handed in."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import msgspec

from actors.recorder.ordering import number
from config.schema import RunConfig
from contracts import events as ev
from contracts.core import Entry
from contracts.envelope import Envelope
from contracts.events import Event
from pipeline import eventlog
from pipeline.eventlog import Batch
from pipeline.oneline import summary
from pipeline.rundir import RunInfo
from pipeline.selection import KINDS
from pipeline.ui._drawing import Drawing
from pipeline.ui._index import Index, Query, Rows
from pipeline.ui._plots import charts
from pipeline.ui._samples import Samples
from pipeline.ui._timeline import Timeline, order
from pipeline.verdict import NORMAL
from pipeline.view import View
from pipeline.why import render
from pipeline.why.diagnosis import NOTHING, diagnose
from pipeline.why.load import Follower
from pipeline.why.look import Look
from pipeline.why.model import Model
from pipeline.why.result import Diagnosis, Evidence

PAGE = 500
"""Most events of one answer."""
CHAIN = 60
"""Causes of an event that are followed back, and effects that are listed."""
SEARCHES = 6
"""Text searches whose rows are remembered."""
PAUSE = 64
"""Blocks that are searched before others get their turn."""


class Shown(msgspec.Struct, frozen=True):
    """A diagnosis with how it is to be read: `stopped` and `ended` as in `pipeline.why.load.Case`."""

    diagnosis: Diagnosis
    stopped: str = ""
    ended: bool = False


class RunData:
    """Feed every event in log order to `apply`; the methods answer what can be written as JSON."""

    def __init__(self, info: RunInfo, config: RunConfig) -> None:
        self.info = info
        self.config = config
        self.drawing = Drawing()
        self.view = View()
        self.follower = Follower()
        self.unreadable = 0
        self._found: OrderedDict[Query, tuple[int, list[int]]] = OrderedDict()
        self._drawn: tuple[Any, list[dict[str, Any]]] = (None, [])

    @property
    def index(self) -> Index:
        return self.drawing.index

    @property
    def timeline(self) -> Timeline:
        return self.drawing.timeline

    @property
    def samples(self) -> Samples:
        return self.drawing.samples

    @property
    def model(self) -> Model:
        return self.follower.model

    def apply(self, entry: Entry, envelope: Envelope[Event]) -> None:
        """Consume the next event of the log, which stands in `entry`."""
        self.extend(Batch((entry,), (envelope,), (number(entry.entry),)))

    def extend(self, batch: Batch) -> None:
        """Consume the next events: each view takes them all at once, which costs less than one by one."""
        self.judge(batch)
        self.drawing.extend(batch)

    def judge(self, batch: Batch) -> None:
        """Consume the next events, but for what is drawn and searched."""
        self.follower.extend(batch)
        self.view.extend(batch.envelopes)

    # --- at a glance ---

    def overview(self, now: float, evidence: Evidence) -> dict[str, Any]:
        """Numbers of the run, its engines and its actors."""
        return {
            "run": self.info.run,
            "description": self.config.description,
            "figures": figures(self.info, self.config, self.view, self.timeline.length),
            "engines": engines(self.config, self.model, self.view, now, evidence),
            "actors": actors(self.model, now),
            "mishaps": mishaps(self.view),
            "events": len(self.index),
            "step": self.view.step,
            "steps": self.config.steps,
        }

    def status(self, state: str, now: float, why: dict[str, Any], evidence: Evidence) -> dict[str, Any]:
        """What the page shows all the time; `why` is a diagnosis as `told` tells it."""
        return {
            "state": state,
            "problem": "",
            "version": 0,
            "total": len(self.index),
            "unreadable": self.unreadable,
            "now": now,
            "zero": self.timeline.zero(),
            "length": self.timeline.length,
            "why": why,
            **self.overview(now, evidence),
        }

    def diagnose(self, now: float, evidence: Evidence, *, live: bool) -> Shown:
        """What the run waits for; one that was stopped is judged as it was before."""
        before = self.follower.before_stop
        if before is not None and before[1] not in NORMAL:
            model, reason, at = before
            return Shown(diagnose(model, self.config, at, NOTHING), stopped=reason)
        found = diagnose(self.model, self.config, now, evidence)
        return Shown(found, ended=not live and self.model.finished is None)

    def charts(self, begin: float | None = None, end: float | None = None) -> list[dict[str, Any]]:
        """The charts of the steps from `begin` to `end`."""
        key = (len(self.view.rows), self.view.totals["refits"], len(self.view.evaluations), begin, end)
        if self._drawn[0] != key:
            self._drawn = (key, [msgspec.to_builtins(each) for each in charts(self.config, self.view, begin, end)])
        return self._drawn[1]

    def window(self, begin: float | None, end: float | None, width: int) -> dict[str, Any]:
        """The timeline from `begin` to `end` in seconds since the first event; all of it by default."""
        start = 0.0 if begin is None else begin
        stop = self.timeline.length if end is None else end
        return self.timeline.window(self.index, start, max(stop, start + 1e-4), width)

    # --- events ---

    async def search(self, query: Query, offset: int, limit: int, *, newest: bool = True) -> dict[str, Any]:
        """A page of the events that a query wants, and how many there are; newest first unless told otherwise."""
        rows = await self._rows(query)
        count, first, limit = len(rows), max(0, offset), min(limit, PAGE)
        last = max(0, count - first)
        page = rows[max(0, last - limit) : last][::-1] if newest else rows[first : first + limit]
        return {"total": count, "offset": first, "events": [self.line(int(row)) for row in page]}

    async def _rows(self, query: Query) -> Rows | list[int]:
        rows = self.index.choose(query)
        if not query.text:
            return rows
        upto, found = self._found.pop(query, (0, []))
        seen = len(self.index)
        for count, hits in enumerate(self.index.containing(rows[rows >= upto], query.text), 1):
            found.extend(hits)
            if count % PAUSE == 0:
                await asyncio.sleep(0)
        self._found[query] = (seen, found)
        while len(self._found) > SEARCHES:
            self._found.popitem(last=False)
        return found

    def line(self, row: int) -> dict[str, Any]:
        """One event in a list."""
        envelope = self.index.envelope(row)
        return {
            "row": row,
            "n": self.index.position(row),
            "at": envelope.wall_ns / 1e9,
            "kind": self.index.kind(row),
            "actor": envelope.actor,
            "boot": envelope.boot,
            "text": summary(envelope.body, self.timeline.zero()),
        }

    def event(self, row: int) -> dict[str, Any]:
        """One event in full, the events that led to it (nearest first), and those that followed at once.

        Raises IndexError for a row that there is not.
        """
        if not 0 <= row < len(self.index):
            raise IndexError(row)
        entry = self.index.entry(row)
        envelope = self.index.envelope(row)
        effects = self.index.effects(envelope.id)
        return {
            **self.line(row),
            "event": msgspec.Raw(eventlog.render(entry, envelope)),
            "causes": self._causes(envelope),
            "effects": [self.line(int(each)) for each in effects[:CHAIN]],
            "more_effects": max(0, len(effects) - CHAIN),
            "trajectory": isinstance(envelope.body, ev.TrajectoryFinished),
        }

    def _causes(self, envelope: Envelope[Event]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        seen = {envelope.id}
        cause = envelope.causation_id
        while cause is not None and cause not in seen and len(found) < CHAIN:
            row = self.index.row_of(cause)
            if row is None:
                break
            seen.add(cause)
            found.append(self.line(row))
            cause = self.index.envelope(row).causation_id
        return found

    def choices(self) -> dict[str, Any]:
        """What can be searched for."""
        return {"kinds": KINDS, "actors": sorted(self.index.actors, key=order)}


# --- pieces ----------------------------------------------------------------------------------------------------------


def told(shown: Shown) -> dict[str, Any]:
    """A diagnosis for the page: its parts, and the lines that `pipeline why` prints."""
    found = shown.diagnosis
    return {
        "stuck": found.stuck,
        "at": found.at,
        "lines": list(render.lines(found, shown.stopped, ended=shown.ended)),
        **msgspec.to_builtins(found),
    }


def figures(info: RunInfo, config: RunConfig, view: View, seconds: float) -> list[tuple[str, str]]:
    """The numbers at the top; `seconds` from the first event to the latest."""
    rewards = view.rewards()
    last = view.evaluations[-1] if view.evaluations else None
    pauses = sorted(refit.pause_s for refit in view.refits)
    return [
        ("ended", view.finished or info.ended or "not yet"),
        ("steps", f"{view.step} of {config.steps}"),
        ("reward", f"{rewards[0]:.3f} to {rewards[-1]:.3f}" if rewards else "none"),
        ("held out", f"{last.reward:.3f}" if last else "not evaluated"),
        ("time", clock(seconds)),
        ("rollouts", f"{view.totals['trajectories']:,}"),
        ("tokens generated", f"{view.totals['generated_tokens']:,}"),
        ("refits", f"{view.totals['refits']:,}"),
        ("median pause", f"{pauses[len(pauses) // 2]:.2f} s" if pauses else "none"),
        ("failed epochs", f"{view.totals['failed_refits']}"),
        ("quarantines", f"{view.totals['quarantines']}"),
        ("restarts", f"{sum(len(boots) - 1 for boots in view.boots.values())}"),
    ]


def clock(seconds: float) -> str:
    """`h:mm:ss`, or `m:ss` below an hour."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def engines(config: RunConfig, model: Model, view: View, now: float, evidence: Evidence) -> list[dict[str, Any]]:
    """What is known of each engine. `in_flight`: requests there, None where no gateway's state is known."""
    look = Look(model, config, now, evidence, 0.0)
    requests = look.requests()
    epoch = model.commit.epoch if model.commit else None
    found = []
    for name in look.of_kind("engine"):
        engine, actor = model.engines.get(name), model.actors.get(name)
        found.append(
            {
                "name": name,
                "state": engine.mode if engine else "not started",
                "since": now - engine.since if engine else None,
                "reason": engine.reason if engine else "",
                "version": view.serving.get(name),
                "epoch": epoch if name in view.serving else None,
                "in_flight": None if requests is None else requests[name],
                "boots": actor.boots if actor else 0,
                "host": actor.host if actor else "",
            }
        )
    return found


def actors(model: Model, now: float) -> list[dict[str, Any]]:
    """Every actor that was heard: boots, and how long ago it last said something."""
    waits: dict[str, list[str]] = {}
    for wait in model.waits.values():
        waits.setdefault(wait.actor, []).append(f"{wait.on}: {wait.cause}")
    return [
        {
            "name": name,
            "boots": actor.boots,
            "host": actor.host,
            "silent": max(0.0, now - actor.last_at),
            "left": actor.left,
            "failed": actor.failed,
            "waits": waits.get(name, []),
        }
        for name, actor in sorted(model.actors.items(), key=lambda item: order(item[0]))
    ]


def mishaps(view: View) -> list[tuple[str, str, str]]:
    """Failures, lost epochs and quarantines, dropped groups and failed samples: (when, who, what)."""
    begin = view.started_at or 0.0
    timed = [(f.wall, f.actor, f"{f.error}: {f.message}") for f in view.failures]
    timed += [(m.wall, m.engine or f"epoch {m.epoch}", m.reason) for m in view.mishaps]
    rows = [(f"{wall - begin:.1f} s", who, what) for wall, who, what in sorted(timed)]
    rows += [("", "buffer", f"{n} groups dropped: {reason}") for reason, n in view.drops.most_common()]
    counted = [(key.partition(":"), n) for key, n in sorted(view.totals.items()) if ":" in key]
    rows += [("", "rollouts", f"{n} {what}: {why}") for (what, _, why), n in counted]
    return rows
