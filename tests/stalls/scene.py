"""A simulated run that can be sabotaged, and what `diagnose` says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from config.schema import BufferConfig, EngineConfig, LaunchConfig, RefitConfig, RolloutConfig, RunConfig
from contracts.envelope import decode
from contracts.events import RunStarted
from pipeline.simulate.shells import shells
from pipeline.simulate.world import Pace, World
from pipeline.why.diagnosis import diagnose
from pipeline.why.model import Model
from pipeline.why.result import Diagnosis, Evidence, StoreFacts

BASE = RunConfig(
    steps=500,
    engine=EngineConfig(count=2, restarts=1000),
    launch=LaunchConfig(collectors=1),
    buffer=BufferConfig(groups=4, max_staleness=1, sampler="fifo"),
    rollout=RolloutConfig(samples=4, open_groups=16),
    refit=RefitConfig(failures=1000),
)


class Scene:
    """One world. `store_facts` is what the store would say of itself."""

    def __init__(self, config: RunConfig = BASE, seed: int = 1, pace: Pace | None = None) -> None:
        self.config = config
        self.world = World(seed, pace)
        self.store_facts: StoreFacts | None = None
        for name, shell in shells(config).items():
            self.world.add(name, shell)

    def __getitem__(self, name: str) -> Any:
        return self.world.actors[name]

    def start(self) -> None:
        self.world.start()
        self.world.post(RunStarted(config_digest="stall"), "start")

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Go on for `seconds` of virtual time, or until `until()`."""
        return self.world.run(until, seconds)

    def step(self) -> int:
        state = self["trainer"].state
        return 0 if state is None else state.step

    def swallow(self, name: str, kind: type | tuple[type, ...], when: Callable[[Any], Any]) -> None:
        """Commands of `kind` for which `when(command)` is true are never performed by `name`."""
        shell: Any = self[name].shell
        perform = shell.perform

        def performs(actor: Any, command: Any) -> None:
            if not (isinstance(command, kind) and when(command)):
                perform(actor, command)

        shell.perform = performs

    def model(self) -> Model:
        model = Model()
        for entry in self.world.store.log:
            model.apply(decode(entry.stream, entry.data), int(entry.entry.partition("-")[0]))
        return model

    def evidence(self) -> Evidence:
        actors = self.world.actors
        return Evidence(
            states={name: actor.state for name, actor in actors.items() if actor.state is not None},
            alive={name: actor.machine is not None for name, actor in actors.items()} | {"recorder": True},
            store=self.store_facts,
        )

    def diagnose(self) -> Diagnosis:
        return diagnose(self.model(), self.config, self.world.now(), self.evidence())

    def diagnose_from_events(self) -> Diagnosis:
        """What the log alone tells."""
        return diagnose(self.model(), self.config, self.world.now())
