"""The collector's core: every sample gets one result, every task one ack."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.collector.core import (
    CRASHES,
    Cancel,
    CancelAll,
    Cancelled,
    CollectorCore,
    Discard,
    GatewayGone,
    Restart,
    Rollout,
    SampleDone,
    SampleProblem,
    State,
    ThreadsStuck,
    Try,
)
from config.schema import AttemptsConfig, RolloutConfig
from contracts import limits
from contracts.core import Ack, Booted, Delivered, Emit, LeaseLost, Ref, Tick
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import (
    ActorBooted,
    GatewayReady,
    PayloadRef,
    Provenance,
    RunStarted,
    RunStopping,
    SampleFailed,
    TaskIssued,
    TrajectoryFinished,
    WaitEnded,
    WaitStarted,
)

URL = "http://127.0.0.1:1"


class Collector:
    """A core with its state; keeps the rollouts that the shell would be running."""

    def __init__(self, **config: Any) -> None:
        if isinstance(budget := config.get("attempts"), int):
            config["attempts"] = AttemptsConfig(infra=budget, timeout=budget)
        self.core = CollectorCore(RolloutConfig(**{"samples": 2, "retry_backoff_s": 1.0, **config}), "collector-0")
        self.state = self.core.initial()
        self.now = 0.0
        self.count = 0
        self.commands: list[Any] = []
        self.rollouts: list[Rollout] = []
        self.emits: list[Emit] = []
        self.acked: list[Ref] = []

    def feed(self, input: Any) -> list[Any]:
        self.state, commands = self.core.step(self.state, input, self.now)
        self.state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=State)
        self.commands += commands
        self.rollouts += [command for command in commands if isinstance(command, Rollout)]
        self.emits += [command for command in commands if isinstance(command, Emit)]
        self.acked += [command.ref for command in commands if isinstance(command, Ack)]
        return list(commands)

    def event(self, body: Any, entry: str | None = None, deliveries: int = 1) -> list[Any]:
        self.count += 1
        ref = Ref(STREAM_OF[type(body)], entry or f"{self.count}-0")
        envelope = Envelope(
            id="x:1.0", run="r", stream=ref.stream, actor="x", boot=1, epoch=0, wall_ns=0, mono_ns=0, body=body
        )
        return self.feed(Delivered(ref, envelope, deliveries))

    def gateway(self, url: str = URL) -> list[Any]:
        return self.event(GatewayReady(gateway="gateway-0", boot=1, url=url))

    def task(self, index: int = 0, samples: int = 2, split: Any = "train", deliveries: int = 1, **again: Any) -> Ref:
        self.event(
            TaskIssued(
                task=f"t{index}",
                index=index,
                samples=samples,
                payload=b"{}",
                producer="p",
                seed=0,
                split=split,
                **again,
            ),
            entry=f"{index}-7",
            deliveries=deliveries,
        )
        return Ref("tasks", f"{index}-7")

    def done(self, ref: Ref, sample: int, attempt: int = 1, handle: str = "h", mask: str | None = None) -> list[Any]:
        return self.feed(
            SampleDone(
                ref=ref,
                sample=sample,
                attempt=attempt,
                reward=0.5,
                components={"a": 1.0},
                mask_reason=mask,
                prompt_tokens=3,
                completion_tokens=4,
                sources=(Provenance(1, "engine-0", 1),),
                stop_reason="stop",
                handle=handle,
                size=9,
                seconds=1.5,
            )
        )

    def problem(self, ref: Ref, sample: int, attempt: int = 1, failure: Any = "infra") -> list[Any]:
        return self.feed(SampleProblem(ref, sample, attempt, failure, "why"))

    def gone(self, ref: Ref, *tries: Try, url: str = URL) -> list[Any]:
        return self.feed(GatewayGone(ref, tries, url, "refused"))

    def tick(self) -> list[Any]:
        wake = self.core.wake(self.state)
        assert wake is not None
        self.now = max(self.now, wake)
        return self.feed(Tick())

    def events(self, kind: type) -> list[Any]:
        return [emit.event for emit in self.emits if isinstance(emit.event, kind)]


def ready(**config: Any) -> Collector:
    collector = Collector(**config)
    collector.feed(Booted(1))
    collector.gateway()
    return collector


# --- intake and launch -----------------------------------------------------------------------------------------------


def test_no_work_is_taken_before_a_gateway_is_known() -> None:
    collector = Collector(open_groups=3)
    assert collector.core.intake(collector.state) == {}
    collector.gateway()
    assert collector.core.intake(collector.state) == {"tasks": 3}
    collector.task(0)
    assert collector.core.intake(collector.state) == {"tasks": 2}


def test_a_task_is_rolled_out_whole_at_the_gateway() -> None:
    collector = ready()
    ref = collector.task(5)
    (rollout,) = collector.rollouts
    assert (rollout.ref, rollout.task.index, rollout.url) == (ref, 5, URL)
    assert rollout.tries == (Try(0, 1), Try(1, 1))
    assert collector.core.wake(collector.state) is None


def test_a_task_that_comes_before_the_gateway_waits_for_it() -> None:
    collector = Collector()
    collector.task()
    assert collector.rollouts == []
    assert collector.core.wake(collector.state) is None
    collector.gateway()
    assert len(collector.rollouts) == 1


def test_a_task_in_hand_that_is_delivered_again_changes_nothing() -> None:
    collector = ready()
    collector.task()
    state = collector.state
    collector.task(deliveries=2)
    assert collector.state == state
    assert len(collector.rollouts) == 1


# --- results ---------------------------------------------------------------------------------------------------------


def test_a_done_sample_becomes_a_trajectory_under_the_lease_of_its_task() -> None:
    collector = ready()
    ref = collector.task(3, split="eval")
    (emit,) = collector.done(ref, 0, mask="truncated")
    assert emit.payload == "h"
    assert emit.lease == ref
    assert emit.correlation == "t3"
    assert emit.event == TrajectoryFinished(
        task="t3",
        index=3,
        sample=0,
        attempt=1,
        samples=2,
        reward=0.5,
        components={"a": 1.0},
        valid=False,
        payload=PayloadRef("traj:3:0:collector-0:0", 9),
        prompt_tokens=3,
        completion_tokens=4,
        sources=(Provenance(1, "engine-0", 1),),
        seconds=1.5,
        split="eval",
        mask_reason="truncated",
        stop_reason="stop",
    )


def test_the_entry_is_acked_with_the_last_result_and_not_before() -> None:
    collector = ready()
    ref = collector.task()
    collector.done(ref, 1)
    assert collector.acked == []
    emit, ack = collector.problem(ref, 0, failure="data")
    assert emit.event == SampleFailed(task="t0", index=0, sample=0, attempt=1, samples=2, failure="data", reason="why")
    assert emit.lease == ref
    assert ack == Ack(ref)
    assert collector.core.intake(collector.state)["tasks"] == 64


def test_payload_keys_never_repeat_over_redeliveries_and_restarts() -> None:
    collector = ready()
    for _ in range(3):
        ref = collector.task(0)
        collector.done(ref, 0)
        collector.feed(LeaseLost((ref,)))
        collector.feed(Booted(1))
    keys = [event.payload.key for event in collector.events(TrajectoryFinished)]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("failure", ["infra", "timeout"])
def test_what_another_try_may_cure_is_tried_again_with_growing_pauses_until_the_budget_is_spent(failure: Any) -> None:
    collector = ready(attempts=3)
    ref = collector.task()
    collector.done(ref, 1)
    for attempt, pause in ((1, 1.0), (2, 2.0)):
        before = collector.now
        assert collector.problem(ref, 0, attempt, failure) == []
        assert collector.core.wake(collector.state) == before + pause
        (rollout,) = collector.tick()
        assert rollout.tries == (Try(0, attempt + 1),)
    collector.problem(ref, 0, 3, failure)
    (failed,) = collector.events(SampleFailed)
    assert (failed.attempt, failed.failure) == (3, failure)
    assert collector.acked == [ref]


@pytest.mark.parametrize("failure", ["data", "noncontiguous"])
def test_what_another_try_cannot_cure_fails_at_once(failure: Any) -> None:
    collector = ready()
    ref = collector.task()
    collector.problem(ref, 0, failure=failure)
    assert [event.failure for event in collector.events(SampleFailed)] == [failure]


def test_each_kind_of_failure_has_a_budget_of_its_own_and_the_last_one_names_it() -> None:
    collector = ready(attempts=AttemptsConfig(infra=2, timeout=1, data=1, noncontiguous=2))
    ref = collector.task()
    collector.problem(ref, 0, 1, "infra")
    collector.tick()
    collector.problem(ref, 0, 2, "noncontiguous")
    collector.tick()
    assert collector.events(SampleFailed) == []
    collector.problem(ref, 0, 3, "infra")
    collector.problem(ref, 1, 1, "timeout")
    first, second = collector.events(SampleFailed)
    assert (first.sample, first.failure, first.attempt) == (0, "infra", 3)
    assert first.reason.endswith("(failure 2 of rollout.attempts.infra=2)")
    assert (second.sample, second.failure, second.attempt) == (1, "timeout", 1)
    assert collector.acked == [ref]


def test_a_task_that_is_issued_again_tries_only_what_is_missing_with_attempts_of_its_own() -> None:
    collector = ready(attempts=2)
    ref = collector.task(samples=4, only=(1, 3), first_attempt=4)
    (rollout,) = collector.rollouts
    assert rollout.tries == (Try(1, 4), Try(3, 4))
    collector.done(ref, 1, attempt=4)
    collector.problem(ref, 3, 4)
    (again,) = collector.tick()
    assert again.tries == (Try(3, 5),)
    collector.problem(ref, 3, 5)
    assert collector.acked == [ref]
    assert [event.sample for event in collector.events(SampleFailed)] == [3]


def test_pauses_are_bounded() -> None:
    collector = ready(attempts=50)
    ref = collector.task()
    for attempt in range(1, 40):
        collector.problem(ref, 0, attempt)
        collector.tick()
    assert collector.now <= 39 * 30.0


def test_samples_due_at_different_times_go_out_separately_and_together_if_due_together() -> None:
    collector = ready(samples=3)
    ref = collector.task(samples=3)
    collector.problem(ref, 0)
    collector.problem(ref, 1)
    collector.now = 0.5
    collector.problem(ref, 2)
    (first,) = collector.tick()
    (second,) = collector.tick()
    assert first.tries == (Try(0, 2), Try(1, 2))
    assert second.tries == (Try(2, 2),)


def test_results_of_another_attempt_or_a_settled_sample_are_thrown_away() -> None:
    collector = ready()
    ref = collector.task()
    collector.problem(ref, 0)
    assert collector.done(ref, 0, attempt=1, handle="late") == [Discard("late")]
    collector.done(ref, 1)
    assert collector.done(ref, 1, handle="twice") == [Discard("twice")]
    assert collector.problem(ref, 1) == []
    assert collector.gone(ref, Try(1, 1)) == []
    assert collector.done(Ref("tasks", "9-9"), 0, handle="foreign") == [Discard("foreign")]


def test_no_more_tasks_are_taken_than_a_state_can_hold_if_each_is_as_large_as_one_may_be() -> None:
    collector = ready(open_groups=1000)
    full = limits.TASKS // limits.TASK
    assert collector.core.intake(collector.state) == {"tasks": full}
    collector.task(0)
    assert collector.core.intake(collector.state) == {"tasks": full - 1}, "the next may be large"
    held = collector.state.open["0-7"]
    large = msgspec.structs.replace(held.task, payload=b" " * limits.TASK)
    for index in range(1, 200):
        tasks = {**collector.state.open, f"{index}-7": msgspec.structs.replace(held, task=large)}
        collector.state = msgspec.structs.replace(collector.state, open=tasks)
        assert collector.core.intake(collector.state)["tasks"] == max(0, full - 1 - index)


# --- gateway ---------------------------------------------------------------------------------------------------------


def test_while_nobody_answers_samples_wait_without_using_up_attempts() -> None:
    collector = ready(attempts=1, deadline_s=60.0)
    ref = collector.task()
    (emit,) = collector.gone(ref, Try(0, 1), Try(1, 1))
    assert emit.event == WaitStarted(
        actor="collector-0", on="gateway", cause=f"nobody answers at {URL}: refused", deadline_at=60.0
    )
    for _ in range(20):
        (rollout,) = collector.tick()
        assert rollout.tries == (Try(0, 1), Try(1, 1))
        assert collector.gone(ref, *rollout.tries) == []
    assert collector.events(SampleFailed) == []


def test_in_an_outage_only_one_task_probes_and_a_result_ends_it() -> None:
    collector = ready()
    ref = collector.task()
    collector.gone(ref, Try(0, 1))
    assert collector.core.intake(collector.state) == {"tasks": 0}
    collector.done(ref, 1)
    assert collector.events(WaitEnded) == [WaitEnded(actor="collector-0", on="gateway", seconds=0.0)]
    assert collector.core.intake(collector.state) == {"tasks": 63}
    collector.tick()
    collector.gone(ref, Try(0, 1))
    collector.feed(LeaseLost((ref,)))
    assert collector.core.intake(collector.state) == {"tasks": 1}


def test_an_outage_past_its_deadline_uses_up_attempts() -> None:
    collector = ready(attempts=2, deadline_s=10.0)
    ref = collector.task()
    collector.gone(ref, Try(0, 1), Try(1, 1))
    collector.now = 10.0
    (rollout,) = collector.tick()
    collector.gone(ref, *rollout.tries)
    (rollout,) = collector.tick()
    assert rollout.tries == (Try(0, 2), Try(1, 2))
    collector.gone(ref, *rollout.tries)
    assert [event.failure for event in collector.events(SampleFailed)] == ["infra", "infra"]
    assert collector.acked == [ref]


def test_a_gateway_that_comes_back_gets_what_waited_at_once() -> None:
    collector = ready(retry_backoff_s=9.0)
    ref = collector.task()
    collector.gone(ref, Try(0, 1), Try(1, 1))
    collector.now = 2.0
    emit, rollout = collector.gateway("http://127.0.0.1:2")
    assert emit.event == WaitEnded(actor="collector-0", on="gateway", seconds=2.0)
    assert rollout.url == "http://127.0.0.1:2"
    # What was on its way to the old address learns of its death later: it goes to the new one.
    (again,) = collector.gone(ref, *rollout.tries, url=URL)
    assert again.url == "http://127.0.0.1:2"
    assert collector.state.outage is None


def test_a_new_gateway_does_not_cut_a_backoff_short_without_an_outage() -> None:
    collector = ready()
    ref = collector.task()
    collector.problem(ref, 0)
    assert collector.gateway("http://127.0.0.1:2") == []


# --- life ------------------------------------------------------------------------------------------------------------


def test_a_boot_rolls_out_again_what_has_no_result() -> None:
    collector = ready()
    ref = collector.task()
    collector.done(ref, 0)
    other = collector.task(1)
    collector.problem(other, 1)
    collector.gone(other, Try(0, 1))
    events = collector.feed(Booted(2))
    rollouts = [command for command in events if isinstance(command, Rollout)]
    assert [(rollout.ref, rollout.tries) for rollout in rollouts] == [
        (ref, (Try(1, 1),)),
        (other, (Try(0, 1), Try(1, 2))),
    ]
    assert collector.state.outage is None


def test_a_task_during_which_the_collector_keeps_dying_is_given_up() -> None:
    collector = ready()
    ref = collector.task()
    for boot in range(CRASHES):
        assert collector.acked == []
        assert collector.core.holds(collector.state, ref)
        collector.feed(Booted(boot + 2))
    assert [event.reason for event in collector.events(SampleFailed)] == [
        "the collector crashed 5 times during this task"
    ] * 2
    assert collector.acked == [ref]
    assert not collector.core.holds(collector.state, ref)


@pytest.mark.parametrize("left", [True, False], ids=["left", "killed-while-leaving"])
def test_a_task_survives_any_number_of_stops_that_were_ordered(left: bool) -> None:
    collector = ready()
    ref = collector.task()
    for session in range(CRASHES + 3):
        collector.event(RunStopping(reason="interrupted"))
        if left:
            collector.feed(Cancelled())
        collector.feed(Booted(session + 2))
        collector.event(RunStarted(config_digest="", resumed=True))
        collector.event(RunStopping(reason="interrupted"))
        collector.event(RunStarted(config_digest="", resumed=True))
        assert collector.core.holds(collector.state, ref)  # else the bus would bury it for its deliveries
    assert collector.events(SampleFailed) == []
    assert collector.rollouts[-1].tries == (Try(0, 1), Try(1, 1))
    for boot in range(CRASHES):
        assert collector.acked == []
        collector.feed(Booted(boot + 20))
    assert collector.acked == [ref]


def test_a_lost_task_is_cancelled_and_forgotten() -> None:
    collector = ready()
    ref, kept = collector.task(0), collector.task(1)
    assert collector.feed(LeaseLost((ref, Ref("tasks", "77-0")))) == [Cancel(ref)]
    assert collector.done(ref, 0) == [Discard("h")]
    collector.done(kept, 0)
    assert len(collector.events(TrajectoryFinished)) == 1


def test_stopping_cancels_without_acking_and_a_resume_goes_on() -> None:
    collector = ready()
    ref = collector.task()
    assert collector.event(RunStopping(reason="x")) == [CancelAll()]
    assert collector.core.intake(collector.state) == {}
    assert not collector.core.done(collector.state)
    collector.problem(ref, 1)
    assert collector.core.wake(collector.state) is None
    collector.done(ref, 0)
    collector.feed(Cancelled())
    assert collector.core.done(collector.state)
    assert collector.acked == []
    (rollout,) = collector.event(RunStarted(config_digest="", resumed=True))
    assert rollout.tries == (Try(1, 2),)
    assert collector.feed(Cancelled()) == []
    assert not collector.core.done(collector.state)


def test_stuck_threads_end_the_process() -> None:
    collector = ready()
    assert collector.feed(ThreadsStuck(8, "producer 'p'")) == [Restart("8 threads are stuck: producer 'p'")]


def test_events_that_say_nothing_to_it_change_nothing() -> None:
    collector = ready()
    state = collector.state
    assert collector.event(ActorBooted(actor="x", boot=1, pid=1, host="h")) == []
    assert collector.event(RunStarted(config_digest="")) == []
    assert collector.feed(LeaseLost(())) == []
    assert collector.state == state


class Rollouts(RuleBasedStateMachine):
    """Results, failures, outages, restarts and lost leases in any order."""

    @initialize()
    def begin(self) -> None:
        self.collector = ready(open_groups=4, attempts=2, deadline_s=5.0)
        self.next = 0
        self.running: dict[tuple[str, int], tuple[Ref, int]] = {}
        self.mine: dict[str, int] = {}
        self.seen = 0

    def collect(self) -> None:
        """Follow what the shell was told since."""
        for command in self.collector.commands[self.seen :]:
            if isinstance(command, Rollout):
                for each in command.tries:
                    key = (command.ref.entry, each.sample)
                    assert key not in self.running, "a sample runs twice"
                    self.running[key] = (command.ref, each.attempt)
            elif isinstance(command, Ack):
                assert self.mine.pop(command.ref.entry) == 0, "acked with samples owed"
            elif isinstance(command, Emit) and isinstance(command.event, TrajectoryFinished | SampleFailed):
                assert command.lease is not None
                self.mine[command.lease.entry] -= 1
        self.seen = len(self.collector.commands)

    @precondition(lambda self: self.collector.core.intake(self.collector.state).get("tasks", 0))
    @rule(samples=st.integers(2, 3))
    def deliver(self, samples: int) -> None:
        self.mine[f"{self.next}-7"] = samples
        self.collector.task(self.next, samples)
        self.next += 1
        self.collect()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "infra", "timeout", "data", "gone", "gone_elsewhere"]))
    def result(self, data: Any, outcome: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        ref, attempt = self.running.pop(key)
        if outcome == "done":
            self.collector.done(ref, key[1], attempt)
        elif outcome.startswith("gone"):
            self.collector.gone(ref, Try(key[1], attempt), url=URL if outcome == "gone" else "http://old")
        else:
            self.collector.problem(ref, key[1], attempt, outcome)
        self.collect()

    @rule(seconds=st.floats(0.1, 4.0))
    def wait(self, seconds: float) -> None:
        self.collector.now += seconds
        wake = self.collector.core.wake(self.collector.state)
        if wake is not None and wake <= self.collector.now:
            self.collector.feed(Tick())
            assert self.collector.core.wake(self.collector.state) != wake
        self.collect()

    @rule()
    def restart(self) -> None:
        self.running.clear()
        self.collector.feed(Booted(2))
        self.collect()

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        entry = data.draw(st.sampled_from(sorted(self.mine)))
        del self.mine[entry]
        self.running = {key: value for key, value in self.running.items() if key[0] != entry}
        self.collector.feed(LeaseLost((Ref("tasks", entry),)))
        self.collect()

    @rule()
    def gateway(self) -> None:
        self.collector.gateway()
        self.collect()

    @invariant()
    def every_owed_sample_runs_or_waits(self) -> None:
        state = self.collector.state
        assert set(state.open) == set(self.mine)
        for entry, task in state.open.items():
            running = {sample for owner, sample in self.running if owner == entry}
            assert running | set(task.waiting) == set(task.attempts)
            assert not running & set(task.waiting)
            assert len(task.attempts) == self.mine[entry]

    def teardown(self) -> None:
        """Once results come, every task ends."""
        if not hasattr(self, "collector"):
            return
        for _ in range(200):
            for key, (ref, attempt) in sorted(self.running.items()):
                del self.running[key]
                self.collector.done(ref, key[1], attempt)
                self.collect()
            if self.collector.core.wake(self.collector.state) is None:
                break
            self.collector.tick()
            self.collect()
        assert self.mine == {}


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
