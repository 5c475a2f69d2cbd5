"""The buffer with all other cores around it, on virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from actors.buffer.core import State
from actors.collector import core as collector
from config.schema import BufferConfig, EngineConfig, LaunchConfig, RefitConfig, RolloutConfig, RunConfig
from contracts.envelope import decode
from contracts.events import DataLost, GroupDropped, RunStarted, SampleFailed, StepFinished, TaskIssued
from pipeline.simulate.run import Result, simulate
from pipeline.simulate.shells import shells
from pipeline.simulate.world import Pace, World
from pipeline.verify import Verifier

WIDE = Pace(generate=(0.05, 2.0), train=(0.2, 0.4))
"""Some rollouts take many steps' time; with interrupted drains they go on over refits."""


def config(steps: int = 10, sync: bool = False, **buffer: Any) -> RunConfig:
    return RunConfig(
        steps=steps,
        sync=sync,
        engine=EngineConfig(count=2),
        launch=LaunchConfig(collectors=2),
        buffer=BufferConfig(groups=4, **buffer),
        rollout=RolloutConfig(samples=2, open_groups=8),
        refit=RefitConfig(drain="interrupt"),
    )


def drops(result: Result) -> Counter[str]:
    return Counter(event.body.reason for event in result.log() if isinstance(event.body, GroupDropped))


@pytest.mark.parametrize("buffer", [{}, {"sampler": "windowed"}, {"sampler": "windowed", "window": 9}])
def test_stragglers_are_trained_by_default_and_in_a_window(buffer: dict[str, Any]):
    result = simulate(config(max_staleness=2, **buffer), 1, pace=WIDE)
    assert result.ok
    assert drops(result) == {}
    assert result.summary.tasks == 40


def test_first_come_first_trained_loses_stragglers():
    result = simulate(config(max_staleness=2, sampler="fifo"), 1, pace=WIDE)
    assert result.ok
    assert set(drops(result)) == {"stale"}


# --- credit ----------------------------------------------------------------------------------------------------------


class Stage:
    """All cores on virtual time; tasks in `lost` and results in `lost_results` vanish when somebody reads them."""

    def __init__(self, config: RunConfig, lost: tuple[int, ...] = (), lost_results: tuple[int, ...] = ()) -> None:
        self.config = config
        self.world = World(1, Pace())
        self.vanishing = {"tasks": set(lost), "trajectories": set(lost_results)}
        self._read_new = self.world.store.read_new
        self.world.store.read_new = self.read_new  # type: ignore[method-assign]
        for name, shell in shells(config).items():
            self.world.add(name, shell)
        self.world.start()
        self.world.post(RunStarted(config_digest="x"), "start")

    def read_new(self, stream: str, actor: str, count: int) -> list[Any]:
        kept = []
        for item in self._read_new(stream, actor, count):
            event: Any = decode(stream, item.data).body
            if stream in self.vanishing and event.index in self.vanishing[stream]:
                self.vanishing[stream].discard(event.index)
                del self.world.store.streams[stream].pending[int(item.entry.partition("-")[0])]
                gone = DataLost(stream=stream, entries=(item.entry,), reason="unreadable")
                self.world.post(gone, f"lost-{item.entry}")
            else:
                kept.append(item)
        return kept

    def events(self, kind: type[Any]) -> list[Any]:
        log = [decode(entry.stream, entry.data) for entry in self.world.store.log]
        return [envelope.body for envelope in log if isinstance(envelope.body, kind)]

    def run(self, limit_s: float) -> bool:
        trainer = self.world.actors["trainer"]
        return self.world.run(lambda: trainer.state is not None and trainer.state.phase == "finished", limit_s)

    def broken(self) -> list[Any]:
        log = (decode(entry.stream, entry.data) for entry in self.world.store.log)
        return Verifier.of(self.config).apply_all(log).findings()

    @property
    def buffer(self) -> State:
        return self.world.actors["buffer"].state


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_trainer_that_stops_stops_generation_within_the_staleness_window(sync: bool, staleness: int):
    stage = Stage(config(steps=50, sync=sync, max_staleness=staleness))
    stage.world.run(lambda: len(stage.events(StepFinished)) >= 3, 60.0)
    stage.world.actors["trainer"].pause(1e9)
    stage.world.run(lambda: False, 300.0)
    issued, steps = len(stage.events(TaskIssued)), len(stage.events(StepFinished))
    window = 0 if sync else staleness
    committed = stage.buffer.committed or 0
    assert issued == 4 * (committed + 1 + window)
    assert committed <= steps <= 4
    assert issued - 4 * steps <= 4 * (1 + window)


@pytest.mark.parametrize("policy", ["shrink", "drop", "wait", "replace"])
@pytest.mark.parametrize("sync", [False, True])
def test_lost_tasks_give_their_credit_back_and_the_run_goes_on(sync: bool, policy: str):
    stage = Stage(config(steps=6, sync=sync, max_staleness=1, group_policy=policy), lost=(0, 1, 2, 3, 9))
    assert stage.run(120.0), "the run stalls"
    assert stage.broken() == []
    dropped = {event.index: event.reason for event in stage.events(GroupDropped)}
    assert dropped == ({} if policy == "replace" else dict.fromkeys((0, 1, 2, 3, 9), "lost"))


@pytest.mark.parametrize("policy", ["shrink", "drop", "replace"])
def test_lost_results_give_their_credit_back_at_the_deadline(policy: str):
    buffer = {"max_staleness": 1, "group_policy": policy, "group_deadline_s": 5.0}
    stage = Stage(config(steps=6, sync=True, **buffer), lost_results=(0, 5))
    assert stage.run(120.0), "the run stalls"
    assert stage.broken() == []


def test_samples_that_fail_for_good_give_their_credit_back(monkeypatch: pytest.MonkeyPatch):
    stage = Stage(config(steps=6, sync=True))
    shell = stage.world.actors["collector-0"].shell
    done = shell._result  # type: ignore[attr-defined]

    def result(actor: Any, command: Any, attempt: Any, spans: Any, started: float) -> Any:
        ended = done(actor, command, attempt, spans, started)
        return (
            collector.SampleProblem(command.ref, attempt.sample, attempt.attempt, "data", "bad row")
            if (command.task.index % 3 == 1)
            else ended
        )

    monkeypatch.setattr(shell, "_result", result)
    assert stage.run(300.0), "the run stalls"
    assert stage.broken() == []
    failed = {event.index for event in stage.events(SampleFailed)}
    assert failed
    assert failed == {event.index for event in stage.events(GroupDropped) if event.reason == "too_few_valid"}
