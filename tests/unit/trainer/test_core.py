"""The trainer's core: one operation at a time, versions never reused, batches trained once in the surviving lineage."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trainer import state as trainer
from actors.trainer.core import MISSED, QUEUE, TrainerCore, reward_metrics
from actors.trainer.state import State
from config.schema import CheckpointConfig, EngineConfig, RunConfig
from contracts import events, limits
from contracts.core import Ack, Booted, Delivered, Emit, Ref, Release, Tick
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import BatchReady, GroupRef, PayloadRef, SampleRef
from pipeline.runtime.journal import Journal


def asked(epoch: int) -> events.RefitRequested:
    """A refit to the version that a fresh run has."""
    return events.RefitRequested(
        epoch=epoch, version=0, step=0, engines=(), gateways=(), drain="finish", deadline_at=70.0
    )


def delivered(body: Any, entry: str = "1-0") -> Any:
    stream = STREAM_OF[type(body)]
    envelope = Envelope(id="x:1.0", run="r", stream=stream, actor="x", boot=1, epoch=0, wall_ns=0, mono_ns=0, body=body)
    return Delivered(Ref(stream, entry), envelope)


def batch(number: int, rewards: tuple[float, ...] = (0.0, 1.0), lag: int = 0) -> Any:
    samples = tuple(
        SampleRef(sample=i, reward=r, valid=True, payload=PayloadRef(f"p{number}-{i}", 10), lag=lag)
        for i, r in enumerate(rewards)
    )
    body = BatchReady(batch=number, groups=(GroupRef(task=f"t{number}", index=number, samples=samples),))
    return delivered(body, f"{number}-0")


@pytest.mark.parametrize(("groups", "samples"), [(2, 2), (512, 32), (limits.groups(128), 128)])
def test_a_batch_takes_no_more_than_is_reckoned_with(groups: int, samples: int) -> None:
    most = (1 << 31) - 1
    key = f"traj:{most}:{samples}:collector-1023:{1 << 53}"
    refs = tuple(
        SampleRef(sample=n, reward=0.1, valid=True, payload=PayloadRef(key, most), lag=most) for n in range(samples)
    )
    body = BatchReady(
        batch=most, groups=tuple(GroupRef(task="i" * limits.TASK_ID, index=most, samples=refs) for _ in range(groups))
    )
    taken = delivered(body, f"{1 << 53}-0")
    core: Any = TrainerCore(RunConfig())
    _, commands = core.step(core.initial(), taken, 0.0)
    record = Journal(core).record(1, 1.8e9, taken, commands)
    assert len(record) <= limits.batch(groups, samples) <= limits.ENTRY
    assert limits.batch(groups, samples) < 1.2 * len(record) + 1024


def emitted(commands: Any) -> list[Any]:
    return [c.event for c in commands if isinstance(c, Emit)]


class Driver:
    """Feeds a core and performs its policy commands at once when told to."""

    def __init__(self, steps: int = 10, every: int = 1) -> None:
        self.core = TrainerCore(RunConfig(steps=steps, checkpoint=CheckpointConfig(every=every)))
        self.state = self.core.initial()
        self.commands: list[Any] = []
        self.now = 0.0

    def feed(self, input: Any) -> list[Any]:
        self.state, commands = self.core.step(self.state, input, self.now)
        self.commands.extend(commands)
        return list(commands)

    def boot(self, boot: int = 1) -> list[Any]:
        self.feed(Booted(boot))
        return self.feed(trainer.Loaded(version=self.state.version))

    def trained(self, seconds: float = 0.5) -> list[Any]:
        return self.feed(
            trainer.Trained(version=self.state.highest + 1, metrics={"loss": 1.0}, seconds=seconds, tokens=7)
        )

    def saved(self) -> list[Any]:
        version = self.state.version
        return self.feed(trainer.Saved(version=version, path=f"/c/{version}", bytes=3, seconds=0.1))


def test_the_first_boot_announces_version_zero_of_step_zero():
    driver = Driver()
    assert driver.feed(Booted(1)) == [trainer.Load(path=None, version=0)]
    ready, waiting = emitted(driver.feed(trainer.Loaded(version=0)))
    assert ready == events.PolicyReady(version=0, step=0, parent_version=None, trainer_boot=1)
    assert (waiting.on, waiting.cause) == ("buffer", "no batch for step 1")


def test_a_step_makes_a_new_version_and_reports_how_long_it_waited():
    driver = Driver()
    driver.boot()
    driver.now = 4.0
    ended, train = driver.feed(batch(1))
    assert ended.event.seconds == 4.0
    assert (train.step, train.version) == (1, 1)
    driver.now = 4.5
    finished = emitted(driver.trained())[0]
    assert (finished.version, finished.parent_version, finished.step, finished.batch) == (1, 0, 1, 1)
    assert finished.waited_s == pytest.approx(4.0)
    assert finished.metrics["reward"] == 0.5
    assert finished.metrics["loss"] == 1.0


def run_batches(driver: Driver, *numbers: int) -> list[Any]:
    """Train and, where it is due, save; answers the commands of the last save."""
    for number in numbers:
        driver.feed(batch(number))
        driver.trained()
    return driver.saved()


def test_a_batch_is_acked_only_once_two_checkpoints_cover_it():
    driver = Driver(every=2)
    driver.boot()
    driver.feed(batch(1))
    assert not any(isinstance(c, Ack | Release | trainer.Save) for c in driver.trained())
    driver.feed(batch(2))
    assert driver.trained()[-1] == trainer.Save(version=2, step=2, batch=2, entry="2-0")
    commands = driver.saved()
    assert emitted(commands)[0].batch == 2
    assert not any(isinstance(c, Ack | Release) for c in commands)
    commands = run_batches(driver, 3, 4)
    (release,) = [c for c in commands if isinstance(c, Release)]
    assert release.keys == tuple(
        s.payload.key for n in (1, 2) for g in batch(n).envelope.body.groups for s in g.samples
    )
    assert [c.ref.entry for c in commands if isinstance(c, Ack)] == ["1-0", "2-0"]
    assert trainer.Prune() in commands, "older checkpoints go only once the newer one is announced"


def test_a_damaged_checkpoint_is_passed_over_and_what_it_alone_covered_is_trained_again():
    driver = Driver(every=2)
    driver.boot()
    run_batches(driver, 1, 2)
    run_batches(driver, 3, 4)
    driver.feed(batch(5))
    driver.trained()
    driver.feed(batch(6))
    assert driver.feed(Booted(2)) == [trainer.Load(path="/c/4", version=6)]
    failed, load = driver.feed(trainer.LoadFailed(version=6, reason="/c/4 differs"))
    assert load == trainer.Load(path="/c/2", version=6)
    assert failed.event.message == "/c/4 differs; going on from /c/2 (step 2), batches 3 to 4 are trained again"
    assert not failed.event.fatal
    commands = driver.feed(trainer.Loaded(version=6))
    ready = emitted(commands)[0]
    assert (ready.step, ready.parent_version, ready.abandoned) == (2, 2, (3, 4, 5))
    order = []
    trains = [c for c in commands if isinstance(c, trainer.Train)]
    while trains:
        order.append((trains[0].batch.batch, trains[0].step, trains[0].version))
        commands = driver.trained()
        if any(isinstance(c, trainer.Save) for c in commands):
            commands = driver.saved()
        trains = [c for c in commands if isinstance(c, trainer.Train)]
    assert order == [(3, 3, 7), (4, 4, 8), (5, 5, 9), (6, 6, 10)]


def test_the_first_checkpoint_falls_back_on_the_initial_model():
    driver = Driver()
    driver.boot()
    run_batches(driver, 1)
    driver.feed(Booted(2))
    failed, load = driver.feed(trainer.LoadFailed(version=2, reason="torn"))
    assert load == trainer.Load(path=None, version=2)
    assert "going on from the initial model (step 0)" in failed.event.message


def test_without_a_checkpoint_to_fall_back_on_the_run_ends_with_the_reason():
    driver = Driver()
    driver.boot()
    run_batches(driver, 1)
    run_batches(driver, 2)
    driver.feed(Booted(2))
    driver.feed(trainer.LoadFailed(version=3, reason="/c/2 torn"))
    (failed,) = driver.feed(trainer.LoadFailed(version=3, reason="/c/1 torn"))
    assert failed.event.fatal
    assert failed.event.message.startswith("/c/1 torn; the run can't go on")
    assert driver.feed(Booted(3)) == [trainer.Load(path="/c/1", version=4)], "a repaired one is tried again"


def test_news_of_a_load_that_is_over_changes_nothing():
    driver = Driver()
    driver.boot()
    state = driver.state
    assert driver.feed(trainer.LoadFailed(version=0, reason="late")) == []
    assert driver.state == state


def test_a_batch_that_only_the_newest_checkpoint_covers_is_not_trained_twice():
    driver = Driver()
    driver.boot()
    run_batches(driver, 1)
    driver.feed(Booted(2))
    driver.feed(trainer.Loaded(version=2))
    assert driver.feed(batch(1)) == []


def test_after_a_crash_uncovered_batches_are_trained_again_in_order_and_their_versions_abandoned():
    driver = Driver(every=3)
    driver.boot()
    for number in range(1, 4):
        driver.feed(batch(number))
        driver.trained()
    driver.saved()
    for number in (4, 5):
        driver.feed(batch(number))
        driver.trained()
    driver.feed(batch(6))
    assert driver.feed(Booted(2)) == [trainer.Load(path="/c/3", version=6)]
    commands = driver.feed(trainer.Loaded(version=6))
    ready = emitted(commands)[0]
    assert (ready.step, ready.parent_version, ready.abandoned) == (3, 3, (4, 5))
    trains = [c for c in commands if isinstance(c, trainer.Train)]
    order = []
    while trains:
        order.append((trains[0].batch.batch, trains[0].version))
        trains = [c for c in driver.trained() if isinstance(c, trainer.Train)]
    assert order == [(4, 7), (5, 8), (6, 9)]


def test_a_redelivered_batch_that_is_already_held_is_not_trained_twice():
    driver = Driver(every=5)
    driver.boot()
    driver.feed(batch(1))
    driver.trained()
    assert driver.feed(batch(1)) == []
    driver.feed(batch(2))
    assert driver.feed(batch(2)) == []


def test_checkpoints_that_are_not_removed_in_time_are_told_and_training_goes_on():
    driver = Driver()
    driver.boot()
    state = driver.state
    (failed,) = emitted(driver.feed(trainer.Unpruned(300.0)))
    assert (failed.error, failed.fatal) == ("PruneLate", False)
    assert "not removed after 300 s" in failed.message
    assert driver.state == state


def requeued(number: int) -> Any:
    """A dead letter that a person handed out again: the same batch in another entry."""
    return delivered(batch(number).envelope.body, f"{number + 1000}-0")


def test_a_batch_that_comes_again_under_another_entry_is_refused_and_not_trained_twice():
    driver = Driver(every=2)
    driver.boot()
    driver.feed(batch(1))

    def refused(number: int) -> None:
        emit, ack = driver.feed(requeued(number))
        assert emit.event == events.BatchRejected(
            batch=number, reason="duplicate: the trainer has taken this batch before"
        )
        assert ack == Ack(requeued(number).ref)
        assert not driver.core.holds(driver.state, ack.ref)

    refused(1)
    driver.trained()
    refused(1)
    run_batches(driver, 2)
    run_batches(driver, 3, 4)  # the first two are acked, and their payloads gone
    refused(1)
    driver.feed(Booted(2))
    driver.feed(trainer.Loaded(version=driver.state.version))
    refused(4)
    assert [c.batch.batch for c in driver.commands if isinstance(c, trainer.Train)] == [1, 2, 3, 4]


def test_a_batch_that_was_passed_over_is_trained_when_it_is_handed_out_after_all():
    driver = Driver(every=99, steps=99)
    driver.boot()
    for number in (1, 4):
        driver.feed(batch(number))
        driver.trained()
    (_, train) = driver.feed(requeued(3))
    assert isinstance(train, trainer.Train)
    assert driver.state.missed == (2,)
    driver.trained()
    driver.feed(delivered(requeued(3).envelope.body, "2000-0"))
    assert isinstance(emitted(driver.commands)[-1], events.BatchRejected)
    driver.feed(batch(MISSED + 10))
    assert driver.state.missed == tuple(range(10, MISSED + 10)), "bounded: the youngest"


def test_a_batch_is_held_from_its_arrival_until_two_checkpoints_cover_it():
    """So the runtime never gives it up, however often the trainer boots."""
    driver = Driver(every=2)
    driver.boot()
    ref = batch(1).ref

    def holds() -> bool:
        return driver.core.holds(driver.state, ref)

    assert not holds()
    driver.feed(batch(1))
    assert holds()
    for boot in range(2, 12):
        driver.feed(Booted(boot))
        driver.feed(trainer.Loaded(version=driver.state.version))
        assert holds()
    driver.trained()
    assert holds()
    run_batches(driver, 2)
    assert holds()
    run_batches(driver, 3, 4)
    assert not holds()


def test_the_last_step_is_saved_before_training_is_declared_finished():
    driver = Driver(steps=1, every=100)
    driver.boot()
    driver.feed(batch(1))
    assert isinstance(driver.trained()[-1], trainer.Save)
    assert isinstance(emitted(driver.saved())[-1], events.TrainingFinished)
    assert driver.core.intake(driver.state) == {}


def test_a_finished_run_that_is_booted_again_says_so_again():
    driver = Driver(steps=1)
    driver.boot()
    driver.feed(batch(1))
    driver.trained()
    driver.saved()
    assert isinstance(emitted(driver.boot(2))[-1], events.TrainingFinished)


@pytest.mark.parametrize("moment", ["idle", "training", "saving", "loading", "off", "uncovered"])
def test_stopping_saves_what_is_trained_and_then_leaves(moment: str):
    driver = Driver(every=2)
    if moment != "off":
        driver.feed(Booted(1))
    if moment not in ("off", "loading"):
        driver.feed(trainer.Loaded(version=0))
    if moment in ("training", "saving", "uncovered"):
        driver.feed(batch(1))
    if moment in ("saving", "uncovered"):
        driver.trained()
    if moment == "saving":
        driver.feed(batch(2))
        driver.trained()
    driver.feed(delivered(events.RunStopping(reason="ctrl-c")))
    if moment == "training":
        assert not driver.core.done(driver.state)
        driver.trained()
    if moment in ("training", "saving", "uncovered"):
        assert not driver.core.done(driver.state)
        assert driver.state.phase == "saving"
        driver.saved()
    assert driver.core.done(driver.state)
    assert driver.core.intake(driver.state) == {}


@pytest.mark.parametrize("idle", [True, False])
def test_a_run_that_is_started_again_goes_on_training(idle: bool):
    driver = Driver()
    driver.boot()
    if not idle:
        driver.feed(batch(1))
    driver.feed(delivered(events.RunStopping(reason="ctrl-c")))
    driver.feed(delivered(events.RunStarted(config_digest="d", resumed=True)))
    if idle:
        assert isinstance(driver.feed(batch(1))[-1], trainer.Train)
    driver.trained()
    assert driver.state.step == 1
    assert not driver.core.done(driver.state)


def test_a_transfer_is_offered_sent_and_reported_under_its_epoch():
    driver = Driver()
    driver.boot()
    driver.now = 10.0
    requested = asked(4)
    assert driver.feed(delivered(requested)) == [trainer.Abandon(3), trainer.Offer(4, 0, 60.0)]
    assert driver.feed(delivered(requested)) == []
    offered = trainer.Offered(
        epoch=4, version=0, address="h", port=1, bytes=9, digest="d", plan="p", plan_bytes=7, nccl=("NCCL_PROTO=LL",)
    )
    told = emitted(driver.feed(offered))[0]
    assert (told.trainer_boot, told.nccl) == (1, ("NCCL_PROTO=LL",))
    driver.now = 12.0
    started = events.TransferStarted(epoch=4, version=0, group="g", fresh=True, members=(), world_size=3)
    assert driver.feed(delivered(started)) == [trainer.Send(started, 58.0)]
    assert emitted(driver.feed(trainer.Sent(epoch=4, version=0, seconds=1.0, bytes=9)))[0].bytes == 9


def offer(driver: Driver, epoch: int, plan: str = "p") -> tuple[PayloadRef, str | None, tuple[str, ...]]:
    """Where the plan of an offer is kept, what is written there, and what is released."""
    driver.feed(delivered(asked(epoch)))
    offered = trainer.Offered(
        epoch=epoch, version=0, address="h", port=1, bytes=9, digest="d", plan=plan, plan_bytes=len(plan)
    )
    emit, *others = driver.feed(offered)
    assert all(isinstance(command, Release) for command in others)
    return emit.event.payload, emit.payload, tuple(key for command in others for key in command.keys)


def test_a_plan_is_written_once_and_released_when_another_takes_its_place():
    driver = Driver()
    driver.boot()
    assert offer(driver, 1) == (PayloadRef("plan:1:1", 1), "p", ())
    assert offer(driver, 2) == (PayloadRef("plan:1:1", 1), None, ())
    assert offer(driver, 3, "other") == (PayloadRef("plan:1:3", 5), "other", ("plan:1:1",))
    assert offer(driver, 4, "other") == (PayloadRef("plan:1:3", 5), None, ())


def test_a_plan_that_engines_may_not_have_got_is_written_anew():
    driver = Driver()
    driver.boot()
    offer(driver, 1)
    driver.feed(delivered(events.RefitFailed(epoch=1, version=0, phase="transfer", reason="no plan")))
    assert offer(driver, 2) == (PayloadRef("plan:1:2", 1), "p", ("plan:1:1",))
    driver.feed(delivered(events.RefitFailed(epoch=1, version=0, phase="transfer", reason="late")))
    assert offer(driver, 3) == (PayloadRef("plan:1:2", 1), None, ())
    driver.boot(2)
    assert offer(driver, 4) == (PayloadRef("plan:2:4", 1), "p", ("plan:1:2",))


@pytest.mark.parametrize("end", ["sent", "broke", "failed", "committed"])
def test_a_stopping_trainer_stays_until_the_barrier_does_not_need_it(end: str):
    driver = Driver()
    driver.boot()
    driver.feed(delivered(asked(4)))
    driver.feed(delivered(events.RunStopping(reason="trained")))
    assert not driver.core.done(driver.state)
    driver.feed(trainer.Offered(epoch=4, version=0, address="h", port=1, bytes=9, digest="d", plan="p", plan_bytes=7))
    assert not driver.core.done(driver.state)
    if end == "sent":
        driver.feed(trainer.Sent(epoch=4, version=0, seconds=1.0, bytes=9))
    elif end == "broke":
        driver.feed(trainer.TransferBroke(epoch=4, phase="join", error="TimeoutError", reason="late"))
    elif end == "failed":
        driver.feed(delivered(events.RefitFailed(epoch=4, version=0, phase="join", reason="x")))
    else:
        commit = events.RefitCommitted(
            epoch=4, version=0, step=0, engines=(), world_size=1, pause_s=1, drain_s=1, transfer_s=1, bytes=1
        )
        driver.feed(delivered(commit))
    assert driver.core.done(driver.state)


def test_a_copy_that_is_ready_only_after_its_epoch_failed_is_not_offered_and_holds_no_stop_up():
    driver = Driver()
    driver.boot()
    driver.feed(delivered(asked(4)))
    driver.feed(delivered(events.RefitFailed(epoch=4, version=0, phase="drain", reason="no engine is left")))
    late = trainer.Offered(epoch=4, version=0, address="h", port=1, bytes=9, digest="d", plan="p", plan_bytes=7)
    assert driver.feed(late) == []
    driver.feed(delivered(events.RunStopping(reason="trained")))
    assert driver.core.done(driver.state)


def test_late_results_and_requests_of_older_epochs_have_no_effect():
    driver = Driver()
    driver.boot()
    driver.feed(delivered(asked(4)))
    assert driver.feed(trainer.Sent(epoch=3, version=0, seconds=1.0, bytes=9)) == []
    old = events.TransferStarted(epoch=3, version=0, group="g", fresh=True, members=(), world_size=3)
    assert driver.feed(delivered(old)) == []
    assert driver.feed(delivered(events.RefitFailed(epoch=3, version=0, phase="drain", reason="x"))) == []
    assert driver.feed(trainer.Loaded(version=0)) == []
    assert driver.feed(trainer.Saved(version=0, path="p", bytes=1, seconds=1.0)) == []
    assert driver.feed(trainer.Trained(version=1, metrics={}, seconds=1.0, tokens=1)) == []
    assert driver.feed(Tick()) == []
    assert driver.core.wake(driver.state) is None


def test_a_broken_or_failed_transfer_is_reported_and_abandoned():
    driver = Driver()
    driver.boot()
    driver.feed(delivered(asked(1)))
    broke = trainer.TransferBroke(epoch=1, phase="join", error="TimeoutError", reason="engine-1 never came")
    assert emitted(driver.feed(broke))[0] == events.TransferFailed(
        epoch=1, phase="join", error="TimeoutError", reason="engine-1 never came"
    )
    failed = events.RefitFailed(epoch=1, version=0, phase="join", reason="x")
    assert driver.feed(delivered(failed)) == [trainer.Abandon(1, failed.reason)]


def test_intake_never_exceeds_the_queue():
    driver = Driver()
    assert driver.core.intake(driver.state) == {}
    driver.boot()
    assert driver.core.intake(driver.state) == {"batches": QUEUE}
    for number in range(1, QUEUE + 1):
        driver.feed(batch(number))
    assert driver.core.intake(driver.state)["batches"] == 0


def test_reward_metrics_leave_out_masked_samples():
    body = batch(1, (0.0, 1.0, 1.0, 0.0), lag=2).envelope.body
    group = body.groups[0]
    masked = msgspec.structs.replace(group.samples[0], valid=False)
    metrics = reward_metrics(BatchReady(batch=0, groups=(GroupRef("t", 0, (masked, *group.samples[1:])),)))
    assert metrics["reward"] == pytest.approx(2 / 3)
    assert (metrics["samples"], metrics["masked_samples"], metrics["staleness_max"]) == (3, 1, 2)
    assert reward_metrics(BatchReady(batch=0, groups=()))["reward"] == 0.0


class World:
    """A store that redelivers unacked batches, and a disk that holds checkpoints, around the core."""

    def __init__(self, every: int) -> None:
        self.driver = Driver(steps=8, every=every)
        self.boots = 0
        self.torn = False
        self.sent = 0
        self.pending: dict[str, Delivered] = {}
        self.disk: dict[str, list[int]] = {}
        self.memory: list[int] = []
        self.ops: list[Any] = []
        self.versions: list[int] = []

    def absorb(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Ack):
                del self.pending[command.ref.entry]
            elif isinstance(command, trainer.Load | trainer.Train | trainer.Save):
                self.ops.append(command)
            elif isinstance(command, Emit) and isinstance(command.event, events.StepFinished | events.PolicyReady):
                self.versions.append(command.event.version)
        assert len(self.ops) <= 1, "one policy operation at a time"

    def crash(self) -> None:
        self.ops.clear()
        self.memory = []
        self.boots += 1
        self.absorb(self.driver.feed(Booted(self.boots)))
        for delivery in list(self.pending.values()):
            self.absorb(self.driver.feed(delivery))

    def tear(self) -> None:
        """The newest checkpoint is found torn at the next start, if there is one before it."""
        self.torn = self.driver.state.before is not None
        self.crash()

    def send(self) -> None:
        if self.driver.core.intake(self.driver.state).get("batches"):
            self.sent += 1
            delivery = batch(self.sent)
            self.pending[delivery.ref.entry] = delivery
            self.absorb(self.driver.feed(delivery))

    def perform(self) -> None:
        if not self.ops:
            return
        command = self.ops.pop()
        if isinstance(command, trainer.Load):
            if self.torn and command.path:
                self.torn = False
                self.absorb(self.driver.feed(trainer.LoadFailed(version=command.version, reason="torn")))
                return
            self.memory = list(self.disk[command.path]) if command.path else []
            self.absorb(self.driver.feed(trainer.Loaded(version=command.version)))
        elif isinstance(command, trainer.Train):
            self.memory.append(command.batch.batch)
            self.absorb(self.driver.trained())
        else:
            self.disk[f"/c/{command.version}"] = list(self.memory)
            self.absorb(self.driver.saved())


@settings(max_examples=300, deadline=None)
@given(
    every=st.integers(1, 4),
    moves=st.lists(st.sampled_from(["send", "perform", "perform", "crash", "tear"]), max_size=80),
)
def test_whatever_crashes_the_surviving_weights_saw_each_batch_once_and_in_order(every: int, moves: list[str]):
    world = World(every)
    world.crash()
    for move in moves:
        getattr(world, move)()
        assert world.memory == list(range(1, 1 + len(world.memory)))
    while world.driver.state.phase != "finished":
        world.send()
        world.perform()
    assert world.memory == list(range(1, 9))
    before = world.driver.state.before
    assert before is not None
    assert all(int(entry.partition("-")[0]) > before.step for entry in world.pending)
    assert {item.ref.entry for item in world.driver.state.covered.held} <= world.pending.keys()
    assert world.versions == sorted(set(world.versions)), "versions only rise and are never reused"


def test_states_survive_a_snapshot():
    driver = Driver(every=3)
    driver.boot()
    driver.feed(batch(1))
    driver.trained()
    encoded = msgspec.msgpack.encode(driver.state)
    assert msgspec.msgpack.decode(encoded, type=State) == driver.state


# --- engine.release --------------------------------------------------------------------------------------------------


def asking() -> Driver:
    """A trainer that shares its device with engines which give memory back; it has its first batch."""
    driver = Driver()
    driver.core = TrainerCore(RunConfig(steps=10, engine=EngineConfig(release="kv")))
    driver.boot()
    driver.now = 4.0
    driver.feed(batch(1))
    return driver


def released(step: int = 1, boot: int = 1) -> Any:
    return delivered(events.ReleaseFinished(epoch=2, step=step, trainer_boot=boot, engines=(), seconds=0.1))


def test_no_step_is_taken_before_the_engines_gave_their_memory_back():
    driver = asking()
    assert emitted(driver.commands)[-2] == events.MemoryWanted(step=1, trainer_boot=1)
    waiting = emitted(driver.commands)[-1]
    assert (waiting.on, waiting.cause) == ("refit", "engines are to give memory back for step 1 (engine.release)")
    assert not any(isinstance(c, trainer.Train) for c in driver.commands)
    assert driver.feed(batch(2)) == [], "one batch at a time"
    assert driver.feed(released(step=2)) == driver.feed(released(boot=2)) == []
    driver.now = 5.0
    ended, train = driver.feed(released())
    assert (ended.event.on, ended.event.seconds, train.step) == ("refit", 1.0, 1)
    assert driver.feed(released()) == [], "a repeat changes nothing"
    driver.now = 6.0
    driver.trained()
    assert emitted(driver.saved())[-2] == events.MemoryWanted(step=2, trainer_boot=1), "the batch that was there"


def test_a_run_that_stops_while_memory_is_asked_for_leaves_and_a_resume_asks_again():
    driver = asking()
    ended = emitted(driver.feed(delivered(events.RunStopping(reason="r"))))
    assert [(event.on, event.seconds) for event in ended] == [("refit", 0.0)]
    assert driver.core.done(driver.state)
    assert driver.feed(released()) == []
    assert events.MemoryWanted(step=1, trainer_boot=1) in emitted(
        driver.feed(delivered(events.RunStarted(config_digest="c", resumed=True)))
    )


def test_after_a_crash_memory_is_asked_for_again():
    driver = asking()
    driver.feed(Booted(2))
    assert driver.feed(released()) == []
    commands = driver.feed(trainer.Loaded(version=driver.state.version))
    assert events.MemoryWanted(step=1, trainer_boot=2) in emitted(commands)
