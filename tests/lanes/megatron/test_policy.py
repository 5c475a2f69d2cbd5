"""One rank: the same arithmetic as the torch backend and transformers, from weights to weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from actors.engine.torch_server.config import read_config
from actors.engine.torch_server.kv import KVCache
from actors.engine.torch_server.model import Model
from actors.engine.torch_server.weights import Weights
from tests.lanes.megatron.bench import Bench, furthest, same

DENSE = ["llama", "qwen2", "qwen3"]


def engine_tokens(model_dir: Path, weights: dict[str, torch.Tensor], prompt: list[int], count: int) -> list[int]:
    """What the embedded engine generates greedily with these weights."""
    config = read_config(model_dir)
    own = Weights(config, torch.float32, torch.device("cpu"))
    own.check((name, tensor.shape) for name, tensor in weights.items())
    assert {name for name, tensor in weights.items() if own.assign(name, tensor)} == own.named.keys() == weights.keys()
    model, cache = Model(own, 64), KVCache(config, torch.float32, torch.device("cpu"), 64)
    cache.reserve(1, 64, 0)
    tokens = list(prompt)
    hidden = model.forward(cache, model.prefill_batch(cache, 0, [tokens], [0]))
    for place in range(len(prompt), len(prompt) + count):
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
        batch = model.decode_batch(cache, torch.tensor(tokens[-1:]), torch.tensor([place]), place + 1)
        hidden = model.forward(cache, batch)
    return tokens[len(prompt) :]


def reference_tokens(directory: Path, prompt: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([prompt])
    seen = torch.ones_like(ids)
    answer = model.generate(
        ids,
        attention_mask=seen,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", [*DENSE, "qwen3-moe"])
def test_it_trains_exports_generates_and_resumes_as_the_torch_backend_does(
    family: str, bench: Callable[[str], Bench], tmp_path: Path
) -> None:
    stand = bench(family)
    samples, saved = stand.samples, tmp_path / "v0000000002-step00000002"
    with stand.megatron() as policy:
        reference = stand.torch()
        assert furthest(policy.logprobs(samples), reference.logprobs(samples)) < 2e-5
        for _ in range(2):
            mine, theirs = policy.train_step(samples), reference.train_step(samples)
            assert mine.keys() == theirs.keys()
            for name in mine.keys() - {"padding_fraction"}:
                assert mine[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-5), name
        assert mine["padding_fraction"] == 0.0
        assert furthest(policy.logprobs(samples), reference.logprobs(samples)) < 5e-3

        weights = dict(policy.export())
        with safe_open(stand.model_dir / "model.safetensors", "pt") as file:
            assert weights.keys() == set(file.keys())
        before = policy.logprobs(samples)
        policy.save(saved, {"step": 2})
        for tensor in weights.values():
            tensor.zero_()  # a copy: the policy doesn't see it
        assert furthest(policy.logprobs(samples), before) == 0.0

        prompt = samples[0].ids.tolist()
        wanted = reference_tokens(saved, prompt, 8)
        if family in DENSE:
            assert engine_tokens(stand.model_dir, dict(policy.export()), prompt, 8) == wanted
        assert furthest(stand.torch(saved).logprobs(samples), before) < 2e-5

        after = policy.train_step(samples)
        uninterrupted = dict(policy.export())
    with stand.megatron() as resumed:
        assert resumed.load(saved) == {"step": 2}
        assert resumed.step == 2
        assert resumed.train_step(samples) == {**after, "lr": after["lr"]}
        assert same(dict(resumed.export()), uninterrupted)


def test_in_bfloat16_logprobs_are_those_of_the_full_precision_model_but_for_rounding(bench: Callable[[str], Bench]):
    stand = bench("qwen3")
    with stand.megatron(dtype="bfloat16") as policy:
        exact = np.concatenate(stand.torch().logprobs(stand.samples))
        rounded = np.concatenate(policy.logprobs(stand.samples))
        error, scale = np.abs(exact - rounded)[exact != 0], np.abs(exact[exact != 0])
        # one relative step of bfloat16 on average, and a few steps at worst
        assert 0 < error.mean() < 2**-7 * scale.mean()
        assert error.max() < 2**-4 * scale.mean()
        policy.train_step(stand.samples)
        assert {tensor.dtype for _, tensor in policy.export()} == {torch.bfloat16}


def test_an_update_whose_gradient_is_not_finite_changes_no_weight(bench: Callable[[str], Bench]) -> None:
    stand = bench("llama")
    with stand.megatron(minibatches=1) as policy:
        before = dict(policy.export())
        broken = policy._part._built.optimizer
        real, broken.get_grad_norm = broken.get_grad_norm, lambda: float("nan")
        assert policy.train_step(stand.samples)["skipped_updates"] == 1.0
        assert same(dict(policy.export()), before)
        broken.get_grad_norm = real
        assert policy.train_step(stand.samples)["skipped_updates"] == 0.0
        assert not same(dict(policy.export()), before)
