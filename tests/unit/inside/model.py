"""A model whose loader fuses, shards and pads, as those of inference servers do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from actors.engine.inside.slices import Spec

HEADS = {"q": 8, "k": 4, "v": 4}
ROWS = 16
SPECS = (
    Spec("embed", torch.float32, (13, 8)),
    *(Spec(name, torch.float32, (rows, 8)) for name, rows in HEADS.items()),
    Spec("down", torch.float32, (8, 32)),
    Spec("norm", torch.float32, (8,)),
)


class Model(torch.nn.Module):
    """Rank `rank` of `size`. `quirk` is asked before a tensor is loaded, and may load it in another way."""

    def __init__(self, rank: int = 0, size: int = 1, quirk: Callable[..., bool] | None = None) -> None:
        super().__init__()
        self.rank, self.size, self.quirk = rank, size, quirk
        self.qkv = torch.nn.Parameter(torch.randn(ROWS // size, 8))
        self.embed = torch.nn.Parameter(torch.randn(16, 8))
        self.down = torch.nn.Parameter(torch.randn(8, 32 // size))
        self.norm = torch.nn.Parameter(torch.randn(8))
        self.loads = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights:
            self.loads += 1
            if self.quirk is not None and self.quirk(self, name, tensor):
                continue
            if name in HEADS:
                start = sum(HEADS[before] for before in "qkv"["qkv".index(name) :: -1][1:]) // self.size
                rows = HEADS[name] // self.size
                own["qkv"].data.narrow(0, start, rows).copy_(tensor.narrow(0, self.rank * rows, rows))
            elif name == "down":
                columns = 32 // self.size
                own[name].data.copy_(tensor.narrow(1, self.rank * columns, columns))
            elif name == "embed":
                own[name].data[: len(tensor)].copy_(tensor)
                own[name].data[len(tensor) :].fill_(0)
            elif name in own:
                if own[name].shape != tensor.shape:
                    raise ValueError(f"{name} has another shape")
                own[name].data.copy_(tensor)


def weights(seed: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=source, dtype=spec.dtype) for spec in SPECS}
