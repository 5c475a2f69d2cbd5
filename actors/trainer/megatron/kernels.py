"""Whose layers a model gets, and who rotates its packed rows. Pure; imports nothing of megatron."""

from __future__ import annotations

from typing import Any, Literal

import torch

Rotation = Literal["fused", "whole", "megatron"]
"""Who turns queries and keys of a packed row by the positions of their tokens.

`fused`: a kernel of Transformer Engine, which reads the bounds of the sequences on the GPU. `whole`: `layers.Rotation`,
the row at once. `megatron`: megatron-core's own way, which cuts the row into its sequences in Python in each layer.
"""


def transformer_engine(*, installed: bool, gpu: bool, dtype: torch.dtype) -> bool:
    """Whether layers are Transformer Engine's. It has nothing for CPUs, and no packed attention in float32."""
    return installed and gpu and dtype == torch.bfloat16


def rotation(provider: Any, *, engine: bool, kernel: bool) -> Rotation:
    """For a model as megatron-bridge's `provider` describes it.

    `engine`: layers are Transformer Engine's; `kernel`: it has a fused rotation of packed rows. That one leaves out the
    factor of YaRN, and interleaved pairs need a newer one than megatron-core asks for.
    """
    if not engine:
        return "whole"
    if provider.multi_latent_attention or provider.position_embedding_type not in ("rope", "yarn"):
        return "megatron"
    plain = provider.position_embedding_type == "rope" and not provider.rotary_interleaved
    return "fused" if kernel and plain else "whole"
