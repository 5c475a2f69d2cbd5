"""Shape of a Llama-family model, read from a Hugging Face `config.json` without importing transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_TYPES = ("llama", "qwen2", "qwen3")


class UnsupportedModel(ValueError):
    """The checkpoint asks for something this forward does not compute: names the field and the value."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base `theta`, and the frequency scaling of Llama 3.1 when `factor` is not 1."""

    theta: float
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def frequencies(self, head_dim: int) -> list[float]:
        """The head_dim/2 angular frequencies (radians a position).

        With `factor` > 1 wavelengths above original/low are stretched by `factor`, those below original/high are
        kept, and the band between is interpolated (Llama 3.1 model card, "rope_type": "llama3").
        """
        base = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        return base if self.factor == 1.0 else [self._scaled(f) for f in base]

    def _scaled(self, frequency: float) -> float:
        turns = self.original * frequency / (2 * math.pi)
        kept = min(max((turns - self.low) / (self.high - self.low), 0.0), 1.0)
        return kept * frequency + (1 - kept) * frequency / self.factor


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes in elements; `eos` are the token ids that end a sequence unless a request ignores them."""

    model_type: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    init_std: float
    rope: Rope
    eos: frozenset[int]
    raw: Mapping[str, Any]


def read_config(path: Path) -> ModelConfig:
    """Parse `path`/config.json (and the end tokens of generation_config.json, when there is one).

    Raises `UnsupportedModel` on an architecture or option outside the family, FileNotFoundError without a config.
    """
    raw = json.loads((path / "config.json").read_text())
    generation = path / "generation_config.json"
    extra = json.loads(generation.read_text()) if generation.exists() else {}
    return parse_config(raw, extra)


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig` of a parsed config.json; raises `UnsupportedModel`."""
    kind = raw.get("model_type", "")
    _require(kind in MODEL_TYPES, "model_type", kind, f"one of {', '.join(MODEL_TYPES)}")
    _require(raw.get("hidden_act", "silu") == "silu", "hidden_act", raw.get("hidden_act"), "silu")
    _require(not raw.get("use_sliding_window", False), "use_sliding_window", True, "false")
    heads = int(raw["num_attention_heads"])
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        model_type=kind,
        vocab=int(raw["vocab_size"]),
        hidden=int(raw["hidden_size"]),
        intermediate=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        positions=int(raw.get("max_position_embeddings", 2048)),
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or attention_bias,
        out_bias=kind != "qwen2" and attention_bias,
        mlp_bias=kind == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        init_std=float(raw.get("initializer_range", 0.02)),
        rope=_rope(raw),
        eos=_ids(raw.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
        raw=raw,
    )


def _rope(raw: Mapping[str, Any]) -> Rope:
    """transformers 5 keeps everything under `rope_parameters`; 4 has `rope_theta` beside `rope_scaling`."""
    found = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(found.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = found.get("rope_type") or found.get("type") or "default"
    _require(float(found.get("partial_rotary_factor") or 1.0) == 1.0, "partial_rotary_factor", found, "1.0")
    if kind == "default":
        return Rope(theta)
    _require(kind == "llama3", "rope_type", kind, "default or llama3")
    return Rope(
        theta,
        float(found["factor"]),
        float(found["low_freq_factor"]),
        float(found["high_freq_factor"]),
        int(found["original_max_position_embeddings"]),
    )


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset((int(value),))


def _require(holds: bool, field: str, value: Any, want: str) -> None:
    if not holds:
        raise UnsupportedModel(f"config.json: {field} is {value!r}, this engine computes only {want}")
