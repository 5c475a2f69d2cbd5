"""What each event changes in what is known of a run (`pipeline.why.state`). Pure: reads no clock.

It is the fold that `pipeline why`, `diff`, `trace` and `bundle` look at. `apply` takes every event in log order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from actors.recorder.ordering import number
from contracts import events as ev
from contracts.envelope import Envelope
from pipeline.why.clocks import SKEW_S
from pipeline.why.facts import (
    Actor,
    Barrier,
    Batch,
    Engine,
    Failed,
    Group,
    Loss,
    Problem,
    Result,
    SampleProblem,
    Wait,
    Waited,
)
from pipeline.why.state import KEPT, State


class Model(State):
    """Feed `apply`; the attributes then describe the run up to the last event."""

    def __init__(self) -> None:
        super().__init__()
        self._boot = 0
        self._handlers: dict[type, Callable[[Any, float, str], None]] = {
            event: getattr(self, f"_on_{tag.replace('.', '_')}")
            for event, tag in ((event, event.__struct_config__.tag) for event in _kinds())
            if hasattr(self, f"_on_{tag.replace('.', '_')}")
        }

    def apply(self, envelope: Envelope[Any], position: int | None = None) -> None:
        """Consume the next event of the log, at place `position` of it (default: the next)."""
        self.extend((envelope,), (self.position + 1 if position is None else position,))

    def apply_all(self, log: Iterable[Envelope[Any]]) -> Model:
        envelopes = list(log)
        self.extend(envelopes, range(self.position + 1, self.position + 1 + len(envelopes)))
        return self

    def extend(self, envelopes: Sequence[Envelope[Any]], positions: Sequence[int]) -> None:
        """Consume the next events of the log, each with its place in it."""
        if not envelopes:
            return
        if self.started_at is None:
            self.started_at, self.run = envelopes[0].wall_ns / 1e9, envelopes[0].run
        actors, handler_of, clocks = self.actors, self._handlers.get, self.clocks
        peak = clocks.peak
        for envelope, position in zip(envelopes, positions, strict=True):
            wall_ns, name, boot, mono_ns = envelope.wall_ns, envelope.actor, envelope.boot, envelope.mono_ns
            at, body = wall_ns / 1e9, envelope.body
            actor = actors.get(name)
            if actor is None:
                actor = actors[name] = Actor()
            actor.last_at = at
            if mono_ns and wall_ns - mono_ns != actor.offset_ns:
                clocks.moved(actor, name, at, wall_ns - mono_ns)
            if at > peak:
                clocks.peak, clocks.ahead, peak = at, name, at
            elif peak - at > SKEW_S:
                clocks.late(name, at)
            if boot < actor.boot and boot and type(body) is not ev.ActorLeft:
                self.usurped.append((name, boot, actor.boot, at))
            handler = handler_of(type(body))
            if handler is not None:
                self._boot, self.position = boot, position
                handler(body, at, name)
        self.position, self.last_at = positions[-1], envelopes[-1].wall_ns / 1e9
        self.events += len(envelopes)

    # --- tasks, groups, batches ---

    def _on_task_issued(self, event: ev.TaskIssued, at: float, by: str) -> None:
        if event.split == "eval":
            self.evals += 1
            return
        self.moved_at = at
        self.issued = max(self.issued, event.index + 1)
        group = self.groups.get(event.index)
        if group is None or not event.only:
            self.groups[event.index] = Group(event.task, event.samples, at, self.position)
            return
        group.complete_at = None
        for sample in event.only:
            group.results.pop(sample, None)

    def _on_trajectory_finished(self, event: ev.TrajectoryFinished, at: float, by: str) -> None:
        self.results.append((at, True))
        group = self.groups.get(event.index)
        if group is not None and event.split == "train":
            self._result(group, event.sample, at, by)

    def _on_sample_failed(self, event: ev.SampleFailed, at: float, by: str) -> None:
        self.results.append((at, False))
        self.sample_problems.append(SampleProblem(event.index, by, event.failure, event.reason, at))
        group = self.groups.get(event.index)
        if group is not None and event.split == "train":
            self._result(group, event.sample, at, by)

    def _result(self, group: Group, sample: int, at: float, by: str) -> None:
        results = group.results
        if sample in results:
            return
        self.moved_at = at
        results[sample] = Result(at, by, self.position)
        if len(results) >= group.size and group.complete_at is None:
            group.complete_at = at
            self.group_s.append(at - group.issued_at)

    def _on_trajectory_rejected(self, event: ev.TrajectoryRejected, at: float, by: str) -> None:
        self.rejected[event.reason] += 1

    def _on_group_dropped(self, event: ev.GroupDropped, at: float, by: str) -> None:
        self.drops[event.reason] += 1
        self.recent_drops.append((at, event.index, event.reason))
        self.groups.pop(event.index, None)

    def _on_batch_ready(self, event: ev.BatchReady, at: float, by: str) -> None:
        self.moved_at = at
        known = self.batches.get(event.batch)
        if known is not None and known.version is not None:  # requeued by hand after it was trained
            return
        self.batches[event.batch] = Batch(at, tuple(group.index for group in event.groups), self.position)
        for group in event.groups:
            self.groups.pop(group.index, None)

    def _on_batch_rejected(self, event: ev.BatchRejected, at: float, by: str) -> None:
        known = self.batches.get(event.batch)
        if known is not None and known.version is None:
            del self.batches[event.batch]

    def _on_credit_granted(self, event: ev.CreditGranted, at: float, by: str) -> None:
        self.credit = max(self.credit, event.total)

    def _on_data_exhausted(self, event: ev.DataExhausted, at: float, by: str) -> None:
        self.exhausted = True

    # --- trainer ---

    def _on_policy_ready(self, event: ev.PolicyReady, at: float, by: str) -> None:
        self.moved_at = at
        self.policy_ready, self.trainer_boot, self.step = True, event.trainer_boot, event.step
        for batch in self.batches.values():
            if batch.version in event.abandoned:
                batch.version = None

    def _on_step_finished(self, event: ev.StepFinished, at: float, by: str) -> None:
        self.moved_at = at
        self.step, self.step_at = event.step, at
        self.step_s.append(event.seconds)
        self.steps_at.append(at)
        if event.batch in self.batches:
            self.batches[event.batch].version = event.version

    def _on_checkpoint_saved(self, event: ev.CheckpointSaved, at: float, by: str) -> None:
        self.moved_at = at
        self.checkpoint = event
        covered = [n for n, batch in self.batches.items() if n <= event.batch and batch.version is not None]
        for batch in covered:
            del self.batches[batch]

    def _on_training_finished(self, event: ev.TrainingFinished, at: float, by: str) -> None:
        self.trained_out = True

    # --- refit ---

    def _on_refit_requested(self, event: ev.RefitRequested, at: float, by: str) -> None:
        if self.barrier is not None:
            self._end(at, "abandoned")
        self.barrier = Barrier(
            epoch=event.epoch,
            version=event.version,
            since=at,
            deadline_at=event.deadline_at,
            drain=event.drain,
            gates=dict.fromkeys((member.actor for member in event.gateways), None),
            drained=dict.fromkeys((member.actor for member in event.engines), None),
        )
        self.requesters[by, self._boot] = event.epoch
        for member in event.engines:
            self._mode(member.actor, member.boot, "uncertain", at)

    def _on_release_requested(self, event: ev.ReleaseRequested, at: float, by: str) -> None:
        for member in event.engines:
            self._mode(member.actor, member.boot, "uncertain", at)

    def _on_gate_closed(self, event: ev.GateClosed, at: float, by: str) -> None:
        if self.barrier is not None and event.epoch == self.barrier.epoch:
            self.barrier.gates[event.gateway] = at

    def _on_engine_drained(self, event: ev.EngineDrained, at: float, by: str) -> None:
        if self.barrier is not None and event.epoch == self.barrier.epoch:
            self.barrier.drained[event.engine] = at

    def _on_transfer_offered(self, event: ev.TransferOffered, at: float, by: str) -> None:
        if self.barrier is not None and event.epoch == self.barrier.epoch:
            self.barrier.offered_at = at

    def _on_transfer_started(self, event: ev.TransferStarted, at: float, by: str) -> None:
        if self.barrier is not None and event.epoch == self.barrier.epoch:
            self.barrier.started_at = at
            self.barrier.loaded = dict.fromkeys((member.engine for member in event.members), None)

    def _on_transfer_finished(self, event: ev.TransferFinished, at: float, by: str) -> None:
        if self.barrier is not None and event.epoch == self.barrier.epoch:
            self.barrier.finished_at = at

    def _on_engine_loaded(self, event: ev.EngineLoaded, at: float, by: str) -> None:
        if self.barrier is not None and event.epoch == self.barrier.epoch:
            self.barrier.loaded[event.engine] = at

    def _on_engine_quarantined(self, event: ev.EngineQuarantined, at: float, by: str) -> None:
        self._mode(event.engine, event.boot, "quarantined", at, event.reason)
        if self.barrier is not None and event.epoch == self.barrier.epoch:
            self.barrier.drained.pop(event.engine, None)
            self.barrier.loaded.pop(event.engine, None)

    def _on_refit_committed(self, event: ev.RefitCommitted, at: float, by: str) -> None:
        self.moved_at = at
        self.commit, self.commit_at = event, at
        self.failed_epochs.clear()
        for member in event.engines:
            self._mode(member.actor, member.boot, "serving", at)
        if self.barrier is not None and event.epoch == self.barrier.epoch:
            self._end(at, "committed")

    def _on_refit_failed(self, event: ev.RefitFailed, at: float, by: str) -> None:
        dead = () if self.barrier is None else tuple(self.barrier.deaths)
        self.failed_epochs.append(Failed(event.epoch, event.phase, event.reason, at, dead))
        if self.barrier is not None and event.epoch == self.barrier.epoch:
            self._end(at, "failed")

    def _end(self, at: float, how: str) -> None:
        assert self.barrier is not None
        self.barrier.end, self.barrier.ended_at = how, at
        self.past.append(self.barrier)
        self.barrier = None

    # --- fleet ---

    def _mode(self, engine: str, boot: int, mode: str, at: float, reason: str = "") -> None:
        known = self.engines.get(engine)
        if known is None or mode == "serving":
            self.engines[engine] = Engine(boot, mode, at, reason, None if mode == "serving" else at, ended=reason)
            return
        down_at = at if known.down_at is None and mode != "uncertain" else known.down_at
        starts = known.starts + (mode == "starting")
        self.engines[engine] = Engine(boot, mode, at, reason, down_at, starts, reason or known.ended)

    def _on_engine_ready(self, event: ev.EngineReady, at: float, by: str) -> None:
        self.moved_at = at
        self._mode(event.engine, event.boot, "uncertain", at)

    def _on_engine_dead(self, event: ev.EngineDead, at: float, by: str) -> None:
        self._mode(event.engine, event.boot, "dead", at, event.reason)
        if self.barrier is not None:
            self.barrier.deaths.append(event.engine)

    def _on_engine_health(self, event: ev.EngineHealth, at: float, by: str) -> None:
        """The coordinator's view; what an engine says of itself stands above it."""
        known = self.engines.get(event.engine)
        if event.health in ("suspect", "retired", "dead") and (known is None or known.boot <= event.boot):
            self._mode(event.engine, event.boot, event.health, at, event.reason)
        if event.health == "retired":
            self._forget_waits(event.engine)

    def _on_fleet_scaled(self, event: ev.FleetScaled, at: float, by: str) -> None:
        self.wanted_engines = event.engines

    def _on_actor_booted(self, event: ev.ActorBooted, at: float, by: str) -> None:
        actor = self.actors.setdefault(event.actor, Actor())
        actor.boots, actor.boot, actor.booted_at, actor.host = actor.boots + 1, event.boot, at, event.host
        actor.left, actor.failed = False, ""
        if event.actor.startswith("engine-"):
            if self.barrier is not None and event.actor in self.barrier.drained:
                self.barrier.deaths.append(event.actor)
            self._mode(event.actor, event.boot, "starting", at)
        if event.actor == "trainer":
            self.policy_ready = False
        self._forget_waits(event.actor)

    def _on_actor_left(self, event: ev.ActorLeft, at: float, by: str) -> None:
        self.actors.setdefault(event.actor, Actor()).left = True
        self._forget_waits(event.actor)

    def _forget_waits(self, name: str) -> None:
        """Who is gone, or begins anew, waits for nobody."""
        for key in [key for key in self.waits if key[0] == name]:
            del self.waits[key]

    # --- control ---

    def _on_wait_started(self, event: ev.WaitStarted, at: float, by: str) -> None:
        self.waits[event.actor, event.on] = Wait(event.actor, event.on, event.cause, at, event.deadline_at)

    def _on_wait_ended(self, event: ev.WaitEnded, at: float, by: str) -> None:
        key = (event.actor, event.on)
        self.waits.pop(key, None)
        known = self.waited.get(key)
        if known is None:
            known = self.waited[key] = deque(maxlen=KEPT)
        known.append(Waited(at, event.seconds))

    def _on_actor_failed(self, event: ev.ActorFailed, at: float, by: str) -> None:
        problem = Problem(event.actor, event.error, event.message, event.fatal, at, self._boot)
        self.problems.append(problem)
        if event.fatal and self.failed is None:
            self.failed = problem
        self.actors.setdefault(event.actor, Actor()).failed = f"{event.error}: {event.message}"

    def _on_bus_data_lost(self, event: ev.DataLost, at: float, by: str) -> None:
        self.losses.append(Loss(event.stream, event.entries, event.reason, at))
        gone = {number(entry) for entry in event.entries}
        for group in self.groups.values():
            group.lost += [sample for sample, result in group.results.items() if result.position in gone]
            if group.position in gone:
                group.lost += group.missing()
        for batch in self.batches.values():
            batch.lost = batch.lost or batch.position in gone

    def _on_run_started(self, event: ev.RunStarted, at: float, by: str) -> None:
        self.stopping = self.finished = self.failed = None
        self.started_at = self.moved_at = at

    def _on_run_stopping(self, event: ev.RunStopping, at: float, by: str) -> None:
        self.stopping = (event.reason, at)

    def _on_run_finished(self, event: ev.RunFinished, at: float, by: str) -> None:
        self.finished = event.reason


def _kinds() -> tuple[type, ...]:
    return ev.Event.__args__  # pyright: ignore[reportAttributeAccessIssue]
