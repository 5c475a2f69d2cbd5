"""Files of a Hugging Face model directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from actors.trainer.checkpoint import Writer

WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


def copied(model_dir: Path) -> dict[str, Writer]:
    """Writers of everything that belongs to a model beside its weights: configuration, tokenizer, chat template."""
    return {
        source.name: lambda file, source=source: _copy(source, file)
        for source in sorted(model_dir.iterdir())
        if source.suffix in {".json", ".jinja", ".txt", ".model"} and not source.name.endswith(".index.json")
    }


def on_host(tensors: Iterable[tuple[str, Any]], *, keep: bool) -> dict[str, Any]:
    """Takes all of `tensors`, which ranks gather together, and keeps copies in host memory where they are wanted."""
    kept = {}
    for name, tensor in tensors:
        if keep:
            kept[name] = tensor.cpu()
        del tensor  # before the next one is gathered
    return kept


def vocabulary(model_dir: Path) -> int:
    """Rows of the embedding."""
    return json.loads((model_dir / "config.json").read_text())["vocab_size"]


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
