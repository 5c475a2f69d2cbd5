"""A mixture of experts of 235 billion parameters is refitted through the store: its plan goes beside the stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import fakeredis
import pytest
from msgspec.structs import replace

from actors.engine.core import EngineCore
from actors.engine.state import Drained, Receive, ServerReady
from actors.refit.transports.plan import plan as fill
from actors.trainer import state as trainer
from actors.trainer.core import TrainerCore
from config.schema import EngineConfig, RefitConfig, RunConfig
from contracts import limits, plan
from contracts.core import Booted, Delivered, Ref
from contracts.envelope import STREAM_OF, Envelope, decode
from contracts.events import Member, Rank, RefitRequested, TensorSpec, TransferOffered, TransferStarted
from pipeline.bus import Bus, PayloadMissing
from pipeline.bus.address import parse
from pipeline.bus.link import Link
from pipeline.runtime.clock import WallClock
from pipeline.runtime.machine import Attempt, Identity, Machine

LAYERS, EXPERTS, WIDTH, WIDE = 94, 128, 4096, 1536


def specs() -> Iterator[TensorSpec]:
    """What Qwen3-235B-A22B exports: 36,945 tensors in bfloat16."""
    yield TensorSpec("model.embed_tokens.weight", "bfloat16", (151936, WIDTH))
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (8192, WIDTH),
            "self_attn.k_proj": (512, WIDTH),
            "self_attn.v_proj": (512, WIDTH),
            "self_attn.o_proj": (WIDTH, 8192),
            "self_attn.q_norm": (128,),
            "self_attn.k_norm": (128,),
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
            "mlp.gate": (EXPERTS, WIDTH),
        }.items():
            yield TensorSpec(f"{prefix}{name}.weight", "bfloat16", shape)
        for expert in range(EXPERTS):
            for name, shape in {"gate": (WIDE, WIDTH), "up": (WIDE, WIDTH), "down": (WIDTH, WIDE)}.items():
                yield TensorSpec(f"{prefix}mlp.experts.{expert}.{name}_proj.weight", "bfloat16", shape)
    yield TensorSpec("model.norm.weight", "bfloat16", (WIDTH,))
    yield TensorSpec("lm_head.weight", "bfloat16", (151936, WIDTH))


class Actor:
    """A real core on a real bus, whose commands the test sees."""

    def __init__(self, bus: Bus, core: Any, boot: int, payloads: dict[str, bytes]) -> None:
        identity = Identity("test", bus.actor, boot, "host", 1)
        self.bus, self.machine = bus, Machine(core, identity, WallClock(), payloads.__getitem__, 0, core.initial())
        self.journalled = 0

    async def feed(self, *inputs: Any) -> list[Any]:
        attempt = Attempt(self.machine, inputs)
        await self.bus.commit(attempt.commit)
        self.machine.settle(attempt)
        self.journalled = max(map(len, attempt.commit.journal))
        return attempt.commands


@pytest.fixture
async def open_bus() -> AsyncIterator[Any]:
    server = fakeredis.FakeServer(version=(7,))
    opened: list[Bus] = []

    def opening(actor: str) -> Bus:
        link = Link(fakeredis.FakeAsyncRedis(server=server, protocol=2), parse("redis://fake"), 1.0)
        opened.append(Bus(link, "test", actor))
        return opened[-1]

    yield opening
    for bus in opened:
        await bus.close()


def delivered(event: Any, entry: str = "1-0") -> Delivered:
    stream = STREAM_OF[type(event)]
    envelope = Envelope(
        id="refit:1.0", run="test", stream=stream, actor="refit", boot=1, epoch=0, wall_ns=0, mono_ns=0, body=event
    )
    return Delivered(Ref(stream, entry), envelope)


def requested(epoch: int) -> Delivered:
    engines = (Member("engine-0", 1),)
    return delivered(
        RefitRequested(epoch=epoch, version=0, step=0, engines=engines, gateways=(), drain="finish", deadline_at=2e9)
    )


def started(epoch: int) -> Delivered:
    members = (Rank("engine-0", 1, 1, 1),)
    return delivered(TransferStarted(epoch=epoch, version=0, group="g", fresh=True, members=members, world_size=2))


async def test_a_235b_mixture_of_experts_is_refitted_through_the_store(open_bus: Any) -> None:
    buckets = fill(specs(), 256 << 20)
    data = plan.encode(buckets)
    assert sum(len(bucket.tensors) for bucket in buckets) == 36_945
    assert 2_000_000 < len(data) <= limits.PAYLOAD
    source, sink = open_bus("trainer"), open_bus("engine-0")
    policy = Actor(source, TrainerCore(RunConfig()), (await source.boot())[0], {"handle": data})
    engine = Actor(sink, EngineCore("engine-0", EngineConfig(), RefitConfig()), (await sink.boot())[0], {})
    await policy.feed(Booted(1), trainer.Loaded(version=0))
    await engine.feed(Booted(1), ServerReady("http://x", 1, 0.0))
    keys: list[str] = []
    for epoch in (1, 2):
        frozen = trainer.Offered(
            epoch=epoch, version=0, address="h", port=1, bytes=1, digest="d", plan="handle", plan_bytes=len(data)
        )
        await policy.feed(requested(epoch), frozen)
        entry = (await sink.read_after({"refit": "0-0"}, block_ms=None, count=99))[-1]
        offer = decode("refit", entry.data).body
        assert isinstance(offer, TransferOffered)
        await engine.feed(requested(epoch), Drained(epoch, 0.0), delivered(offer))
        (receive,) = await engine.feed(started(epoch))
        assert isinstance(receive, Receive)
        assert plan.decode((await sink.payloads([receive.plan]))[0]) == buckets
        assert max(len(entry.data), policy.journalled, engine.journalled) < 1000
        keys.append(receive.plan)
    assert keys[0] == keys[1]
    await policy.feed(Booted(2), trainer.Loaded(version=1), requested(3), replace(frozen, epoch=3))
    assert await source.discard("99-0") == 1
    with pytest.raises(PayloadMissing):
        await sink.payloads(keys[:1])
