"""What an analysis answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the store says of itself. `error`: why it does not answer, empty if it does. Sizes in bytes."""

    error: str = ""
    used: int = 0
    limit: int = 0
    """0: the store has none."""
    dead: dict[str, int] = {}
    """Work stream -> entries in its dead-letter stream."""
    waiting: dict[str, int] = {}
    """Work stream -> entries that nobody has taken yet."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known beside the events. `states`: actor -> its core's state; `alive`: whether its process exists, where
    that can be seen; `heard`: actor -> when it last consumed an input."""

    states: Mapping[str, Any] = {}
    alive: Mapping[str, bool] = {}
    heard: Mapping[str, float] = {}
    store: StoreFacts | None = None


class Edge(msgspec.Struct, frozen=True):
    """`waiter` can't go on until `on` acts."""

    waiter: str
    on: str
    why: str
    since: float
    deadline_at: float | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause: `code` is a key of `causes.CAUSES`, `culprit` the actor, group, batch or store that is to blame."""

    code: str
    culprit: str
    text: str
    since: float
    evidence: tuple[str, ...] = ()
    fix: str = ""


class Missing(msgspec.Struct, frozen=True):
    """A member of a barrier that still owes `event`."""

    member: str
    event: str
    detail: str = ""


class Frontier(msgspec.Struct, frozen=True, kw_only=True):
    """How far a refit has come."""

    epoch: int
    version: int
    phase: str
    since: float
    deadline_at: float
    missing: tuple[Missing, ...]
    arrived: tuple[str, ...]


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """Which stage bounds the pace over the last `window_s`; `shares`: fractions of that time."""

    stage: str
    text: str
    window_s: float
    shares: dict[str, float]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """`stuck`: the run does not move, and `cause` says why. `path` leads from what is noticed to the cause; `edges` are
    all waits, `cycles` the actors that wait for each other; `also` what is wrong without being the cause."""

    at: float
    stuck: bool
    headline: str
    cause: Finding | None = None
    path: tuple[Edge, ...] = ()
    edges: tuple[Edge, ...] = ()
    cycles: tuple[tuple[str, ...], ...] = ()
    barrier: Frontier | None = None
    pressure: Pressure | None = None
    also: tuple[Finding, ...] = ()
