"""Every command of every core ends in time, every call of a client does, and each of them says what came of it.

The commands are read from the shells, the calls from the clients: one that is added without an end here fails.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from actors import models, registry
from actors.engine import actor as engine_actor
from actors.engine import client as engine_client
from actors.engine import colocated, operations
from actors.engine.client import CallError, HttpEngineClient
from actors.engine.server import Server
from actors.engine.state import (
    Abandon,
    Drain,
    DrainFailed,
    LoadFailed,
    Receive,
    Release,
    Resume,
    ServerDead,
    StartServer,
    Watch,
)
from actors.gateway import client as gateway_client
from actors.gateway.client import DeadlineProblem, GatewayClient
from actors.refit.probes import Prober
from actors.refit.state import Missed
from actors.refit.state import Watch as Probe
from actors.refit.transports import Sender
from actors.trainer import actor as trainer_actor
from actors.trainer import checkpoint
from actors.trainer.actor import TrainerShell
from actors.trainer.state import Load, Offer, Prune, Save, Train, TransferBroke, Unpruned
from config.schema import EngineConfig, FleetConfig, LaunchConfig, RunConfig, TrainerConfig
from contracts.core import ARCHIVED_CHECKPOINT, Overdue
from contracts.engine import EngineClient
from contracts.events import BatchReady, MemoryWanted
from contracts.trajectory import Sampling
from pipeline.cores import core_of
from tests.unit.engine.driver import Driver
from tests.unit.engine.world import PLAN
from tests.unit.refit.drive import Drive

ROOT = Path(__file__).parents[3]
SOON_S = 0.2
"""Deadlines of these tests."""
LATE_S = 20.0
"""A call that is not over by then has no deadline."""

ENDS: dict[str, tuple[str, str]] = {
    "collector.Rollout": ("setting rollout.deadline_s", "SampleProblem"),
    "collector.Cancel": ("at once", ""),
    "collector.CancelAll": ("at once", "Cancelled"),
    "collector.Discard": ("at once", ""),
    "collector.Restart": ("at once", ""),
    "engine.StartServer": ("setting launch.start_deadline_s", "ServerDead"),
    "engine.Watch": ("constant actors.engine.actor.PROBE_DEADLINE_S", "ServerDead"),
    "engine.Drain": ("field deadline_at", "DrainFailed"),
    "engine.Release": ("field deadline_at", "ServerDead"),
    "engine.Receive": ("field deadline_at", "LoadFailed"),
    "engine.Resume": ("constant actors.engine.operations.CALL_S", "ServerDead"),
    "engine.Abandon": ("constant actors.engine.operations.CALL_S", "ServerDead"),
    "engine.Exit": ("at once", ""),
    "gateway.Call": ("setting gateway.request_deadline_s", "CallFailed"),
    "gateway.AbortCall": ("field deadline_at", ""),
    "gateway.Reply": ("at once", ""),
    "gateway.Refuse": ("at once", ""),
    "gateway.Announce": ("at once", "Listening"),
    "gateway.AbortAll": ("constant actors.gateway.actor.ABORT_TIMEOUT_S", ""),
    "recorder.Follow": ("setting broker.outage_s", ""),
    "recorder.Flush": ("at once", "Flushed"),
    "recorder.Trim": ("setting broker.outage_s", ""),
    "refit.FsyncHigh": ("at once", "HighWritten"),
    "refit.Watch": ("setting fleet.probe_deadline_s", "Missed"),
    "refit.Log": ("at once", ""),
    "source.FetchTasks": ("setting producer.task_deadline_s", "ProducerFailed"),
    "trainer.Load": ("setting trainer.start_deadline_s", "LoadFailed"),
    "trainer.Train": ("setting trainer.step_deadline_s", "Trained"),
    "trainer.Save": ("setting trainer.step_deadline_s", "Saved"),
    "trainer.Prune": ("constant actors.trainer.actor.PRUNE_S", "Unpruned"),
    "trainer.Offer": ("field timeout", "TransferBroke"),
    "trainer.Send": ("field timeout", "TransferBroke"),
    "trainer.Abandon": ("at once", ""),
}
"""Command -> what bounds it, and the input that tells the core when that has passed (or what came of it).

