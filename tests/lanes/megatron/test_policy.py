"""One rank: the same arithmetic as the torch backend and transformers, from weights to weights."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from actors.engine.torch_server.config import read_config
from actors.engine.torch_server.kv import KVCache
from actors.engine.torch_server.model import Model
from actors.engine.torch_server.weights import Weights
from actors.trainer.backend import BackendError
from actors.trainer.megatron import installation
from actors.trainer.packing import Sample
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


def generated(directory: Path, weights: dict[str, Tensor], prompt: list[int], count: int) -> Sample:
    """What transformers generates greedily with these weights; its log-probabilities stand for the behaviour's."""
    copied = directory / "exported"
    copied.mkdir()
    shutil.copy(directory / "config.json", copied)
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    loaded: Any = AutoModelForCausalLM.from_pretrained(copied, dtype=torch.float32, output_loading_info=True)
    model, told = loaded
    assert not any(told.values()), told
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = answer.sequences[0]
    logprobs = torch.stack(answer.logits)[:, 0].log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]
    return Sample(
        ids=tokens.numpy().astype(np.int32),
        loss_mask=np.array([0] * len(prompt) + [1] * count, dtype=np.uint8),
        behaviour=np.concatenate([np.zeros(len(prompt)), logprobs.numpy()]).astype(np.float32),
        advantage=1.0,
    )


@pytest.mark.parametrize("family", [*DENSE, "qwen3-moe"])
def test_it_trains_exports_generates_and_resumes_as_the_torch_backend_does(
    family: str, bench: Callable[[str], Bench], tmp_path: Path
) -> None:
    stand = bench(family)
    samples, saved = stand.samples, tmp_path / "v0000000002-step00000002"
    with stand.megatron() as policy:
        reference = stand.torch()
        assert furthest(policy.logprobs(samples), reference.logprobs(samples)) < 2e-5
        mine: Any = {}
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
        answer = generated(saved, dict(policy.export()), prompt, 8)
        assert furthest(policy.logprobs([answer]), [answer.behaviour]) < 2e-5
        if family in DENSE:
            wanted = answer.ids[len(prompt) :].tolist()
            assert engine_tokens(stand.model_dir, dict(policy.export()), prompt, 8) == wanted
        assert furthest(stand.torch(saved).logprobs(samples), before) < 2e-5

        after = policy.train_step(samples)
        uninterrupted = dict(policy.export())
    with stand.megatron() as resumed:
        assert resumed.load(saved) == {"step": 2}
        assert resumed.step == 2
        assert resumed.train_step(samples) == {**after, "lr": after["lr"]}
        assert same(dict(resumed.export()), uninterrupted)


def test_in_bfloat16_logprobs_are_those_of_the_full_precision_model_but_for_rounding(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = bench("qwen3")
    taken: list[Tensor] = []
    with stand.megatron(dtype="bfloat16") as policy:
        module = inspect.getmodule(type(policy._part))
        real = module.token_statistics  # type: ignore[union-attr]
        monkeypatch.setattr(module, "token_statistics", lambda *a, **n: (taken.append(a[0]), real(*a, **n))[1])
        exact = np.concatenate(stand.torch().logprobs(stand.samples))
        rounded = np.concatenate(policy.logprobs(stand.samples))
        error, scale = np.abs(exact - rounded)[exact != 0], np.abs(exact[exact != 0])
        # one relative step of bfloat16 on average, and a few steps at worst
        assert 0 < error.mean() < 2**-7 * scale.mean()
        assert error.max() < 2**-4 * scale.mean()
        # logits are only those of trainable tokens, and never all of them in float32
        assert {logits.dtype for logits in taken} == {torch.bfloat16}
        assert sum(map(len, taken)) == sum(int(sample.loss_mask.sum()) for sample in stand.samples)
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


class ByBounds(torch.nn.Module):
    """Attention that must be told where in a row its sequences begin, as Transformer Engine's must."""

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Tensor:
        parts = []
        for start, end in pairwise(packed_seq_params.cu_seqlens_q.tolist()):
            q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
            done = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
            parts.append(done.transpose(0, 1).flatten(1))
        return torch.cat(parts)


def test_an_attention_that_wants_bounds_gets_them_though_the_row_is_rotated_as_one_with_yarns_angles_too(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    installation.prepare()
    from actors.trainer.megatron import layers

    real = layers.blocks

    def blocks(*arguments: Any, **named: Any) -> Any:
        made = real(*arguments, **named)
        for layer in made.layer_specs or ():
            layer.submodules.self_attention.submodules.core_attention = ByBounds
        return made

    monkeypatch.setattr(layers, "blocks", blocks)
    stand = bench("qwen2-yarn")
    with stand.megatron() as policy:
        policy._part._built = replace(policy._part._built, engine=True)
        assert furthest(policy.logprobs(stand.samples), stand.torch().logprobs(stand.samples)) < 2e-5


def test_a_layout_whose_state_could_not_be_saved_is_refused(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket for each parameter, and not for each 40 million."""
    installation.prepare()
    from actors.trainer.megatron import model

    monkeypatch.setattr(
        model, "DistributedDataParallelConfig", partial(model.DistributedDataParallelConfig, bucket_size=1)
    )
    with (
        pytest.raises(BackendError, match=r"a bucket of \d+ parameters is padded to \d+, with others behind it"),
        bench("qwen3").megatron(megatron={"overlap": True}),
    ):
        pass


def test_a_model_of_another_kind_is_refused() -> None:
    installation.prepare()
    from actors.trainer.megatron import model

    with pytest.raises(BackendError, match="this model is a Linear there"):
        model._check_kind([torch.nn.Linear(1, 1)])
