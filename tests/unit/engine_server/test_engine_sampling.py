"""Sampling: the right distribution, the logprob SGLang returns, validation by field."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.engine.torch_server.sampling import (
    BadRequest,
    Sampling,
    SamplingRows,
    parse_sampling,
    sample,
    stream_key,
    uniform,
)

CPU = torch.device("cpu")
EOS = frozenset([2])


def params(**change: Any) -> Sampling:
    given = {
        "max_new": 8,
        "min_new": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "n": 1,
        "stops": EOS,
        "seed": None,
    }
    return Sampling(**(given | change))


def draw(logits: torch.Tensor, times: int, **change: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = SamplingRows.of([params(**change)] * times, [stream_key(0, str(i), 1, None) for i in range(times)], CPU)
    return sample(logits.repeat(times, 1), rows, torch.zeros(times, dtype=torch.int64))


def test_frequencies_follow_the_distribution_at_the_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -float("inf")])
    for temperature in (0.5, 1.0, 2.0):
        ids, logprobs = draw(logits, 40000, temperature=temperature)
        want = (logits / temperature).softmax(-1)
        seen = torch.bincount(ids, minlength=5) / 40000
        torch.testing.assert_close(seen, want, atol=0.01, rtol=0)
        torch.testing.assert_close(logprobs, want.log()[ids], atol=1e-5, rtol=1e-5)


def test_greedy_takes_the_maximum_with_its_unscaled_logprob_also_beside_hot_rows() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    rows = SamplingRows.of([params(temperature=0.0), params(temperature=5.0)], [1, 2], CPU)
    ids, logprobs = sample(logits.clone(), rows, torch.zeros(2, dtype=torch.int64))
    assert ids[0] == 1
    torch.testing.assert_close(logprobs[0], logits[0].log_softmax(-1)[1])


def test_top_k_and_top_p_restrict_the_draw_and_not_the_logprob() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    ids, logprobs = draw(logits, 4000, top_k=2)
    assert set(ids.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs, logits[ids])
    assert set(draw(logits, 4000, top_p=0.6)[0].tolist()) == {0, 1}
    assert set(draw(logits, 4000, top_p=0.75, top_k=3)[0].tolist()) == {0, 1, 2}
    assert set(draw(logits, 4000, top_p=1e-6)[0].tolist()) == {0}
    seen = torch.bincount(draw(logits, 40000, top_p=0.6)[0], minlength=4) / 40000
    torch.testing.assert_close(seen[:2], torch.tensor([4 / 7, 3 / 7]), atol=0.01, rtol=0)


def test_random_numbers_are_uniform_repeatable_and_below_one() -> None:
    keys = torch.tensor([stream_key(0, f"request {i}", 5, None) for i in range(20000)])
    counts = torch.arange(20000) % 7
    found = uniform(keys, counts)
    assert torch.equal(found, uniform(keys, counts))
    assert found.min() >= 0
    assert found.max() <= 1 - 2**-22
    histogram = torch.histc(found, 10, 0, 1) / 20000
    torch.testing.assert_close(histogram, torch.full((10,), 0.1), atol=0.01, rtol=0)
    neighbours = uniform(keys, counts + 1)
    assert abs(torch.corrcoef(torch.stack((found, neighbours)))[0, 1]) < 0.03


def test_a_probability_of_zero_is_never_drawn() -> None:
    logits = torch.tensor([-float("inf"), 0.0, -float("inf"), 0.0, -float("inf")])
    assert set(draw(logits, 20000)[0].tolist()) == {1, 3}


def test_own_seed_decides_the_stream_whatever_the_id() -> None:
    assert stream_key(0, "a", 3, 7) == stream_key(1, "b", 4, 7)
    assert len({stream_key(s, r, p, None) for s in (0, 1) for r in "ab" for p in (3, 4)}) == 8


def test_defaults_are_those_of_sglang() -> None:
    found = parse_sampling({}, EOS, 100, 500)
    assert found == params(max_new=128)
    assert parse_sampling({"max_new_tokens": None}, EOS, 100, 500).max_new == 500
    assert parse_sampling({"top_k": -1, "temperature": 1e-9}, EOS, 100, 500).temperature == 0.0


def test_ignoring_ends_ignores_stop_ids_too() -> None:
    assert parse_sampling({"stop_token_ids": [5]}, EOS, 100, 500).stops == {2, 5}
    assert parse_sampling({"stop_token_ids": [5], "ignore_eos": True}, EOS, 100, 500).stops == frozenset()


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"n": 0}, "n is 0"),
        ({"stop": "x"}, "stop"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"regex": "a+"}, "regex"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"sampling_seed": "x"}, "sampling_seed"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_bad_or_unserved_parameter_is_refused_by_name(raw: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        parse_sampling(raw, EOS, 100, 500)
