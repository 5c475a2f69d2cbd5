"""Whose layers megatron gets, and who rotates packed rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.trainer.megatron import kernels


@pytest.mark.parametrize(
    ("installed", "gpu", "dtype", "expected"),
    [
        (True, True, torch.bfloat16, True),
        (False, True, torch.bfloat16, False),
        (True, False, torch.bfloat16, False),
        (True, True, torch.float32, False),
    ],
)
def test_layers_are_transformer_engines_where_it_can_attend_packed_rows(
    installed: bool, gpu: bool, dtype: torch.dtype, expected: bool
) -> None:
    assert kernels.transformer_engine(installed=installed, gpu=gpu, dtype=dtype) == expected


def model(**fields: Any) -> Any:
    plain = {"multi_latent_attention": False, "position_embedding_type": "rope", "rotary_interleaved": False}
    return SimpleNamespace(**{**plain, **fields})


@pytest.mark.parametrize(
    ("fields", "engine", "kernel", "expected"),
    [
        ({}, True, True, "fused"),
        ({}, True, False, "whole"),
        ({}, False, False, "whole"),
        # its kernel is no reason to use it: without its layers, attention is told of rectangles
        ({}, False, True, "whole"),
        ({"position_embedding_type": "yarn"}, True, True, "whole"),
        ({"rotary_interleaved": True}, True, True, "whole"),
        ({"multi_latent_attention": True}, True, True, "megatron"),
        ({"position_embedding_type": "learned_absolute"}, True, True, "megatron"),
    ],
)
def test_a_packed_row_is_never_cut_into_its_sequences_where_that_can_be_avoided(
    fields: dict[str, Any], engine: bool, kernel: bool, expected: str
) -> None:
    assert kernels.rotation(model(**fields), engine=engine, kernel=kernel) == expected
