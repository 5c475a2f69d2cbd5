"""Tiny random models and a scheduler that a test steps by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from actors.engine.torch_server.config import read_config
from actors.engine.torch_server.generation import Generation
from actors.engine.torch_server.model import Model
from actors.engine.torch_server.sampling import Sampling
from actors.engine.torch_server.scheduler import Scheduler
from actors.engine.torch_server.weights import Weights

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def reference(kind: str) -> Any:
    """A random Hugging Face model of the kind, norms and biases off their neutral values."""
    torch.manual_seed(1)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    elif kind == "llama3":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """(Hugging Face model, its directory) of a kind, made once."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(kind: str) -> tuple[Any, Path]:
        if kind not in made:
            model = reference(kind)
            path = tmp_path_factory.mktemp(kind)
            model.save_pretrained(path)
            made[kind] = model, path
        return made[kind]

    return get


class Stepped:
    """A scheduler without its thread: `run` steps until idle, inference mode included."""

    def __init__(self, path: Path, **options: Any) -> None:
        weights = Weights(read_config(path), torch.float32, torch.device("cpu"))
        weights.load(path)
        given = {"max_running": 16, "max_total_tokens": 8192, "prefix_tokens": 4096, "chunk": 256, "threads": 1}
        self.scheduler = Scheduler(Model(weights, 512), **(given | options))
        self.weights = weights
        self._made = 0

    def add(self, prompt: Sequence[int], new: int = 6, start: int = -1, **sampling: Any) -> Generation:
        params = {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_new": 0,
            "stops": frozenset(),
            "n": 1,
            "seed": None,
        }
        self._made += 1
        rid = sampling.pop("rid", f"r{self._made}")
        made = Sampling(max_new=new, **(params | sampling))
        g = Generation(rid, list(prompt), made, self._made * 7919, True, start, False, None)
        self.scheduler.waiting.append(g)
        return g

    def step(self, times: int = 1) -> None:
        with torch.inference_mode():
            for _ in range(times):
                self.scheduler._step()

    def run(self) -> None:
        while not self.scheduler.idle:
            self.step()

    def alone(self, prompt: Sequence[int], new: int = 6, **sampling: Any) -> Generation:
        g = self.add(prompt, new, **sampling)
        self.run()
        return g


@pytest.fixture
def stepped(saved: Callable[[str], tuple[Any, Path]]) -> Callable[..., Stepped]:
    return lambda kind="llama", **options: Stepped(saved(kind)[1], **options)


def output(g: Generation) -> list[int]:
    return g.tokens[g.prompt :]
