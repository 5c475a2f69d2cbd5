"""One epoch of the barrier, from `refit.requested` to its commit or failure.

draining: gates close, engines drain, the trainer offers -> transferring: the trainer broadcasts, the engines load and
verify -> commit or failure. An engine that fails alone, or misses a deadline, is expelled from the epoch; a fault while
the collective runs fails the epoch, because every receiver may then hold parts of two versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from actors.refit.faults import Faults
from actors.refit.fleet import Fleet
from actors.refit.outliers import outliers, strangers
from actors.refit.state import Barrier, Committed, Gate, Group, Offer, Seat, Turn, Wait
from config.schema import RefitConfig
from contracts.core import Raise
from contracts.events import (
    EngineDrained,
    EngineFailed,
    EngineLoaded,
    Event,
    GateClosed,
    Member,
    Rank,
    RefitCommitted,
    TransferFailed,
    TransferFinished,
    TransferOffered,
    TransferStarted,
)

OWN_PHASES = ("flush", "retake", "verify")
"""Phases of an engine's failure that no other receiver shares."""


class Barriers:
    """The rules of an epoch. Every method works on a `Turn` whose state has a barrier, and may end that barrier."""

    def __init__(self, refit: RefitConfig, fleet: Fleet, faults: Faults) -> None:
        self._refit = refit
        self._fleet = fleet
        self._faults = faults
        self._answers: Mapping[type, Callable[[Turn, Any], None]] = {
            GateClosed: self._gate_closed,
            TransferOffered: self._offered,
            EngineDrained: self._drained,
            TransferFinished: self._sent,
            TransferFailed: self._broke,
            EngineLoaded: self._loaded,
            EngineFailed: self._engine_failed,
        }

    # --- the checks that safety rests on; the model test removes them one by one ------------------------------------

    def epoch_matches(self, barrier: Barrier, event: Any) -> bool:
        """Only answers to this epoch count."""
        return getattr(event, "epoch", None) == barrier.epoch

    def seat(self, barrier: Barrier, engine: str, boot: int) -> Seat | None:
        """The part of exactly this boot of the engine; None when it has none, or no longer."""
        for seat in barrier.seats:
            if seat.engine == engine and seat.boot == boot:
                return seat
        return None

    def digest_accepted(self, offered: str, digest: str) -> bool:
        """An engine that can't tell its digest (stock SGLang) is trusted."""
        return self._refit.verify == "none" or digest in ("", offered)

    def gates_closed(self, barrier: Barrier) -> bool:
        """No gateway can send a request."""
        return all([g.closed for g in barrier.gates])

    def engines_drained(self, barrier: Barrier) -> bool:
        """No receiver runs a request."""
        return all([s.drained for s in barrier.seats])

    # --- answers ---------------------------------------------------------------------------------------------------

    def ack(self, turn: Turn, event: Event) -> None:
        """Take an answer. Those of the trainer need no boot: its reboot ends the epoch."""
        if not self.epoch_matches(turn.barrier, event):
            return
        handle = self._answers.get(type(event))
        if handle is not None:
            handle(turn, event)

    def _sent(self, turn: Turn, event: TransferFinished) -> None:
        if turn.barrier.started_at is not None:
            turn.set_barrier(transfer_s=event.seconds)
            turn.log("transfer finished", seconds=event.seconds, bytes=event.bytes)

    def _broke(self, turn: Turn, event: TransferFailed) -> None:
        self._faults.transfer_failed(turn, event.phase, event.error, event.reason)

    def _gate_closed(self, turn: Turn, event: GateClosed) -> None:
        gate = next((g for g in turn.barrier.gates if g.gateway == event.gateway), None)
        if gate is not None and gate.closed_by < event.boot:
            turn.set_gate(replace(gate, closed_by=event.boot))
            turn.log("gate closed", gateway=event.gateway, boot=event.boot, seconds=event.seconds)

    def _offered(self, turn: Turn, event: TransferOffered) -> None:
        if event.trainer_boot == turn.barrier.trainer_boot and turn.barrier.offer is None:
            turn.set_barrier(offer=Offer(event.version, event.bytes, event.digest))
            turn.log(
                "transfer offered",
                offered=event.version,
                bytes=event.bytes,
                seconds=turn.now - turn.barrier.requested_at,
            )

    def _drained(self, turn: Turn, event: EngineDrained) -> None:
        seat = self.seat(turn.barrier, event.engine, event.boot)
        if seat is not None and not seat.drained:
            turn.set_seat(seat.engine, drained=True)
            turn.log("engine drained", engine=event.engine, seconds=event.seconds)

    def _loaded(self, turn: Turn, event: EngineLoaded) -> None:
        if turn.barrier.started_at is None:
            return
        seat, offer = self.seat(turn.barrier, event.engine, event.boot), turn.barrier.offer
        assert offer is not None
        if seat is None or seat.loaded:
            return
        if self.digest_accepted(offer.digest, event.digest):
            turn.set_seat(seat.engine, loaded=True, probe=event.probe, fingerprint=event.fingerprint)
            turn.log("engine loaded", engine=event.engine, seconds=event.seconds)
        else:
            reason = f"holds weights of digest {event.digest}, the trainer sent {offer.digest}"
            self._faults.expel(turn, seat, "DigestMismatch", reason)

    def _engine_failed(self, turn: Turn, event: EngineFailed) -> None:
        seat = self.seat(turn.barrier, event.engine, event.boot)
        if seat is None:
            return
        reason = f"failed in {event.phase}: {event.reason}"
        if turn.barrier.started_at is None or event.phase in OWN_PHASES:
            self._faults.expel(turn, seat, event.error, reason)
        else:
            self._faults.collective_failed(turn, seat, event.phase, event.error, reason)

    # --- members that go away ----------------------------------------------------------------------------------------

    def engine_lost(self, turn: Turn, engine: str, boot: int, error: str, reason: str) -> None:
        """A boot of an engine is gone. Once it has loaded, or before the transfer, that is its own affair."""
        seat = self.seat(turn.barrier, engine, boot)
        if seat is None:
            return
        if turn.barrier.started_at is None or seat.loaded:
            self._faults.expel(turn, seat, error, reason)
        else:
            self._faults.collective_failed(turn, seat, "transfer", error, reason)

    def gateway_booted(self, turn: Turn, gateway: str, boot: int) -> None:
        """A newer boot answers for itself, as it may have read older epochs only.

        Not so when its predecessor closed for this epoch: it was alive after the request, so whoever fenced it off
        reads the request before it opens.
        """
        gate = next((g for g in turn.barrier.gates if g.gateway == gateway), Gate(gateway, boot))
        if turn.barrier.started_at is None and not gate.closed:
            turn.set_gate(replace(gate, boot=max(gate.boot, boot)))

    def trainer_booted(self, turn: Turn, boot: int) -> None:
        """The copy that was offered died with its process."""
        if turn.barrier.trainer_boot != boot:
            phase = "drain" if turn.barrier.started_at is None else "transfer"
            self._faults.fail(turn, phase, "Restarted", f"trainer was restarted as boot {boot}")

    # --- progress ----------------------------------------------------------------------------------------------------

    def advance(self, turn: Turn) -> None:
        """Go as far as the answers, or the clock, allow."""
        if turn.state.phase == "draining":
            self._drain(turn)
        if turn.state.phase == "transferring":
            self._collect(turn)

    def _drain(self, turn: Turn) -> None:
        if turn.now >= turn.barrier.drain_at and not self._end_drain(turn):
            return
        barrier = turn.barrier
        if not barrier.seats:
            self._faults.fail(turn, "drain", "NoEngine", "no engine is left")
        elif self.gates_closed(barrier) and self.engines_drained(barrier) and self._offered_step(turn) is not None:
            self._start_transfer(turn)
        elif turn.now >= barrier.deadline_at:
            reason = f"trainer offered no known version in {self._refit.deadline_s:g} s (refit.deadline_s)"
            self._faults.fail(turn, "offer", "Deadline", reason)

    def _end_drain(self, turn: Turn) -> bool:
        """The drain's deadline: an open gate fails the epoch (False), a busy engine stays out of it."""
        waited = f"in {self._refit.drain_deadline_s:g} s (refit.drain_deadline_s)"
        if not self.gates_closed(turn.barrier):
            names = ", ".join(g.gateway for g in turn.barrier.gates if not g.closed)
            self._faults.fail(turn, "drain", "Deadline", f"{names} did not close the gate {waited}")
            return False
        if not self.engines_drained(turn.barrier):
            for seat in turn.barrier.seats:
                if not seat.drained:
                    self._faults.expel(turn, seat, "Deadline", f"did not drain {waited}")
        return True

    def _offered_step(self, turn: Turn) -> int | None:
        """Optimizer step of the offered version; the trainer may offer a newer one than was asked for."""
        offer, trainer = turn.barrier.offer, turn.state.trainer
        assert trainer is not None
        return None if offer is None else trainer.step_of(offer.version)

    def _start_transfer(self, turn: Turn) -> None:
        barrier, last, trainer = turn.barrier, turn.state.group, turn.state.trainer
        assert barrier.offer is not None
        assert trainer is not None
        members, offset = [], 1
        for seat in barrier.seats:
            members.append(Rank(seat.engine, seat.boot, offset, seat.ranks))
            offset += seat.ranks
        group = Group(f"{trainer.run}-refit-{barrier.epoch}", tuple(members), barrier.trainer_boot)
        fresh = last is None or replace(last, name=group.name) != group
        if last is not None and not fresh:
            group = last
        version = barrier.offer.version
        turn.set(phase="transferring", group=None)
        turn.set_barrier(version=version, step=self._offered_step(turn), started_at=turn.now, group=group)
        turn.emit(
            TransferStarted(
                epoch=barrier.epoch,
                version=version,
                group=group.name,
                fresh=fresh,
                members=group.members,
                world_size=offset,
            )
        )
        turn.log("refit drained", seconds=turn.now - barrier.requested_at, world_size=offset, fresh=fresh)

    def _collect(self, turn: Turn) -> None:
        """Wait for the trainer and for every receiver, up to the epoch's deadline."""
        barrier = turn.barrier
        sent = barrier.transfer_s is not None
        if turn.now >= barrier.deadline_at:
            waited = f"in {self._refit.deadline_s:g} s (refit.deadline_s)"
            if not sent:
                self._faults.transfer_failed(turn, "transfer", "Deadline", f"the transfer did not end {waited}")
                return
            for seat in barrier.seats:
                if not seat.loaded:
                    self._faults.expel(turn, seat, "Deadline", f"did not load {waited}")
        loaded = sent and all([s.loaded for s in turn.barrier.seats])
        if loaded:
            self._compare(turn)
        if not turn.barrier.seats:
            self._faults.fail(turn, "verify", "NoEngine", "no engine is left")
        elif loaded:
            self._commit(turn)

    def _compare(self, turn: Turn) -> None:
        """Whoever holds other weights than the fleet, or generates unlike it, stays out."""
        for seat, reason in strangers(turn.barrier.seats):
            self._faults.expel(turn, seat, "ChecksumMismatch", reason)
        for seat, reason in outliers(turn.barrier.seats):
            self._faults.expel(turn, seat, "ProbeMismatch", reason)

    def _commit(self, turn: Turn) -> None:
        barrier, now = turn.barrier, turn.now
        assert barrier.offer is not None
        assert barrier.group is not None
        assert barrier.started_at is not None
        assert barrier.transfer_s is not None
        event = RefitCommitted(
            epoch=barrier.epoch,
            version=barrier.version,
            step=barrier.step,
            engines=tuple(Member(s.engine, s.boot) for s in barrier.seats),
            world_size=1 + sum(m.ranks for m in barrier.group.members),
            pause_s=now - barrier.requested_at,
            drain_s=barrier.started_at - barrier.requested_at,
            transfer_s=barrier.transfer_s,
            bytes=barrier.offer.bytes,
        )
        turn.do(Raise("committed", barrier.epoch))
        turn.emit(event)
        turn.log(
            "refit committed",
            engines=len(event.engines),
            world_size=event.world_size,
            pause_s=event.pause_s,
            transfer_s=event.transfer_s,
            bytes=event.bytes,
        )
        engines = turn.state.engines.copy()
        for seat in barrier.seats:
            engines[seat.engine] = replace(engines[seat.engine], serving=True, strikes=0, eligible_at=0.0)
        turn.set(engines=engines)
        for seat in barrier.seats:
            self._fleet.happen(turn, seat.engine, "committed", f"holds version {barrier.version}")
        turn.set(
            phase="idle",
            barrier=None,
            committed=Committed(barrier.epoch, barrier.version, barrier.step, barrier.trainer_boot),
            gateways={name: replace(g, open=g.up) for name, g in turn.state.gateways.items()},
            group=barrier.group if len(barrier.seats) == len(barrier.group.members) else None,
            gathering=False,
            failures=0,
            retry_at=0.0,
        )

    # --- waits -------------------------------------------------------------------------------------------------------

    def wake(self, barrier: Barrier) -> float:
        """The next deadline of the epoch."""
        draining = barrier.started_at is None and not (self.gates_closed(barrier) and self.engines_drained(barrier))
        return barrier.drain_at if draining else barrier.deadline_at

    def awaited(self, barrier: Barrier) -> str:
        """Key of the wait that the epoch is in."""
        return f"{'drain' if barrier.started_at is None else 'transfer'}-{barrier.epoch}"

    def wait(self, barrier: Barrier) -> tuple[Wait, str]:
        """What the epoch waits for now, and why."""
        since = barrier.requested_at
        missing = {
            "gate.closed": [g.gateway for g in barrier.gates if not g.closed],
            "engine.drained": [s.engine for s in barrier.seats if not s.drained],
            "transfer.offered": ["trainer"] if barrier.offer is None else [],
        }
        if barrier.started_at is not None:
            since = barrier.started_at
            missing = {
                "transfer.finished": ["trainer"] if barrier.transfer_s is None else [],
                "engine.loaded": [s.engine for s in barrier.seats if not s.loaded],
            }
        cause = "; ".join(f"{event} from {', '.join(names)}" for event, names in missing.items() if names)
        on = ",".join(dict.fromkeys(name for names in missing.values() for name in names))
        return Wait(self.awaited(barrier), on, since, self.wake(barrier)), f"refit epoch {barrier.epoch} awaits {cause}"
