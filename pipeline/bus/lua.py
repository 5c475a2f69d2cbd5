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

_PRELUDE = """\
local nk, na = 0, 0
local function _take(kind)
  if kind == 'k' then
    nk = nk + 1
    return KEYS[nk]
  end
  na = na + 1
  return ARGV[na]
end
local function _many(shape)
  local out = {}
  for i = 1, tonumber(_take('a')) do
    if #shape == 1 then
      out[i] = _take(shape)
    else
      local row = {}
      for j = 1, #shape do row[j] = _take(shape:sub(j, j)) end
      out[i] = row
    end
  end
  return out
end
"""


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
        self._shapes = {name: _shape(hints[name]) for name in self._signature.parameters}
        self.name = function.__name__
        head = "".join(f"local {name} = {_reader(shape)}\n" for name, shape in self._shapes.items())
        self.source = _PRELUDE + head + textwrap.dedent(function.__doc__ or "").strip() + "\n"
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        bound: dict[str, Any] = dict(zip(self._shapes, args, strict=False)) | kwargs
        if bound.keys() != self._shapes.keys() or len(args) + len(kwargs) != len(bound):
            self._signature.bind(*args, **kwargs)  # says what is wrong, and is slow
        keys: list[str] = []
        argv: list[str | bytes | int | float] = []
        for name, shape in self._shapes.items():
            value = bound[name]
            if shape[0] != "*":
                (keys if shape == "k" else argv).append(value)
                continue
            argv.append(len(value))
            for row in value:
                for kind, cell in zip(shape[1:], row if len(shape) > 2 else (row,), strict=True):
                    (keys if kind == "k" else argv).append(cell)
        return Call(self.name, self.source, self.sha, keys, argv)


def script(function: Callable[P, R]) -> Script[P, R]:
    """Decorator: see the module's docstring."""
    return Script(function)


def _reader(shape: str) -> str:
    return f"_many('{shape[1:]}')" if shape[0] == "*" else f"_take('{shape}')"


def _shape(hint: Any) -> str:
    """`k` a key, `a` an argument, `*` and kinds a table of rows."""
    if get_origin(hint) is Sequence:
        (row,) = get_args(hint)
        cells = get_args(row) if get_origin(row) is tuple else (row,)
        return "*" + "".join(_shape(cell) for cell in cells)
    return "k" if hint is Key else "a"
