"""A buffer core with its state, and short ways to feed it the events of a run."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.buffer.core import BufferCore, State
from config.schema import BufferConfig, EvalConfig, RolloutConfig, RunConfig
from contracts.core import Ack, Delivered, Emit, Ref, Release, Tick
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import (
    BatchReady,
    DataLost,
    GroupDropped,
    Member,
    PayloadRef,
    PolicyReady,
    Provenance,
    RefitCommitted,
    SampleFailed,
    StepFinished,
    TaskIssued,
    TrajectoryFinished,
    TrajectoryRejected,
)

ENGINE = Member("engine-0", 1)


class Buffer:
    """A core with its state, fed events; collects what it emits."""

    def __init__(
        self,
        *,
        steps: int = 100,
        sync: bool = False,
        evals: EvalConfig | None = None,
        rollout: RolloutConfig | None = None,
        **buffer: Any,
    ) -> None:
        settings = {"groups": 2, "max_staleness": 1, "sampler": "fifo", **buffer}
        config = RunConfig(
            steps=steps,
            sync=sync,
            buffer=BufferConfig(**settings),
            eval=evals or EvalConfig(),
            rollout=rollout or RolloutConfig(),
        )
        self.core = BufferCore(config)
        self.state = self.core.initial()
        self.now = 0.0
        self.count = 0
        self.emitted: list[Any] = []
        self.released: list[str] = []
        self.acked = 0
        self.fed: list[tuple[Any, float]] = []

    def feed(self, input: Any) -> list[Any]:
        self.fed.append((input, self.now))
        self.state, commands = self.core.step(self.state, input, self.now)
        self.state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=State)
        events = [command.event for command in commands if isinstance(command, Emit)]
        self.emitted += events
        self.released += [key for command in commands if isinstance(command, Release) for key in command.keys]
        self.acked += sum(isinstance(command, Ack) for command in commands)
        return events

    def fold(self) -> tuple[State, list[Any]]:
        """State and events of another core that takes the same inputs."""
        state, events = self.core.initial(), []
        for input, now in self.fed:
            state, commands = self.core.step(state, input, now)
            events += [command.event for command in commands if isinstance(command, Emit)]
        return state, events

    def event(self, body: Any) -> list[Any]:
        self.count += 1
        stream = STREAM_OF[type(body)]
        envelope = Envelope(
            id=f"x:{self.count}.0", run="r", stream=stream, actor="x", boot=1, epoch=0, wall_ns=0, mono_ns=0, body=body
        )
        return self.feed(Delivered(Ref(stream, f"{self.count}-0"), envelope))

    def ready(self, version: int = 0, step: int = 0, abandoned: tuple[int, ...] = ()) -> list[Any]:
        body = PolicyReady(version=version, step=step, parent_version=None, trainer_boot=1, abandoned=abandoned)
        return self.event(body)

    def commit(self, version: int, step: int | None = None, engines: tuple[Member, ...] = (ENGINE,)) -> list[Any]:
        return self.event(
            RefitCommitted(
                epoch=self.count,
                version=version,
                step=version if step is None else step,
                engines=engines,
                world_size=2,
                pause_s=0,
                drain_s=0,
                transfer_s=0,
                bytes=0,
            )
        )

    def stepped(self, batch: int, version: int | None = None, step: int | None = None) -> list[Any]:
        return self.event(
            StepFinished(
                version=batch if version is None else version,
                parent_version=0,
                step=batch if step is None else step,
                trainer_boot=1,
                batch=batch,
                metrics={},
                seconds=0,
                waited_s=0,
                tokens=0,
                tasks=(),
            )
        )

    def issue(self, index: int, samples: int = 2) -> str:
        """The task of `index` as the source issues it; answers its entry."""
        task = TaskIssued(task=f"t{index}", index=index, samples=samples, payload=b"{}", producer="p", seed=0)
        self.event(task)
        return f"{self.count}-0"

    def issued_again(self) -> list[TaskIssued]:
        return [event for event in self.of(TaskIssued) if event.only]

    def lose(self, *entries: str, stream: str = "tasks") -> list[Any]:
        return self.event(DataLost(stream=stream, entries=entries, reason="unreadable"))

    def sample(
        self, index: int, sample: int, version: int = 0, reward: float | None = None, **changes: Any
    ) -> list[Any]:
        fields: dict[str, Any] = dict(
            task=f"t{index}",
            index=index,
            sample=sample,
            attempt=1,
            samples=2,
            reward=float(sample) if reward is None else reward,
            components={},
            valid=True,
            payload=PayloadRef(f"p{index}.{sample}", 1),
            prompt_tokens=1,
            completion_tokens=1,
            sources=(Provenance(version, ENGINE.actor, ENGINE.boot),),
            seconds=0.0,
        )
        return self.event(TrajectoryFinished(**{**fields, **changes}))

    def group(self, index: int, version: int = 0, **changes: Any) -> list[Any]:
        return self.sample(index, 0, version, **changes) + self.sample(index, 1, version, **changes)

    def failed(self, index: int, sample: int, **changes: Any) -> list[Any]:
        fields: dict[str, Any] = dict(
            task=f"t{index}", index=index, sample=sample, attempt=3, samples=2, failure="infra", reason="x"
        )
        return self.event(SampleFailed(**{**fields, **changes}))

    def tick(self, now: float) -> list[Any]:
        self.now = now
        return self.feed(Tick())

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.emitted if isinstance(event, kind)]

    def batches(self) -> list[list[int]]:
        return [[group.index for group in batch.groups] for batch in self.of(BatchReady)]

    def drops(self) -> list[tuple[int, str]]:
        return [(event.index, event.reason) for event in self.of(GroupDropped)]

    def rejections(self) -> list[str]:
        return [event.reason for event in self.of(TrajectoryRejected)]


def started(**settings: Any) -> Buffer:
    """A buffer whose version 0 is committed."""
    buffer = Buffer(**settings)
    buffer.ready()
    buffer.commit(0)
    return buffer
