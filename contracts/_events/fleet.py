"""Processes and engines that come, go and change."""

from __future__ import annotations

from typing import Literal

from contracts._events.base import Record


class ActorBooted(Record, frozen=True, kw_only=True, tag="actor.booted"):
    """Any actor -> all: a process took over `actor` as boot `boot`; every earlier boot is fenced off."""

    actor: str
    boot: int
    pid: int
    host: str


class ActorLeft(Record, frozen=True, kw_only=True, tag="actor.left"):
    """Any actor but the recorder -> driver: after run.stopping, it has finished what was in hand and is gone."""

    actor: str
    boot: int


class EngineReady(Record, frozen=True, kw_only=True, tag="engine.ready"):
    """Engine -> coordinator and gateways: its server answers, holding unknown weights: UNCERTAIN until a commit."""

    engine: str
    boot: int
    url: str
    ranks: int
    seconds: float
    nccl: tuple[str, ...] = ()
    """As of `transfer.offered`, what its server has; empty for one that somebody else runs."""


class GatewayReady(Record, frozen=True, kw_only=True, tag="gateway.ready"):
    """Gateway -> coordinator and collectors: it listens at `url`, its gate closed until the next commit it sees."""

    gateway: str
    boot: int
    url: str


class EngineDead(Record, frozen=True, kw_only=True, tag="engine.dead"):
    """Engine -> all: its server process ended or stopped answering; the boot that ran it is gone."""

    engine: str
    boot: int
    reason: str


Health = Literal["uncertain", "healthy", "suspect", "quarantined", "dead", "restarting", "retired"]


class EngineHealth(Record, frozen=True, kw_only=True, tag="engine.health"):
    """Coordinator -> all: what is known of an engine changed from `was` to `health`.

    With `ordered`, whoever starts the engine's process ends that of `boot`, if it still runs, and starts another.
    """

    engine: str
    boot: int
    was: Health
    health: Health
    reason: str
    ordered: bool = False


FleetEvent = ActorBooted | ActorLeft | EngineReady | GatewayReady | EngineDead | EngineHealth
