"""The trainer's turn on a device that it shares with engines (engine.release).

wanted -> releasing: an epoch without a transfer, in which engines drain, as for a refit, and give memory back ->
yielded: the trainer takes its step, and no refit begins before that is over. An engine that fails ends by itself, which
gives its memory back; one that says nothing is quarantined at the drain's deadline, and the step is taken: a release
always ends. What engines gave back they take in the refit that follows.
"""

from __future__ import annotations

from msgspec.structs import replace

from actors.refit.faults import Faults
from actors.refit.state import Log, RefitState, Release, Turn, Wait, Wanted, Yielded
from config.schema import RefitConfig
from contracts.core import Emit, Raise
from contracts.events import (
    ActorFailed,
    EngineQuarantined,
    EngineReleased,
    Event,
    Member,
    MemoryWanted,
    ReleaseFinished,
    ReleaseRequested,
)


class Releases:
    """Every method works on a `Turn`. `step_deadline_s` bounds the trainer's step."""

    def __init__(self, refit: RefitConfig, faults: Faults, step_deadline_s: float, actor: str) -> None:
        self._refit = refit
        self._faults = faults
        self._step_deadline_s = step_deadline_s
        self._actor = actor

    def wanted(self, turn: Turn, event: MemoryWanted) -> None:
        """Take note; the release begins when no refit is due."""
        trainer = turn.state.trainer
        if trainer is not None and trainer.boot == event.trainer_boot:
            turn.set(wanted=Wanted(event.step, event.trainer_boot), yielded=None)

    def over(self, turn: Turn) -> None:
        """The step is done, or the trainer that wanted it is gone."""
        turn.set(wanted=None, yielded=None)

    def due(self, state: RefitState) -> bool:
        """Whether the trainer waits for a release that has not begun."""
        return state.wanted is not None and not (state.stopping or state.halted)

    def begin(self, turn: Turn) -> None:
        """Ask all engines that are up; from here on nothing serves until a commit says so."""
        state, now = turn.state, turn.now
        assert state.wanted is not None
        engines = tuple(Member(name, e.boot) for name, e in sorted(state.engines.items()) if e.up)
        release = Release(
            epoch=state.epoch,
            wanted=state.wanted,
            requested_at=now,
            drain_at=now + min(self._refit.drain_deadline_s, self._refit.deadline_s),
            waiting=engines,
        )
        turn.set(
            phase="releasing",
            release=release,
            wanted=None,
            engines={name: replace(e, serving=False) for name, e in state.engines.items()},
            gateways={name: replace(g, open=False) for name, g in state.gateways.items()},
        )
        turn.do(Raise("epoch", state.epoch))
        request = ReleaseRequested(
            epoch=state.epoch,
            step=release.wanted.step,
            engines=engines,
            drain=self._refit.drain,
            deadline_at=now + self._refit.deadline_s,
        )
        _emit(turn, release, request)

    def ack(self, turn: Turn, event: EngineReleased) -> None:
        """An engine gave its memory back."""
        release, member = turn.state.release, Member(event.engine, event.boot)
        if release is not None and release.epoch == event.epoch and member in release.waiting:
            waiting = tuple(m for m in release.waiting if m != member)
            turn.set(release=replace(release, waiting=waiting, released=(*release.released, member)))

    def engine_lost(self, turn: Turn, member: Member, reason: str) -> None:
        """It is gone, and its memory with it."""
        release = turn.state.release
        if release is not None and member in (*release.waiting, *release.released):
            self._expel(turn, release, member, reason)

    def advance(self, turn: Turn) -> None:
        """Let the trainer go as soon as nobody is waited for."""
        release = turn.state.release
        if release is None:
            return
        for member in release.waiting if turn.now >= release.drain_at else ():
            waited = f"in {self._refit.drain_deadline_s:g} s (refit.drain_deadline_s)"
            self._expel(turn, release, member, f"did not give its memory back {waited}")
            release = turn.state.release
            assert release is not None
        if not release.waiting:
            self._finish(turn, release)

    def _expel(self, turn: Turn, release: Release, member: Member, reason: str) -> None:
        quarantined = EngineQuarantined(epoch=release.epoch, engine=member.actor, boot=member.boot, reason=reason)
        _emit(turn, release, quarantined)
        fields = {"epoch": release.epoch, "engine": member.actor, "reason": reason}
        turn.do(Log("engine quarantined", fields, warning=True))
        self._faults.shut_out(turn, member.actor, reason)
        waiting = tuple(m for m in release.waiting if m != member)
        turn.set(release=replace(release, waiting=waiting, released=tuple(m for m in release.released if m != member)))

    def _finish(self, turn: Turn, release: Release) -> None:
        seconds, wanted, trainer = turn.now - release.requested_at, release.wanted, turn.state.trainer
        finished = ReleaseFinished(
            epoch=release.epoch,
            step=wanted.step,
            trainer_boot=wanted.trainer_boot,
            engines=release.released,
            seconds=seconds,
        )
        _emit(turn, release, finished)
        turn.do(Log("memory released", {"epoch": release.epoch, "step": wanted.step, "seconds": seconds}))
        lives = trainer is not None and trainer.boot == wanted.trainer_boot
        yielded = Yielded(wanted, turn.now, turn.now + self._step_deadline_s) if lives else None
        turn.set(phase="idle", release=None, yielded=yielded)

    # --- the trainer's step ------------------------------------------------------------------------------------------

    def overdue(self, turn: Turn) -> None:
        """A step that does not end would keep the engines out for ever."""
        yielded = turn.state.yielded
        if yielded is None or turn.now < yielded.deadline_at:
            return
        message = (
            f"step {yielded.wanted.step} of the trainer was not done in {self._step_deadline_s:g} s "
            "(trainer.step_deadline_s), and engines gave their memory back for it: see its log"
        )
        turn.do(Emit(ActorFailed(actor=self._actor, error="StepTimeout", message=message, fatal=True)))
        turn.set(halted=True, yielded=None)

    # --- waits -------------------------------------------------------------------------------------------------------

    def wait(self, state: RefitState) -> tuple[Wait, str] | None:
        """Whom a release, or the pause after it, waits for, and why."""
        if state.release is not None:
            release = state.release
            names = [m.actor for m in release.waiting]
            cause = f"release epoch {release.epoch} awaits engine.released from {', '.join(names)}"
            key = f"release-{release.epoch}"
            return Wait(key, ",".join(names), release.requested_at, release.drain_at), cause
        if state.yielded is not None:
            yielded = state.yielded
            key, cause = f"step-{yielded.wanted.step}", f"the device is the trainer's for step {yielded.wanted.step}"
            return Wait(key, "trainer", yielded.since, yielded.deadline_at), cause
        return None


def _emit(turn: Turn, release: Release, event: Event) -> None:
    turn.do(Emit(event, correlation=f"refit-{release.epoch}"))
