"""What a refit costs beside drain and transfer: `python -m tests.bench.refit [--refits N]`.

Real actors on a real store in one process: coordinator, gateway, engines. First 4 engines with a real server process
each and the trainer's own gloo sender, then 32 engines whose servers answer at once. The overhead of a refit is its
pause, from `refit.requested` to `refit.committed`, less the longest drain and the longest load that an engine reports;
a load is pause, broadcast, flush and checksums. Nothing generates, so that a drain is one flush.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from actors.engine import state as engine
from actors.engine.actor import EngineShell
from actors.engine.core import EngineCore
from actors.gateway.core import GatewayCore
from actors.gateway.state import Announce, Listening
from actors.refit.actor import RefitShell
from config.schema import BrokerConfig, EngineConfig, FleetConfig, ModelConfig, RefitConfig, RunConfig
from contracts import plan
from contracts.core import Booted, Delivered, Emit
from contracts.envelope import decode
from contracts.events import (
    EngineDrained,
    EngineLoaded,
    Event,
    PayloadRef,
    PolicyReady,
    RefitCommitted,
    RefitRequested,
    StepFinished,
    TransferFinished,
    TransferOffered,
    TransferStarted,
)
from pipeline.broker import choose
from pipeline.bus import Bus
from pipeline.runtime.clock import WallClock
from pipeline.runtime.loop import Runtime

PARAMS: dict[str, Any] = {
    "vocabulary": {"texts": ["one two three four"]},
    "layers": 2,
    "width": 64,
    "heads": 4,
    "positions": 256,
}
PLAN = "plan"
LIMIT_S = 500.0
GOAL_S = 0.050


# --- a trainer that only makes versions ------------------------------------------------------------------------------


class Offer(msgspec.Struct, frozen=True):
    epoch: int
    version: int


class Send(msgspec.Struct, frozen=True):
    started: TransferStarted


class Said(msgspec.Struct, frozen=True, tag="said"):
    """What came of a command."""

    event: TransferOffered | TransferFinished


class Made(msgspec.Struct, frozen=True):
    boot: int = 0
    version: int = 0
    planned: bool = False


class VersionsCore:
    """A new version after each commit, up to `last`."""

    state_type = Made
    local_type = Said
    work: tuple[str, ...] = ()
    watch = ("refit",)

    def __init__(self, last: int) -> None:
        self._last = last

    def initial(self) -> Made:
        return Made()

    def intake(self, state: Made) -> Mapping[str, int]:
        return {}

    def wake(self, state: Made) -> float | None:
        return None

    def done(self, state: Made) -> bool:
        return False

    def step(self, state: Made, input: Any, now: float) -> tuple[Made, Sequence[Any]]:
        match input:
            case Booted(boot=boot):
                ready = PolicyReady(version=0, step=0, parent_version=None, trainer_boot=boot)
                return Made(boot, 0), (Emit(ready),)
            case Said(event=TransferOffered() as event) if not state.planned:
                return msgspec.structs.replace(state, planned=True), (Emit(event, payload=PLAN),)
            case Said(event=event):
                return state, (Emit(event),)
            case Delivered(envelope=envelope):
                return self._event(state, envelope.body)
        return state, ()

    def _event(self, state: Made, event: Event) -> tuple[Made, Sequence[Any]]:
        match event:
            case RefitRequested():
                return state, (Offer(event.epoch, event.version),)
            case TransferStarted():
                return state, (Send(event),)
            case RefitCommitted() if state.version < self._last:
                version = state.version + 1
                step = StepFinished(
                    version=version,
                    parent_version=state.version,
                    step=version,
                    trainer_boot=state.boot,
                    batch=version,
                    metrics={},
                    seconds=0.0,
                    waited_s=0.0,
                    tokens=0,
                    tasks=(),
                )
                return Made(state.boot, version, state.planned), (Emit(step),)
        return state, ()


class Quiet:
    """The parts of a shell that do nothing."""

    async def start(self, context: Any) -> None:
        self.context = context

    def payload(self, handle: str) -> bytes:
        raise KeyError(handle)

    async def close(self) -> None:
        pass


class Planned(Quiet):
    """The plan of all offers is that of the first."""

    def payload(self, handle: str) -> bytes:
        assert handle == PLAN
        return self.plan

    def offered(self, command: Offer, address: str, port: int, buckets: Any, size: int, digest: str) -> TransferOffered:
        self.plan = plan.encode(buckets)
        return TransferOffered(
            epoch=command.epoch,
            version=command.version,
            trainer_boot=1,
            address=address,
            port=port,
            bytes=size,
            digest=digest,
            payload=PayloadRef(PLAN, len(self.plan)),
        )


class GlooTrainer(Planned):
    """Sends random weights of the model's shape with the product's own sender."""

    def __init__(self, config: RunConfig, last: int) -> None:
        import torch

        from actors import models
        from actors.engine.torch_server.config import read_config
        from actors.engine.torch_server.weights import Weights
        from actors.refit.transports import choice
        from actors.refit.transports.gloo import GlooSender

        torch.set_num_threads(1)
        self.core = VersionsCore(last)
        self._sender = GlooSender("127.0.0.1", choice.bucket_bytes(config))
        directory = models.resolve("random", models.cache_dir(), PARAMS)
        weights = Weights(read_config(directory), torch.float32, torch.device("cpu"))
        weights.randomise(1)
        self._tensors = list(weights.named.items())

    async def perform(self, command: Any) -> Any:
        if isinstance(command, Offer):
            offer = await asyncio.to_thread(self._sender.offer, self._tensors)
            return Said(self.offered(command, offer.address, offer.port, offer.buckets, offer.bytes, offer.digest))
        sent = await asyncio.to_thread(self._sender.send, command.started, LIMIT_S)
        return Said(_finished(command, sent.seconds, sent.bytes))

    async def close(self) -> None:
        self._sender.close()


class InstantTrainer(Planned):
    """Its broadcast takes no time."""

    def __init__(self, last: int) -> None:
        self.core = VersionsCore(last)

    async def perform(self, command: Any) -> Any:
        if isinstance(command, Offer):
            return Said(self.offered(command, "h", 1, (), 0, "d"))
        return Said(_finished(command, 0.0, 0))


def _finished(command: Send, seconds: float, size: int) -> TransferFinished:
    return TransferFinished(epoch=command.started.epoch, version=command.started.version, seconds=seconds, bytes=size)


# --- the others ------------------------------------------------------------------------------------------------------


class Farm(msgspec.Struct, frozen=True):
    engines: tuple[engine.EngineState, ...]


class FarmCore:
    """Many real engine cores as one actor, whose servers do everything at once."""

    state_type = Farm
    local_type = engine.ServerReady
    work: tuple[str, ...] = ()
    watch = ("refit", "control")

    def __init__(self, config: RunConfig) -> None:
        self._cores = [EngineCore(f"engine-{n}", config.engine, config.refit) for n in range(config.engine.count)]

    def initial(self) -> Farm:
        return Farm(tuple(core.initial() for core in self._cores))

    def intake(self, state: Farm) -> Mapping[str, int]:
        return {}

    def wake(self, state: Farm) -> float | None:
        return None

    def done(self, state: Farm) -> bool:
        return False

    def step(self, state: Farm, input: Any, now: float) -> tuple[Farm, Sequence[Any]]:
        after, said = [], []
        for core, one in zip(self._cores, state.engines, strict=True):
            inputs = [input]
            while inputs:
                one, commands = core.step(one, inputs.pop(0), now)
                said += [c for c in commands if isinstance(c, Emit)]
                inputs += [result for c in commands if (result := _at_once(c)) is not None]
            after.append(one)
        return Farm(tuple(after)), said


def _at_once(command: Any) -> Any:
    match command:
        case engine.StartServer():
            return engine.ServerReady("http://127.0.0.1:9", 1, 0.0)
        case engine.Drain():
            return engine.Drained(command.epoch, 0.0)
        case engine.Receive():
            return engine.Loaded(command.epoch, "d", 0.0)
        case engine.Resume():
            return engine.Resumed(command.epoch)
    return None


class EngineFarm(Quiet):
    def __init__(self, config: RunConfig) -> None:
        self.core = FarmCore(config)

    async def perform(self, command: Any) -> Any:
        return None


class GateOnly(Quiet):
    """The gateway's real core without callers."""

    def __init__(self, config: RunConfig) -> None:
        self.core = GatewayCore("gateway-0", config.gateway, config.refit)

    async def perform(self, command: Any) -> Any:
        return Listening("http://127.0.0.1:9") if isinstance(command, Announce) else None


