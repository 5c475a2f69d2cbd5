"""A gateway shell with its real core, an engine of a few lines, and a tiny model directory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actors.gateway.actor import GatewayShell, build
from actors.gateway.client import GatewayClient
from config.schema import EngineConfig, GatewayConfig, ModelConfig, RefitConfig, RunConfig
from contracts.core import Booted, Delivered, Emit, Ref, Tick
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import EngineReady, GateClosed, GatewayReady, Member, RefitCommitted, RefitRequested

VOCABULARY = 64
WAIT_S = 30.0
TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}"
)


def write_model(directory: Path, template: str | None = TEMPLATE, context: int = 48) -> Path:
    """A character tokenizer with ids of `VOCABULARY`, and the configs beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    characters = "abcdefghijklmnopqrstuvwxyz :+0123456789"
    ids = {"<pad>": 0, "<eos>": 1, "<start>": 2} | {c: k + 3 for k, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<pad>", "<eos>", "<start>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": context, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 63]}')
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


class Clock:
    def now(self) -> float:
        return time.monotonic()


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop run until `condition` holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Engine:
    """Answers like an engine's sidecar. Token k of a sequence of length L is L + k; its logprob is -k-1.

    `script` holds, for the next calls, what to do instead: a coroutine of (engine, request, body). `gate` cleared,
    generation stops after `held_tokens` tokens until it is set or the request is aborted.
    """

    def __init__(self, name: str, boot: int = 1) -> None:
        self.name, self.boot, self.url = name, boot, ""
        self.script: list[Callable[[Engine, web.Request, Any], Awaitable[web.StreamResponse]]] = []
        self.bodies: list[Any] = []
        self.headers: list[Any] = []
        self.aborts: list[str] = []
        self.deaf = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.held_tokens = 2
        self.hung_up = 0
        self._stirred = asyncio.Condition()
        app = web.Application(client_max_size=2**26)
        app.add_routes([web.post("/generate", self._generate), web.post("/abort_request", self._abort)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start(self) -> Engine:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def close(self) -> None:
        await self._runner.cleanup()

    async def release(self) -> None:
        self.gate.set()
        async with self._stirred:
            self._stirred.notify_all()

    def aborted(self, rid: str) -> bool:
        return not self.deaf and any(rid.startswith(prefix) for prefix in self.aborts)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborts.append((await request.json())["rid"])
        async with self._stirred:
            self._stirred.notify_all()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        try:
            if self.script:
                return await self.script.pop(0)(self, request, body)
            return self.reply(await self.answer(body))
        except asyncio.CancelledError:
            self.hung_up += 1
            raise

    def reply(self, answer: Any, status: int = 200) -> web.Response:
        return web.json_response(answer, status=status, headers={"x-sluice-boot": str(self.boot)})

    async def answer(self, body: Any) -> Any:
        listed = isinstance(body["rid"], list)
        rids = body["rid"] if listed else [body["rid"]]
        async with self._stirred:
            await self._stirred.wait_for(lambda: self.gate.is_set() or all(self.aborted(rid) for rid in rids))
        found = [self.sequence(body, k) for k in range(len(rids))]
        return found if listed else found[0]

    def sequence(self, body: Any, at: int) -> dict[str, Any]:
        listed = isinstance(body["rid"], list)
        prompt = body["input_ids"][at] if listed else body["input_ids"]
        params = body["sampling_params"]
        params = params[at] if isinstance(params, list) else params
        cut = not self.gate.is_set()
        count = min(self.held_tokens, params["max_new_tokens"]) if cut else params["max_new_tokens"]
        ids = [(len(prompt) + k) % VOCABULARY for k in range(count)]
        reason = {"type": "abort", "message": "Aborted"} if cut else {"type": "length", "length": count}
        logprobs = [[-k - 1.0, token, None] for k, token in enumerate(ids)]
        return {"output_ids": ids, "meta_info": {"finish_reason": reason, "output_token_logprobs": logprobs}}


class Host:
    """Runs a shell and its core as the runtime does, with events of this process instead of a store."""

    def __init__(self, shell: GatewayShell, boot: int = 1, run_actor: str = "gateway-0") -> None:
        self.shell, self.core, self.boot = shell, shell.core, boot
        self.clock = Clock()
        self.current = self.core.initial()
        self.events: list[Any] = []
        self.performed: list[Any] = []
        self.frozen = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.context = SimpleNamespace(
            run="r", actor=run_actor, boot=boot, clock=self.clock, log=structlog.get_logger(),
            config=None, store=None, deliver=self._queue.put_nowait, state=lambda: self.current,
        )  # fmt: skip

    async def start(self) -> Host:
        await self.shell.start(self.context)  # pyright: ignore[reportArgumentType]
        await self.start_actor()
        return self

    async def start_actor(self) -> None:
        self._queue.put_nowait(Booted(self.boot))
        self._spawn(self._run())
        await until(lambda: self.of(GatewayReady))
        self.url = self.of(GatewayReady)[-1].url

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.shell.close()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def feed(self, event: Any) -> None:
        stream = STREAM_OF[type(event)]
        envelope = Envelope(
            id="x:1.0", run="r", stream=stream, actor="x", boot=1, epoch=0, wall_ns=0, mono_ns=0, body=event
        )
        self._queue.put_nowait(Delivered(Ref(stream, "1-0"), envelope))

    async def _run(self) -> None:
        while True:
            wake = self.core.wake(self.current)
            timeout = None if wake is None else max(0.0, wake - self.clock.now())
            try:
                async with asyncio.timeout(timeout):
                    input = await self._queue.get()
            except TimeoutError:
                input = Tick()
            if not self.frozen:
                self._step(input)

    def _step(self, input: Any) -> None:
        input = _journalled(input, self.core.local_type)
        self.current, commands = self.core.step(self.current, input, self.clock.now())
        for command in commands:
            if isinstance(command, Emit):
                self.events.append(command.event)
                if isinstance(command.event, GatewayReady):
                    self.feed(command.event)
            else:
                self.performed.append(command)
                self._spawn(self._perform(command))

    async def _perform(self, command: Any) -> None:
        result = await self.shell.perform(command)
        if result is not None:
            self._queue.put_nowait(result)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # pyright: ignore[reportGeneralTypeIssues]

    # --- the rest of the pipeline ---

    def commit(self, epoch: int, *engines: Engine) -> None:
        for engine in engines:
            self.feed(EngineReady(engine=engine.name, boot=engine.boot, url=engine.url, ranks=1, seconds=0.0))
        members = tuple(Member(engine.name, engine.boot) for engine in engines)
        self.feed(RefitCommitted(
            epoch=epoch, version=10 * epoch, step=epoch, engines=members, world_size=1 + len(members),
            pause_s=0, drain_s=0, transfer_s=0, bytes=0,
        ))  # fmt: skip

    def request_refit(self, epoch: int, drain: Any) -> None:
        deadline_at = self.clock.now() + self.core._refit.deadline_s
        self.feed(RefitRequested(
            epoch=epoch, version=10 * epoch, step=epoch, engines=(), gateways=(), drain=drain, deadline_at=deadline_at,
        ))  # fmt: skip

    async def closed(self, epoch: int) -> GateClosed:
        await until(lambda: [c for c in self.of(GateClosed) if c.epoch == epoch])
        return self.of(GateClosed)[-1]


def _journalled(input: Any, local: Any) -> Any:
    """What the core would be handed after a restart."""
    if isinstance(input, (Delivered, Booted, Tick)):
        return input
    return msgspec.msgpack.decode(msgspec.msgpack.encode(input), type=local)


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    found = [await Engine(f"engine-{k}").start() for k in range(2)]
    yield found
    for engine in found:
        await engine.close()


@pytest.fixture
def config(model: Path) -> RunConfig:
    return RunConfig(
        model=ModelConfig(source=str(model)),
        gateway=GatewayConfig(retries=2, max_body_mib=1, request_deadline_s=30.0),
        engine=EngineConfig(max_total_tokens=4096),
        refit=RefitConfig(deadline_s=20.0, drain_deadline_s=10.0),
    )


@pytest.fixture
async def host(config: RunConfig) -> AsyncIterator[Host]:
    running = await Host(build(config, "gateway-0")).start()
    yield running
    await running.close()


@pytest.fixture
async def client(host: Host) -> AsyncIterator[GatewayClient]:
    caller = GatewayClient(host.url)
    yield caller
    await caller.close()


@pytest.fixture
def serving(host: Host, engines: list[Engine]) -> Host:
    """The gate is about to open on the first engine alone, version 10."""
    host.commit(1, engines[0])
    return host


@pytest.fixture(name="until")
def _until() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    return until


@pytest.fixture(name="write_model")
def _write_model() -> Callable[..., Path]:
    return write_model


@pytest.fixture(name="Host")
def _host() -> type[Host]:
    return Host
