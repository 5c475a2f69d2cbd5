"""An event in one line, for whoever lists events."""

from __future__ import annotations

from typing import Any

import msgspec

from contracts import events as ev
from contracts.events import Event

SUMMARY = 220
"""Characters of an event's line."""
FIELD = 72
"""Characters of one of its fields."""


def summary(body: Event, zero: float) -> str:
    """The fields of an event in one line, but for those that are None; long ones are cut.

    Readings of the clock become seconds since `zero`.
    """
    parts = []
    for field in body.__struct_fields__:
        value = getattr(body, field)
        if value is None:
            continue
        timed = field.endswith("_at") and isinstance(value, float)
        shown = f"+{value - zero:.3f}" if timed else brief(value)
        parts.append(f"{field}={shown if len(shown) <= FIELD else shown[: FIELD - 3] + '...'}")
    text = "  ".join(parts)
    return text if len(text) <= SUMMARY else text[: SUMMARY - 3] + "..."


def brief(value: Any) -> str:
    """A field of an event in few characters."""
    match value:
        case bytes():
            return f"{len(value)} bytes"
        case float():
            return f"{value:.5g}"
        case ev.PayloadRef():
            return value.key
        case dict():
            return " ".join(f"{key}:{brief(each)}" for key, each in value.items()) or "none"
        case (ev.Member(), *_):
            return ",".join(member.actor for member in value)
        case (msgspec.Struct(), *_):
            return f"{len(value)} of them"
        case tuple():
            return ",".join(map(brief, value)) or "none"
    return str(value)
