"""From prompts to token ids and from sampled ids to text, with the model's own tokenizer.

The tokenizer is read by `tokenizers` alone (0.1 s). The first request with chat messages loads transformers' fast
tokenizer class (1.5 s, without torch; `AutoTokenizer` would take 4 s and bring torch along).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from actors.gateway.client import DataProblem, NoncontiguousProblem

LARGE = 32_768
"""Characters from which a text is tokenised in a thread."""


class ModelFilesError(Exception):
    """The model directory can't serve a gateway: names the file and what is missing."""


class Tokens:
    """`vocabulary`: ids run from 0 to below it. `context`: tokens a sequence may have. `eos`: ids that end one."""

    def __init__(self, directory: Path) -> None:
        """Read tokenizer and limits from a Hugging Face checkpoint directory. Raises `ModelFilesError`."""
        config = _read(directory / "config.json")
        config |= config.get("text_config", {})
        for field in ("vocab_size", "max_position_embeddings"):
            if not isinstance(config.get(field), int):
                raise ModelFilesError(
                    f"{directory / 'config.json'}: {field} is {config.get(field)!r}, an integer is due"
                )
        self.vocabulary: int = config["vocab_size"]
        self.context: int = config["max_position_embeddings"]
        self.eos = _end_ids(directory, config)
        self._directory = directory
        self._tokenizer = _tokenizer(directory / "tokenizer.json")
        self._chat: Any = None
        self._loading = threading.Lock()

    async def text_ids(self, text: str, prefix: Sequence[int]) -> list[int]:
        """Ids of `prefix` followed by `text`; without a prefix the tokenizer may add its begin token."""
        return [*prefix, *await _threaded(len(text), self._encode, text, not prefix)]

    async def chat_ids(self, messages: list[dict[str, Any]], prefix: Sequence[int]) -> list[int]:
        """Ids of the conversation up to where the assistant's next turn begins; they begin with `prefix`.

        Raises `DataProblem` without a chat template or if it refuses the messages, `NoncontiguousProblem` if the
        rendered text does not begin with the text of `prefix`.
        """
        text = await asyncio.to_thread(self._render, messages)
        carried = self._tokenizer.decode(prefix, skip_special_tokens=False) if prefix else ""
        if not text.startswith(carried):
            at = next((k for k, (a, b) in enumerate(zip(text, carried, strict=False)) if a != b), len(text))
            raise NoncontiguousProblem(
                f"the conversation differs from prefix_ids at character {at}: "
                f"{text[at : at + 40]!r} where the prefix has {carried[at : at + 40]!r}"
            )
        return [*prefix, *await _threaded(len(text), self._encode, text[len(carried) :], False)]

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def check(self, name: str, ids: Sequence[int]) -> None:
        """Raises `DataProblem` naming the first id that the model does not have."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocabulary):
            at = next(k for k, token in enumerate(ids) if not 0 <= token < self.vocabulary)
            raise DataProblem(f"{name}[{at}] is {ids[at]}, the vocabulary has ids 0 to {self.vocabulary - 1}")

    def _encode(self, text: str, begin: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=begin).ids

    def _render(self, messages: list[dict[str, Any]]) -> str:
        from jinja2 import TemplateError

        chat = self._load_chat()
        if not chat.chat_template:
            raise DataProblem(
                f"the model in {self._directory} has no chat template: send `prompt` instead of `messages`"
            )
        try:
            return chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            raise DataProblem(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    def _load_chat(self) -> Any:
        with self._loading:
            if self._chat is None:
                from transformers import PreTrainedTokenizerFast

                self._chat = PreTrainedTokenizerFast.from_pretrained(str(self._directory), local_files_only=True)
            return self._chat


async def _threaded(size: int, work: Any, *args: Any) -> Any:
    return await asyncio.to_thread(work, *args) if size > LARGE else work(*args)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelFilesError(f"{path} is missing") from error
    except ValueError as error:
        raise ModelFilesError(f"{path} is not JSON: {error}") from error


def _tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        raise ModelFilesError(f"{path} is missing: the gateway needs a fast tokenizer")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    sources = [config, _read(generation) if generation.exists() else {}]
    found: set[int] = set()
    for value in (source.get("eos_token_id") for source in sources):
        found |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    return tuple(sorted(found))
