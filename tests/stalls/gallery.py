"""Stalls after public reports of asynchronous RL frameworks, each reproduced with the real cores on virtual time.

Where a mechanism of the project prevents a stall, `off` says which one the scene switches off to have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from actors.collector import core as collector
from actors.engine import state as engine
from actors.refit import core as refit_core
from actors.source import core as source
from actors.trainer import state as trainer
from config.schema import BufferConfig, EngineConfig, RefitConfig, RunConfig
from contracts.core import Delivered, Emit
from contracts.events import DataLost, EngineDead, RefitCommitted, RefitRequested, WaitStarted
from pipeline.bus import WorkEntry
from pipeline.simulate.shells import RefitSim
from pipeline.simulate.world import Pace
from pipeline.why.result import StoreFacts
from tests.stalls.scene import BASE, Scene


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """`arrange` sabotages a fresh scene; after `seconds` the diagnosis must name `cause` and `culprit`."""

    name: str
    report: str
    """Public reports of this stall, empty if it is one of our own making."""
    off: str
    arrange: Callable[[Scene], None]
    cause: str
    culprit: str
    config: RunConfig = BASE
    pace: Pace | None = None
    seconds: float = 180.0
    events_suffice: bool = True
    """The log alone leads to the same cause, without a look into the actors."""


SYNC = replace(BASE, sync=True)
IN_ORDER = replace(BASE, buffer=BufferConfig(groups=4, max_staleness=3, sampler="in_order"))
PATIENT = replace(BASE, refit=RefitConfig(deadline_s=900.0, drain_deadline_s=600.0, failures=1000))
ONE_ENGINE = replace(BASE, engine=EngineConfig(count=1, restarts=1000))


# --- tasks and rollouts ----------------------------------------------------------------------------------------------


def dataset_ends(scene: Scene) -> None:
    shell: Any = scene["source"].shell
    perform = shell.perform

    def performs(actor: Any, command: source.FetchTasks) -> None:
        if int(command.cursor or 0) >= 18:
            actor.after(0.01, source.Exhausted(command.split))
        else:
            perform(actor, replace(command, n=min(command.n, 18 - int(command.cursor or 0))))

    shell.perform = performs


def collector_ends(scene: Scene) -> None:
    scene.world.later(6.0, lambda: scene["collector-0"].kill(restart=False))


def producer_hangs(scene: Scene) -> None:
    scene.swallow("source", source.FetchTasks, lambda command: int(command.cursor or 0) >= 32)


def producer_fails(scene: Scene) -> None:
    shell: Any = scene["source"].shell
    perform = shell.perform

    def performs(actor: Any, command: Any) -> None:
        if isinstance(command, source.FetchTasks) and int(command.cursor or 0) >= 32:
            actor.after(0.1, source.ProducerFailed(command.split, command.cursor, "KeyError", "'question'"))
        else:
            perform(actor, command)

    shell.perform = performs


def one_sample_hangs(scene: Scene) -> None:
    shell: Any = scene["collector-0"].shell
    perform = shell.perform

    def performs(actor: Any, command: Any) -> None:
        if isinstance(command, collector.Rollout) and command.task.index == 14:
            command = replace(command, tries=tuple(each for each in command.tries if each.sample != 2))
        perform(actor, command)

    shell.perform = performs


def one_group_hangs(scene: Scene) -> None:
    scene.swallow("collector-0", collector.Rollout, lambda command: command.task.index == 14)


def environment_swallows_errors(scene: Scene) -> None:
    scene.swallow("collector-0", collector.Rollout, lambda command: command.task.index >= 20)


def environment_fails(scene: Scene) -> None:
    shell: Any = scene["collector-0"].shell
    perform = shell.perform

    def performs(actor: Any, command: Any) -> None:
        if not (isinstance(command, collector.Rollout) and command.task.index >= 20):
            perform(actor, command)
            return
        for each in command.tries:
            problem = collector.SampleProblem(command.ref, each.sample, each.attempt, "data", "KeyError: 'answer'")
            actor.after(1.0, problem)

    shell.perform = performs


def result_is_poison(scene: Scene) -> None:
    """One trajectory is handed out again and again, and given up at last."""
    store = scene.world.store
    read = store.read_new

    def read_new(stream: str, actor: str, count: int) -> list[WorkEntry]:
        found = read(stream, actor, count)
        poison = [e for e in found if stream == "trajectories" and b"traj:14:2:" in e.data]
        for entry in poison:
            lost = DataLost(stream=stream, entries=(entry.entry,), reason="delivered 9 times without an ack")
            scene.world.later(1.0, lambda lost=lost: scene.world.post(lost, "lost"))
        return [entry for entry in found if entry not in poison]

    store.read_new = read_new  # pyright: ignore[reportAttributeAccessIssue]


# --- buffer and trainer ----------------------------------------------------------------------------------------------


def credit_is_not_returned(scene: Scene) -> None:
    batches: Any = scene["buffer"].core.batches
    grant = batches.grant
    batches.grant = lambda state: grant(replace(state, dropped=0))
    scene.swallow("collector-0", collector.Rollout, _fail_group(scene, 14))


def _fail_group(scene: Scene, index: int) -> Callable[[Any], bool]:
    def when(command: collector.Rollout) -> bool:
        if command.task.index != index:
            return False
        for each in command.tries:
            problem = collector.SampleProblem(command.ref, each.sample, each.attempt, "data", "no answer in the task")
            scene["collector-0"].after(0.5, problem)
        return True

    return when


def resume_skips_a_batch(scene: Scene) -> None:
    store, trainer_ = scene.world.store, scene["trainer"]
    read = store.read_new

    def read_new(stream: str, actor: str, count: int) -> list[WorkEntry]:
        found = read(stream, actor, count)
        return found if stream != "batches" or trainer_.life < 3 else []

    store.read_new = read_new  # pyright: ignore[reportAttributeAccessIssue]
    scene.world.later(6.0, trainer_.kill)


def step_hangs(scene: Scene) -> None:
    scene.swallow("trainer", trainer.Train, lambda command: command.step == 6)


def trainer_waits_for_its_own_refit(scene: Scene) -> None:
    core: Any = scene["trainer"].core
    go_on, deliver = core._next, core._inputs[Delivered]

    def goes_on(state: trainer.State, now: float) -> Any:
        if state.step < 5:
            return go_on(state, now)
        wait = WaitStarted(actor="trainer", on="refit", cause=f"version {state.version} must be committed first")
        return replace(state, idle_since=now), (Emit(wait),)

    def delivers(state: trainer.State, input: Any, now: float) -> Any:
        if state.step >= 5 and isinstance(input.envelope.body, RefitRequested):
            return state, ()
        return deliver(state, input, now)

    core._next, core._inputs = goes_on, {**core._inputs, Delivered: delivers}


# --- refit -----------------------------------------------------------------------------------------------------------


def engine_dies_in_transfer(scene: Scene) -> None:
    actor = scene["engine-1"]
    shell, refit = actor.shell, scene["refit"]
    shell.killed = lambda actor: None  # type: ignore[method-assign]
    refit.core._events = {**refit.core._events, EngineDead: lambda turn, event, envelope: None}

    def dies(command: engine.Receive) -> bool:
        if command.epoch < 4:
            return False
        dead = EngineDead(engine="engine-1", boot=actor.state.boot, reason="the server ended with signal 9")
        scene.world.post(dead, "dead")
        actor.kill(restart=False)
        return True

    scene.swallow("engine-1", engine.Receive, dies)


def transfer_never_ends(scene: Scene) -> None:
    scene.swallow("engine-1", engine.Receive, lambda command: command.epoch >= 4)


def long_tail_in_drain(scene: Scene) -> None:
    shell: Any = scene["engine-0"].shell
    generate = shell.generate
    stuck: list[str] = []

    def generates(actor: Any, call: Any, end: Any) -> None:
        if not stuck and call.epoch >= 3:
            stuck.append(call.rid)
            long, short = scene.world.pace.generate, (10_000.0, 10_000.0)
            scene.world.pace = replace(scene.world.pace, generate=short)
            generate(actor, call, end)
            scene.world.pace = replace(scene.world.pace, generate=long)
        else:
            generate(actor, call, end)

    shell.generate = generates


def server_is_stopped_in_drain(scene: Scene) -> None:
    """A SIGSTOP: what it generates does not end, and no probe is answered."""
    long_tail_in_drain(scene)
    silent = engine.ServerSilent("/model_info: no answer in 5 s")

    def stopped(command: engine.Drain) -> bool:
        if command.epoch >= 4:
            scene["engine-0"].after(7.0, silent)
        return False

    scene.swallow("engine-0", engine.Drain, stopped)


def server_is_stopped(scene: Scene) -> None:
    generation_hangs(scene)
    scene.world.later(7.0, lambda: scene["engine-0"].push(engine.ServerSilent("/model_info: no answer in 5 s")))


def probe_blocked_by_broadcast(scene: Scene) -> None:
    actor = scene["engine-0"]

    def probed(command: engine.Receive) -> bool:
        if command.epoch >= 4:
            dead = engine.ServerDead("/health did not answer for 5 s")
            actor.do(5.0, lambda: actor.push(dead) if actor.state.mode == "loading" else None)
        return False

    scene.swallow("engine-0", engine.Receive, probed)


def commit_is_lost(scene: Scene) -> None:
    core: Any = scene["gateway-0"].core
    commit = core._events[RefitCommitted]

    def committed(state: Any, event: RefitCommitted, now: float) -> Any:
        return (state, []) if event.epoch >= 4 else commit(state, event, now)

    core._events = {**core._events, RefitCommitted: committed}


def gateway_is_gone(scene: Scene) -> None:
    scene.world.later(6.0, lambda: scene["gateway-0"].kill(restart=False))


def every_engine_is_gone(scene: Scene) -> None:
    def die() -> None:
        for name in ("engine-0", "engine-1"):
            boot = scene[name].state.boot
            scene.world.post(EngineDead(engine=name, boot=boot, reason="CUDA error: out of memory"), f"dead-{name}")
            scene[name].kill(restart=False)

    idle = lambda: scene["refit"].state is not None and scene["refit"].state.phase == "idle" and scene.step() >= 4  # noqa: E731

    def look() -> None:
        die() if idle() else scene.world.later(0.05, look)

    scene.world.later(4.0, look)


def engine_never_starts(scene: Scene) -> None:
    scene.swallow("engine-1", engine.StartServer, lambda command: True)


def generation_hangs(scene: Scene) -> None:
    shell: Any = scene["engine-0"].shell
    generate = shell.generate

    def generates(actor: Any, call: Any, end: Any) -> None:
        usual = scene.world.pace
        if call.epoch >= 4:
            scene.world.pace = replace(usual, generate=(10_000.0, 10_000.0))
        generate(actor, call, end)
        scene.world.pace = usual

    shell.generate = generates


def two_coordinators(scene: Scene) -> None:
    """Each has a disk of its own, so each has its own epoch numbers."""
    config = scene.config
    for name in ("refit", "refit-b"):
        core = refit_core.RefitCore(config.refit, config.engine, config.gateway, config.launch, actor=name)
        scene.world.add(name, SlowRefit(core))
    store: Any = scene.world.store
    commit = store.commit
    store.commit = lambda actor, batch: commit(actor, replace_registers(batch))


def replace_registers(batch: Any) -> Any:
    return replace(batch, registers=())


class SlowRefit(RefitSim):
    def perform(self, actor: Any, command: Any) -> None:
        if isinstance(command, refit_core.FsyncHigh):
            actor.after(actor.world.draw((1.0, 3.0)), refit_core.HighWritten(command.epoch))


# --- the platform ----------------------------------------------------------------------------------------------------


class Full(Exception):
    """The store's answer to every write."""


