"""From prompts to token ids and from sampled ids to text, with the model's own tokenizer.

The tokenizer is read by `tokenizers` alone (0.1 s). The first request with chat messages loads transformers' fast
tokenizer class (1.5 s, without torch; `AutoTokenizer` would take 4 s and bring torch along).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from actors.gateway.client import DataProblem
from actors.gateway.parsing import THINK
from actors.gateway.sessions import text_of
from actors.startup import uncollected

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

LARGE = 32_768
"""Characters from which a text is rendered and tokenised in a thread."""

CHARACTER = 8
"""Tokens that one character may take; bytes that are no character by then are shown as such."""

KEPT = 1 << 20
"""Characters of the prompts that are kept with their ids."""

MARK = "q7Zk1xW9answerT4vB8"
"""Stands in for an answer while what follows it is rendered: letters and digits, which no template changes."""


class ModelFilesError(Exception):
    """The model directory can't serve a gateway: names the file and what is missing."""


class Tokens:
    """`vocabulary`: ids run from 0 to below it. `context`: tokens a sequence may have. `eos`: ids that end one.

    `family`: the model's type. `specials`: the tokens that are no text. `response_template`: the tokenizer's own,
    unchecked, or None.
    """

    def __init__(self, directory: Path) -> None:
        """Read tokenizer and limits from a Hugging Face checkpoint directory. Raises `ModelFilesError`."""
        config = _read(directory / "config.json")
        self.family = str(config.get("model_type", ""))
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
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {id: token.content for id, token in added if token.special}
        self.specials = list(special.values())
        self._special_ids = frozenset(special)
        settings = directory / "tokenizer_config.json"
        self.response_template: Any = _read(settings).get("response_template") if settings.exists() else None
        self._chat: Any = None
        self._recent = Recent()
        self._loading = threading.Lock()

    async def text_ids(self, text: str, prefix: Sequence[int]) -> list[int]:
        """Ids of `prefix` followed by `text`; without a prefix the tokenizer may add its begin token."""
        return [*prefix, *await _threaded(len(text), self._encode, text, not prefix)]

    async def chat_ids(
        self,
        messages: Messages,
        prefix: Sequence[int] = (),
        carried: int = 0,
        tools: Tools = None,
        template: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the conversation up to where the assistant's next turn begins; they begin with `prefix`.

        `prefix` holds the first `carried` messages, of which the last is the assistant's answer as it was sampled: only
        what follows is rendered and tokenised. `template`: further variables for the template. Raises `DataProblem`
        without a chat template or if it refuses the messages.
        """
        if not prefix:
            return await self._first_ids(messages, tools, template)
        if not 1 <= carried < len(messages) or messages[carried - 1].get("role") != "assistant":
            raise DataProblem(
                f"carried={carried} of {len(messages)} messages: it counts those that prefix_ids hold, of which the "
                "last is the assistant's, and something must follow"
            )
        following = await self._rendered(messages, self._following, messages, carried, tools, template)
        text = self._behind(prefix[-1], following)
        return [*prefix, *await _threaded(len(text), self._encode, text, False)]

    async def _first_ids(self, messages: Messages, tools: Tools, template: Mapping[str, Any] | None) -> list[int]:
        """Of a conversation that begins. The samples of a group have one prompt, so the newest are kept."""
        asked = repr((messages, tools, template))
        found = self._recent.get(asked)
        if found is None:
            text = await self._rendered(messages, self._render, messages, tools, template)
            found = await _threaded(len(text), self._encode, text, False)
            self._recent.add(asked, found)
        return list(found)

    def thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends within thinking that its template opened."""
        return self.raw(prompt[-8:]).rstrip().endswith(THINK)

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def raw(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens and all."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def written(self, ids: Sequence[int]) -> str | None:
        """The text of sampled ids with the special tokens in it, but for the one that ends it; None without any."""
        body = ids[:-1] if ids and ids[-1] in self.eos else ids
        return None if self._special_ids.isdisjoint(body) else self.raw(body)

    def check(self, name: str, ids: Sequence[int]) -> None:
        """Raises `DataProblem` naming the first id that the model does not have."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocabulary):
            at = next(k for k, token in enumerate(ids) if not 0 <= token < self.vocabulary)
            raise DataProblem(f"{name}[{at}] is {ids[at]}, the vocabulary has ids 0 to {self.vocabulary - 1}")

    async def _rendered(self, messages: Messages, render: Any, *args: Any) -> str:
        """In a thread if it takes long: the first time, and for a long conversation."""
        size = LARGE + 1 if self._chat is None else sum(_size(message) for message in messages)
        return await _threaded(size, render, *args)

    def _encode(self, text: str, begin: bool) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=begin).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise DataProblem("the prompt has half a character (a lone surrogate), which is no text") from error

    def _following(self, messages: Messages, carried: int, tools: Tools, template: Any) -> str:
        """The text that the template puts behind the content of message `carried - 1`, the assistant's last answer.

        A mark stands in for the answer, so that it does not matter what the template would make of it or of those
        before it.
        """
        mark = {"role": "assistant", "content": MARK}
        text = self._render([*messages[: carried - 1], mark, *messages[carried:]], tools, template)
        if text.count(MARK) != 1:
            raise DataProblem(f"the chat template shows the assistant's message {text.count(MARK)} times")
        return text.partition(MARK)[2]

    def _behind(self, last: int, text: str) -> str:
        """`text` without the end token that the answer brought itself."""
        if last not in self.eos:
            return text
        end = self._tokenizer.id_to_token(last) or ""
        before, found, after = text.partition(end)
        return after if found and not before.strip() else text

    def _render(self, messages: Messages, tools: Tools, template: Mapping[str, Any] | None) -> str:
        from jinja2 import TemplateError

        chat = self._load_chat()
        if not chat.chat_template:
            raise DataProblem(
                f"the model in {self._directory} has no chat template: send `prompt` instead of `messages`"
            )
        try:
            return chat.apply_chat_template(
                [_templated(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **(template or {}),
            )
        except (TemplateError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DataProblem(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    def _load_chat(self) -> Any:
        with self._loading:
            if self._chat is None:
                with uncollected():
                    from transformers import PreTrainedTokenizerFast

                    directory = str(self._directory)
                    self._chat = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
            return self._chat


class Recent:
    """The prompts that were asked for last, at most `KEPT` characters of them."""

    def __init__(self) -> None:
        self._found: dict[str, list[int]] = {}
        self._size = 0

    def get(self, asked: str) -> list[int] | None:
        ids = self._found.pop(asked, None)
        if ids is not None:
            self._found[asked] = ids
        return ids

    def add(self, asked: str, ids: list[int]) -> None:
        """One that takes much of the room is not kept; those that were asked for longest ago make room."""
        if len(asked) > KEPT // 8:
            return
        if asked not in self._found:
            self._size += len(asked)
        self._found[asked] = ids
        while self._size > KEPT:
            oldest = next(iter(self._found))
            self._size -= len(oldest)
            del self._found[oldest]


class Unfolding:
    """The text of ids that grow, piece by piece. A character whose bytes are not all there is kept back a while."""

    def __init__(self, text: Callable[[Sequence[int]], str]) -> None:
        """`text`: of ids, as `Tokens` has it."""
        self._text = text
        self._from = self._done = 0

    def more(self, ids: Sequence[int]) -> str:
        """What can be read of `ids` beyond the last call; the ids before have not changed."""
        known = self._text(ids[self._from : self._done])
        text = self._text(ids[self._from :])
        unfinished = text.endswith("\ufffd") and len(ids) - self._done < CHARACTER
        if len(text) <= len(known) or unfinished:
            return ""
        self._from, self._done = self._done, len(ids)
        return text[len(known) :]


def _size(message: Mapping[str, Any]) -> int:
    """Characters of a message, roughly; what is not plain text counts as long."""
    content = message.get("content")
    return len(content) if isinstance(content, str) else 0 if content is None else LARGE


def _templated(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content a string, the arguments of calls an object, `developer` is `system`."""
    found = {**message, "content": text_of(message.get("content"))}
    if found.get("role") == "developer":
        found["role"] = "system"
    if found.get("tool_calls"):
        found["tool_calls"] = [_templated_call(call) for call in found["tool_calls"]]
    return found


def _templated_call(call: Any) -> dict[str, Any]:
    function = {"arguments": {}, **call["function"]}
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "type": "function", "function": function}


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