`at once`: it waits for nobody; it computes, writes to a disk, or puts something down. A loss of the store during
`Follow`, `Trim` or any commit ends the process after broker.outage_s, and what hangs on the policy's thread ends it
after its deadline; its successor begins anew.
"""


def performed(kind: str) -> list[tuple[str, type]]:
    """The commands that the shell of an actor performs."""
    module = import_module(f"actors.{kind}.actor")
    tree = ast.parse(inspect.getsource(module))
    performs = [n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef) and n.name == "perform"]
    cases = [c.pattern for perform in performs for n in ast.walk(perform) if isinstance(n, ast.Match) for c in n.cases]
    names = [ast.unparse(pattern.cls) for pattern in cases if isinstance(pattern, ast.MatchClass)]
    return [(f"{kind}.{name}", getattr(module, name)) for name in names]


COMMANDS = [command for kind in registry.KINDS for command in performed(kind)]


def test_every_command_of_every_core_says_how_it_ends() -> None:
    assert sorted(ENDS) == sorted(name for name, _ in COMMANDS)


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_what_bounds_a_command_is_there_and_its_end_is_heard(name: str, command: type) -> None:
    bound, outcome = ENDS[name]
    how, _, what = bound.partition(" ")
    match how:
        case "field":
            assert what in inspect.signature(command).parameters
        case "setting":
            section, _, field = what.partition(".")
            assert getattr(getattr(RunConfig(), section), field) > 0
        case "constant":
            module, _, constant = what.rpartition(".")
            assert getattr(import_module(module), constant) > 0
        case _:
            assert bound == "at once"
    kind = name.partition(".")[0]
    local = core_of(RunConfig(), f"{kind}-0" if kind in ("engine", "gateway", "collector") else kind).local_type
    heard = {each.__name__ for each in get_args(local) or (local,)}
    assert outcome in {"", *heard}


# --- a peer that takes calls and never answers -----------------------------------------------------------------------


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    """The URL of one."""
    held: list[Any] = []
    server = await asyncio.start_server(lambda *streams: held.append(streams), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for _, writer in held:
        writer.close()
    server.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "FLUSH_GRACE_S", SOON_S)
    monkeypatch.setattr(gateway_client, "PROMPT_S", SOON_S)
    monkeypatch.setattr(gateway_client, "MARGIN_S", SOON_S)
    monkeypatch.setattr(operations, "CALL_S", SOON_S)
    for name in ("CALL_S", "PROBE_S", "PROBE_DEADLINE_S"):
        monkeypatch.setattr(engine_actor, name, SOON_S)


def arguments(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Something for every parameter that has no default."""
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is inspect.Parameter.empty]
    fill = {
        "tensors": (),
        "buckets": ((),),
        "parts": ("{}",),
        "body": {},
        "port": 1,
        "offset": 1,
        "world_size": 2,
        "ahead": 1,
    } | given
    return {name: fill.get(name, "x") for name in needed if name != "self"} | given


def calls(kind: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(kind, inspect.iscoroutinefunction) if name[0] != "_"]


@pytest.mark.parametrize("name", [name for name in calls(HttpEngineClient) if name != "close"])
async def test_a_call_of_an_engine_ends_at_its_deadline(silent: str, name: str) -> None:
    client = HttpEngineClient(silent)
    call = getattr(client, name)
    async with asyncio.timeout(LATE_S):
        if name == "healthy":
            assert not await call(SOON_S)
        else:
            with pytest.raises(CallError, match="deadline of") as raised:
                await call(**arguments(call, {"timeout": SOON_S}))
            assert raised.value.status is None
    await client.close()


async def test_a_request_that_is_passed_on_ends_at_its_deadline(silent: str) -> None:
    client = HttpEngineClient(silent)
    async with asyncio.timeout(LATE_S):
        with pytest.raises(CallError, match="deadline of"):
            async with client.forward("/generate", b"{}", SOON_S):
                pass
    await client.close()


def test_the_protocol_of_an_engine_has_a_deadline_in_every_call() -> None:
    for kind in (EngineClient, HttpEngineClient):
        for name in calls(kind):
            parameters = inspect.signature(getattr(kind, name)).parameters
            assert name == "close" or parameters["timeout"].default is inspect.Parameter.empty, name
    assert inspect.signature(Sender.send).parameters["timeout"].default is inspect.Parameter.empty


