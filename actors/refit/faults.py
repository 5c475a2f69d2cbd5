"""What a fault costs: one of an engine alone its part in the epoch, one of the collective the epoch itself.

An engine is left out for a while, longer each time; after too many failed epochs in a row the run ends.
"""

from __future__ import annotations

from actors.refit.fleet import Fleet
from actors.refit.state import Seat, Turn
from config.schema import RefitConfig
from contracts.core import Emit
from contracts.events import ActorFailed, EngineQuarantined, Member, RefitFailed

BACKOFF_MAX_S = 30.0
"""Longest pause between a failed epoch and the next one."""
STRIKE_MAX_S = 300.0
"""Longest time an engine that failed again and again is left out."""
COLLECTIVE_STRIKES = 3
"""A fault in the collective costs the whole fleet an epoch: it weighs as much as three of the engine alone."""


class Faults:
    """Every method works on a `Turn`; all but `strike` and `shut_out` need one whose state has a barrier."""

    def __init__(self, refit: RefitConfig, fleet: Fleet, actor: str) -> None:
        self._refit = refit
        self._fleet = fleet
        self._actor = actor

    def _backoff(self, times: int, most: float) -> float:
        return min(most, self._refit.retry_backoff_s * 2.0 ** min(times - 1, 32))

    def strike(self, turn: Turn, engine: str, weight: int) -> None:
        """Leave an engine out for a while, twice as long for each earlier fault since it last came through."""
        strikes = turn.state.engines[engine].strikes + weight
        turn.set_engine(engine, strikes=strikes, eligible_at=turn.now + self._backoff(strikes, STRIKE_MAX_S))

    def expel(self, turn: Turn, seat: Seat, error: str, reason: str, weight: int = 1) -> None:
        """This engine leaves the epoch; the others go on."""
        barrier = turn.barrier
        turn.emit(EngineQuarantined(epoch=barrier.epoch, engine=seat.engine, boot=seat.boot, reason=reason))
        seconds = turn.now - barrier.requested_at
        turn.log("engine quarantined", warning=True, engine=seat.engine, error=error, reason=reason, seconds=seconds)
        turn.set_barrier(seats=tuple(s for s in barrier.seats if s.engine != seat.engine))
        self.shut_out(turn, seat.engine, reason, weight)

    def shut_out(self, turn: Turn, engine: str, reason: str, weight: int = 1) -> None:
        """What an expulsion costs an engine beyond its part in the epoch."""
        self.strike(turn, engine, weight)
        self._fleet.happen(turn, engine, "expelled", reason)

    def collective_failed(self, turn: Turn, seat: Seat, phase: str, error: str, reason: str) -> None:
        """An engine broke the collective: no receiver can be trusted."""
        self.expel(turn, seat, error, reason, COLLECTIVE_STRIKES)
        self.fail(turn, phase, error, f"{seat.engine} {reason}")

    def transfer_failed(self, turn: Turn, phase: str, error: str, reason: str) -> None:
        """Nobody knows which member broke the collective: from the second time on, one after another is left out.

        A trainer that can't tell who never came, as over NCCL, leaves it to this to name who has said nothing.
        """
        barrier, failures = turn.barrier, turn.state.failures
        silent = tuple(s for s in barrier.seats if not s.loaded)
        if phase in ("join", "transfer") and silent and not any(s.engine in reason for s in silent):
            reason = f"{reason}; no word from {', '.join(s.engine for s in silent)}"
        if barrier.started_at is not None and failures and silent and len(barrier.seats) > 1:
            self.expel(turn, silent[failures % len(silent)], error, f"suspected: {reason}", COLLECTIVE_STRIKES)
        self.fail(turn, phase, error, reason)

    def fail(self, turn: Turn, phase: str, error: str, reason: str) -> None:
        """End the epoch without a commit; after too many in a row, end the run."""
        barrier, failures = turn.barrier, turn.state.failures + 1
        turn.emit(RefitFailed(epoch=barrier.epoch, version=barrier.version, phase=phase, reason=reason))
        turn.log(
            "refit failed",
            warning=True,
            transfer=self._refit.transport,
            refit=barrier.epoch,
            phase=phase,
            error=error,
            reason=reason,
            failures=failures,
            seconds=turn.now - barrier.requested_at,
        )
        halted = failures >= self._refit.failures
        if halted:
            message = f"{failures} refits failed in a row (refit.failures), the last one in phase {phase}: {reason}"
            turn.do(Emit(ActorFailed(actor=self._actor, error=error, message=message, fatal=True)))
        turn.set(
            phase="idle",
            barrier=None,
            suspects=tuple(Member(s.engine, s.boot) for s in barrier.seats),
            failures=failures,
            retry_at=turn.now + self._backoff(failures, BACKOFF_MAX_S),
            halted=halted,
        )
