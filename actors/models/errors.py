"""What resolving a model can raise."""

from __future__ import annotations


class ModelError(Exception):
    """A model can't be had: says which source, why, and what to do."""
