"""The megatron backend on the CPU. A missing installation fails this lane: it is never skipped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.lanes.megatron.bench import FAMILIES, Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """The bench of a family, its model on disk with weights whose norms and biases are no constants."""
    made: dict[str, Bench] = {}

    def of(family: str) -> Bench:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            torch.manual_seed(len(family))
            model = AutoModelForCausalLM.from_config(FAMILIES[family]())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            model.save_pretrained(path)
            made[family] = Bench(path)
        return made[family]

    return of
