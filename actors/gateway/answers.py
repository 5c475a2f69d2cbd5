"""How the answers of the run's model are taken apart: by a response template, or as Hermes and Qwen write them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from actors.gateway.client import DataProblem, Sample
from actors.gateway.parsing import THINK, Parsed, Shown, names_of, parse, shown
from actors.gateway.reading import Following, read
from actors.gateway.templates import Template, TemplateError, Tools, read_file
from actors.gateway.tokens import LARGE, Tokens, Unfolding

WINDOWS = (64, 1024)
"""Tokens at the end of a prompt in which the beginning of the answer is looked for, before all of it is read."""
PIECE = 1024
"""Tokens of a prompt that are read at a time: others get their turn between two pieces. A thread would not let them:
decoding keeps the interpreter to itself."""

FAMILIES = Path(__file__).parent / "families"
"""The shipped response templates."""
FAMILY = {
    "gpt_oss": "gpt-oss",
    **dict.fromkeys(("gemma4", "gemma4_text"), "gemma-4"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "qwen3.5"),
}
"""Model types whose tokenizers may lack a template -> which shipped one is theirs."""


class Follower(Protocol):
    """An answer on its way: neither part of what is shown ever loses what it had."""

    def more(self, ids: Sequence[int]) -> Shown:
        """`ids` are all that are known, and more will follow."""
        ...

    def end(self, sample: Sample, answer: Parsed) -> Shown:
        """The sample is whole, and `answer` is what was made of it."""
        ...


class Answers:
    """Takes answers apart. Without a template, by `parsing`."""

    def __init__(self, tokens: Tokens, template: Template | None = None) -> None:
        self._tokens, self._template = tokens, template

    async def begun(self, prompt: Sequence[int]) -> str:
        """What the prompt has of the answer, for all its samples; one that begins none has nothing of it.

        A long prompt holds nobody up: see `PIECE`.
        """
        template = self._template
        if template is None:
            return THINK if self._tokens.thinking(prompt) else ""
        for size in WINDOWS:
            found = template.behind(self._tokens.raw(prompt[-size:]))
            if found is not None or len(prompt) <= size:
                return found or ""
        return template.behind(await self._whole(prompt)) or ""

    async def _whole(self, prompt: Sequence[int]) -> str:
        """The text of a prompt, special tokens and all. The odd piece comes first, so that none is left at the end."""
        unfolding, pieces = Unfolding(self._tokens.raw), []
        for end in range(len(prompt) % PIECE or PIECE, len(prompt) + 1, PIECE):
            pieces.append(unfolding.more(prompt[:end]))
            await asyncio.sleep(0)
        return "".join(pieces)

    async def parsed(self, begun: str, sample: Sample, tools: Tools) -> Parsed:
        """A sample. Long ones are taken apart in a thread. Raises `DataProblem` for tools without names."""
        names = offered(tools)
        if self._template is None:
            return parse(sample.text, names, bool(begun))
        text = self._tokens.raw(sample.output_ids)
        asked = self._template, text, begun, tools
        return await asyncio.to_thread(read, *asked) if len(text) > LARGE else read(*asked)

    def follow(self, begun: str, tools: Tools) -> Follower:
        """For one sample while it is made."""
        if self._template is None:
            return _Plain(self._tokens, offered(tools), bool(begun))
        return _Templated(self._tokens, Following(self._template, begun, tools))


def offered(tools: Tools) -> list[str] | None:
    """The names of the tools that are offered. Raises `DataProblem` for one without."""
    try:
        return names_of(tools)
    except ValueError as error:
        raise DataProblem(str(error)) from error


def load(choice: str, tokens: Tokens) -> Answers:
    """`choice` is `rollout.response_template`. Raises `TemplateError` naming it, what is wrong, and the fix."""
    if choice == "auto" and tokens.response_template is None:
        choice = FAMILY.get(tokens.family, "hermes")
    return Answers(tokens, template_of(choice, tokens.response_template, tokens.specials))


def template_of(choice: str, carried: Any = None, specials: Sequence[str] = ()) -> Template | None:
    """The template that is chosen; `carried` is the tokenizer's own. Raises `TemplateError` as `load` does."""
    if choice == "hermes" or (choice == "auto" and carried is None):
        return None
    place = "auto: response_template in the model's tokenizer_config.json" if choice == "auto" else choice
    try:
        return Template(carried if choice == "auto" else read_file(_file(choice)), specials)
    except TemplateError as error:
        known = ", ".join(sorted(path.stem for path in FAMILIES.glob("*.json")))
        raise TemplateError(
            f"rollout.response_template={place}: {error}; give auto, hermes, one of {known}, or the path of a JSON "
            "file with a response template of transformers"
        ) from error


def _file(choice: str) -> Path:
    """The file of a template given by shipped name, or by a path: that ends in .json or has a slash."""
    if "/" in choice or choice.endswith(".json"):
        return Path(choice)
    path = FAMILIES / f"{choice}.json"
    if not path.is_file():
        raise TemplateError("no family has this name")
    return path


class _Plain:
    """Without a template."""

    def __init__(self, tokens: Tokens, names: list[str] | None, thinking: bool) -> None:
        self._unfolding = Unfolding(tokens.text)
        self._names, self._thinking = names, thinking
        self._text = ""

    def more(self, ids: Sequence[int]) -> Shown:
        self._text += self._unfolding.more(ids)
        return shown(self._text, self._names, self._thinking, ended=False)

    def end(self, sample: Sample, answer: Parsed) -> Shown:
        text = sample.text if sample.text.startswith(self._text) else self._text
        return shown(text, self._names, self._thinking, ended=True)


class _Templated:
    """By a template."""

    def __init__(self, tokens: Tokens, following: Following) -> None:
        self._unfolding, self._following = Unfolding(tokens.raw), following

    def more(self, ids: Sequence[int]) -> Shown:
        return self._following.more(self._unfolding.more(ids))

    def end(self, sample: Sample, answer: Parsed) -> Shown:
        return self._following.end(answer)
