"""What an analysis may look at, and the small questions that it asks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from statistics import median

import msgspec
from msgspec.structs import replace

from actors import registry
from actors.collector import core as collector
from actors.engine.core import SERVER
from actors.gateway import state as gateway
from config.schema import RunConfig
from pipeline.why.causes import CAUSES
from pipeline.why.facts import Actor, Wait
from pipeline.why.model import Model
from pipeline.why.result import Evidence, Finding

FLOOR_S = 15.0
"""A shorter wait never counts as a stall."""
FIRST_S = 60.0
"""Patience for what a run has not done yet: nothing is known of how long it takes."""
TIMES = 4.0
"""A wait is a stall when it takes so many times its usual length."""


class InFlight(msgspec.Struct, frozen=True):
    """A request that a gateway has sent to an engine."""

    gateway: str
    engine: str
    session: str
    samples: int
    deadline_at: float


class Look:
    """A model, the moment, and what is known beside the events. `floor_s`: the least patience."""

    def __init__(self, model: Model, config: RunConfig, now: float, evidence: Evidence, floor_s: float) -> None:
        self.model = model
        self.config = config
        self.now = now
        self.evidence = evidence
        self.floor_s = floor_s
        self.staleness = 0 if config.sync else config.buffer.max_staleness
        if model.wanted_engines is not None:
            config = replace(config, engine=replace(config.engine, count=model.wanted_engines))
        self.names = registry.names(config)

    # --- time ---

    def age(self, since: float) -> float:
        return self.now - since

    def usual(self, actor: str, on: str) -> float | None:
        """Median length of the waits of `actor` for `on` that ended."""
        known = self.model.waited.get((actor, on))
        return median(wait.seconds for wait in known) if known else None

    def patience(self, *usual: float | None) -> float:
        known = [seconds for seconds in usual if seconds is not None]
        return max([self.floor_s, *(TIMES * seconds for seconds in known)])

    def step_patience(self) -> float:
        """How long may pass from one optimizer step to the next."""
        at = list(self.model.steps_at)
        gaps = [later - earlier for earlier, later in pairwise(at)]
        if not gaps:
            return max(self.floor_s, FIRST_S) if self.floor_s >= FLOOR_S else self.floor_s
        return self.patience(median(gaps))

    # --- actors ---

    def of_kind(self, kind: str) -> list[str]:
        """The run's actors of a kind, and those of the log that the configuration does not know."""
        known = [name for name in self.names if registry.kind_of(name) == kind]
        return known + [n for n in self.model.actors if registry.kind_of(n) == kind and n not in known]

    def gone(self, name: str) -> Finding | None:
        """Why `name` can't act any more; None if nothing says so."""
        actor = self.model.actors.get(name)
        if actor is None or not actor.boots:
            if name in self.names and name != "recorder" and self.age(self.model.started_at or self.now) > self.floor_s:
                since = self.model.started_at or self.now
                return finding("actor_gone", name, f"{name} has never started", since)
            return None
        text = self._end_of(name, actor)
        if text is None or self.age(actor.last_at) < min(5.0, self.floor_s):
            return None
        return finding("actor_gone", name, f"{name} {text} and was not started again", actor.last_at)

    def _end_of(self, name: str, actor: Actor) -> str | None:
        if actor.left and self.model.stopping is None:
            return "left the run"
        if actor.failed and self.age(actor.last_at) > self.floor_s and not self.evidence.alive.get(name):
            return f"ended with {actor.failed}"
        if self.evidence.alive.get(name) is False:
            return f"is gone (boot {actor.boot}: its process does not exist)"
        return None

    def engine_lost(self, name: str) -> str | None:
        """Why an engine can't answer within the present epoch."""
        engine = self.model.engines.get(name)
        if engine is not None and engine.mode == "dead":
            return f"{name} died: {first_line(engine.reason)}"
        if engine is not None and engine.mode == "starting":
            return f"{name} was restarted as boot {engine.boot}"
        if self.evidence.alive.get(name) is False:
            return f"the process of {name} does not exist"
        return None

    def silent(self, name: str) -> Wait | None:
        """The announced wait of an engine for its server, which answers no probe."""
        return self.model.waits.get((name, SERVER))

    def serving(self) -> list[str]:
        """Engines that the last commit named and that nothing has been heard against since."""
        return [
            name for name, e in self.model.engines.items() if e.mode == "serving" and self.engine_lost(name) is None
        ]

    # --- insight into cores ---

    def gateways(self) -> Iterator[tuple[str, gateway.State]]:
        for name, state in self.evidence.states.items():
            if isinstance(state, gateway.State):
                yield name, state

    def collectors(self) -> Iterator[tuple[str, collector.State]]:
        for name, state in self.evidence.states.items():
            if isinstance(state, collector.State):
                yield name, state

    def in_flight(self, engine: str | None = None) -> list[InFlight]:
        """Requests that run on engines, oldest first; of one engine or of all."""
        found = [
            InFlight(name, call.engine, request.session, len(call.samples), request.deadline_at)
            for name, state in self.gateways()
            for call in state.calls.values()
            if (request := state.requests.get(call.request)) is not None
        ]
        return [each for each in found if engine in (None, each.engine)]

    def requests(self) -> Counter[str] | None:
        """Engine -> requests in flight there; None if no gateway can be looked into."""
        if not any(True for _ in self.gateways()):
            return None
        return Counter(call.engine for call in self.in_flight())

    def held(self) -> int | None:
        """Requests that gateways hold back; None if no gateway can be looked into."""
        states = [state for _, state in self.gateways()]
        return sum(len(state.waiting) for state in states) if states else None

    def running(self) -> int | None:
        """Samples that collectors are rolling out; None if no collector can be looked into."""
        states = [state for _, state in self.collectors()]
        if not states:
            return None
        return sum(len(task.attempts) - len(task.waiting) for state in states for task in state.open.values())

    def holder(self, task: str) -> str | None:
        """The collector that works on a task."""
        for name, state in self.collectors():
            if any(held.task.task == task for held in state.open.values()):
                return name
        return None


def finding(code: str, culprit: str, text: str, since: float, evidence: Iterable[str] = ()) -> Finding:
    """A finding with the fix that belongs to its code. Raises KeyError for a code that `CAUSES` lacks."""
    shown = tuple(line for line in evidence if line)
    return Finding(code=code, culprit=culprit, text=text, since=since, evidence=shown, fix=CAUSES[code])


def first_line(reason: str) -> str:
    """Of how a server ended, without the end of its log."""
    line, _, more = reason.partition("\n")
    return (
        line.removesuffix(" ends with:").replace("; ", "; see ", 1) if more and line.endswith(" ends with:") else line
    )


def span(seconds: float) -> str:
    """`42 s`, `2 min 3 s`, `1 h 4 min`."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def counted(count: int, noun: str) -> str:
    """`1 request`, `3 requests`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def some(items: Iterable[object], most: int = 4) -> str:
    """A few of many, and how many more there are."""
    shown = [str(item) for item in items]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
