"""Protocol of a policy backend: what the trainer's shell asks of `torch` and `megatron`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class PolicyBackend(Protocol):
    """Weights, optimizer and the training step of one policy. Not thread-safe: one call at a time."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    def train_step(self, samples: Sequence[Any]) -> Mapping[str, float]:
        """One optimizer step over the samples of a batch; answers scalar metrics."""
        ...

    def export(self) -> Iterator[tuple[str, Any]]:
        """Hugging Face name and a *copy* of each parameter in transfer dtype; tied duplicates omitted."""
        ...

    def save(self, path: Path, meta: Mapping[str, Any]) -> int:
        """Write model, optimizer and schedule durably and atomically; answers bytes."""
        ...

    def load(self, path: Path) -> Mapping[str, Any]:
        """Restore what `save` wrote, bit for bit; answers its meta."""
        ...

    def close(self) -> None:
        """Give back what it holds: groups, processes."""
        ...
