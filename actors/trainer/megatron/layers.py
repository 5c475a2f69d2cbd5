"""Layers for megatron-core without Transformer Engine, which take packed sequences and sequence parallelism."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from actors.trainer.backend import BackendError
from actors.trainer.packed import attend


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a packed row ("thd"), which Megatron's own local attention can't do."""

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """`query` [tokens, heads, width], `key` and `value` [tokens, groups, width] -> [tokens, heads * width].

        `packed_seq_params` is what `Rotation` made for the row.
        """
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        attended = attend(self, q, k, v, None, layout=packed_seq_params.attended, scaling=self._scale)[0]
        return attended[0].flatten(1)


def packed(bounds: Tensor, longest: int) -> PackedSeqParams:
    """What a packed row's forward pass is given: int32 `bounds` of its sequences, and the `longest` one's tokens."""
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


class Rotation:
    """Rotates the tokens of a packed row each by its own position, all at once.

    megatron cuts a row into its sequences to do so, in Python, and twice in each layer. It takes a row for one sequence
    instead, whose angles are laid out beforehand: `positions` int64 [tokens] of the row that comes next. Attention is
    told of the sequences apart from that.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.positions: Tensor | None = None
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, RotaryEmbedding):
                    module.register_forward_hook(self._laid_out)
                attention = getattr(module, "core_attention", None)
                if attention is not None and not isinstance(attention, PackedAttention):
                    attention.register_forward_pre_hook(_apart, with_kwargs=True)

    def _laid_out(self, module: torch.nn.Module, arguments: Any, angles: Any) -> Any:
        """[longest, 1, 1, width] -> [tokens, 1, 1, width]; YaRN's come with a factor."""
        assert self.positions is not None
        if isinstance(angles, tuple):
            return angles[0][self.positions], *angles[1:]
        return angles[self.positions]

    def packed(self, positions: Tensor, longest: int, attended: Any) -> PackedSeqParams:
        """A row as one sequence, whose bounds are on the CPU, so that reading them waits for nothing.

        `attended` is for attention: rectangles for `PackedAttention`, what `packed` makes for another.
        """
        self.positions = positions
        row = packed(torch.tensor([0, len(positions)], dtype=torch.int32), longest)
        row.attended = attended
        return row


def _apart(attention: torch.nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return arguments, {**named, "packed_seq_params": named["packed_seq_params"].attended}


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose weight is known to see one part of the sequence a rank, under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = bool(config.sequence_parallel)  # type: ignore[attr-defined]


def blocks(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of a pipeline stage: `transformer_layer_spec` of megatron-bridge's provider.

    Raises `BackendError` for a model that these layers can't make.
    """
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma or config.multi_latent_attention:
        raise BackendError(
            "without Transformer Engine, the megatron backend trains models with RMSNorm and plain attention (Llama, "
            "Qwen2, Qwen3, Qwen3-MoE); others need transformer-engine, a GPU and model.dtype=bfloat16"
        )
    # Asked for as LayerNorm, since megatron's RMSNorm without Transformer Engine refuses sequence parallelism.
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
    )
    modules: Any = layer.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = Norm
    attention: Any = modules.self_attention.submodules
    attention.core_attention = PackedAttention
    for name in ("q_layernorm", "k_layernorm"):
        if getattr(attention, name) is not IdentityOp:
            setattr(attention, name, Norm)
    layers: list[ModuleSpec] = [layer] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
