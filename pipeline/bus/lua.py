"""Lua scripts as typed functions.

`@script` turns a function whose docstring is Lua into a builder of calls. The signature is the contract: each parameter
is a local of that name in the script. A `Key` goes to KEYS (so that a cluster can route and check the call), anything
else to ARGV; a `Sequence` becomes a table, a `Sequence` of tuples a table of tables. The return annotation is the type
of the raw reply.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Generic, NewType, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import msgspec

Key = NewType("Key", str)
"""The full name of a key."""

P = ParamSpec("P")
R = TypeVar("R")


class Call(msgspec.Struct, Generic[R], frozen=True):
    """One call of a script, ready to send; `R` is the type of its raw reply."""

    name: str
    source: str
    sha: str
    keys: list[str]
    args: list[str | bytes | int | float]


class Script(Generic[P, R]):
    """A script; calling it builds a `Call`."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._signature = inspect.signature(function)
        hints = get_type_hints(function)
        shapes = {name: _shape(hints[name]) for name in self._signature.parameters}
        self._names = frozenset(shapes)
        self._keys = [name for name, shape in shapes.items() if shape == "k"]
        self._args = [name for name, shape in shapes.items() if shape == "a"]
        self._tables = [(name, shape[1:]) for name, shape in shapes.items() if shape[0] == "*"]
        self.name = function.__name__
        self.source = self._head() + textwrap.dedent(function.__doc__ or "").strip() + "\n"
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        bound: dict[str, Any] = dict(zip(self._signature.parameters, args, strict=False)) | kwargs
        if bound.keys() != self._names or len(args) + len(kwargs) != len(bound):
            self._signature.bind(*args, **kwargs)  # says what is wrong, and is slow
        keys: list[str] = [bound[name] for name in self._keys]
        argv: list[str | bytes | int | float] = [bound[name] for name in self._args]
        for name, kinds in self._tables:
            rows = bound[name]
            argv.append(len(rows))
            for row in rows:
                for kind, cell in zip(kinds, row if len(kinds) > 1 else (row,), strict=True):
                    (keys if kind == "k" else argv).append(cell)
        return Call(self.name, self.source, self.sha, keys, argv)

    def _head(self) -> str:
        """Lua that takes the parameters: single keys and arguments by their places, then tables one after the other."""
        lines = [f"local {name} = KEYS[{place}]" for place, name in enumerate(self._keys, 1)]
        lines += [f"local {name} = ARGV[{place}]" for place, name in enumerate(self._args, 1)]
        lines.append(f"local _k, _a = {len(self._keys)}, {len(self._args)}")
        return "\n".join(lines + [_table(name, kinds) for name, kinds in self._tables]) + "\n"


def script(function: Callable[P, R]) -> Script[P, R]:
    """Decorator: see the module's docstring."""
    return Script(function)


def _table(name: str, kinds: str) -> str:
    """Lua that takes a table: its length, then its rows. `_k` and `_a` count the keys and arguments taken so far."""
    keys, args = kinds.count("k"), kinds.count("a")
    places = {
        "k": (f"KEYS[_k + {n}]" for n in range(1, keys + 1)),
        "a": (f"ARGV[_a + {n}]" for n in range(1, args + 1)),
    }
    cells = ", ".join(next(places[kind]) for kind in kinds)
    return f"""\
local {name} = {{}}
_a = _a + 1
for i = 1, tonumber(ARGV[_a]) do
  {name}[i] = {cells if len(kinds) == 1 else f"{{{cells}}}"}
  _k, _a = _k + {keys}, _a + {args}
end"""


def _shape(hint: Any) -> str:
    """`k` a key, `a` an argument, `*` and kinds a table of rows."""
    if get_origin(hint) is Sequence:
        (row,) = get_args(hint)
        cells = get_args(row) if get_origin(row) is tuple else (row,)
        return "*" + "".join(_shape(cell) for cell in cells)
    return "k" if hint is Key else "a"
