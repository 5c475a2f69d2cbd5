"""A small Llama with random weights and a tokenizer made from the words of its task: enough to learn from nothing.

Words are one token each, leading space included; digits are single tokens, and so is every other character that the
texts hold. Encoding and decoding such a text loses nothing; anything else becomes `<unk>`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from actors.models.errors import ModelError
from actors.models.files import build_once

FORMAT = 1
"""Part of the directory's name; raise it whenever the same spec gives other files."""

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML; an earlier answer's thinking is shown as it was said."""

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PIECES = r" ?[^\W\d_]+| ?\d|\s|[^\w\s]|_"
"""How text is cut: words with the space before them, digits, spaces, symbols."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts that the tokenizer must know: `size` tasks (questions and answers) of a reasoning-gym dataset with settings
    `args`, and `texts` and `phrases` besides."""

    dataset: str | None = None
    args: dict[str, Any] = {}
    size: Count = 200
    texts: tuple[str, ...] = ()
    phrases: tuple[str, ...] = ()
    """Texts of one token each, whatever is in them, such as `<action>hit</action>`."""


class RandomSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of the model. `mlp` and `kv_heads` default to four times the width and to `heads`."""

    vocabulary: Vocabulary
    layers: Count = 2
    width: Count = 128
    heads: Count = 4
    kv_heads: Count | None = None
    mlp: Count | None = None
    positions: Count = 128
    """Longest sequence, prompt and completion."""
    init_std: Annotated[float, msgspec.Meta(gt=0)] = 0.02
    """Standard deviation of the weights drawn."""
    rope_theta: Annotated[float, msgspec.Meta(gt=0)] = 10000.0
    tied: bool = True
    """Share the embedding with the output layer."""
    chat: bool = False
    """Give it a chat template in ChatML's form, with its end token."""


def parse(params: Mapping[str, Any]) -> RandomSpec:
    """Check a spec given as plain data. Raises `ModelError` naming the field."""
    try:
        spec = msgspec.convert(dict(params), RandomSpec)
    except msgspec.ValidationError as error:
        known = ", ".join(RandomSpec.__struct_fields__)
        raise ModelError(f"model.params of a random model: {error}; its fields are {known}") from error
    if spec.width % spec.heads or (spec.width // spec.heads) % 2:
        raise ModelError(f"model.params.width={spec.width} is not an even multiple of heads={spec.heads}")
    if spec.heads % (spec.kv_heads or spec.heads):
        raise ModelError(f"model.params.heads={spec.heads} is not a multiple of kv_heads={spec.kv_heads}")
    return spec


def materialise(spec: RandomSpec, cache_dir: Path) -> Path:
    """Write config.json and the tokenizer, but no weights, into a directory named after the spec; answers its path.

    The same spec gives the same files. Several processes may call at once: one writes, all get the same directory.
    Raises `ModelError` for a dataset that doesn't exist or refuses its settings.
    """
    document = json.dumps([FORMAT, _said(spec)], sort_keys=True)
    path = cache_dir / f"random-{hashlib.sha256(document.encode()).hexdigest()[:16]}"
    return build_once(path, lambda scratch: _write(spec, scratch))


def _said(spec: RandomSpec) -> dict[str, Any]:
    """The spec as plain data, without what is newer than FORMAT and left at its default."""
    data = msgspec.to_builtins(spec)
    if not spec.chat:
        del data["chat"]
    if not spec.vocabulary.phrases:
        del data["vocabulary"]["phrases"]
    return data


def vocabulary(texts: Iterable[str]) -> list[str]:
    """Tokens in the order of their ids: special ones, digits, then the pieces of `texts`, sorted."""
    pieces = {piece for text in texts for piece in re.findall(PIECES, text)}
    digits = [str(digit) for digit in range(10)]
    return [PAD, EOS, UNKNOWN, *digits, *sorted(pieces - set(digits))]


def _write(spec: RandomSpec, path: Path) -> None:
    tokens = [*vocabulary(_texts(spec.vocabulary)), *_extra(spec)]
    _write_tokenizer(tokens, spec, path)
    eos = END if spec.chat else EOS
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": spec.width,
        "intermediate_size": spec.mlp or 4 * spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads or spec.heads,
        "head_dim": spec.width // spec.heads,
        "max_position_embeddings": spec.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "rope_theta": spec.rope_theta,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "torch_dtype": "float32",
        "pad_token_id": tokens.index(PAD),
        "bos_token_id": None,
        "eos_token_id": tokens.index(eos),
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))


def _extra(spec: RandomSpec) -> list[str]:
    """Tokens behind the vocabulary: those of the chat template, and phrases."""
    return [*((START, END) if spec.chat else ()), *dict.fromkeys(spec.vocabulary.phrases)]


def _texts(source: Vocabulary) -> list[str]:
    texts = list(source.texts)
    if source.dataset is not None:
        from actors.environments.reasoning_gym import dataset_factory

        try:
            tasks = dataset_factory(source.dataset)(seed=0, size=source.size, **source.args)
        except (TypeError, ValueError, AssertionError) as error:
            raise ModelError(f"model.params.vocabulary of dataset {source.dataset!r}: {error}") from error
        texts += [text for task in tasks for text in (task["question"], str(task["answer"]))]
    if not texts and not source.phrases:
        raise ModelError("model.params.vocabulary names neither a dataset nor texts or phrases")
    return texts


def _write_tokenizer(tokens: list[str], spec: RandomSpec, path: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS, UNKNOWN)])
    if spec.chat:
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (START, END)])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in spec.vocabulary.phrases])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.positions,
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD,
        "eos_token": END if spec.chat else EOS,
        "unk_token": UNKNOWN,
    }
    if spec.chat:
        settings["chat_template"] = TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
