"""How much memory a computation has at once, counted by its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Within the block, `peak` is the most bytes that tensors made in it have had together after any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self._sizes = {key: size for key, size in self._sizes.items() if not key.expired()}
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and _key(value) not in given:
                self._sizes[_key(value)] = value.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


def _key(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
