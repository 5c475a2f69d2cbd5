"""From a model's text to what an agent reads: thinking, tool calls, content, and what is wrong with them.

This is for models without a response template (`templates`). Read are the forms of Hermes and Qwen:
`<think>...</think>` before the answer, and `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks in it.
Nothing is ever repaired: a broken block stays in the content and is named among the problems.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

_BLOCK = re.compile(re.escape(CALL) + r"(.*?)" + re.escape(CALL_END), re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a function: `arguments` is the text of a JSON object."""

    name: str
    arguments: str


FlawKind = Literal["invalid_tool_call", "malformed_thinking", "malformed_answer"]


class Flaw(msgspec.Struct, frozen=True):
    """One thing wrong with an answer: which kind, where in the text (characters), and what.

    `malformed_answer` is text that fits into no part of a response template, or a part that it requires and misses.
    """

    kind: FlawKind
    at: int
    what: str


class Parsed(msgspec.Struct, frozen=True):
    """An answer, taken apart. `content` has neither thinking nor valid tool calls in it."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    flaws: tuple[Flaw, ...] = ()


def parse(text: str, tools: Collection[str] | None = None, thinking: bool = False) -> Parsed:
    """Take `text` apart. `tools`: names that were offered; None leaves tool calls in the content.

    `thinking`: the prompt itself ended in an opened `<think>`.
    """
    reasoning, offset, flaws = _thinking(text, thinking)
    content = text[offset:]
    if tools is None:
        return Parsed(content.strip() if reasoning is not None else content, reasoning, (), tuple(flaws))
    calls, rest, more = _calls(content, offset, tools)
    return Parsed(rest.strip() if calls or reasoning is not None else rest, reasoning, calls, (*flaws, *more))


class Shown(msgspec.Struct, frozen=True):
    """How much of an unfinished answer can be shown: neither part ever loses what it had when the text grows."""

    reasoning: str | None
    content: str


def shown(text: str, tools: Collection[str] | None, thinking: bool, ended: bool) -> Shown:
    """What of `text`, which is `ended` or will grow, belongs to thinking and content beyond doubt.

    The same as `parse` says at the end, but for an answer whose thinking was closed and never opened: what has been
    shown as content stays there.
    """
    begin = len(text) - len(text.lstrip())
    if not ended and THINK.startswith(text[begin:]):
        return Shown(None, "")
    explicit = text.startswith(THINK, begin)
    if not explicit and not thinking:
        return Shown(None, _visible(text, tools, False, ended))
    start = begin + len(THINK) if explicit else 0
    end = text.find(THINK_END, start)
    if end < 0:
        return Shown(text[start : len(text) if ended else _safe(text, THINK_END)].strip(), "")
    return Shown(text[start:end].strip(), _visible(text[end + len(THINK_END) :], tools, True, ended))


def message_of(parsed: Parsed) -> dict[str, Any]:
    """The answer as a chat message; the ids of its calls count from 0."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": f"call_{number}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for number, call in enumerate(parsed.tool_calls)
        ]
    return message


def names_of(tools: Sequence[Mapping[str, Any]] | None) -> list[str] | None:
    """The names of the functions that are offered, None if there are none. Raises `ValueError` for one without."""
    if not tools:
        return None
    names = []
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type", "function") != "function" or not isinstance(name, str):
            due = '{"type": "function", "function": {"name": ...}}'
            raise ValueError(f"tool {tool!r}"[:200] + f" can't be offered: {due} is due")
        names.append(name)
    return names