# --- a run -----------------------------------------------------------------------------------------------------------


class Fleet:
    """A run of `engines` engines that makes `refits` refits after the first one. Use `async with`."""

    def __init__(self, run_dir: Path, engines: int, refits: int, *, real: bool, log: Any = None) -> None:
        self.config = RunConfig(
            model=ModelConfig(params=PARAMS),
            engine=EngineConfig(count=engines, max_total_tokens=4096, max_running=8),
            refit=RefitConfig(),
            fleet=FleetConfig(probe_s=3600.0),
        )
        self._run_dir, self._real, self._last = run_dir, real, refits
        self._log = log or structlog.get_logger()
        self._buses: list[Bus] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Fleet:
        self._stack = contextlib.ExitStack()
        broker = self._stack.enter_context(choose({"PATH": os.defpath}, self._run_dir, BrokerConfig()))
        count = self.config.engine.count
        trainer: Any = GlooTrainer(self.config, self._last) if self._real else InstantTrainer(self._last)
        shells: dict[str, Any] = {"refit": RefitShell(self.config, "refit"), "trainer": trainer}
        shells["gateway-0"] = GateOnly(self.config)
        if self._real:
            shells |= {name: EngineShell(self.config, name) for name in (f"engine-{n}" for n in range(count))}
        else:
            shells["engine-0"] = EngineFarm(self.config)
        self._bus = await self._connect(broker.url, "bench")
        for name, shell in shells.items():
            bus = await self._connect(broker.url, name)
            log = self._log.bind(run="bench", actor=name)
            runtime = Runtime(shell, bus, "bench", name, self.config, str(self._run_dir), WallClock(), log)
            self._tasks.append(asyncio.create_task(runtime.run()))
        return self

    async def _connect(self, url: str, actor: str) -> Bus:
        self._buses.append(await Bus.connect(url, "bench", actor=actor))
        return self._buses[-1]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for bus in self._buses:
            await bus.close()
        self._stack.close()

    async def events(self) -> AsyncIterator[Event]:
        """The refit stream up to the last commit. Raises what ended an actor, `TimeoutError` after `LIMIT_S`."""
        cursor = "0-0"
        async with asyncio.timeout(LIMIT_S):
            while True:
                for task in self._tasks:
                    if task.done():
                        task.result()
                for entry in await self._bus.read_after({"refit": cursor}, count=256, block_ms=200):
                    cursor = entry.entry
                    event = decode("refit", entry.data).body
                    yield event
                    if isinstance(event, RefitCommitted) and event.version == self._last:
                        return