@pytest.mark.parametrize("name", [name for name in calls(GatewayClient) if name != "close"])
async def test_a_call_of_a_gateway_ends_at_its_deadline(silent: str, name: str) -> None:
    client = GatewayClient(silent)
    given = {"sampling": Sampling(temperature=1.0, max_new_tokens=1), "deadline_s": SOON_S, "noncontiguous": "error"}
    call = getattr(client, name)
    async with asyncio.timeout(LATE_S):
        with pytest.raises(DeadlineProblem):
            await call(**{k: v for k, v in arguments(call, given).items() if k in inspect.signature(call).parameters})
    await client.close()


async def test_a_probe_of_the_fleet_ends_at_its_deadline(silent: str) -> None:
    heard: asyncio.Queue[Any] = asyncio.Queue()
    prober = Prober(FleetConfig(probe_s=0.01, probe_deadline_s=SOON_S), heard.put_nowait)
    prober.watch(Probe("engine-0", 1, silent))
    async with asyncio.timeout(LATE_S):
        assert isinstance(await heard.get(), Missed)
    await prober.close()


# --- the sidecar, whose server does not answer -----------------------------------------------------------------------


def receive(address: str = "127.0.0.1") -> Receive:
    deadline_at = time.time() + SOON_S
    return Receive(1, 1, "g", True, None, 1, 2, address, 1, PLAN.key, deadline_at)


SILENCE: dict[str, tuple[Callable[[], Any], type]] = {
    "StartServer": (lambda: StartServer(0.0), ServerDead),
    "Watch": (Watch, ServerDead),
    "Drain": (lambda: Drain(1, time.time(), time.time() + SOON_S), DrainFailed),
    "Release": (lambda: Release(1, time.time(), time.time() + SOON_S), ServerDead),
    "Receive": (receive, LoadFailed),
    "Resume": (lambda: Resume(1), ServerDead),
    "Abandon": (lambda: Abandon(1, "g"), ServerDead),
}
"""Commands of the engine's core -> what its sidecar says when the server answers nothing."""


def test_every_command_of_the_sidecar_is_tried_on_a_silent_server() -> None:
    names = {name.partition(".")[2] for name, _ in COMMANDS if name.startswith("engine.")}
    assert names == {*SILENCE, "Exit"}


