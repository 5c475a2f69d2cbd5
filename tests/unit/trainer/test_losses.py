from __future__ import annotations

import math

import pytest
import torch

from actors.trainer import losses


def terms(ratio: float, advantage: float, importance: float = 1.0, **options):
    options = {"clip_low": 0.2, "clip_high": 0.3, "importance_cap": 2.0, **options}
    current = torch.tensor([math.log(ratio)], requires_grad=True)
    proximal = torch.zeros(1)
    behaviour = torch.tensor([-math.log(importance)])
    result = losses.policy_terms(current, proximal, behaviour, torch.tensor([advantage]), **options)
    result.loss.sum().backward()
    assert current.grad is not None
    return result, float(current.grad)


def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient() -> None:
    result, gradient = terms(1.0, 0.7)
    assert gradient == pytest.approx(-0.7)
    assert not result.clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.31, 1.0, True),
        (1.29, 1.0, False),
        (0.5, 1.0, False),
        (0.79, -1.0, True),
        (0.81, -1.0, False),
        (2.0, -1.0, False),
    ],
)
def test_the_clip_takes_the_gradient_only_beyond_its_own_side(ratio: float, advantage: float, clipped: bool) -> None:
    result, gradient = terms(ratio, advantage)
    assert bool(result.clipped) is clipped
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-5)


def test_the_importance_weight_multiplies_the_loss_and_is_truncated() -> None:
    low, gradient_low = terms(1.0, 1.0, importance=0.25)
    high, gradient_high = terms(1.0, 1.0, importance=5.0)
    assert (gradient_low, gradient_high) == (pytest.approx(-0.25), pytest.approx(-2.0))
    assert (bool(low.capped), bool(high.capped)) == (False, True)


def test_the_importance_weight_is_a_constant() -> None:
    proximal = torch.zeros(1, requires_grad=True)
    result = losses.policy_terms(
        torch.zeros(1), proximal, torch.tensor([-0.3]), torch.ones(1), clip_low=0.2, clip_high=0.2, importance_cap=2.0
    )
    assert not result.weight.requires_grad


def test_importance_weighting_corrects_the_expectation_under_a_stale_policy() -> None:
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    stale = torch.log_softmax(torch.tensor([0.8, 0.1, 0.2], dtype=torch.float64), 0)
    advantage = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    current = torch.log_softmax(logits, 0)
    (fresh,) = torch.autograd.grad(-(current.exp() * advantage).sum(), logits, retain_graph=True)
    result = losses.policy_terms(
        current, current.detach(), stale, advantage, clip_low=0.2, clip_high=0.2, importance_cap=100.0
    )
    (corrected,) = torch.autograd.grad((result.loss * stale.exp()).sum(), logits)
    torch.testing.assert_close(corrected, fresh)


def test_no_finite_log_ratio_overflows() -> None:
    result = losses.policy_terms(
        torch.tensor([500.0]),
        torch.tensor([-500.0]),
        torch.tensor([-1500.0]),
        -torch.ones(1),
        clip_low=0.2,
        clip_high=0.2,
        importance_cap=2.0,
    )
    assert result.loss.isfinite().all()


def test_k3_is_the_exact_divergence_in_expectation_and_never_negative() -> None:
    q = torch.log_softmax(torch.tensor([0.1, 1.0, -0.5]), 0)
    p = torch.log_softmax(torch.tensor([0.4, 0.2, 0.3]), 0)
    estimate = losses.k3(p - q)
    assert float((q.exp() * estimate).sum()) == pytest.approx(float((q.exp() * (q - p)).sum()), rel=1e-5)
    assert (estimate >= 0).all()
    assert float(losses.k3(torch.zeros(1))) == 0.0


def test_mismatch_counts_both_directions() -> None:
    values = losses.mismatch(torch.tensor([-1.0, -1.5, -2.0]), torch.tensor([-1.5, -1.0, -2.0]))
    assert values.tolist() == pytest.approx([math.exp(0.5), math.exp(0.5), 1.0])


def test_token_weights_make_a_mean_of_tokens_or_of_sequences() -> None:
    rows, trainable = torch.tensor([0, 0, 0, 1]), torch.tensor([3, 1])
    loss = torch.tensor([1.0, 2.0, 3.0, 10.0])
    token = losses.token_weights(rows, trainable, "token", tokens=4, sequences=2)
    sequence = losses.token_weights(rows, trainable, "sequence", tokens=4, sequences=2)
    assert float((token * loss).sum()) == pytest.approx(4.0)
    assert float((sequence * loss).sum()) == pytest.approx((2.0 + 10.0) / 2)
