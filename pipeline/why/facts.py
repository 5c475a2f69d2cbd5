"""The parts of `Model`: what the events of a run say about each actor, group, epoch and wait."""

from __future__ import annotations

from typing import Literal

import msgspec

Phase = Literal["drain", "transfer", "verify"]
"""Phases of an epoch: until `transfer.started`, until `transfer.finished`, until its end."""


class Actor(msgspec.Struct):
    """What is known of one actor. `offset_ns`: its wall clock minus its host's monotonic clock."""

    boots: int = 0
    boot: int = 0
    booted_at: float = 0.0
    last_at: float = 0.0
    host: str = ""
    offset_ns: int | None = None
    left: bool = False
    failed: str = ""
    """Last words of a process that ended with an error, until the next boot."""


class Engine(msgspec.Struct):
    """`mode`: starting, uncertain, serving, suspect, quarantined, dead or retired, as the log tells it."""

    boot: int = 0
    mode: str = "starting"
    since: float = 0.0
    reason: str = ""
    down_at: float | None = None
    """When it stopped to serve, or began to start; None while it serves."""
    starts: int = 0
    """Times that it was started again since it last served, or since its first start."""
    ended: str = ""
    """Why it last stopped to serve, or to start."""


class Wait(msgspec.Struct, frozen=True, gc=False):
    """An announced wait that has not ended."""

    actor: str
    on: str
    cause: str
    since: float
    deadline_at: float | None = None


class Result(msgspec.Struct, frozen=True, gc=False):
    """How a sample ended: emitted by `actor` at place `position` of the log."""

    at: float
    actor: str
    position: int


class Group(msgspec.Struct):
    """A train group that is neither batched nor dropped. `lost`: samples whose results nobody will read."""

    task: str
    size: int
    issued_at: float
    position: int
    results: dict[int, Result] = {}
    complete_at: float | None = None
    lost: list[int] = []

    def missing(self) -> list[int]:
        return [sample for sample in range(self.size) if sample not in self.results]


class Batch(msgspec.Struct):
    """A batch that was emitted; `version` made from it, None while it is untrained."""

    ready_at: float
    groups: tuple[int, ...]
    position: int
    version: int | None = None
    lost: bool = False


class Barrier(msgspec.Struct):
    """One epoch. `gates`, `drained`, `loaded`: member -> when it answered, None while it has not."""

    epoch: int
    version: int
    since: float
    deadline_at: float
    drain: str
    gates: dict[str, float | None]
    drained: dict[str, float | None]
    loaded: dict[str, float | None] = {}
    offered_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    deaths: list[str] = []
    """Engines that died or were restarted within it."""
    end: str = ""
    ended_at: float | None = None

    @property
    def phase(self) -> Phase:
        if self.started_at is None:
            return "drain"
        return "transfer" if self.finished_at is None else "verify"

    def missing(self) -> dict[str, list[str]]:
        """Event that is awaited -> members that owe it."""
        if self.started_at is None:
            owed = {
                "gate.closed": [name for name, at in self.gates.items() if at is None],
                "engine.drained": [name for name, at in self.drained.items() if at is None],
                "transfer.offered": ["trainer"] if self.offered_at is None else [],
            }
        else:
            owed = {
                "transfer.finished": ["trainer"] if self.finished_at is None else [],
                "engine.loaded": [name for name, at in self.loaded.items() if at is None],
            }
        return {event: names for event, names in owed.items() if names}


class Failed(msgspec.Struct, frozen=True):
    """An epoch that ended without a commit."""

    epoch: int
    phase: str
    reason: str
    at: float
    dead: tuple[str, ...]


class Loss(msgspec.Struct, frozen=True):
    """Entries that nobody will handle any more."""

    stream: str
    entries: tuple[str, ...]
    reason: str
    at: float


class Problem(msgspec.Struct, frozen=True):
    """What an actor wanted a person to see. `boot` 0: the last words of its process, rather than its core's."""

    actor: str
    error: str
    message: str
    fatal: bool
    at: float
    boot: int = 0


class Skew(msgspec.Struct, frozen=True):
    """An actor's wall clock was found `seconds` ahead of (below 0: behind) where it should have been."""

    actor: str
    seconds: float
    at: float
    how: str


class SampleProblem(msgspec.Struct, frozen=True):
    """A sample that failed for good."""

    index: int
    actor: str
    failure: str
    reason: str
    at: float


class Waited(msgspec.Struct, frozen=True, gc=False):
    """A wait that ended."""

    ended_at: float
    seconds: float
