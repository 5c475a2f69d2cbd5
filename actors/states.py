"""Changes to immutable states that several cores make."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def without(held: dict[Key, Value], key: Key) -> dict[Key, Value]:
    """`held` without `key`: a copy, if it has it."""
    if key not in held:
        return held
    rest = held.copy()
    del rest[key]
    return rest
