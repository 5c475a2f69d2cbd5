"""Tiny models of each family, and the megatron policy beside the torch one. Run by `make test-megatron`.

A missing installation fails this lane: it is never skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from actors.trainer.backend import Job
from actors.trainer.packing import Sample
from actors.trainer.ranks import RankedPolicy
from actors.trainer.torch_policy import TorchPolicy
from config.schema import LossConfig, MegatronConfig, TrainerConfig

VOCABULARY = 131
"""Odd, so that two tensor-parallel ranks need padding."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
NARROW: dict[str, Any] = {**SHAPE, "head_dim": 16}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True, architectures=["LlamaForCausalLM"]),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"]),
    "qwen2-yarn": lambda: Qwen2Config(
        **SHAPE,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        architectures=["Qwen2ForCausalLM"],
    ),
    "qwen3": lambda: Qwen3Config(**NARROW, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"]),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **NARROW,
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        architectures=["Qwen3MoeForCausalLM"],
    ),
}


def settings(backend: str, **fields: Any) -> TrainerConfig:
    """Every part of the objective is on; `megatron` and `loss` as mappings."""
    loss = LossConfig(**{"kl_coef": 0.05, "entropy_coef": 0.01, **fields.pop("loss", {})})
    sizes = MegatronConfig(**fields.pop("megatron", {}))
    defaults = {"device": "cpu", "lr": 1e-3, "microbatch_tokens": 40, "minibatches": 2, "weight_decay": 0.1}
    return TrainerConfig(**{**defaults, **fields}, backend=backend, loss=loss, megatron=sizes)  # type: ignore[arg-type]


class Bench:
    """One model and one batch, for both backends."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.samples = samples()

    @contextmanager
    def megatron(self, *, dtype: Any = "float32", **fields: Any) -> Iterator[RankedPolicy]:
        job = Job(model_dir=str(self.model_dir), trainer=settings("megatron", **fields), dtype=dtype, total_steps=10)
        policy = RankedPolicy(job)
        try:
            yield policy
        finally:
            policy.close()

    def torch(self, directory: Path | None = None, **fields: Any) -> TorchPolicy:
        return TorchPolicy(directory or self.model_dir, settings("torch", **fields), total_steps=10)


def samples(count: int = 9) -> list[Sample]:
    """Random sequences of unequal length, sampled at a temperature that is not 1."""
    rng = np.random.default_rng(7)
    made = []
    for number in range(count):
        prompt, sampled = int(rng.integers(2, 7)), int(rng.integers(1, 12))
        mask = np.zeros(prompt + sampled, dtype=np.uint8)
        mask[prompt:] = 1
        made.append(
            Sample(
                ids=rng.integers(0, VOCABULARY, prompt + sampled).astype(np.int32),
                loss_mask=mask,
                behaviour=(-rng.uniform(3, 6, prompt + sampled) * mask).astype(np.float32),
                advantage=float(rng.normal()),
                lag=number % 2,
                temperature=0.7,
            )
        )
    return made


def furthest(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