async def measure(engines: int, refits: int, *, real: bool) -> None:
    """Print the figures of the refits after the first."""
    drains: dict[int, float] = {}
    loads: dict[int, float] = {}
    commits: list[RefitCommitted] = []
    cpu: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with Fleet(Path(folder), engines, refits, real=real) as fleet:
            async for event in fleet.events():
                if isinstance(event, EngineDrained):
                    drains[event.epoch] = max(drains.get(event.epoch, 0.0), event.seconds)
                if isinstance(event, EngineLoaded):
                    loads[event.epoch] = max(loads.get(event.epoch, 0.0), event.seconds)
                if isinstance(event, RefitCommitted):
                    commits.append(event)
                    cpu.append(time.process_time())
    first, rest = commits[0], commits[1:]
    overhead = [c.pause_s - loads[c.epoch] - drains[c.epoch] for c in rest]
    p50 = statistics.median(overhead)
    kind = "real server processes" if real else "engines without a server"
    print(f"{engines} {kind}: refits={len(rest)} world_size={first.world_size} bytes={first.bytes}")
    print(f"  first refit, group made: pause {first.pause_s * 1e3:.1f} ms, transfer {first.transfer_s * 1e3:.1f} ms")
    for name, values in (
        ("pause", [c.pause_s for c in rest]),
        ("transfer", [c.transfer_s for c in rest]),
        ("longest drain", [drains[c.epoch] for c in rest]),
        ("longest load", [loads[c.epoch] for c in rest]),
        ("overhead", overhead),
    ):
        print(f"  {name}: p50 {statistics.median(values) * 1e3:.1f} ms, worst {max(values) * 1e3:.1f} ms")
    print(f"  computed by this process, all actors together: {(cpu[-1] - cpu[0]) / len(rest) * 1e3:.1f} ms a refit")
    print(f"  overhead p50 {p50 * 1e3:.1f} ms {'within' if p50 <= GOAL_S else 'ABOVE'} {GOAL_S * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refits", type=int, default=30)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--simulated", type=int, default=32)
    chosen = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    load, began = os.getloadavg()[0], time.perf_counter()
    asyncio.run(measure(chosen.engines, chosen.refits, real=True))
    asyncio.run(measure(chosen.simulated, chosen.refits, real=False))
    print(f"load average {load:.1f} to {os.getloadavg()[0]:.1f}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
