"""What runs an actor: `run_actor` boots it, feeds its core, commits and performs; it is the same on Ray and alone."""

from __future__ import annotations

from pipeline.runtime.run import run_actor

__all__ = ["run_actor"]
