"""The trainer's shell offers a copy with a plan that the core can have written, as often as it likes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.refit.transports import Offer as SenderOffer
from actors.trainer.actor import TrainerShell
from actors.trainer.state import Offer, Offered
from config.schema import RunConfig
from contracts import plan
from contracts.events import Bucket, TensorSpec

LOG: Any = SimpleNamespace(info=lambda *_, **__: None, warning=lambda *_, **__: None)


def buckets(*names: str) -> tuple[Bucket, ...]:
    return tuple(Bucket((TensorSpec(name, "float32", (2,)),), 8) for name in names)


@pytest.fixture
def shell() -> TrainerShell:
    made: Any = TrainerShell(RunConfig())
    made._context = SimpleNamespace(log=LOG)
    made._copies = {version: [] for version in range(9)}
    return made


async def offered(shell: Any, version: int, *names: str) -> Offered:
    told = SenderOffer("h", 1, buckets(*names), 8 * len(names), "d", "xxh3_128", "")
    shell._sender = SimpleNamespace(offer=lambda tensors: told, close=lambda: None)
    answer = await shell.perform(Offer(version, version, 20.0))
    assert isinstance(answer, Offered)
    return answer


async def test_the_handle_of_a_plan_names_its_buckets(shell: TrainerShell) -> None:
    first, same, other = [await offered(shell, n, *names) for n, names in enumerate((("a", "b"), ("a", "b"), ("a",)))]
    assert first.plan == same.plan != other.plan
    assert plan.decode(shell.payload(first.plan)) == buckets("a", "b")
    assert len(shell.payload(other.plan)) == other.plan_bytes < first.plan_bytes


async def test_a_plan_is_encoded_once_as_long_as_it_is_the_same(
    shell: TrainerShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = [], plan.encode
    monkeypatch.setattr(plan, "encode", lambda buckets: encoded.append(buckets) or encode(buckets))
    told = [await offered(shell, n, name) for n, name in enumerate("aaabba")]
    assert encoded == [buckets("a"), buckets("b"), buckets("a")]
    assert [each.plan == told[0].plan for each in told] == [True] * 3 + [False] * 2 + [True]
    assert plan.decode(shell.payload(told[-1].plan)) == buckets("a")


async def test_plans_of_the_last_offers_alone_are_kept(shell: TrainerShell) -> None:
    told = [await offered(shell, n, name) for n, name in enumerate("abc")]
    assert shell.payload(told[1].plan) != shell.payload(told[2].plan)
    with pytest.raises(KeyError):
        shell.payload(told[0].plan)
