"""What a stretch at a time says of tokens is what autograd says of the whole distribution, with far less kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from actors.trainer import statistics
from actors.trainer.statistics import token_statistics

N, VOCABULARY = 37, 19


def given(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = (5 * torch.randn(N, VOCABULARY, generator=generator)).to(dtype)
    targets = torch.randint(VOCABULARY, (N,), generator=generator)
    return logits, targets, torch.rand(N, generator=generator) + 0.5


def whole(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    distribution = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stretch", [1, 3 * VOCABULARY, N * VOCABULARY])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.3, -2.0)])
def test_stretches_change_neither_values_nor_gradients(
    dtype: torch.dtype, stretch: int, weights: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "STRETCH", stretch)
    logits, targets, temperature = given(dtype)
    factors = torch.linspace(-1.0, 1.0, N)
    gradients = []
    for compute in (token_statistics, whole):
        own = logits.clone().requires_grad_()
        values = compute(own, targets, temperature)
        loss = sum(weight * (factors * value).sum() for weight, value in zip(weights, values, strict=True) if weight)
        assert isinstance(loss, Tensor)
        loss.backward()
        assert own.grad is not None
        assert own.grad.dtype == dtype
        gradients.append((own.grad, *(value.detach() for value in values)))
    for mine, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, reference, atol=2e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_gradients_are_those_of_finite_differences() -> None:
    logits, targets, temperature = given()
    own = logits[:5].clone().requires_grad_()
    value = torch.cat(token_statistics(own, targets[:5], temperature[:5])).sum()
    value.backward()
    assert own.grad is not None
    step = torch.zeros_like(own)
    step[2, 7] = 1e-2
    with torch.no_grad():
        above, below = (
            torch.cat(token_statistics(own + sign * step, targets[:5], temperature[:5])).double().sum()
            for sign in (1, -1)
        )
    assert float((above - below) / 2e-2) == pytest.approx(float(own.grad[2, 7]), abs=2e-3)


def test_nothing_but_the_logits_is_kept_for_the_backward_pass() -> None:
    logits, targets, temperature = given(torch.bfloat16)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    own = logits.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_statistics(own, targets, temperature)
    assert [tuple(tensor.shape) for tensor in kept if tensor.ndim == 2] == [(N, VOCABULARY)]
    assert {tensor.dtype for tensor in kept if tensor.ndim == 2} == {torch.bfloat16}


def test_temperature_divides_the_logits_of_its_own_token() -> None:
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    chosen, _ = token_statistics(logits, torch.tensor([0, 0]), torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(chosen, torch.log_softmax(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), -1)[:, 0])


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size() -> None:
    _, entropy = token_statistics(torch.zeros(1, 8), torch.tensor([3]), torch.ones(1))
    assert float(entropy[0]) == pytest.approx(math.log(8))
