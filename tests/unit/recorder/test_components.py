"""What environments and the gateway counted in samples becomes metrics of the step."""

from __future__ import annotations

from typing import Any

from actors.recorder.metrics import Row, Steps
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import PayloadRef, SampleFailed, StepFinished, TrajectoryFinished


def apply(steps: Steps, event: Any) -> Row | None:
    return steps.apply(
        Envelope(
            id="x:1.0",
            run="r",
            stream=STREAM_OF[type(event)],
            actor="x",
            boot=1,
            epoch=0,
            wall_ns=0,
            mono_ns=0,
            body=event,
        )
    )


def finished(components: dict[str, float], split: Any = "train") -> TrajectoryFinished:
    return TrajectoryFinished(
        task="t", index=0, sample=0, attempt=1, samples=2, reward=0.0, components=components, valid=True,
        payload=PayloadRef("k", 1), prompt_tokens=1, completion_tokens=1, sources=(), seconds=1.0, split=split,
    )  # fmt: skip


def failed(kind: Any) -> SampleFailed:
    return SampleFailed(task="t", index=0, sample=1, attempt=1, samples=2, failure=kind, reason="why")


def step(version: int) -> StepFinished:
    return StepFinished(
        version=version, parent_version=version - 1, step=version, trainer_boot=1, batch=version, metrics={},
        seconds=1.0, waited_s=0.0, tokens=1, tasks=(),
    )  # fmt: skip


def test_components_are_means_over_all_train_samples_since_the_row_before():
    steps = Steps()
    for event in (
        finished({"exact": 1.0}),
        finished({"exact": 0.0, "invalid_tool_calls": 3.0}),
        finished({"e": 9.0}, "eval"),
    ):
        apply(steps, event)
    row = apply(steps, step(1))
    assert row is not None
    assert row.components == {"exact": 0.5, "invalid_tool_calls": 1.5}
    assert row.flat()["component/exact"] == 0.5
    later = apply(steps, step(2))
    assert later is not None
    assert later.components == {}


def test_samples_that_left_their_episode_are_counted_whatever_became_of_them():
    steps = Steps()
    for event in (finished({"noncontiguous": 1.0}), failed("noncontiguous"), failed("infra"), finished({})):
        apply(steps, event)
    row = apply(steps, step(1))
    assert row is not None
    assert (row.noncontiguous_total, row.failed_samples_total) == (2, 2)
    assert row.flat()["total/noncontiguous"] == 2
