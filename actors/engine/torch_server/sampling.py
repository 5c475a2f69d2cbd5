"""Sampling of a whole batch at once, and what a request may ask of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# SGLang parameters whose neutral value is accepted and whose effect this engine does not have
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": (None, "", []),
    "stop_regex": (None, "", []),
    "min_p": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
}
# these speak of text, and ids are all this engine returns
IRRELEVANT = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval")
EPSILON = 1e-6  # SGLang: a temperature below it is greedy
MAX_SAMPLES = 4096
TINY = torch.finfo(torch.float32).min


class BadRequest(ValueError):
    """A request that can't be served: names the field, the value and what would do."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of one request; `stops` empty when ends of sequence are ignored. temperature 0 is greedy."""

    max_new: int
    min_new: int
    temperature: float
    top_p: float
    top_k: int
    n: int
    stops: frozenset[int]
    seed: int | None


def parse_sampling(raw: Mapping[str, Any], eos: frozenset[int], vocab: int, room: int) -> Sampling:
    """Validate SGLang's `sampling_params`; `room` is what max_new_tokens=null means. Raises `BadRequest`.

    As in SGLang `ignore_eos` also switches `stop_token_ids` off.
    """
    for name, value in raw.items():
        if name in NEUTRAL:
            _check(value in NEUTRAL[name], name, value, "its neutral value: this engine does not compute it")
        elif name not in _KNOWN and name not in IRRELEVANT:
            raise BadRequest(f"unknown sampling parameter {name!r}: known are {', '.join(sorted(_KNOWN))}")
    max_new = room if "max_new_tokens" in raw and raw["max_new_tokens"] is None else _int(raw, "max_new_tokens", 128)
    min_new, n = _int(raw, "min_new_tokens", 0), _int(raw, "n", 1)
    top_k, temperature, top_p = _int(raw, "top_k", -1), _float(raw, "temperature"), _float(raw, "top_p")
    _check(max_new >= 1, "max_new_tokens", max_new, "at least 1")
    _check(0 <= min_new <= max_new, "min_new_tokens", min_new, f"between 0 and max_new_tokens={max_new}")
    _check(math.isfinite(temperature) and temperature >= 0, "temperature", temperature, "a finite number >= 0")
    _check(0 < top_p <= 1, "top_p", top_p, "in (0, 1]")
    _check(top_k == -1 or top_k >= 1, "top_k", top_k, "-1 or at least 1")
    _check(1 <= n <= MAX_SAMPLES, "n", n, f"between 1 and {MAX_SAMPLES}")
    stop_ids = raw.get("stop_token_ids") or []
    _check(
        isinstance(stop_ids, list) and all(type(t) is int for t in stop_ids),
        "stop_token_ids",
        stop_ids,
        "ids",
    )
    seed = raw.get("sampling_seed")
    _check(seed is None or type(seed) is int, "sampling_seed", seed, "an integer or null")
    return Sampling(
        max_new=max_new,
        min_new=min_new,
        temperature=0.0 if temperature < EPSILON else temperature,
        top_p=top_p,
        top_k=0 if top_k == -1 or top_k >= vocab else top_k,
        n=n,
        stops=frozenset() if raw.get("ignore_eos") else eos | frozenset(stop_ids),
        seed=seed,
    )


_KNOWN = frozenset(
    ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "n", "stop_token_ids", "ignore_eos")
) | {"sampling_seed"}


def _int(raw: Mapping[str, Any], name: str, default: int) -> int:
    value = default if raw.get(name) is None else raw[name]
    _check(type(value) is int, name, value, "an integer")
    return value


def _float(raw: Mapping[str, Any], name: str) -> float:
    value = 1.0 if raw.get(name) is None else raw[name]
    _check(type(value) in (int, float), name, value, "a number")
    return float(value)


def _check(holds: bool, field: str, value: Any, want: str) -> None:
    if not holds:
        raise BadRequest(f"{field} is {value!r}, it must be {want}")


def stream_key(seed: int, rid: str, prompt: int, own: int | None) -> int:
    """Signed 64-bit key of a request's random numbers: its own seed, else (engine seed, request id, prompt length).

    Drawing by key makes a sample independent of which requests share its batch.
    """
    text = f"{own}" if own is not None else f"{seed}:{rid}:{prompt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Tensors of the batch's parameters, each (B,). `filtered`: some row has top_p < 1 or top_k."""

    temperature: torch.Tensor
    greedy: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    keys: torch.Tensor
    all_greedy: bool
    filtered: bool
    hot: bool

    @staticmethod
    def of(params: Sequence[Sampling], keys: Sequence[int], device: torch.device) -> SamplingRows:
        temperatures = [p.temperature or 1.0 for p in params]
        greedy = [p.temperature == 0.0 for p in params]
        return SamplingRows(
            torch.tensor(temperatures, device=device),
            torch.tensor(greedy, device=device),
            torch.tensor([p.top_p for p in params], device=device),
            torch.tensor([p.top_k for p in params], device=device),
            torch.tensor(keys, dtype=torch.int64, device=device),
            all(greedy),
            any((p.top_p < 1 or p.top_k) and p.temperature for p in params),
            any(t != 1.0 for t in temperatures),
        )


def sample(logits: torch.Tensor, rows: SamplingRows, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Next ids (B,) int64 and their logprobs (B,) float32 from logits (B, V) float32, which may be overwritten.

    The logprob is log softmax(logits / temperature) of the whole vocabulary, before top_p and top_k; for a greedy row
    (temperature 0) the distribution is the unscaled one: what SGLang returns. `counts` (B,): tokens already drawn by
    each request, the counter of its random stream.
    """
    if rows.hot:
        logits = logits.div_(rows.temperature[:, None])
    probs = logits.softmax(-1)
    if rows.all_greedy:
        ids = probs.argmax(-1)
    else:
        point = uniform(rows.keys, counts)
        ids = _filtered(probs, rows, point) if rows.filtered else _draw(probs, point)
        ids = torch.where(rows.greedy, probs.argmax(-1), ids)
    return ids, probs.gather(1, ids[:, None]).squeeze(1).log_().clamp_(min=TINY)


def uniform(keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Floats in [0, 1 - 2**-22], one a row, from a counter-based generator (splitmix64 of key + counter)."""
    x = keys + (counts + 1) * -0x61C8864680B583EB
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    x = x ^ _shift(x, 31)
    return _shift(x, 42).float() * 2.0**-22


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _draw(probs: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution at `point` < 1: one id a row, never one of probability 0."""
    cumulative = probs.cumsum(-1)
    target = point[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=probs.shape[-1] - 1)


def _filtered(probs: torch.Tensor, rows: SamplingRows, point: torch.Tensor) -> torch.Tensor:
    """Draw among the top_k most likely that also lie in the smallest set of probability top_p (the first always)."""
    ordered, ids = probs.sort(dim=-1, descending=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    outside = (rows.top_k[:, None] > 0) & (ranks >= rows.top_k[:, None])
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(outside | (before >= rows.top_p[:, None]), 0.0)
    return ids.gather(1, _draw(ordered, point)[:, None]).squeeze(1)
