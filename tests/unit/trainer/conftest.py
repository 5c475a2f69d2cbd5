"""A tiny Llama and random samples for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from actors.trainer.packing import Sample

VOCABULARY = 23


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the config of a tiny tied Llama and no weights."""
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)
    return path


@pytest.fixture
def make_samples() -> Callable[..., list[Sample]]:
    """Random samples: prompts of 2 to 6 tokens, 1 to 7 trainable ones, one gap that is not trained on now and then."""

    def make(count: int, seed: int = 0, **fields: object) -> list[Sample]:
        rng = np.random.default_rng(seed)
        samples = []
        for number in range(count):
            prompt, sampled = int(rng.integers(2, 7)), int(rng.integers(1, 8))
            length = prompt + sampled
            mask = np.zeros(length, dtype=np.uint8)
            mask[prompt:] = 1
            if sampled > 3 and number % 2:
                mask[prompt + 1] = 0
            values = {
                "ids": rng.integers(0, VOCABULARY, length).astype(np.int32),
                "loss_mask": mask,
                "behaviour": (-rng.uniform(1.5, 4.5, length) * mask).astype(np.float32),
                "advantage": float(rng.normal()),
                "lag": number % 2,
                "group": number // 4,
                "temperature": 1.0,
            }
            samples.append(Sample(**{**values, **fields}))
        return samples

    return make