@pytest.mark.parametrize("name", SILENCE)
async def test_the_sidecar_gives_up_a_server_that_does_not_answer(
    silent: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, outcome = SILENCE[name]
    engine = EngineConfig(kind="external", urls=(silent,))
    driver = Driver(RunConfig(engine=engine, launch=LaunchConfig(start_deadline_s=SOON_S)), tmp_path)
    shell = driver.shell
    await shell.start(driver)  # type: ignore[arg-type]
    shell._take(Server(HttpEngineClient(silent), None))
    shell._operations._paused = True
    async with asyncio.timeout(LATE_S):
        assert type(await shell.perform(make())) is outcome
    await shell.close()


async def test_a_trainer_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    """A colocated transfer: the socket accepts, and no bucket is ever filled."""
    path = tmp_path / "s"
    server = await asyncio.start_unix_server(lambda *_: None, str(path))
    command = receive(f"{colocated.SCHEME}{path}")

    async def load(parts: Any, left: float) -> None:
        raise AssertionError("no bucket came")

    async with asyncio.timeout(LATE_S):
        with pytest.raises(TimeoutError):
            await colocated.take(command, "engine-0", 1, 1, load, SOON_S)
    server.close()


# --- the trainer -----------------------------------------------------------------------------------------------------


async def test_an_offer_that_takes_too_long_breaks_the_transfer() -> None:
    shell = TrainerShell(RunConfig())
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(tensors: Any) -> Any:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(LATE_S)

    shell._sender = SimpleNamespace(offer=slow, close=lambda: None)  # type: ignore[assignment]
    shell._copies[3] = []
    broke = await shell.perform(Offer(epoch=2, version=3, timeout=SOON_S))
    assert isinstance(broke, TransferBroke)
    assert (broke.epoch, broke.phase, broke.error) == (2, "offer", "Deadline")
    release.set()
    await shell.close()


async def test_an_offer_that_is_late_does_not_replace_a_later_one() -> None:
    shell = TrainerShell(RunConfig())
    release, second = threading.Event(), threading.Event()
    order: list[str] = []

    def offered(tensors: list[str]) -> Any:
        (version,) = tensors
        order.append(f"{version} begins")
        if version == "first":
            release.wait(LATE_S)
        else:
            second.set()
        order.append(f"{version} is offered")
        whole = {"bytes": 0, "digest": version, "checksum": "mix64", "note": ""}
        return SimpleNamespace(address="a", port=1, buckets=(), **whole)

    shell._sender = SimpleNamespace(offer=offered, close=lambda: None)  # type: ignore[assignment]
    shell._context = SimpleNamespace(log=SimpleNamespace(info=lambda *_, **__: None))  # type: ignore[assignment]
    shell._copies = {3: ["first"], 4: ["second"]}  # type: ignore[assignment]
    assert isinstance(await shell.perform(Offer(epoch=2, version=3, timeout=SOON_S)), TransferBroke)
    later = asyncio.create_task(shell.perform(Offer(epoch=3, version=4, timeout=LATE_S)))
    await asyncio.to_thread(second.wait, SOON_S)
    release.set()
    assert (await later).digest == "second"  # type: ignore[union-attr]
    assert order == ["first begins", "first is offered", "second begins", "second is offered"]
    await shell.close()


POLICY = {
    "Load": Load(path=None, version=0),
    "Train": Train(BatchReady(batch=1, groups=()), step=1, version=1),
    "Save": Save(version=1, step=1, batch=1, entry="1-0"),
}
"""What a trainer's policy does."""


@pytest.mark.parametrize("name", POLICY)
async def test_a_policy_that_hangs_ends_the_trainer_at_its_deadline(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        release.wait(LATE_S)
        raise AssertionError("nobody waits for it")

    async def payloads(keys: Any) -> list[bytes]:
        return []

    monkeypatch.setattr(trainer_actor, "MARGIN_S", 0.0)
    monkeypatch.setattr(models, "resolve", hang)
    deadlines = TrainerConfig(start_deadline_s=SOON_S, step_deadline_s=SOON_S, export_deadline_s=SOON_S)
    shell = TrainerShell(RunConfig(trainer=deadlines))
    shell._context, shell._checkpoints = SimpleNamespace(payloads=payloads, run="r"), tmp_path  # type: ignore[assignment]
    shell._sender = SimpleNamespace(close=hang)  # type: ignore[assignment]
    if name != "Load":
        shell._policy = SimpleNamespace(train_step=hang, save=hang, close=hang)  # type: ignore[assignment]
    async with asyncio.timeout(LATE_S):
        with pytest.raises(
            Overdue, match=r"not done in 0\.\d s \(trainer\.step_deadline_s \+ trainer\.export_deadline_s"
        ):
            await shell.perform(POLICY[name])
        await shell.close()
    release.set()


async def test_a_removal_of_checkpoints_that_hangs_is_told_and_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, asked = threading.Event(), []

    def hang(*given: Any) -> Any:
        asked.append(given)
        release.wait(LATE_S)
        return []

    async def register(name: str) -> int:
        return {ARCHIVED_CHECKPOINT: 7}[name]

    monkeypatch.setattr(trainer_actor, "PRUNE_S", SOON_S)
    monkeypatch.setattr(checkpoint, "prune", hang)
    shell = TrainerShell(RunConfig())
    shell._context, shell._checkpoints = SimpleNamespace(register=register), tmp_path  # type: ignore[assignment]
    async with asyncio.timeout(LATE_S):
        assert await shell.perform(Prune()) == Unpruned(SOON_S)
        assert await shell.perform(Prune()) is None, "one at a time"
        assert await shell._on_policy_thread("step 1", lambda: "trained") == "trained"
        monkeypatch.setattr(trainer_actor, "LEAVE_S", SOON_S)
        await shell.close()
        release.set()
        await asyncio.wait({asyncio.wrap_future(shell._pruning)})  # type: ignore[arg-type]
        monkeypatch.setattr(trainer_actor, "PRUNE_S", LATE_S)
        assert await shell.perform(Prune()) is None
    assert asked == [(tmp_path, 2, 7)] * 2


@pytest.mark.parametrize("error", [PermissionError("read-only"), ValueError("a fault of ours")])
async def test_a_removal_that_fails_ends_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any) -> Any:
        raise error

    async def register(name: str) -> int:
        return 0

    monkeypatch.setattr(checkpoint, "prune", refuse)
    shell = TrainerShell(RunConfig())
    shell._context, shell._checkpoints = SimpleNamespace(register=register), tmp_path  # type: ignore[assignment]
    async with asyncio.timeout(LATE_S):
        with pytest.raises(type(error)):
            await shell.perform(Prune())
        await shell.close()


def test_an_actor_run_alone_leaves_a_thread_that_hangs_behind() -> None:
    program = """
import concurrent.futures, threading, types
import pipeline.runtime, pipeline.single
from config.schema import RunConfig
from contracts.core import Overdue

def hung(*_):
    concurrent.futures.ThreadPoolExecutor(1).submit(threading.Event().wait)
    raise Overdue("step 7: not done in 1 s (trainer.step_deadline_s)")

pipeline.runtime.run_actor = hung
info = types.SimpleNamespace(redis_url="redis://x", run="r", ended=None)
pipeline.single.config_of = lambda _: RunConfig()
pipeline.single.RunDir = types.SimpleNamespace(find=lambda _: types.SimpleNamespace(path="d", info=lambda: info))
pipeline.single.run("trainer", "d")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LATE_S)
    assert done.returncode == 1
    assert done.stderr == "trainer: step 7: not done in 1 s (trainer.step_deadline_s); start it again\n"


def test_the_end_of_an_actor_that_is_overdue_waits_for_none_of_its_threads() -> None:
    program = """
import asyncio, os, threading, types
import msgspec
from config.schema import RunConfig
from contracts.core import Overdue
from pipeline.runtime import run

class Bus:
    @staticmethod
    async def connect(*_, **__):
        return Bus()
    async def get_config(self):
        return msgspec.json.encode(RunConfig())
    async def post(self, stream, data):
        pass
    async def close(self):
        pass

class Runtime:
    def __init__(self, *_):
        pass
    async def run(self):
        began = threading.Event()
        hung = asyncio.create_task(asyncio.to_thread(lambda: (began.set(), threading.Event().wait())))
        await asyncio.to_thread(began.wait)
        raise Overdue("step 7")

run.Bus, run.Runtime = Bus, Runtime
run.registry = types.SimpleNamespace(build=lambda *_: None)
run.logs = types.SimpleNamespace(configure=lambda *_: None)
try:
    run.run_actor("trainer", "redis://x", "r", None)
except Overdue as error:
    print(error, flush=True)
os._exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 7, done.stderr
    assert done.stdout.endswith("step 7\n")


# --- the coordinator -------------------------------------------------------------------------------------------------


def test_the_coordinator_waits_for_nothing_without_an_alarm() -> None:
    """In every state of an epoch, and before the first one, either its own disk writes or a deadline is set."""
    drive = Drive(engines=2)

    def alarmed(said: Any) -> None:
        wake = drive.core.wake(drive.state)
        assert drive.state.wait is None or wake is not None
        barrier = drive.state.barrier
        if drive.state.phase == "opening":
            return
        if drive.state.release is not None or drive.state.yielded is not None:
            assert drive.state.wait is not None
        if barrier is not None:
            assert wake is not None
            assert wake <= barrier.deadline_at == barrier.requested_at + 60.0

    steps: list[Callable[[], Any]] = [
        lambda: drive.hear(),
        lambda: drive.fleet(),
        lambda: drive.open(),
        lambda: drive.hear(drive.gate()),
        lambda: drive.hear(drive.drained(0)),
        lambda: drive.hear(drive.drained(1)),
        lambda: drive.hear(drive.offer()),
        lambda: drive.hear(drive.sent()),
        lambda: drive.hear(drive.loaded(0)),
        lambda: drive.hear(drive.loaded(1)),
        lambda: drive.hear(MemoryWanted(step=1, trainer_boot=1)),
        lambda: drive.open(),
        lambda: drive.at(drive.now + 30.0),
    ]
    for step in steps:
        alarmed(step())
    assert drive.state.committed is not None
    assert drive.state.yielded is not None
