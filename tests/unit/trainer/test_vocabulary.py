"""Log-probabilities from a split vocabulary; ranks are threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from actors.trainer import statistics
from actors.trainer.megatron import vocabulary
from actors.trainer.statistics import token_statistics
from tests.unit.trainer.live import Live

VOCABULARY, PADDED = 23, 32


class Group:
    """An all-reduce of threads, in place of a process group that torch knows by name."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._slots: list[Tensor] = [torch.zeros(0)] * size

    def all_reduce(self, tensor: Tensor, operation: object, group: Member) -> None:
        self._slots[group.number] = tensor.clone()
        self._barrier.wait()
        stacked = torch.stack(self._slots)
        self._barrier.wait()
        tensor.copy_(stacked.amax(0) if operation == torch.distributed.ReduceOp.MAX else stacked.sum(0))


class Member:
    def __init__(self, number: int) -> None:
        self.number = number

    def rank(self) -> int:
        return self.number


def weighted(factors: tuple[float, float], *values: Tensor) -> Tensor:
    """What has no weight gets no gradient at all."""
    return torch.stack([factor * value for factor, value in zip(factors, values, strict=True) if factor]).sum()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_statistics_and_gradients_are_those_of_the_whole_vocabulary_without_its_padding(
    size: int, factors: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 4 parts the last one holds padding alone. Seven rows, one, one and three at a time."""
    monkeypatch.setattr(statistics, "STRETCH", 31)
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(7, PADDED, generator=generator)
    targets = torch.tensor([0, 5, 22, 8, 15, 16, 7])
    temperature = torch.tensor([1.0, 0.7, 1.3, 1.0, 0.5, 2.0, 1.0])
    by_chosen, by_entropy = torch.randn(7, generator=generator), torch.randn(7, generator=generator)

    whole = logits[:, :VOCABULARY].clone().requires_grad_()
    chosen, entropy = token_statistics(whole, targets, temperature)
    weighted(factors, chosen @ by_chosen, entropy @ by_entropy).backward()

    group = Group(size)
    monkeypatch.setattr(vocabulary, "all_reduce", group.all_reduce)
    parts = [part.clone().requires_grad_() for part in logits.chunk(size, dim=1)]
    results: dict[int, tuple[Tensor, Tensor]] = {}

    def run(number: int) -> None:
        member: ProcessGroup = Member(number)  # type: ignore[assignment]
        result = vocabulary.token_statistics(parts[number], targets, temperature, vocabulary=VOCABULARY, group=member)
        results[number] = result
        weighted(factors, result[0] @ by_chosen, result[1] @ by_entropy).backward()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for number in range(size):
        torch.testing.assert_close(results[number][0], chosen, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(results[number][1], entropy, atol=2e-6, rtol=1e-5)
    gradient = torch.cat([part.grad for part in parts if part.grad is not None], dim=1)
    torch.testing.assert_close(gradient[:, :VOCABULARY], whole.grad, atol=2e-6, rtol=1e-5)
    assert not gradient[:, VOCABULARY:].any()


def test_beside_logits_in_their_own_dtype_there_is_their_gradient_and_a_few_rows_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, width = 256, 512
    monkeypatch.setattr(statistics, "STRETCH", 8 * width)
    monkeypatch.setattr(vocabulary, "all_reduce", lambda *_: None)
    alone: ProcessGroup = Member(0)  # type: ignore[assignment]
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    with Live() as live:
        chosen, entropy = vocabulary.token_statistics(
            logits, torch.arange(rows), torch.full((rows,), 0.7), vocabulary=width - 3, group=alone
        )
        forward = live.peak
        (chosen.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    size = logits.untyped_storage().nbytes()
    assert forward < 0.3 * size
    assert size < live.peak < 1.3 * size
