"""Cost of the buffer's core per trajectory, beside the least that a buffer could do.

Prints events per second of `BufferCore.step` with many groups open, microseconds per event (mean, median and 99th
percentile), and the ratio to appending the same events to lists in a dict; all in CPU time of the thread, which other
processes don't distort. Run as `python -m tests.bench.buffer_core`.
"""

from __future__ import annotations

import random
import time
from typing import Any

from actors.buffer.core import BufferCore
from config.schema import BufferConfig, RunConfig
from contracts.core import Delivered, Emit, Ref
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import (
    BatchReady,
    Member,
    PayloadRef,
    PolicyReady,
    Provenance,
    RefitCommitted,
    StepFinished,
    TrajectoryFinished,
)

GROUPS, SAMPLES, STEPS, OPEN = 64, 8, 20, 64


def main() -> None:
    arrivals = trajectories()
    core = BufferCore(RunConfig(steps=STEPS, buffer=BufferConfig(groups=GROUPS, max_staleness=STEPS)))
    state = core.initial()
    for event in (PolicyReady(version=0, step=0, parent_version=None, trainer_boot=1), commit(0)):
        state, _ = core.step(state, delivered(event, 0), 0.0)
    times: list[int] = []
    batches = most_open = 0
    for number, arrival in enumerate(arrivals):
        started = time.thread_time_ns()
        state, commands = core.step(state, arrival, float(number))
        times.append(time.thread_time_ns() - started)
        most_open = max(most_open, len(state.open))
        for command in commands:
            if isinstance(command, Emit) and isinstance(command.event, BatchReady):
                batches += 1
                state, _ = core.step(state, delivered(finished(batches), number), float(number))
    times.sort()
    seconds = sum(times) / 1e9
    baseline = append_all(arrivals)
    rate, base_rate = len(times) / seconds, len(times) / baseline
    print(f"{len(times)} trajectories, {batches} batches, up to {most_open} groups open")
    print(f"core.step    {rate:>12,.0f} events/s")
    print(f"per event    {1e6 / rate:>12.1f} us mean")
    print(f"             {times[len(times) // 2] / 1e3:>12.1f} us median")
    print(f"             {times[len(times) * 99 // 100] / 1e3:>12.1f} us 99th percentile")
    print(f"dict append  {base_rate:>12,.0f} events/s")
    print(f"ratio        {rate / base_rate:>12.4f}")


def trajectories() -> list[Delivered]:
    """Samples of `STEPS` batches; those of `OPEN` neighbouring groups arrive in random order."""
    order = random.Random(0)
    events: list[Delivered] = []
    for first in range(0, GROUPS * STEPS, OPEN):
        pairs = [(index, sample) for index in range(first, first + OPEN) for sample in range(SAMPLES)]
        order.shuffle(pairs)
        events += [delivered(trajectory(*pair), len(events) + n) for n, pair in enumerate(pairs)]
    return events


def trajectory(index: int, sample: int) -> TrajectoryFinished:
    return TrajectoryFinished(
        task=f"task-{index}",
        index=index,
        sample=sample,
        attempt=1,
        samples=SAMPLES,
        reward=float(sample % 2),
        components={},
        valid=True,
        payload=PayloadRef(f"traj:{index}:{sample}:collector-0:0", 4096),
        prompt_tokens=32,
        completion_tokens=64,
        sources=(Provenance(0, f"engine-{sample % 2}", 1),),
        seconds=1.0,
    )


def commit(version: int) -> RefitCommitted:
    return RefitCommitted(
        epoch=version + 1,
        version=version,
        step=version,
        engines=(Member("engine-0", 1), Member("engine-1", 1)),
        world_size=3,
        pause_s=0.1,
        drain_s=0.1,
        transfer_s=0.1,
        bytes=1,
    )


def finished(batch: int) -> StepFinished:
    return StepFinished(
        version=batch,
        parent_version=batch - 1,
        step=batch,
        trainer_boot=1,
        batch=batch,
        metrics={},
        seconds=1.0,
        waited_s=0.0,
        tokens=1,
        tasks=(),
    )


def delivered(event: Any, number: int) -> Delivered:
    stream = STREAM_OF[type(event)]
    envelope = Envelope(
        id=f"x:{number}.0", run="bench", stream=stream, actor="x", boot=1, epoch=0, wall_ns=0, mono_ns=0, body=event
    )
    return Delivered(Ref(stream, f"{number}-0"), envelope)


def append_all(arrivals: list[Delivered]) -> float:
    """Seconds to append every event to the list of its group."""
    started = time.thread_time()
    groups: dict[int, list[Any]] = {}
    for arrival in arrivals:
        event: Any = arrival.envelope.body
        groups.setdefault(event.index, []).append(event)
    return time.thread_time() - started


if __name__ == "__main__":
    main()
