"""Response templates: how a family of models marks thinking, tool calls and content, as transformers parses it.

A template is a JSON object (transformers' guide "Response parsing" has the form) that tokenizers carry or a file holds.
They are checked when they are loaded, so that no answer is blamed for what is wrong with its template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CALLS, CONTENT = "tool_calls", "content"
REASONING = ("reasoning_content", "thinking", "reasoning")
OUTSIDE = "outside of all fields"
"""The field that takes what a template without an implicit one would drop."""
FAULTS = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError)
"""What transformers' parsers raise for text that they can't read."""

_PLACEHOLDER = re.compile(r"\{(\w+)(?:\.\w+)*\}")

Tools = Sequence[Mapping[str, Any]] | None


class TemplateError(ValueError):
    """A response template can't be used: says which part of it and why."""


class Template:
    """A response template that can be used. `specials`: tokens that are no text. Raises `TemplateError`."""

    def __init__(self, spec: Any, specials: Sequence[str] = ()) -> None:
        fields = _checked(spec)
        self.required = [name for name, field in fields.items() if not field.optional]
        self.fields, self.anchor, self._loaded = _complete(spec)
        self.explicit = {name for name, field in self.fields.items() if field.open_re is not None}
        found = "|".join(re.escape(token) for token in sorted(specials, key=len, reverse=True))
        self._specials = re.compile(found) if found else None

    def parser(self, prefix: str, tools: Tools) -> tuple[Any, str]:
        """transformers' `ResponseParser` behind what the prompt has of the answer, as far as that can be read."""
        from transformers.utils.chat_parsing import ResponseParser

        offered: Any = list(tools or ())
        try:
            return ResponseParser(self._loaded, prefix=prefix, tools=offered), prefix
        except FAULTS:  # the prompt's own calls: no business of this answer
            return ResponseParser(self._loaded, prefix="", tools=offered), ""

    def behind(self, prompt: str) -> str | None:
        """What `prompt` has of the answer already; None if the answer's beginning isn't in it."""
        end = None
        for match in self.anchor.finditer(prompt):
            end = match.end()
        return None if end is None else prompt[end:]

    def bare(self, text: str) -> str:
        """Without special tokens."""
        return self._specials.sub("", text) if self._specials else text


def read_file(path: Path) -> Any:
    """The JSON in a file. Raises `TemplateError`."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise TemplateError(f"it can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"it is not JSON: {error}") from error


# --- what can be used ------------------------------------------------------------------------------------------------


def _checked(spec: Any) -> dict[str, Any]:
    """The fields of a template. Raises `TemplateError`."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        fields = load_response_template(spec).fields
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TemplateError(f"transformers refuses it: {error}") from error
    for name, field in fields.items():
        for problem in _problems(name, field):
            raise TemplateError(f"fields.{name}: {problem}")
    if CONTENT not in fields:
        raise TemplateError(f"fields.{CONTENT} is missing: it says what the answer is beside thinking and calls")
    return fields


def _problems(name: str, field: Any) -> Iterator[str]:
    if name not in (CALLS, CONTENT, *REASONING):
        yield f"agents read {CONTENT}, {CALLS} and {REASONING[0]} (or {', '.join(REASONING[1:])}): name it so"
    if field.open_re is None and name != CONTENT:
        yield f"only {CONTENT} can be what is outside of all others: give it `open` or `open_pattern`"
    if not isinstance(field.content_args, dict):
        yield f"content_args is {type(field.content_args).__name__}, an object is due"
    elif name != CALLS and (field.content != "text" or field.transform is not None):
        yield "it is text: leave out `content` and `transform`"
    elif name == CALLS:
        yield from _call_problems(field)


def _call_problems(field: Any) -> Iterator[str]:
    import regex

    if field.content == "xml-inline":
        try:
            groups = set(regex.compile(field.content_args.get("tag_pattern")).groupindex)
        except (TypeError, regex.error) as error:
            groups = set()
            yield f"content_args.tag_pattern: {error}"
        if not {"key", "value"} <= groups:
            yield "content_args.tag_pattern needs the groups (?P<key>...) and (?P<value>...)"
    known = {"content"}.union(*(pattern.groupindex for pattern in (field.open_re, field.close_re) if pattern))
    used = set() if field.transform_each else set(_placeholders(field.transform))
    if used - known:
        yield f"transform: there is no {{{min(used - known)}}}, only {', '.join(sorted(known))}"


def _placeholders(transform: Any) -> Iterator[str]:
    if isinstance(transform, str) and (match := _PLACEHOLDER.fullmatch(transform)):
        yield match[1]
    parts = transform.values() if isinstance(transform, dict) else transform if isinstance(transform, list) else ()
    for part in parts:
        yield from _placeholders(part)


def _complete(spec: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """Fields, start anchor and template, with a field for everything, none of which must be there."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    fields = {name: {key: field[key] for key in field if key != "optional"} for name, field in spec["fields"].items()}
    if all("open" in field or "open_pattern" in field for field in fields.values()):
        fields[OUTSIDE] = {}
    loaded = load_response_template({**spec, "fields": fields})
    return loaded.fields, loaded.start_anchor_re, loaded
