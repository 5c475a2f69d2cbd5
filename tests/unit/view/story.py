"""Events of a made-up run, for folds."""

from __future__ import annotations

from typing import Any

from contracts import events
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import Event


class Story:
    """Collects events, a second apart unless told otherwise."""

    def __init__(self) -> None:
        self.log: list[Envelope[Event]] = []
        self.now = 1000.0

    def add(self, event: Event, after: float = 1.0, actor: str = "test", boot: int = 1) -> Envelope[Event]:
        self.now += after
        self.log.append(
            Envelope(
                id=f"{actor}:{len(self.log) + 1}.0",
                run="r",
                stream=STREAM_OF[type(event)],
                actor=actor,
                boot=boot,
                epoch=0,
                wall_ns=int(self.now * 1e9),
                mono_ns=0,
                body=event,
            )
        )
        return self.log[-1]


def booted(actor: str, boot: int = 1) -> events.ActorBooted:
    return events.ActorBooted(actor=actor, boot=boot, pid=7, host="h")


def issued(index: int, split: Any = "train") -> events.TaskIssued:
    return events.TaskIssued(task=f"t{index}", index=index, samples=2, payload=b"{}", producer="p", seed=0, split=split)


def rolled(index: int, sample: int, tokens: int = 10) -> events.TrajectoryFinished:
    return events.TrajectoryFinished(
        task=f"t{index}",
        index=index,
        sample=sample,
        attempt=1,
        samples=2,
        reward=1.0,
        components={},
        valid=True,
        payload=events.PayloadRef(f"p{index}.{sample}", 3),
        prompt_tokens=5,
        completion_tokens=tokens,
        sources=(),
        seconds=0.1,
    )


def batch(number: int, rewards: list[float], lags: list[int] | None = None, groups: int = 1) -> events.BatchReady:
    lags = lags or [0] * len(rewards)
    samples = tuple(
        events.SampleRef(n, reward, reward >= 0, events.PayloadRef(f"p{number}.{n}", 3), lag)
        for n, (reward, lag) in enumerate(zip(rewards, lags, strict=True))
    )
    refs = [events.GroupRef(f"t{number}", number, samples)]
    refs += [events.GroupRef(f"t{number}+{n}", number, ()) for n in range(1, groups)]
    return events.BatchReady(batch=number, groups=tuple(refs))


def stepped(
    number: int, version: int | None = None, parent: int | None = None, **metrics: float
) -> events.StepFinished:
    version = number if version is None else version
    return events.StepFinished(
        version=version,
        parent_version=version - 1 if parent is None else parent,
        step=number,
        trainer_boot=1,
        batch=number,
        metrics=metrics,
        seconds=0.5,
        waited_s=0.25,
        tokens=100,
        tasks=(number,),
    )


def requested(epoch: int, version: int) -> events.RefitRequested:
    return events.RefitRequested(
        epoch=epoch, version=version, step=version, engines=(), gateways=(), drain="finish", deadline_at=0.0
    )


def committed(epoch: int, version: int, *engines: str) -> events.RefitCommitted:
    return events.RefitCommitted(
        epoch=epoch,
        version=version,
        step=version,
        engines=tuple(events.Member(engine, 1) for engine in engines or ("engine-0",)),
        world_size=3,
        pause_s=0.5,
        drain_s=0.2,
        transfer_s=0.1,
        bytes=10,
    )


def failed(actor: str, *, fatal: bool, message: str = "broke") -> events.ActorFailed:
    return events.ActorFailed(actor=actor, error="ValueError", message=message, fatal=fatal)


ACTORS = ("source", "collector-0", "buffer", "trainer", "refit", "gateway-0", "engine-0", "engine-1", "recorder")


def trained(steps: int) -> Story:
    """A run that went well for so many steps."""
    story = Story()
    story.add(events.RunStarted(config_digest=""))
    for actor in (
        "source",
        "collector-0",
        "buffer",
        "trainer",
        "refit",
        "gateway-0",
        "engine-0",
        "engine-1",
        "recorder",
    ):
        story.add(booted(actor), 0.0)
    story.add(requested(1, 0))
    story.add(committed(1, 0, "engine-0", "engine-1"))
    for number in range(1, steps + 1):
        story.add(issued(number), 0.0)
        story.add(rolled(number, 0))
        story.add(batch(number, [number / steps, 0.5], [0, 1]))
        story.add(events.BufferDepth(batch=number, ready=1, open=2, lags={0: 1, 1: 1}, flat_groups=0))
        story.add(
            stepped(number, loss=0.1, mismatch_exp=1.01, mismatch_exp_lag0=1.0, mismatch_exp_lagged=1.02, entropy=2.0)
        )
        story.add(requested(number + 1, number))
        story.add(committed(number + 1, number, "engine-0", "engine-1"))
    return story
