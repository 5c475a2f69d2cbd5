"""Forward of the Llama family over a ragged batch: every token knows its cache row and position.

Linear layers see the tokens packed (N, hidden); only attention pads to (rows, tokens a row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from actors.engine.torch_server.kv import KVCache
from actors.engine.torch_server.weights import Weights


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of R neighbouring cache rows, `first` .. `first`+R-1, at most Q new tokens a row.

    tokens, positions: (N,) int64. slots: (N*kv_heads,) where their keys and values go. mask: (R, 1, G*Q, K) float,
    0 or -inf, over the first K cache places. spread: (N,) place of each token in the padded (R*Q) grid, None when
    the grid is full.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    first: int
    rows: int
    width: int
    span: int
    spread: torch.Tensor | None


class Model:
    """Stateless apart from weights and the rotary tables (`context` positions)."""

    def __init__(self, weights: Weights, context: int) -> None:
        self.weights, self.config = weights, weights.config
        self.groups = self.config.heads // self.config.kv_heads
        frequencies = torch.tensor(self.config.rope.frequencies(self.config.head_dim), dtype=torch.float32)
        angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
        self.cos = angles.cos().to(weights.device, weights.dtype)
        self.sin = angles.sin().to(weights.device, weights.dtype)

    def decode_batch(self, cache: KVCache, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> Batch:
        """One token in each of rows 0..N-1; tokens, positions (N,) int64; `span` = 1 + the largest position."""
        rows = tokens.shape[0]
        places = torch.arange(span, device=tokens.device)
        slots = cache.slots(torch.arange(rows, device=tokens.device), positions)
        mask = self._mask(places <= positions[:, None])[:, None, None].expand(rows, 1, self.groups, span)
        return Batch(tokens, positions, slots, mask, 0, rows, 1, span, None)

    def prefill_batch(
        self, cache: KVCache, first: int, pieces: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Batch:
        """Row `first`+i takes pieces[i] (not empty) from position starts[i] on."""
        device, counts = cache.device, [len(piece) for piece in pieces]
        rows, width = len(pieces), max(counts)
        span = max(start + count for start, count in zip(starts, counts, strict=True))
        tokens = torch.tensor([t for piece in pieces for t in piece], device=device)
        lengths, begin = torch.tensor(counts, device=device), torch.tensor(starts, device=device)
        steps = torch.arange(width, device=device)
        valid = steps < lengths[:, None]
        grid = begin[:, None] + steps
        positions = grid[valid]
        row = torch.arange(rows, device=device)
        slots = cache.slots((row + first).repeat_interleave(lengths), positions)
        # padded queries look at place 0 only, which every row has, so no softmax is empty
        seen = torch.arange(span, device=device) <= torch.where(valid, grid, 0)[:, :, None]
        mask = self._mask(seen)[:, None, None].expand(rows, 1, self.groups, width, span)
        spread = None if min(counts) == width else valid.view(-1).nonzero().view(-1)
        mask = mask.reshape(rows, 1, self.groups * width, span)
        return Batch(tokens, positions, slots, mask, first, rows, width, span, spread)

    def forward(self, cache: KVCache, batch: Batch) -> torch.Tensor:
        """Hidden states (N, hidden) after the last norm; keys and values of the tokens enter the cache."""
        c, w = self.config, self.weights
        cos, sin = self.cos[batch.positions][:, None], self.sin[batch.positions][:, None]
        x = F.embedding(batch.tokens, w.embed)
        for i, layer in enumerate(w.layers):
            h = F.rms_norm(x, (c.hidden,), layer.norm_in, c.eps)
            heads = F.linear(h, layer.qkv, layer.qkv_bias).view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
            q, k, v = heads.split((c.heads, c.kv_heads, c.kv_heads), 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = F.rms_norm(q, (c.head_dim,), layer.q_norm, c.eps)
                k = F.rms_norm(k, (c.head_dim,), layer.k_norm, c.eps)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            cache.write(i, batch.slots, k, v)
            x = x + F.linear(self._attend(cache.layers[i], batch, q), layer.out, layer.out_bias)
            h = F.rms_norm(x, (c.hidden,), layer.norm_mlp, c.eps)
            gate, up = F.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = x + F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)
        return F.rms_norm(x, (c.hidden,), w.norm, c.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N, hidden) -> (N, vocab) float32."""
        return F.linear(hidden, self.weights.head).float()

    def _attend(self, cache: torch.Tensor, batch: Batch, q: torch.Tensor) -> torch.Tensor:
        """q (N, heads, head_dim) -> (N, heads*head_dim). Query heads of a group go along the query axis: no repeats."""
        c, (rows, width) = self.config, (batch.rows, batch.width)
        if batch.spread is not None:
            padded = q.new_zeros(rows * width, c.heads, c.head_dim)
            padded[batch.spread] = q
            q = padded
        q = q.reshape(rows, width, c.kv_heads, self.groups, c.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows, c.kv_heads, self.groups * width, c.head_dim)
        keys, values = cache[:, batch.first : batch.first + rows, :, : batch.span]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=batch.mask)
        out = out.view(rows, c.kv_heads, self.groups, width, c.head_dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(rows * width, c.heads * c.head_dim)
        return out if batch.spread is None else out[batch.spread]

    def _mask(self, seen: torch.Tensor) -> torch.Tensor:
        blank = torch.zeros((), dtype=self.weights.dtype, device=seen.device)
        return torch.where(seen, blank, blank - float("inf"))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding on halves: (N, heads, head_dim) with cos, sin (N, 1, head_dim/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
