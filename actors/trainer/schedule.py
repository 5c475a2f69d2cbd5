"""The learning rate over the steps of a run. Pure."""

from __future__ import annotations

import math


def schedule(kind: str, step: int, *, warmup: int, total: int) -> float:
    """Factor of the learning rate at `step` (from 0): rising over `warmup` steps, then constant or falling to 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
