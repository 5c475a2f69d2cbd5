"""The source's core: dense indexes, bounded by credit, in the producer's order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.source.core import (
    PREFETCH,
    Exhausted,
    Fetched,
    FetchedTask,
    FetchTasks,
    ProducerFailed,
    SourceCore,
    State,
)
from actors.waits import QUIET_S
from config.schema import EvalConfig, ProducerConfig, RolloutConfig, RunConfig
from contracts import limits
from contracts.core import Booted, Delivered, Emit, LeaseLost, Ref, Tick
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import (
    ActorFailed,
    CreditGranted,
    DataExhausted,
    GroupDropped,
    RefitCommitted,
    RunStarted,
    RunStopping,
    TaskIssued,
    WaitEnded,
    WaitStarted,
)


class Source:
    """A core with its state and a producer of `size` train and `held_out` eval tasks that answers when told to."""

    def __init__(
        self, size: int = 10_000, held_out: int = 100, evals: EvalConfig | None = None, epochs: int | None = 1
    ) -> None:
        producer = ProducerConfig(epochs=epochs)
        self.core = SourceCore(
            RunConfig(rollout=RolloutConfig(samples=4), seed=7, eval=evals or EvalConfig(), producer=producer), "source"
        )
        self.state = self.core.initial()
        self.sizes = {"train": size, "eval": held_out}
        self.now = 0.0
        self.asked: list[FetchTasks] = []
        self.emitted: list[Any] = []

    def feed(self, input: Any) -> list[Any]:
        self.state, commands = self.core.step(self.state, input, self.now)
        self.state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=State)
        self.asked += [command for command in commands if isinstance(command, FetchTasks)]
        events = [command.event for command in commands if isinstance(command, Emit)]
        self.emitted += events
        return events

    def event(self, body: Any) -> list[Any]:
        stream = STREAM_OF[type(body)]
        envelope = Envelope(
            id="x:1.0", run="r", stream=stream, actor="x", boot=1, epoch=0, wall_ns=0, mono_ns=0, body=body
        )
        return self.feed(Delivered(Ref(stream, "1-0"), envelope))

    def credit(self, total: int) -> list[Any]:
        return self.event(CreditGranted(total=total))

    def commit(self, step: int) -> list[Any]:
        return self.event(
            RefitCommitted(
                epoch=1,
                version=step,
                step=step,
                engines=(),
                world_size=1,
                pause_s=0,
                drain_s=0,
                transfer_s=0,
                bytes=0,
            )
        )

    def answer(self) -> list[Any]:
        """Answer the oldest request."""
        asked = self.asked.pop(0)
        first = 0 if asked.cursor is None else int(asked.cursor)
        numbers = range(first, min(self.sizes[asked.split], first + asked.n))
        if not numbers:
            return self.feed(Exhausted(asked.split))
        tasks = tuple(FetchedTask(f"{asked.split}-{n}", b"{}", str(n + 1), asked.epoch) for n in numbers)
        return self.feed(Fetched(asked.split, tasks))

    def answer_all(self) -> None:
        while self.asked:
            self.answer()

    def issued(self, split: str = "train") -> list[tuple[int, str]]:
        return [(e.index, e.task) for e in self.emitted if isinstance(e, TaskIssued) and e.split == split]


def dense(count: int) -> list[tuple[int, str]]:
    return [(n, f"train-{n}") for n in range(count)]


def test_tasks_are_fetched_ahead_but_none_is_issued_without_credit() -> None:
    source = Source()
    source.feed(Booted(1))
    assert source.asked == [FetchTasks(n=PREFETCH, cursor=None, split="train")]
    source.answer()
    assert source.asked == []
    assert source.emitted == []


def test_an_issued_task_carries_what_the_collector_needs() -> None:
    source = Source()
    source.feed(Booted(1))
    source.answer()
    assert source.credit(1) == [
        TaskIssued(task="train-0", index=0, samples=4, payload=b"{}", producer="reasoning_gym", seed=7)
    ]


def test_credit_issues_what_is_ready_and_fetches_the_rest() -> None:
    source = Source()
    source.feed(Booted(1))
    source.answer()
    source.credit(20)
    assert source.issued() == dense(PREFETCH)
    source.answer_all()
    assert source.issued() == dense(20)


def test_a_repeated_or_smaller_credit_changes_nothing() -> None:
    source = Source()
    source.feed(Booted(1))
    source.answer()
    source.credit(3)
    state = source.state
    assert source.credit(3) == source.credit(2) == []
    assert source.state == state


actions = st.lists(
    st.one_of(
        st.tuples(st.just("credit"), st.integers(1, 120)),
        st.sampled_from([("answer", 0), ("boot", 0), ("stop", 0), ("start", 0)]),
    ),
    max_size=40,
)


@given(actions=actions, size=st.integers(0, 100))
def test_indexes_are_dense_in_order_and_below_the_credit_whatever_happens(
    actions: list[tuple[str, int]], size: int
) -> None:
    source = Source(size=size)
    credit = 0
    for action, value in [("boot", 0), *actions]:
        if action == "credit":
            credit = max(credit, value)
            source.credit(value)
        elif action == "answer" and source.asked:
            source.answer()
        elif action == "boot":
            source.asked.clear()
            source.feed(Booted(1))
        elif action == "stop":
            source.event(RunStopping(reason="x"))
        elif action == "start":
            source.event(RunStarted(config_digest=""))
        assert source.issued() == dense(len(source.issued()))
        assert len(source.issued()) <= credit
        assert len(source.asked) <= 1
    source.asked.clear()
    source.feed(Booted(2))
    source.answer_all()
    assert len(source.issued()) == min(credit, size)
    ends = [event for event in source.emitted if isinstance(event, DataExhausted)]
    assert ends == ([DataExhausted(issued=size)] if len(source.issued()) == size else [])


def test_a_restart_asks_again_from_behind_the_last_task_it_has() -> None:
    source = Source()
    source.feed(Booted(1))
    source.answer()
    source.credit(12)
    lost = source.asked.pop()
    source.feed(Booted(2))
    assert source.asked == [lost]
    assert lost.cursor == "16"


def test_after_stopping_nothing_is_issued_and_it_is_done() -> None:
    source = Source()
    source.feed(Booted(1))
    source.answer()
    source.event(RunStopping(reason="x"))
    assert source.core.done(source.state)
    assert source.credit(5) == []
    assert source.event(RunStarted(config_digest="", resumed=True)) != []
    assert source.issued() == dense(5)
    assert not source.core.done(source.state)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_failing_producer_ends_the_run_with_its_name_cursor_and_error(split: Any) -> None:
    source = Source()
    source.feed(Booted(1))
    failed = ProducerFailed(split=split, cursor="17", error="ValueError", message="no such file")
    (event,) = source.feed(failed)
    assert event == ActorFailed(
        actor="source",
        error="ValueError",
        message=(
            f"producer 'reasoning_gym' failed to give the next {split} task behind cursor '17': "
            "ValueError: no such file"
        ),
        fatal=True,
    )
    source.asked.clear()
    assert source.credit(5) == []
    assert source.asked == []
    assert source.core.wake(source.state) is None


def test_only_a_wait_longer_than_the_normal_rhythm_is_announced_and_then_ended() -> None:
    source = Source()
    source.feed(Booted(1))
    source.answer()
    assert source.core.wake(source.state) == QUIET_S
    source.now = 1.0
    assert source.feed(Tick()) == []
    source.now = QUIET_S
    (event,) = source.feed(Tick())
    assert event == WaitStarted(actor="source", on="buffer", cause="no credit yet for task 0")
    assert source.core.wake(source.state) is None
    assert source.feed(Tick()) == []
    source.now = 8.0
    events = source.credit(20)
    assert events[-1] == WaitEnded(actor="source", on="buffer", seconds=8.0)
    assert source.state.wait is not None
    assert source.state.wait.on == "producer"
    source.now = 13.0
    (event,) = source.feed(Tick())
    assert (event.on, event.deadline_at) == ("producer", 8.0 + RunConfig().producer.task_deadline_s)
    assert "'reasoning_gym'" in event.cause
    assert "'16'" in event.cause
    source.answer()
    assert [type(e) for e in source.emitted].count(WaitEnded) == 2


def test_a_wait_for_credit_ends_with_the_credit_although_the_next_one_follows_at_once() -> None:
    source = Source()
    source.feed(Booted(1))
    source.answer()
    source.now = QUIET_S
    (event,) = source.feed(Tick())
    assert event.on == "buffer"
    source.now = 8.0
    events = source.credit(2)
    assert events[-1] == WaitEnded(actor="source", on="buffer", seconds=8.0)
    assert source.state.wait is not None
    assert (source.state.wait.on, source.state.wait.since, source.state.wait.announced) == ("buffer", 8.0, False)


def test_an_exhausted_source_waits_for_nothing() -> None:
    source = Source(size=1)
    source.feed(Booted(1))
    source.answer_all()
    source.credit(5)
    assert source.core.wake(source.state) is None
    assert source.feed(Tick()) == []


def evaluating(held_out: int = 100, every: int = 2) -> Source:
    source = Source(held_out=held_out, evals=EvalConfig(every=every, groups=3, samples=2))
    source.feed(Booted(1))
    source.answer_all()
    return source


def test_an_evaluation_issues_the_same_held_out_tasks_below_zero_each_time() -> None:
    source = evaluating()
    source.commit(0)
    assert source.asked == [FetchTasks(n=3, cursor=None, split="eval")]
    source.answer_all()
    source.commit(1)
    source.commit(2)
    assert source.issued("eval") == [(-1 - n, f"eval-{n % 3}") for n in range(6)]
    assert {e.samples for e in source.emitted if e.split == "eval"} == {2}
    assert source.issued() == []


def test_an_evaluation_is_due_when_a_period_is_entered_even_if_its_first_step_was_skipped() -> None:
    source = evaluating(every=5)
    counts = []
    for step in (0, 4, 6, 9, 12, 11, 8, 10):
        source.commit(step)
        source.answer_all()
        counts.append(len(source.issued("eval")) // 3)
    assert counts == [1, 1, 2, 2, 3, 3, 3, 4]


def test_rounds_that_fall_due_before_the_first_can_start_are_one() -> None:
    source = evaluating(every=1)
    source.commit(0)
    source.commit(1)
    source.answer_all()
    assert len(source.issued("eval")) == 3
    source.commit(2)
    assert len(source.issued("eval")) == 6


def test_held_out_tasks_may_come_in_parts_and_are_repeated_if_too_few() -> None:
    source = evaluating(held_out=2)
    source.commit(0)
    source.feed(Fetched("eval", (FetchedTask("eval-0", b"{}", "1"),)))
    assert source.asked[-1] == FetchTasks(n=2, cursor="1", split="eval")
    source.asked = source.asked[-1:]
    source.answer_all()
    assert [task for _, task in source.issued("eval")] == ["eval-0", "eval-1", "eval-0"]


def held_out(count: int, size: int) -> Fetched:
    return Fetched("eval", tuple(FetchedTask(f"long-{n}", b"x" * size, str(n + 1)) for n in range(count)))


@pytest.mark.parametrize("count", [4, 2])
def test_held_out_tasks_that_make_evaluations_too_large_are_refused_with_the_setting(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(limits, "HELD_OUT", 6000)
    source = Source(evals=EvalConfig(every=2, groups=6))
    source.commit(2)
    source.feed(held_out(2, 1500))
    assert not source.emitted
    (failed,) = source.feed(held_out(2, 3000)) if count == 4 else source.feed(Exhausted("eval"))
    assert isinstance(failed, ActorFailed)
    assert failed.fatal
    assert failed.error == "HeldOutTooLarge"
    assert failed.message.startswith(f"producer 'reasoning_gym': {count} tasks of split 'eval' make evaluations of ")
    assert "limit 6,000: lower eval.groups=6" in failed.message
    assert source.credit(100) == []


def test_without_any_held_out_task_the_run_ends() -> None:
    source = evaluating(held_out=0)
    source.commit(0)
    (event,) = source.answer()
    assert event.fatal
    assert "eval.every=0" in event.message


def test_without_evaluation_a_commit_changes_nothing() -> None:
    source = Source()
    source.feed(Booted(1))
    state = source.state
    assert source.commit(0) == []
    assert source.event(RunStarted(config_digest="")) == []
    assert source.event(GroupDropped(task="t", index=0, reason="x", samples=0)) == []
    assert source.feed(LeaseLost(())) == []
    assert source.state == state


def test_it_has_no_work_streams() -> None:
    source = Source()
    assert source.core.work == ()
    assert source.core.intake(source.state) == {}


ACTIONS = ["answer", "credit", "crash", "stop"]

# --- passes ----------------------------------------------------------------------------------------------------------


def passes(source: Source) -> list[tuple[int, int, str]]:
    return [(e.index, e.data_epoch, e.task) for e in source.emitted if isinstance(e, TaskIssued)]


def test_a_producer_that_ends_is_asked_again_once_a_pass_and_then_the_end_is_announced():
    source = Source(size=3, epochs=2)
    source.feed(Booted(1))
    source.credit(100)
    source.answer_all()
    assert passes(source) == [(n, n // 3, f"train-{n % 3}") for n in range(6)]
    assert [event for event in source.emitted if isinstance(event, DataExhausted)] == [DataExhausted(issued=6)]


def test_without_a_number_of_passes_it_is_asked_again_for_ever():
    source = Source(size=3, epochs=None)
    source.feed(Booted(1))
    source.credit(50)
    source.answer_all()
    assert passes(source) == [(n, n // 3, f"train-{n % 3}") for n in range(50)]
    assert source.credit(60)[-1].data_epoch == 19


@pytest.mark.parametrize("epochs", [1, 3, None])
def test_a_producer_without_a_task_is_asked_once(epochs: int | None):
    source = Source(size=0, epochs=epochs)
    source.feed(Booted(1))
    source.answer_all()
    assert source.emitted == [DataExhausted(issued=0)]


@given(st.integers(1, 40), st.sampled_from([1, 2, 3]), st.lists(st.sampled_from(ACTIONS)))
def test_whenever_it_restarts_no_task_is_skipped_and_none_repeated(size: int, epochs: int, actions: list[str]):
    source = Source(size=size, epochs=epochs)
    source.feed(Booted(1))
    credit = 0
    for action in [*actions, "crash"]:
        if action == "answer" and source.asked:
            source.answer()
        elif action == "credit":
            credit += 7
            source.credit(credit)
        elif action == "crash":
            source.asked.clear()
            source.feed(Booted(2))
        elif action == "stop":
            source.event(RunStopping(reason="x"))
            source.event(RunStarted(config_digest="", resumed=True))
        assert len(passes(source)) <= credit
    source.credit(size * epochs + 1)
    source.answer_all()
    assert passes(source) == [(n, n // size, f"train-{n % size}") for n in range(size * epochs)]
    assert [event for event in source.emitted if isinstance(event, DataExhausted)] == [
        DataExhausted(issued=size * epochs)
    ]
