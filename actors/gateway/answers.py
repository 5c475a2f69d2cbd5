"""How the answers of the run's model are taken apart: by a response template, or as Hermes and Qwen write them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from actors.gateway.client import DataProblem, Sample
from actors.gateway.parsing import Parsed, Shown, names_of, parse, shown
from actors.gateway.reading import Following, read
from actors.gateway.templates import Template, TemplateError, Tools, read_file
from actors.gateway.tokens import LARGE, Tokens, Unfolding

WINDOW = 64
"""Tokens at the end of a prompt in which the beginning of the answer is looked for first."""

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

    async def parsed(self, prompt: Sequence[int], sample: Sample, tools: Tools) -> Parsed:
        """A sample of `prompt`. Long ones are taken apart in a thread. Raises `DataProblem` for tools without names."""
        names = offered(tools)
        if self._template is None:
            return parse(sample.text, names, self._tokens.thinking(prompt))
        text = self._tokens.raw(sample.output_ids)
        asked = self._template, text, self._behind(self._template, prompt), tools
        return await asyncio.to_thread(read, *asked) if len(text) > LARGE else read(*asked)

    def follow(self, prompt: Sequence[int], tools: Tools) -> Follower:
        """For one sample of `prompt` while it is made."""
        if self._template is None:
            return _Plain(self._tokens, offered(tools), self._tokens.thinking(prompt))
        return _Templated(self._tokens, Following(self._template, self._behind(self._template, prompt), tools))

    def _behind(self, template: Template, prompt: Sequence[int]) -> str:
        """What the prompt has of the answer; a prompt that begins none has nothing of it."""
        size, found = WINDOW, None
        while found is None and size < 2 * max(WINDOW, len(prompt)):
            found = template.behind(self._tokens.raw(prompt[-size:]))
            size *= 2
        return found or ""


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
