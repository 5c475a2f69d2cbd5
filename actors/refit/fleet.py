"""What the coordinator knows of each engine, and when one is restarted or retired.

A table of states and happenings; the clock is handed in. Probes end at the engine's sidecar, which answers during a
barrier too, when SGLang's own health check says 503. An engine that was lost comes back through a commit only: nothing
here makes one healthy but `committed`. Refits and restarts don't interlock; a restart is another boot, and an epoch
counts on exactly one boot of an engine.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from actors.refit.state import Engine, RefitState, Turn, Watch
from config.schema import EngineConfig, FleetConfig
from contracts.core import Emit
from contracts.events import ActorFailed, EngineHealth, Health

Happening = Literal[
    "ready", "booted", "died", "missed", "lost", "answered", "committed", "expelled", "ordered", "overdue", "retired"
]
UP: tuple[Health, ...] = ("uncertain", "healthy", "quarantined", "suspect")
"""States of an engine whose process lives, as far as is known."""
BACKOFF_MAX_S = 60.0
"""Longest pause before a restart is ordered."""
SELF_S = 30.0
"""How long a process that ended by itself may take to come back, before its restart is ordered."""

NEXT: dict[tuple[Health, Happening], Health] = {
    **{(state, "died"): "dead" for state in (*UP, "restarting")},
    **{(state, "booted"): "restarting" for state in (*UP, "dead")},
    **{(state, "ready"): "uncertain" for state in (*UP, "dead", "restarting", "retired")},
    **{(state, "committed"): "healthy" for state in UP},
    **{(state, "expelled"): "quarantined" for state in UP},
    **{(state, "lost"): "dead" for state in UP},
    **{(state, "missed"): "suspect" for state in UP if state != "suspect"},
    ("suspect", "answered"): "suspect",  # replaced by what it was before
    ("dead", "answered"): "uncertain",
    ("dead", "ordered"): "restarting",
    ("restarting", "overdue"): "dead",
    **{(state, "retired"): "retired" for state in (*UP, "dead", "restarting")},
}
"""What becomes of an engine; a pair that is missing changes nothing."""


class Fleet:
    """The rules of the engines' health. Every method works on a `Turn`."""

    def __init__(self, fleet: FleetConfig, engine: EngineConfig, start_deadline_s: float, actor: str) -> None:
        self.misses = fleet.misses
        self._restarts = fleet.restarts
        self._backoff_s = engine.restart_backoff_s
        self._start_deadline_s = start_deadline_s
        self._actor = actor

    def happen(self, turn: Turn, name: str, what: Happening, reason: str) -> bool:
        """Take note of something; answers whether it changed the engine's health."""
        engine = turn.state.engines[name]
        health = NEXT.get((engine.health, what))
        if (engine.health, what) == ("suspect", "answered"):
            health = engine.trusted
        if health is None or health == engine.health:
            return False
        changes: dict[str, object] = {"health": health, "restart_at": self._due(engine, health, what, turn.now)}
        if health == "suspect":
            changes["trusted"] = engine.health
        if health == "healthy":
            changes["restarts"] = 0
        turn.set_engine(name, **changes)
        event = EngineHealth(
            engine=name,
            boot=max(engine.boot, engine.actor_boot),
            was=engine.health,
            health=health,
            reason=reason,
            ordered=what == "ordered",
        )
        turn.do(Emit(event))
        return True

    def _due(self, engine: Engine, health: Health, what: Happening, now: float) -> float | None:
        if health == "restarting":
            return now + self._start_deadline_s
        if health != "dead":
            return None
        if what == "died":
            return now + SELF_S
        return now + min(BACKOFF_MAX_S, self._backoff_s * 2.0 ** min(engine.restarts, 16))

    def advance(self, turn: Turn) -> None:
        """Order restarts that are due, and give up on engines whose budget is spent."""
        for name, engine in turn.state.engines.items():
            if engine.restart_at is None or engine.restart_at > turn.now:
                continue
            if engine.health == "restarting":
                reason = f"no server of it was ready in {self._start_deadline_s:g} s (launch.start_deadline_s)"
                self.happen(turn, name, "overdue", reason)
            elif engine.restarts < self._restarts:
                turn.set_engine(name, restarts=engine.restarts + 1)
                count = f"restart {engine.restarts + 1} of {self._restarts} (fleet.restarts)"
                self.happen(turn, name, "ordered", count)
            else:
                self.retire(turn, name, f"{engine.restarts} restarts did not help (fleet.restarts)")
                self._give_up(turn, name)

    def retire(self, turn: Turn, name: str, reason: str) -> None:
        """This engine has no further part in the run, unless it is started again."""
        self.happen(turn, name, "retired", reason)
        turn.set_engine(name, up=False)
        turn.do(Watch(name, turn.state.engines[name].boot, None))

    def _give_up(self, turn: Turn, name: str) -> None:
        """The run goes on without it, if there is another one."""
        left = [n for n, e in turn.state.engines.items() if e.health != "retired"]
        message = f"{name} is retired: {self._restarts} restarts did not help (fleet.restarts); see its log"
        turn.do(Emit(ActorFailed(actor=name, error="Retired", message=message, fatal=not left)))

    def wake(self, state: RefitState) -> float | None:
        """When the next restart, or its deadline, is due."""
        if state.stopping or state.halted:
            return None
        return min((e.restart_at for e in state.engines.values() if e.restart_at is not None), default=None)

    def watch_all(self, turn: Turn) -> None:
        """Nothing is probed after a start of this process: probe whoever is known."""
        for name, member in (*turn.state.engines.items(), *turn.state.gateways.items()):
            if member.url and not (isinstance(member, Engine) and member.health == "retired"):
                turn.do(Watch(name, member.boot, member.url))

    def gateway_missed(self, turn: Turn, name: str, misses: int) -> None:
        """A gateway that answers no probe holds no refit up."""
        if misses >= self.misses:
            self._set_silent(turn, name, True)

    def gateway_heard(self, turn: Turn, name: str) -> None:
        self._set_silent(turn, name, False)

    def _set_silent(self, turn: Turn, name: str, silent: bool) -> None:
        gateway = turn.state.gateways[name]
        turn.set(gateways={**turn.state.gateways, name: replace(gateway, silent=silent)})
        barrier = turn.state.barrier
        gate = next((g for g in barrier.gates if g.gateway == name), None) if barrier is not None else None
        if gate is not None and silent:
            turn.set_gate(replace(gate, silent=True))
            turn.log(
                "gate given up",
                warning=True,
                gateway=name,
                boot=gate.boot,
                seconds=turn.now - turn.barrier.requested_at,
            )
