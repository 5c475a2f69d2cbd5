"""Decides what the trainer does next: load, train, save, offer weights, send them.

Invariants: one policy operation at a time; a version number is used once, over restarts too; a batch is taken once,
also if it comes again under another entry, as a dead letter does that a person requeues; a batch is acked only once two
checkpoints cover it, so that after a crash, and when the newest checkpoint turns out to be damaged, the batches that
the one loaded does not cover are trained again, in order, and the versions made since are abandoned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from actors.trainer.state import (
    Abandon,
    Covered,
    Load,
    Loaded,
    LoadFailed,
    Local,
    Offer,
    Offered,
    Pending,
    Plan,
    Prune,
    Save,
    Saved,
    Send,
    Sent,
    State,
    Train,
    Trained,
    TransferBroke,
    Unpruned,
)
from config.schema import RunConfig
from contracts.core import Ack, Booted, Delivered, Emit, Ref, Release, Step
from contracts.events import (
    ActorFailed,
    BatchReady,
    BatchRejected,
    CheckpointSaved,
    MemoryWanted,
    PayloadRef,
    PolicyReady,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    ReleaseFinished,
    RunStarted,
    RunStopping,
    StepFinished,
    TrainingFinished,
    TransferFailed,
    TransferFinished,
    TransferOffered,
    TransferStarted,
    WaitEnded,
    WaitStarted,
)

QUEUE = 2
"""Batches held beyond the one being trained."""
MISSED = 64
"""Batches that were given up before they came here, whose numbers are remembered: the youngest."""


class TrainerCore:
    """`config`: steps, checkpoint.every, engine.release."""

    state_type = State
    local_type = Local
    work = ("batches",)
    watch = ("refit", "control")

    def __init__(self, config: RunConfig) -> None:
        self.steps = config.steps
        self.every = config.checkpoint.every
        self.asks = config.engine.release != "none"
        self._inputs: Mapping[type, Callable[[State, Any, float], Step[State]]] = {
            Delivered: self._deliver,
            Booted: self._boot,
            Loaded: self._loaded,
            LoadFailed: self._load_failed,
            Trained: self._trained,
            Saved: self._saved,
            Offered: self._transfer,
            Sent: self._transfer,
            TransferBroke: self._transfer,
            Unpruned: self._unpruned,
        }
        self._events: Mapping[type, Callable[[State, Any, float], Step[State]]] = {
            RefitRequested: self._requested,
            TransferStarted: self._started,
            RefitFailed: self._refit_failed,
            RefitCommitted: self._committed,
            ReleaseFinished: self._released,
            RunStopping: lambda state, _, now: self._stop(replace(state, stopping=True), now),
            RunStarted: self._run_started,
        }

    def initial(self) -> State:
        return State()

    def step(self, state: State, input: Any, now: float) -> Step[State]:
        handle = self._inputs.get(type(input))
        return (state, ()) if handle is None else handle(state, input, now)

    def wake(self, state: State) -> float | None:
        return None

    def intake(self, state: State) -> Mapping[str, int]:
        if state.stopping or state.phase in ("off", "loading", "finished"):
            return {}
        return {"batches": max(0, QUEUE - len(state.queue))}

    def holds(self, state: State, ref: Ref) -> bool:
        """Whether the batch of this entry is to be trained, or was and waits for its ack."""
        return any(item.ref == ref for item in (*state.queue, *state.trained, *state.covered.held))

    def done(self, state: State) -> bool:
        settled = state.phase in ("idle", "finished") and not state.trained and not state.sending
        return state.stopping and (settled or state.phase in ("off", "loading"))

    # --- life ---

    def _boot(self, state: State, input: Booted, _: float) -> Step[State]:
        """Fall back to the newest checkpoint; what was trained since is owed again."""
        version = state.highest + 1
        state = replace(
            state,
            boot=input.boot,
            phase="loading",
            step=state.covered.step,
            highest=version,
            version=version,
            queue=(*state.trained, *state.queue),
            trained=(),
            sending=False,
            plan=_to_be_written(state.plan),
            idle_since=None,
            asked_at=None,
            stopping=False,
        )
        return state, (Load(path=state.covered.path, version=version),)

    def _load_failed(self, state: State, input: LoadFailed, _: float) -> Step[State]:
        """Fall back to the checkpoint before, and train again what only the damaged one covered."""
        if input.version != state.version or state.phase != "loading":
            return state, ()
        damaged, before = state.covered, state.before
        if before is None:
            message = (
                f"{input.reason}; the run can't go on, there is no checkpoint before it to fall back on: restore that "
                f"one from a copy, or start a new run"
            )
            failed = ActorFailed(actor="trainer", error="CheckpointDamaged", message=message, fatal=True)
            return replace(state, phase="off"), (Emit(failed),)
        batches = [item.batch.batch for item in damaged.held]
        message = (
            f"{input.reason}; going on from {before.path or 'the initial model'} (step {before.step}), "
            f"batches {batches[0]} to {batches[-1]} are trained again"
        )
        state = replace(
            state,
            step=before.step,
            queue=(*damaged.held, *state.queue),
            made=(*damaged.made, *state.made),
            covered=before,
            before=None,
        )
        failed = ActorFailed(actor="trainer", error="CheckpointDamaged", message=message, fatal=False)
        return state, (Emit(failed), Load(path=before.path, version=state.version))

    def _loaded(self, state: State, input: Loaded, now: float) -> Step[State]:
        if input.version != state.version or state.phase != "loading":
            return state, ()
        ready = PolicyReady(
            version=state.version,
            step=state.step,
            parent_version=state.covered.version,
            trainer_boot=state.boot,
            abandoned=state.made,
        )
        state = replace(state, phase="idle", made=())
        state, commands = self._next(state, now)
        return state, (Emit(ready), *commands)

    def _deliver(self, state: State, input: Delivered, now: float) -> Step[State]:
        event: Any = input.envelope.body
        kind = type(event)
        if kind is BatchReady:
            return self._batch(state, Pending(input.ref, event), now)
        handle = self._events.get(kind)
        return (state, ()) if handle is None else handle(state, event, now)

    def _run_started(self, state: State, _: RunStarted, now: float) -> Step[State]:
        return self._idle(replace(state, stopping=False), now) if state.stopping else (state, ())

    def _idle(self, state: State, now: float) -> Step[State]:
        return self._next(state, now) if state.phase == "idle" else (state, ())

    def _released(self, state: State, event: ReleaseFinished, now: float) -> Step[State]:
        mine = state.phase == "asking" and (event.step, event.trainer_boot) == (state.step + 1, state.boot)
        return self._train(state, now) if mine else (state, ())

    def _stop(self, state: State, now: float) -> Step[State]:
        """The batch that it asks memory for stays owed."""
        if state.asked_at is not None:
            ended = WaitEnded(actor="trainer", on="refit", seconds=now - state.asked_at)
            state, commands = self._next(replace(state, phase="idle", asked_at=None), now)
            return state, (Emit(ended), *commands)
        return self._idle(state, now)

    # --- steps ---

    def _batch(self, state: State, pending: Pending, now: float) -> Step[State]:
        if self.holds(state, pending.ref):
            return state, ()
        number, newest = pending.batch.batch, state.newest
        if number <= newest and number not in state.missed:
            rejected = BatchRejected(batch=number, reason="duplicate: the trainer has taken this batch before")
            return state, (Emit(rejected), Ack(pending.ref))
        passed = range(max(newest + 1, number - MISSED), number)
        missed = [each for each in (*state.missed, *passed) if each != number]
        state = replace(
            state, queue=(*state.queue, pending), newest=max(number, newest), missed=tuple(missed[-MISSED:])
        )
        return self._idle(state, now)

    def _next(self, state: State, now: float) -> Step[State]:
        """From idle: save what must be saved, else train the next batch, else wait for one."""
        due = len(state.trained) >= self.every or state.step >= self.steps or state.stopping
        if state.trained and due:
            last = state.trained[-1]
            save = Save(version=state.version, step=state.step, batch=last.batch.batch, entry=last.ref.entry)
            return replace(state, phase="saving"), (save,)
        if state.step >= self.steps:
            finished = TrainingFinished(version=state.version, step=state.step)
            return replace(state, phase="finished"), (Emit(finished),)
        if state.stopping:
            return state, ()
        if state.queue:
            return self._ask(state, now) if self.asks else self._train(state, now)
        waiting = WaitStarted(actor="trainer", on="buffer", cause=f"no batch for step {state.step + 1}")
        return replace(state, idle_since=now), (Emit(waiting),)

    def _ask(self, state: State, now: float) -> Step[State]:
        """Engines give their memory back before the step, and take it again with the refit that follows it."""
        step = state.step + 1
        wanted = MemoryWanted(step=step, trainer_boot=state.boot)
        cause = f"engines are to give memory back for step {step} (engine.release)"
        waiting = WaitStarted(actor="trainer", on="refit", cause=cause)
        commands = (*_no_longer_idle(state, now), Emit(wanted), Emit(waiting))
        return replace(state, phase="asking", asked_at=now), commands

    def _train(self, state: State, now: float) -> Step[State]:
        train = Train(state.queue[0].batch, state.step + 1, state.highest + 1)
        if state.asked_at is not None:
            ended = WaitEnded(actor="trainer", on="refit", seconds=now - state.asked_at)
            return replace(state, phase="training", asked_at=None), (Emit(ended), train)
        return replace(state, phase="training"), (*_no_longer_idle(state, now), train)

    def _trained(self, state: State, input: Trained, now: float) -> Step[State]:
        if state.phase != "training" or input.version != state.highest + 1:
            return state, ()
        pending = state.queue[0]
        waited = 0.0 if state.idle_since is None else max(0.0, now - input.seconds - state.idle_since)
        finished = StepFinished(
            version=input.version,
            parent_version=state.version,
            step=state.step + 1,
            trainer_boot=state.boot,
            batch=pending.batch.batch,
            metrics=reward_metrics(pending.batch) | input.metrics,
            seconds=input.seconds,
            waited_s=waited,
            tokens=input.tokens,
            tasks=tuple(group.index for group in pending.batch.groups),
        )
        state = replace(
            state,
            phase="idle",
            step=state.step + 1,
            version=input.version,
            highest=input.version,
            queue=state.queue[1:],
            trained=(*state.trained, pending),
            made=(*state.made, input.version),
            idle_since=None,
        )
        state, commands = self._next(state, now)
        return state, (Emit(finished), *commands)

    def _saved(self, state: State, input: Saved, now: float) -> Step[State]:
        if state.phase != "saving" or input.version != state.version:
            return state, ()
        saved = CheckpointSaved(
            version=state.version,
            step=state.step,
            batch=state.trained[-1].batch.batch,
            path=input.path,
            bytes=input.bytes,
            seconds=input.seconds,
        )
        done = state.covered.held
        acks = tuple(Ack(item.ref) for item in done)
        samples = [sample for item in done for group in item.batch.groups for sample in group.samples]
        release = (Release(tuple(sample.payload.key for sample in samples)),) if samples else ()
        state = replace(
            state,
            phase="idle",
            trained=(),
            made=(),
            covered=Covered(input.path, state.version, state.step, held=state.trained, made=state.made),
            before=replace(state.covered, held=(), made=()),
        )
        state, commands = self._next(state, now)
        return state, (Emit(saved), *acks, *release, Prune(), *commands)

    @staticmethod
    def _unpruned(state: State, input: Unpruned, _: float) -> Step[State]:
        message = (
            f"old checkpoints are not removed after {input.seconds:g} s; training goes on without waiting for it: look "
            "at the disk that holds the run's directory"
        )
        return state, (Emit(ActorFailed(actor="trainer", error="PruneLate", message=message, fatal=False)),)

    # --- transfer ---

    def _requested(self, state: State, event: RefitRequested, now: float) -> Step[State]:
        if event.epoch <= state.epoch:
            return state, ()
        state = replace(state, epoch=event.epoch, refit_deadline=event.deadline_at, sending=True)
        timeout = max(0.0, event.deadline_at - now)
        return state, (Abandon(event.epoch - 1), Offer(event.epoch, event.version, timeout))

    def _started(self, state: State, event: TransferStarted, now: float) -> Step[State]:
        late = event.epoch != state.epoch
        return state, () if late else (Send(event, max(0.0, state.refit_deadline - now)),)

    def _refit_failed(self, state: State, event: RefitFailed, _: float) -> Step[State]:
        late = event.epoch != state.epoch
        if late:
            return state, ()
        return replace(state, sending=False, plan=_to_be_written(state.plan)), (Abandon(event.epoch, event.reason),)

    def _committed(self, state: State, event: RefitCommitted, _: float) -> Step[State]:
        return replace(state, sending=False) if event.epoch == state.epoch else state, ()

    def _transfer(self, state: State, input: Offered | Sent | TransferBroke, _: float) -> Step[State]:
        if input.epoch != state.epoch:
            return state, ()
        event: Any
        if isinstance(input, Offered):
            return self._offered(state, input) if state.sending else (state, ())
        if isinstance(input, Sent):
            event = TransferFinished(epoch=input.epoch, version=input.version, seconds=input.seconds, bytes=input.bytes)
        else:
            event = TransferFailed(epoch=input.epoch, phase=input.phase, error=input.error, reason=input.reason)
        return replace(state, sending=False), (Emit(event),)

    @staticmethod
    def _offered(state: State, input: Offered) -> Step[State]:
        """The plan is the same from offer to offer: it is written once, and again when engines may not have got it."""
        held = state.plan
        written = held is not None and held.digest == input.plan
        plan = held if held is not None and written else Plan(_place(state, input), input.plan)
        event = TransferOffered(
            epoch=input.epoch,
            version=input.version,
            trainer_boot=state.boot,
            address=input.address,
            port=input.port,
            bytes=input.bytes,
            digest=input.digest,
            checksum=input.checksum,
            payload=plan.payload,
            nccl=input.nccl,
        )
        offer = Emit(event, payload=None if written else input.plan)
        commands = (offer,) if held is None or written else (offer, Release((held.payload.key,)))
        return replace(state, sending=True, plan=plan), commands


def _place(state: State, input: Offered) -> PayloadRef:
    """Where a plan is kept: an epoch has one offer a boot."""
    return PayloadRef(f"plan:{state.boot}:{input.epoch}", input.plan_bytes)


def _to_be_written(plan: Plan | None) -> Plan | None:
    """The store may have been rebuilt without it, or engines could not get it."""
    return None if plan is None else replace(plan, digest="")


def _no_longer_idle(state: State, now: float) -> tuple[Any, ...]:
    """The end of the wait for a batch, if there was one."""
    if state.idle_since is None:
        return ()
    return (Emit(WaitEnded(actor="trainer", on="buffer", seconds=now - state.idle_since)),)


def reward_metrics(batch: BatchReady) -> dict[str, float]:
    """Mean and standard deviation of the valid samples' rewards, sample counts, flat groups, staleness."""
    rewards = [s.reward for g in batch.groups for s in g.samples if s.valid]
    lags = [s.lag for g in batch.groups for s in g.samples]
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    variance = math.fsum((r - mean) ** 2 for r in rewards) / len(rewards) if rewards else 0.0
    flat = sum(len({s.reward for s in g.samples if s.valid}) < 2 for g in batch.groups)
    return {
        "reward": mean,
        "reward_std": math.sqrt(variance),
        "samples": float(len(rewards)),
        "masked_samples": float(len(lags) - len(rewards)),
        "flat_groups": float(flat),
        "staleness_mean": math.fsum(lags) / len(lags) if lags else 0.0,
        "staleness_max": float(max(lags, default=0)),
    }