def tool_call(name: Any, arguments: Any) -> ToolCall:
    """A call as it was parsed. Raises `ValueError` saying what no agent could use of it."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"name is {name!r}"[:200])
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of {name[:80]!r} are {type(arguments).__name__}, an object is due")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"name or arguments of {name[:80]!r} have half a character: {error.reason}") from error
    except ValueError as error:
        raise ValueError(f"arguments of {name[:80]!r} are not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"arguments of {name[:80]!r} are nested too deeply") from error
    return ToolCall(name, text)


def unknown(name: str, tools: Collection[str]) -> str:
    """What is wrong with a call of a tool that was not offered."""
    return f"no tool {name[:80]!r} was offered, only {', '.join(sorted(tools)) or 'none'}"


def _thinking(text: str, opened: bool) -> tuple[str | None, int, list[Flaw]]:
    """The thinking, where the content begins, and the flaws."""
    flaws = []
    begin = len(text) - len(text.lstrip())
    explicit = text.startswith(THINK, begin)
    if opened and explicit:
        flaws.append(Flaw("malformed_thinking", begin, f"{THINK} again, which the prompt had opened"))
    start = begin + len(THINK) if explicit else 0
    end = text.find(THINK_END, start)
    if not explicit and not opened:
        flaws += [Flaw("malformed_thinking", at, f"{THINK} in the middle") for at in _all(text, THINK, 0)]
        if end < 0:
            return None, 0, flaws
        flaws.append(Flaw("malformed_thinking", end, f"{THINK_END} was never opened"))
    if end < 0:
        return text[start:].strip(), len(text), [*flaws, Flaw("malformed_thinking", start, f"no {THINK_END}")]
    behind = end + len(THINK_END)
    if explicit or opened:
        flaws += [Flaw("malformed_thinking", at, f"{THINK} again") for at in _all(text, THINK, start)]
    flaws += [Flaw("malformed_thinking", at, f"{THINK_END} again") for at in _all(text, THINK_END, behind)]
    return text[start:end].strip(), behind, flaws


def _all(text: str, tag: str, start: int) -> list[int]:
    return [match.start() for match in re.compile(re.escape(tag)).finditer(text, start)]


def _calls(text: str, offset: int, tools: Collection[str]) -> tuple[tuple[ToolCall, ...], str, list[Flaw]]:
    calls, flaws, rest, last = [], [], [], 0
    for block in _BLOCK.finditer(text):
        at = offset + block.start()
        call, what = _call(block[1])
        if call is None:
            flaws.append(Flaw("invalid_tool_call", at, what))
            continue
        if call.name not in tools:
            flaws.append(Flaw("invalid_tool_call", at, unknown(call.name, tools)))
        calls.append(call)
        rest.append(text[last : block.start()])
        last = block.end()
    left = "".join((*rest, text[last:]))
    bare = _BLOCK.sub("", left)
    flaws += [
        Flaw("invalid_tool_call", offset + text.find(tag), f"{tag} without its other half")
        for tag in (CALL, CALL_END)
        if tag in bare
    ]
    return tuple(calls), left, flaws


def _call(block: str) -> tuple[ToolCall | None, str]:
    """The call in a block, or why there is none."""
    try:
        data: Any = json.loads(block)
    except ValueError as error:
        return None, f"not JSON: {error}"
    except RecursionError:
        return None, "not JSON that can be read: nested too deeply"
    if not isinstance(data, dict):
        return None, f"a JSON object is due, not {type(data).__name__}"
    try:
        return tool_call(data.get("name"), data.get("arguments", {})), ""
    except ValueError as error:
        return None, str(error)


def _visible(text: str, tools: Collection[str] | None, bare: bool, ended: bool) -> str:
    """Content without calls, as far as it is settled. `bare`: white space around it doesn't count."""
    pieces, last, closed = [], 0, 0
    for block in _BLOCK.finditer(text) if tools is not None else ():
        closed = block.end()
        if _call(block[1])[0] is not None:
            pieces.append(text[last : block.start()])
            last = closed
            bare = bare or not "".join(pieces).strip()
    end = len(text)
    if not ended and tools is not None:
        opened = text.find(CALL, closed)
        end = opened if opened >= 0 else max(closed, _safe(text, CALL))
    tail = text[last:end]
    found = "".join((*pieces, tail))
    found = found.lstrip() if bare else found
    return found if ended and not bare and not last else found.rstrip()


def _safe(text: str, tag: str) -> int:
    """How much of `text` can't be the beginning of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return len(text) - size
    return len(text)
