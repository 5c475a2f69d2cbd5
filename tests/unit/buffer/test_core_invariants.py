"""The buffer's invariants under any order of arrivals, failures, refits, deadlines and restarts.

A model of the run stands around the core: a source that issues under credit, engines that sample from commits, and a
trainer that trains batches in order, saves checkpoints, crashes, and goes back to them.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contracts.core import Booted
from contracts.events import (
    BatchReady,
    CreditGranted,
    EngineQuarantined,
    GroupDropped,
    Member,
    PayloadRef,
    Provenance,
    TaskIssued,
    TrajectoryRejected,
)
from tests.unit.buffer.harness import Buffer

STEPS = 5
ENGINES = (Member("engine-0", 1), Member("engine-1", 1))


class Run(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from([1, 1, 2, 3]),
        staleness=st.sampled_from([2, 1, 0, 2]),
        sampler=st.sampled_from(["fifo", "in_order", "ready_first", "windowed"]),
        policy=st.sampled_from(["shrink", "drop", "replace", "wait"]),
        skip=st.booleans(),
    )
    def begin(self, groups: int, staleness: int, sampler: str, policy: str, skip: bool) -> None:
        self.groups, self.staleness = groups, staleness
        self.buffer = Buffer(
            steps=STEPS,
            groups=groups,
            max_staleness=staleness,
            sampler=sampler,
            group_policy=policy,
            skip_flat_groups=skip,
            group_deadline_s=10.0,
        )
        self.seen = 0
        self.hole = False
        self.policy = policy
        self.issued: list[int] = []
        self.entries: dict[int, str] = {}
        self.again: list[TaskIssued] = []
        self.attempts: dict[int, set[int]] = {}
        self.sizes: dict[int, int] = {}
        self.owed: dict[int, set[int]] = {}
        self.batches: list[BatchReady] = []
        self.batched: dict[int, int] = {}
        self.dropped: set[int] = set()
        self.credit = 0
        self.serial = 0
        self.origin: dict[str, tuple[Provenance, ...]] = {}
        self.lawful: dict[str, bool] = {}
        self.steps_of = {0: 0}
        self.trained = self.saved = 0
        self.version = self.highest = 0
        self.made: list[int] = []
        self.abandoned: set[int] = set()
        self.committed: set[Provenance] = set()
        self.commit_version: int | None = None
        self.buffer.ready()
        self.commit(ENGINES)

    # --- the run around it ---

    def collect(self) -> None:
        """Follow what the buffer emitted, and issue what it grants."""
        for event in self.buffer.emitted[self.seen :]:
            if isinstance(event, CreditGranted):
                assert event.total > self.credit, "credit fell"
                self.credit = event.total
            elif isinstance(event, GroupDropped):
                assert event.index not in self.dropped, "dropped twice"
                self.dropped.add(event.index)
            elif isinstance(event, BatchReady):
                self.take(event)
            elif isinstance(event, TaskIssued) and event.only:
                assert self.policy == "replace"
                assert event.first_attempt > max(self.attempts.get(event.index, {0}))
                self.owed[event.index] |= set(event.only)
                self.again.append(event)
        self.seen = len(self.buffer.emitted)
        for event in self.again:
            self.buffer.event(event)
            self.entries[event.index] = f"{self.buffer.count}-0"
        self.again = []
        while len(self.issued) < self.credit:
            index = len(self.issued)
            self.issued.append(index)
            self.sizes[index] = 2 + index % 2
            self.owed[index] = set(range(self.sizes[index]))
            self.entries[index] = self.buffer.issue(index, self.sizes[index])

    def take(self, batch: BatchReady) -> None:
        assert batch.batch == len(self.batches) + 1, "batch numbers are dense"
        assert len(batch.groups) == self.groups
        assert len(self.batches) - self.trained < 2, "the trainer has enough in hand"
        self.batches.append(batch)
        for group in batch.groups:
            assert group.index not in self.batched, "trained twice"
            self.batched[group.index] = batch.batch
            assert sum(sample.valid for sample in group.samples) >= 2
            assert len({sample.sample for sample in group.samples}) == len(group.samples), "a sample twice"
            for sample in group.samples:
                assert self.lawful[sample.payload.key], "admitted from a source that no commit covers"
                used = {source.version for source in self.origin[sample.payload.key]}
                assert not used & self.abandoned, "trained on an abandoned version"

    def commit(self, engines: tuple[Member, ...]) -> None:
        self.commit_version = self.version
        self.committed |= {Provenance(self.version, engine.actor, engine.boot) for engine in engines}
        self.buffer.commit(self.version, self.steps_of[self.version], engines)
        self.collect()

    def deliver(self, index: int, sample: int, sources: tuple[Provenance, ...], reward: float, valid: bool) -> None:
        self.serial += 1
        key = f"p{self.serial}"
        self.origin[key] = sources
        group = self.buffer.state.open.get(index)
        attempt = 1 if group is None else group.attempts + 1
        if group is None or not group.has(sample):
            self.attempts.setdefault(index, set()).add(attempt)
        self.lawful[key] = all(s in self.committed and s.version not in self.abandoned for s in sources)
        self.owed[index].discard(sample)
        self.buffer.sample(
            index,
            sample,
            samples=self.sizes[index],
            sources=sources,
            reward=reward,
            valid=valid,
            payload=PayloadRef(key, 1),
            attempt=attempt,
        )
        self.collect()

    def save(self) -> None:
        self.saved = self.trained
        self.made = []

    def train_next(self) -> None:
        batch = self.batches[self.trained]
        for group in batch.groups:
            for sample in group.samples:
                steps = [self.steps_of[source.version] for source in self.origin[sample.payload.key]]
                lag = self.trained - min(steps, default=self.trained)
                assert sample.lag == lag, "the staleness that was promised is not that of the step"
                assert lag <= self.staleness or not sample.valid, "too stale"
        self.trained += 1
        self.highest += 1
        self.version = self.highest
        self.made.append(self.version)
        self.steps_of[self.version] = self.trained
        self.buffer.stepped(batch.batch, version=self.version, step=self.trained)
        self.collect()

    def sources(self, data: Any) -> tuple[Provenance, ...]:
        """One or two sources that commits cover, the newest first to be tried."""
        known = sorted(self.committed, key=lambda s: (-s.version, s.engine))
        newest = data.draw(st.sampled_from(known[:3]))
        return tuple({newest, data.draw(st.sampled_from([newest, newest, *known[:6]]))})

    # --- what may happen ---

    @precondition(lambda self: self.committed and any(self.owed.values()))
    @rule(data=st.data(), flat=st.booleans(), count=st.integers(1, 3))
    def groups_complete(self, data: Any, flat: bool, count: int) -> None:
        for _ in range(count):
            owed = [index for index, samples in self.owed.items() if samples]
            if owed:
                index = data.draw(st.sampled_from(owed[:4]))
                for sample in sorted(self.owed[index]):
                    self.deliver(index, sample, self.sources(data), 1.0 if flat else float(sample), True)

    @precondition(lambda self: self.committed and self.issued)
    @rule(data=st.data(), valid=st.sampled_from([True, True, False]))
    def sample_arrives(self, data: Any, valid: bool) -> None:
        """Any sample of any issued group: a new one, a duplicate, or one of a closed group."""
        index = data.draw(st.sampled_from(self.issued))
        sample = data.draw(st.integers(0, self.sizes[index] - 1))
        self.deliver(index, sample, self.sources(data), float(sample), valid)

    @precondition(lambda self: any(self.owed.values()))
    @rule(data=st.data())
    def foreign_sample_arrives(self, data: Any) -> None:
        index = data.draw(st.sampled_from([index for index, samples in self.owed.items() if samples]))
        versions = st.sampled_from(sorted(self.abandoned)) if self.abandoned else st.integers(0, self.highest + 1)
        source = Provenance(
            data.draw(versions), data.draw(st.sampled_from(ENGINES)).actor, data.draw(st.sampled_from([1, 1, 2]))
        )
        self.deliver(index, min(self.owed[index]), (source,), 1.0, True)

    @precondition(lambda self: self.issued)
    @rule(data=st.data())
    def sample_fails(self, data: Any) -> None:
        index = data.draw(st.sampled_from(self.issued))
        sample = data.draw(st.integers(0, self.sizes[index] - 1))
        self.owed[index].discard(sample)
        self.buffer.failed(index, sample, samples=self.sizes[index])
        self.collect()

    @precondition(lambda self: self.issued)
    @rule(data=st.data())
    def task_is_lost(self, data: Any) -> None:
        """Its collector gave it up, or its entry is gone: nothing more comes of it."""
        index = data.draw(st.sampled_from(self.issued))
        self.owed[index] = set()
        self.buffer.lose(self.entries[index])
        self.collect()

    @precondition(lambda self: any(self.owed.values()))
    @rule(data=st.data())
    def result_is_lost(self, data: Any) -> None:
        index = data.draw(st.sampled_from([index for index, samples in self.owed.items() if samples]))
        self.owed[index].pop()
        self.buffer.lose("0-1", stream="trajectories")
        self.hole = self.policy == "wait"
        self.collect()

    @rule(engines=st.sampled_from([ENGINES, ENGINES[:1], ENGINES[1:]]))
    def refit(self, engines: tuple[Member, ...]) -> None:
        self.commit(engines)

    @rule(engine=st.sampled_from(ENGINES))
    def quarantine(self, engine: Member) -> None:
        self.committed = {s for s in self.committed if (s.engine, s.boot) != (engine.actor, engine.boot)}
        self.buffer.event(EngineQuarantined(epoch=1, engine=engine.actor, boot=engine.boot, reason="x"))
        self.collect()

    @precondition(lambda self: len(self.batches) > self.trained)
    @rule(refit=st.booleans(), save=st.booleans())
    def train(self, refit: bool, save: bool) -> None:
        self.train_next()
        if save:
            self.save()
        if refit:
            self.commit(ENGINES)

    @precondition(lambda self: self.trained)
    @rule()
    def trainer_crashes(self) -> None:
        self.highest += 1
        self.version = self.highest
        self.trained = self.saved
        self.steps_of[self.version] = self.saved
        self.abandoned |= set(self.made)
        self.buffer.ready(version=self.version, step=self.saved, abandoned=tuple(self.made))
        self.made = []
        self.collect()

    @rule()
    def buffer_restarts(self) -> None:
        self.buffer.feed(Booted(2))
        self.collect()

    @rule(seconds=st.floats(0.5, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.buffer.now += seconds
        wake = self.buffer.core.wake(self.buffer.state)
        if wake is not None and wake <= self.buffer.now:
            self.buffer.tick(self.buffer.now)
            after = self.buffer.core.wake(self.buffer.state)
            assert after is None or after > self.buffer.now, "a deadline that has passed stays due"
        self.collect()

    # --- what must hold ---

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        state = self.buffer.state
        places = [set(self.batched), self.dropped, set(state.issued), set(state.open), set(state.ready)]
        assert sum(map(len, places)) == len(set().union(*places))
        assert set().union(*places) == set(self.issued), "an issued task is nowhere"
        assert {index for index in self.issued if index in state.closed} == set(self.batched) | self.dropped

    @invariant()
    def credit_bounds_the_groups_outstanding(self) -> None:
        outstanding = len(self.issued) - len(self.batched) - len(self.dropped)
        assert outstanding <= self.groups * (1 + self.staleness) - (self.buffer.core.batches.window - 1)
        assert len(self.issued) - len(self.dropped) <= self.groups * STEPS

    @invariant()
    def payloads_are_released_unless_they_are_in_hand_or_in_a_batch(self) -> None:
        released = self.buffer.released
        assert len(released) == len(set(released))
        in_batch = [s.payload.key for batch in self.batches for g in batch.groups for s in g.samples]
        state = self.buffer.state
        held = [s.payload.key for groups in (state.open, state.ready) for g in groups.values() for s in g.samples]
        assert sorted(released + in_batch + held) == sorted(self.origin)

    @invariant()
    def the_bytes_that_are_kept_are_those_of_the_tasks_that_may_be_issued_again(self) -> None:
        state = self.buffer.state
        tasks = [held.task for held in state.issued.values()]
        tasks += [group.issue for groups in (state.open, state.ready) for group in groups.values() if group.issue]
        assert state.kept == sum(len(task.payload) for task in tasks)

    @invariant()
    def every_delivery_is_acked(self) -> None:
        rejected = len(self.buffer.of(TrajectoryRejected))
        assert self.buffer.acked >= self.serial >= rejected

    def teardown(self) -> None:
        """Once faults stop, the run trains all its steps."""
        if not hasattr(self, "buffer"):
            return
        assert self.buffer.fold() == (self.buffer.state, self.buffer.emitted), "the same inputs gave something else"
        if self.hole:
            return  # What `wait` waits for is gone for good.
        for _ in range(40):
            if self.trained == STEPS:
                break
            # What was lost, and whoever waits for it, is settled by the deadlines.
            self.buffer.now += 11.0
            self.buffer.tick(self.buffer.now)
            self.collect()
            self.commit(ENGINES)
            source = (Provenance(self.version, "engine-0", 1),)
            for index in list(self.issued):
                for sample in sorted(self.owed[index]):
                    self.deliver(index, sample, source, float(sample), True)
            if len(self.batches) > self.trained:
                self.train_next()
        assert self.trained == STEPS, "the run stalls"


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
