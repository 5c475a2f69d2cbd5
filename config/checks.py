"""What of a configuration does not fit the schema, in sentences: key, value, what was expected, the nearest key."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from config.schema import RunConfig

_WHERE = re.compile(r" - at `\$(.*)`$")
ALIKE = 0.75
"""Likeness from which one key may have been meant by another: a letter or two differ."""


def against_schema(data: Mapping[str, Any]) -> list[str]:
    """Unknown keys and values that do not fit, in the order of the data; empty if `RunConfig` accepts it."""
    return list(_section(RunConfig, data, ""))


def unmergeable(data: Any) -> list[str]:
    """What a layer puts where a section or a free-form mapping belongs: no other layer could be merged with it."""
    return list(_unmergeable(RunConfig, data, "")) if isinstance(data, Mapping) else []


def is_text(key: str) -> bool:
    """Whether the setting at dotted `key` holds a string and nothing that a number could stand for."""
    kind = leaves().get(key)
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return all(isinstance(k, inspect.StrType | inspect.NoneType | inspect.LiteralType) for k in kinds)


@cache
def leaves() -> dict[str, inspect.Type]:
    """Dotted key -> type of every setting that is no section."""
    return dict(_walk(RunConfig, ""))


def _walk(section: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, inspect.Type]]:
    info = inspect.type_info(section)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        if isinstance(field.type, inspect.StructType):
            yield from _walk(field.type.cls, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.type


def _section(section: type[msgspec.Struct], data: Any, path: str) -> Iterator[str]:
    info = inspect.type_info(section)
    assert isinstance(info, inspect.StructType)
    if not isinstance(data, Mapping):
        yield _no_section(info, data, path)
        return
    fields = {field.name: field.type for field in info.fields}
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        kind = fields.get(key)
        if kind is None:
            yield _unknown(where, path, list(fields))
        elif isinstance(kind, inspect.StructType):
            yield from _section(kind.cls, value, where)
        else:
            yield from _value(section, key, value, where, kind)


def _unmergeable(section: type[msgspec.Struct], data: Mapping[str, Any], path: str) -> Iterator[str]:
    info = inspect.type_info(section)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        value, where = data.get(field.name, {}), f"{path}{field.name}"
        if isinstance(field.type, inspect.StructType):
            if isinstance(value, Mapping):
                yield from _unmergeable(field.type.cls, value, f"{where}.")
            else:
                yield _no_section(field.type, value, where)
        elif isinstance(field.type, inspect.DictType) and not isinstance(value, Mapping):
            yield f"{where}={_shown(value)}: expected keys and values, such as {where}.KEY=VALUE; leave it out for none"


def _no_section(info: inspect.StructType, value: Any, path: str) -> str:
    keys = [field.name for field in info.fields]
    return (
        f"{path}={_shown(value)}: {path} is a section, not a value: set its keys, as in {path}.{keys[0]}=..., or leave "
        f"it out for the defaults. The keys of {path} are {', '.join(keys)}"
    )


def _value(section: type[msgspec.Struct], key: str, value: Any, where: str, kind: inspect.Type) -> Iterator[str]:
    try:
        msgspec.convert({key: value}, section)
    except msgspec.ValidationError as error:
        inside = _WHERE.search(str(error))
        deeper = inside.group(1).removeprefix(f".{key}") if inside else ""
        problem = f": {_WHERE.sub('', str(error))} at {where}{deeper}" if deeper else _fix(section, key, value, kind)
        yield f"{where}={_shown(value)}: expected {describe(kind)}{problem}"
    else:
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{where}={_shown(value)}: expected a finite number"


def _shown(value: Any) -> str:
    """A value as one would type it."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return value if isinstance(value, str) and re.fullmatch(r"\S+", value) else repr(value)


def _fix(section: type[msgspec.Struct], key: str, value: Any, kind: inspect.Type) -> str:
    """What to write instead, where that can be told."""
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "nil", "")):
        info = inspect.type_info(section)
        assert isinstance(info, inspect.StructType)
        default = next(field.default for field in info.fields if field.name == key)
        return f"; leave it out for the default, {_shown(default)}" if default is not msgspec.NODEFAULT else ""
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    numeric = next((m for m in members if isinstance(m, inspect.IntType | inspect.FloatType)), None)
    if numeric is None or isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if numeric.le is not None and value > numeric.le:
        return f"; the most is {_number(numeric.le)}"
    return f"; the least is {_number(numeric.ge)}" if numeric.ge is not None and value < numeric.ge else ""


def _unknown(where: str, path: str, siblings: list[str]) -> str:
    key = where.rpartition(".")[2]
    near = _near(key, siblings)
    if near:
        hint = f"did you mean {path + '.' if path else ''}{near[0]}?"
    else:
        elsewhere: dict[str, list[str]] = {}
        for known in leaves():
            elsewhere.setdefault(known.rpartition(".")[2], []).append(known)
        close = [known for name in _near(key, list(elsewhere)) for known in elsewhere[name]]
        hint = f"did you mean {' or '.join(close)}?" if close else ""
    known = f"keys of {path}" if path else "keys at the top"
    return f"{where}: no such key{'; ' + hint if hint else '.'} The {known} are {', '.join(siblings)}"


def _near(key: str, names: list[str]) -> list[str]:
    """The name that may have been meant by `key`, if any."""
    return (
        get_close_matches(key, names, n=1, cutoff=ALIKE) or [name for name in names if name.startswith(f"{key}_")][:1]
    )


# --- words for types -------------------------------------------------------------------------------------------------


def describe(kind: inspect.Type) -> str:
    """What a value of this type is, in words: `a whole number from 1 to 256`, `one of fifo, in_order`."""
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _bounds(kind)
        case inspect.FloatType():
            return "a number" + _bounds(kind)
        case inspect.StrType():
            return "text"
        case inspect.NoneType():
            return "null"
        case inspect.LiteralType():
            return f"one of {', '.join(map(str, kind.values))}"
        case inspect.UnionType():
            return " or ".join(describe(member) for member in kind.types)
        case inspect.VarTupleType():
            return f"a list of which each is {describe(kind.item_type)}"
        case inspect.TupleType():
            return f"a list of {len(kind.item_types)}: {', '.join(describe(item) for item in kind.item_types)}"
        case inspect.DictType():
            return "keys and values"
    return type(kind).__name__


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    """The range. Every upper bound is one that may be had."""
    low, high = kind.ge if kind.gt is None else kind.gt, kind.le
    if low is None or high is None:
        return ""
    lower = f"from {_number(low)}" if kind.gt is None else f"above {_number(low)}"
    return f" {lower} {'to' if kind.gt is None else 'and up to'} {_number(high)}"


def _number(value: float) -> str:
    return f"{int(value)}" if value == int(value) else f"{value:g}"
