"""States in words, and what lies between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from contracts.core import Delivered, Emit
from contracts.events import kind

MANY = 24
"""Longest list or mapping that is shown whole."""


def plain(value: Any) -> Any:
    """A state as JSON-like values; keys are strings, sets are sorted."""
    return msgspec.json.decode(msgspec.json.encode(_plain(value), enc_hook=repr))


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {field: _plain(getattr(value, field)) for field in value.__struct_fields__}
    if isinstance(value, dict):
        return {_key(name): _plain(each) for name, each in value.items()}
    if isinstance(value, frozenset | set):
        return sorted((_plain(each) for each in value), key=repr)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value


def _key(name: Any) -> str:
    return name if isinstance(name, str) else str(_plain(name))


def changes(before: Any, after: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """`path`, `before` and `after` of each leaf that differs between two plain states; one side lacks what it has not.

    The values are whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys([*before, *after]):
            inner = f"{path}.{name}" if path else name
            if name not in before:
                yield {"path": inner, "after": after[name]}
            elif name not in after:
                yield {"path": inner, "before": before[name]}
            else:
                yield from changes(before[name], after[name], inner)
    elif before != after:
        yield {"path": path, "before": before, "after": after}


def differences(before: Any, after: Any) -> Iterator[str]:
    """`path: old -> new` for each leaf that differs between two plain states."""
    return map(worded, changes(before, after))


def worded(change: dict[str, Any]) -> str:
    """One of `changes` in a line."""
    if "before" not in change:
        return f"{change['path']}: + {short(change['after'])}"
    if "after" not in change:
        return f"{change['path']}: - {short(change['before'])}"
    return f"{change['path']}: {short(change['before'])} -> {short(change['after'])}"


def short(value: Any, most: int = 160) -> str:
    text = msgspec.json.encode(value, enc_hook=repr).decode()
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def outline(state: Any) -> Iterator[str]:
    """A state, a field a line; long collections are counted and begun."""
    for name, value in plain(state).items():
        if isinstance(value, dict | list) and len(value) > MANY:
            yield f"{name}: {len(value)} of them, {short(value)}"
        else:
            yield f"{name}: {msgspec.json.encode(value).decode()}"


def command(value: Any) -> str:
    """A command in one line, without long payloads."""
    if isinstance(value, Emit):
        return f"emit {kind(value.event)} {short(plain(value.event), 300)}"
    return f"{type(value).__name__} {short(plain(value), 300)}"


def source(input: Any) -> str | None:
    """The id of the event that an input delivers."""
    return input.envelope.id if isinstance(input, Delivered) else None