def store_runs_out_of_memory(scene: Scene) -> None:
    store: Any = scene.world.store
    commit, limit, kept = store.commit, 2000, []

    def commits(actor: str, batch: Any) -> Any:
        kept.extend(len(data) for _, data in batch.payloads)
        if sum(kept) > limit:
            scene.store_facts = StoreFacts(used=limit, limit=limit)
        if scene.store_facts is not None:
            raise Full
        return commit(actor, batch)

    store.commit = commits
    for actor in scene.world.actors.values():
        _dies_when_full(actor)


def _dies_when_full(actor: Any) -> None:
    commit = actor._commit

    def commits(inputs: list[Any]) -> None:
        try:
            commit(inputs)
        except Full:
            actor.kill()

    actor._commit = commits


def clock_jumps(scene: Scene) -> None:
    """The trainer's clock was set forward."""
    scene.world.later(6.0, lambda: setattr(scene["trainer"], "skew", 3600.0))


GALLERY = (
    Stall(
        name="dataset ends after one epoch",
        report="NVIDIA-NeMo/RL#2899, thinking-machines-lab/tinker-cookbook#480",
        off="the driver, which ends the run when the tasks left can't fill a batch",
        arrange=dataset_ends,
        cause="data_exhausted",
        culprit="producer",
    ),
    Stall(
        name="collector ends after one epoch",
        report="NVIDIA-NeMo/RL#1814",
        off="the supervisor, which starts an actor again that left",
        arrange=collector_ends,
        cause="actor_gone",
        culprit="collector-0",
        events_suffice=False,
    ),
    Stall(
        name="producer hangs",
        report="",
        off="producer.task_deadline_s",
        arrange=producer_hangs,
        cause="producer_silent",
        culprit="producer",
    ),
    Stall(
        name="producer raises",
        report="",
        off="the driver, which ends a run whose source can't go on",
        arrange=producer_fails,
        cause="producer_failed",
        culprit="producer",
    ),
    Stall(
        name="one straggler in a group",
        report="NVIDIA-NeMo/RL#3238",
        off="rollout.deadline_s",
        arrange=one_sample_hangs,
        config=SYNC,
        cause="straggler",
        culprit="group 14",
    ),
    Stall(
        name="hole at the current version",
        report="NVIDIA-NeMo/RL#3480",
        off="rollout.deadline_s",
        arrange=one_group_hangs,
        config=IN_ORDER,
        cause="hole",
        culprit="group 14",
    ),
    Stall(
        name="environment worker error not surfaced",
        report="thinking-machines-lab/tinker-cookbook#945, Unity-Technologies/ml-agents#4699",
        off="rollout.deadline_s, and the collector's report of every exception",
        arrange=environment_swallows_errors,
        cause="environment_silent",
        culprit="environment",
    ),
    Stall(
        name="environment fails every task",
        report="facebookresearch/CompilerGym#469",
        off="nothing: samples fail with their reason, and their groups are dropped for ever",
        arrange=environment_fails,
        cause="environment_failing",
        culprit="environment",
    ),
    Stall(
        name="dead letter holds a group back",
        report="",
        off="nothing: until buffer.group_deadline_s",
        arrange=result_is_poison,
        config=SYNC,
        cause="dead_letter",
        culprit="trajectories/",
    ),
    Stall(
        name="buffer one short of full",
        report="NVIDIA-NeMo/RL#2651",
        off="the credit for dropped groups",
        arrange=credit_is_not_returned,
        config=SYNC,
        cause="buffer_short",
        culprit="buffer",
    ),
    Stall(
        name="resume skips a target",
        report="NVIDIA-NeMo/RL#3066",
        off="the delivery of what is in the stream to a restarted trainer",
        arrange=resume_skips_a_batch,
        cause="batch_lost",
        culprit="batch ",
    ),
    Stall(
        name="optimizer step hangs",
        report="verl-project/verl#3895",
        off="nothing",
        arrange=step_hangs,
        cause="step_hangs",
        culprit="trainer",
    ),
    Stall(
        name="trainer waits for a refit that waits for the trainer",
        report="verl-project/verl#7990",
        off="the trainer's readiness to offer weights at any time; refit.deadline_s is long",
        arrange=trainer_waits_for_its_own_refit,
        config=PATIENT,
        cause="cycle",
        culprit="trainer, refit",
    ),
    Stall(
        name="engine dead mid-transfer",
        report="NVIDIA-NeMo/RL#2512",
        off="the coordinator's answer to engine.dead, the break of the collective, and the restart",
        arrange=engine_dies_in_transfer,
        config=PATIENT,
        cause="engine_dead",
        culprit="engine-1",
    ),
    Stall(
        name="broadcast never ends",
        report="sgl-project/sglang#4096",
        off="nothing: until refit.deadline_s, which is long",
        arrange=transfer_never_ends,
        config=PATIENT,
        cause="transfer_hangs",
        culprit="trainer, engine-0, engine-1",
    ),
    Stall(
        name="drain waits on a long tail",
        report="verl-project/verl#7990, thinking-machines-lab/tinker-cookbook#822",
        off="nothing: until refit.drain_deadline_s, which is long",
        arrange=long_tail_in_drain,
        config=PATIENT,
        cause="drain_tail",
        culprit="engine-0",
    ),
    Stall(
        name="server stopped in a drain",
        report="",
        off="nothing: until refit.drain_deadline_s, which is long",
        arrange=server_is_stopped_in_drain,
        config=PATIENT,
        cause="server_silent",
        culprit="engine-0",
    ),
    Stall(
        name="server stopped while it generates",
        report="",
        off="the end of a server that misses three probes",
        arrange=server_is_stopped,
        config=replace(ONE_ENGINE, sync=True),
        cause="server_silent",
        culprit="engine-0",
    ),
    Stall(
        name="health probe blocked by a broadcast",
        report="allenai/open-instruct#1454",
        off="the sidecar's knowledge that its server is receiving",
        arrange=probe_blocked_by_broadcast,
        config=ONE_ENGINE,
        pace=Pace(transfer=(8.0, 9.0)),
        cause="probe_in_transfer",
        culprit="engine-0",
        seconds=400.0,
    ),
    Stall(
        name="gateway holds requests after a lost commit",
        report="OpenRLHF/OpenRLHF#1262, verl-project/verl#7846",
        off="the gateway's reading of every event of the refit stream",
        arrange=commit_is_lost,
        cause="gate_held",
        culprit="gateway-0",
    ),
    Stall(
        name="gateway is gone",
        report="",
        off="the supervisor, which starts an actor again that died",
        arrange=gateway_is_gone,
        cause="actor_gone",
        culprit="gateway-0",
        events_suffice=False,
    ),
    Stall(
        name="no engine is left",
        report="NVIDIA-NeMo/RL#2512",
        off="the supervisor, which starts an actor again that died",
        arrange=every_engine_is_gone,
        cause="no_engine",
        culprit="engine-0, engine-1",
    ),
    Stall(
        name="engine never starts",
        report="",
        off="the deadline of the server's start",
        arrange=engine_never_starts,
        cause="not_ready",
        culprit="engine-1",
    ),
    Stall(
        name="generation hangs",
        report="NVIDIA-NeMo/Gym#162",
        off="rollout.deadline_s",
        arrange=generation_hangs,
        config=replace(ONE_ENGINE, sync=True),
        cause="engine_hangs",
        culprit="engine-0",
        events_suffice=False,
    ),
    Stall(
        name="two coordinators",
        report="",
        off="the fence on boots and the epoch register",
        arrange=two_coordinators,
        cause="two_writers",
        culprit="refit, refit-b",
    ),
    Stall(
        name="store out of memory",
        report="OptimalBits/bull#433",
        off="the release of payloads that a checkpoint covers",
        arrange=store_runs_out_of_memory,
        cause="store_full",
        culprit="store",
        events_suffice=False,
    ),
    Stall(
        name="clock jump",
        report="trajectoryRL/trajectoryRL#249, dask/distributed#6181",
        off="nothing: the deadline of a refit travels as a wall-clock time",
        arrange=clock_jumps,
        cause="clock_jump",
        culprit="trainer",
        seconds=300.0,
    ),
)
