"""Attention for sequences that lie one behind the other in one row: each sees itself alone.

Everything but attention works token by token, so only here the sequences are laid out as rectangles again: those of
about one length together, so that at most half of a rectangle is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from actors.trainer.backend import BackendError

NAME = "sluice_packed"
MODELS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Families of transformers that leave all attention to this function, and have no other."""


@dataclass(frozen=True)
class Rectangle:
    """Sequences of about one length: token `tokens[i]` of the row is at `slots[i]` of `rows` x `width`."""

    tokens: Tensor
    slots: Tensor
    rows: int
    width: int


def layout(bounds: NDArray[np.int32], device: torch.device) -> tuple[Rectangle, ...]:
    """How the sequences that `bounds` int32 [sequences + 1] delimits are attended; each token is in one rectangle."""
    starts, lengths = bounds[:-1].astype(np.int64), np.diff(bounds).astype(np.int64)
    classes = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    rectangles = []
    for size in np.unique(classes):
        chosen = np.flatnonzero(classes == size)
        width = int(lengths[chosen].max())
        spans = [(starts[index], lengths[index], number * width) for number, index in enumerate(chosen)]
        tokens = np.concatenate([np.arange(start, start + length) for start, length, _ in spans])
        slots = np.concatenate([np.arange(slot, slot + length) for _, length, slot in spans])
        rectangles.append(
            Rectangle(torch.from_numpy(tokens).to(device), torch.from_numpy(slots).to(device), len(chosen), width)
        )
    return tuple(rectangles)


def use(model: Any) -> None:
    """Have `model` attend packed rows; `layout=` goes with each call. Raises `BackendError` for an unfit model."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    if config.model_type not in MODELS or kinds - {"full_attention"} or getattr(config, "sliding_window", None):
        raise BackendError(
            f"trainer.packed=true: {config.model_type} has attention that can't be packed here (packable: full "
            f"attention of {', '.join(MODELS)}); use trainer.packed=false"
        )
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    model.set_attn_implementation(NAME)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: tuple[Rectangle, ...],
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: query [1, heads, tokens, width] -> [1, tokens, heads, width].

    There may be fewer heads of keys and values, as grouped-query attention has them.
    """
    result = torch.empty_like(query[0].transpose(0, 1))
    for part in layout:
        q, k, v = (_laid_out(tensor, part) for tensor in (query, key, value))
        done = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        flat = done.transpose(1, 2).reshape(part.rows * part.width, *result.shape[1:])
        result = result.index_put((part.tokens,), flat[part.slots])
    return result[None], None


def _laid_out(tensor: Tensor, part: Rectangle) -> Tensor:
    """[1, heads, tokens, width of a head] -> [rows, heads, width, width of a head]; zero where there is no token."""
    tokens = tensor[0].transpose(0, 1)[part.tokens]
    empty = tokens.new_zeros(part.rows * part.width, *tokens.shape[1:])
    filled = empty.index_put((part.slots,), tokens)
    return filled.reshape(part.rows, part.width, *tokens.shape[1:]).transpose(1, 2)
