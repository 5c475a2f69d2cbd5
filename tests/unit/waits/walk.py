"""Finds the waits of a source that no deadline bounds, by walking its syntax tree.

A wait is an `await` of anything but a coroutine of this project (whose own waits are found in its own body), and every
blocking call of a thread: on events, queues, futures, threads, processes, sockets, HTTP, Ray and collectives. It is
bounded within `asyncio.timeout(...)` or `asyncio.wait_for(...)`, or when it is given a timeout itself. A lock needs
none, as what is done while it is held is bounded; nor does work handed to a thread, which is walked where it is
defined.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef

ALWAYS = frozenset(
    ("wait", "get", "join", "acquire", "exception", "recv", "accept", "communicate", "drain", "read", "readline")
)
"""Methods that are waits when nothing is handed to them, even if a coroutine of the project bears the same name."""
BLOCKING = frozenset(("wait", "join", "get", "acquire", "recv", "accept", "communicate", "readline"))
"""Methods that block a thread when nothing is handed to them; `result` does so too, but not in a coroutine."""
PLAIN = {
    "subprocess": frozenset(("run", "call", "check_call", "check_output")),
    "ray": frozenset(("get", "wait")),
    "dist": frozenset(
        ("barrier", "broadcast", "all_reduce", "all_gather", "reduce", "scatter", "gather", "new_group", "send", "recv")
    ),
    "request": frozenset(("urlopen",)),
    "os": frozenset(("waitpid", "wait")),
    "futures": frozenset(("wait",)),
}
"""Functions of modules that block a thread unless they get a timeout."""
HTTP = frozenset(("request", "get", "post", "put", "delete", "head", "ws_connect"))
"""Methods of an aiohttp session, as in `async with session.get(...)`."""
SOON = frozenset(("sleep", "to_thread", "run_in_executor"))
"""A sleep names its length; what runs in a thread is walked where it is defined."""
ANY_OF = frozenset(("gather", "shield", "ensure_future", "create_task"))


class Found(NamedTuple):
    """A wait without a deadline: `where` is FILE:FUNCTION, `what` its source in one line."""

    where: str
    what: str


def coroutines(sources: Iterable[tuple[str, ast.Module]]) -> frozenset[str]:
    """Names of the project's own coroutines and asynchronous generators."""
    return frozenset(
        node.name for _, tree in sources for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)
    )


def parse(root: Path, *folders: str) -> list[tuple[str, ast.Module]]:
    """(path below `root`, tree) of every module in `folders`."""
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    return [(file.relative_to(root).as_posix(), ast.parse(file.read_text())) for file in files]


def unbounded(name: str, tree: ast.Module, known: frozenset[str]) -> list[Found]:
    """The waits of one module that have no deadline. `known`: coroutines of the project."""
    return list(_Walk(name, tree, known).below(tree, _Scope()))


class _Scope(NamedTuple):
    function: str = ""
    coroutine: bool = False
    bounded: bool = False

    def enter(self, node: Function | ast.ClassDef) -> _Scope:
        name = f"{self.function}.{node.name}".lstrip(".")
        return _Scope(name, isinstance(node, ast.AsyncFunctionDef))


class _Walk:
    def __init__(self, name: str, tree: ast.Module, known: frozenset[str]) -> None:
        self._name = name
        self._known = known
        self._endless = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and _endless(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def below(self, node: ast.AST, scope: _Scope) -> Iterator[Found]:
        """What `node` is made of."""
        for child in ast.iter_child_nodes(node):
            yield from self._visit(child, scope)

    def _visit(self, node: ast.AST, scope: _Scope) -> Iterator[Found]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield from self.below(node, scope.enter(node))
                return
            case ast.AsyncWith():
                yield from self._async_with(node, scope)
                return
            case ast.AsyncFor() if not scope.bounded and not self._own(node.iter):
                yield self._found(scope, node.iter, "async for")
            case ast.Await(value=value):
                if not scope.bounded and self._waits(value):
                    yield self._found(scope, value, "await")
                if isinstance(value, ast.Call):
                    inner = scope._replace(bounded=scope.bounded or _bounds(value))
                    for part in (value.func, *value.args, *(keyword.value for keyword in value.keywords)):
                        yield from self.below(part, inner)
                    return
            case ast.Call() if not scope.bounded and self._blocks(node, scope):
                yield self._found(scope, node, "call")
        yield from self.below(node, scope)

    def _async_with(self, node: ast.AsyncWith, scope: _Scope) -> Iterator[Found]:
        """Items take effect from left to right; a request's own timeout bounds the reading of its answer too."""
        for item in node.items:
            call = item.context_expr
            yield from self._visit(call, scope._replace(bounded=True) if self._asks(call) else scope)
            if isinstance(call, ast.Call) and _callee(call) in ("timeout", "timeout_at"):
                scope = scope._replace(bounded=scope.bounded or not _none(call.args))
            elif self._asks(call):
                if isinstance(call, ast.Call) and not scope.bounded and not self._timed(call):
                    yield self._found(scope, call, "async with")
                scope = scope._replace(bounded=True)  # whatever is found, is found once
        for statement in node.body:
            yield from self._visit(statement, scope)

    def _waits(self, value: ast.expr) -> bool:
        """Whether awaiting `value` may take for ever."""
        if isinstance(value, ast.Starred | ast.GeneratorExp | ast.ListComp):
            return self._waits(value.value if isinstance(value, ast.Starred) else value.elt)
        if not isinstance(value, ast.Call):
            return True
        name = _callee(value)
        if name in SOON or _bounds(value) or self._timed(value):
            return False
        if name in ANY_OF:
            return any(map(self._waits, value.args))
        if name == "wait" and isinstance(value.func, ast.Attribute) and ast.unparse(value.func.value) == "asyncio":
            return True
        return (name in ALWAYS and not value.args) or not self._own(value)

    def _own(self, value: ast.expr) -> bool:
        return isinstance(value, ast.Call) and _callee(value) in self._known

    def _blocks(self, call: ast.Call, scope: _Scope) -> bool:
        if not isinstance(call.func, ast.Attribute):
            return False
        owner, name = call.func.value, call.func.attr
        module = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name in PLAIN.get(module, ()):
            return not self._timed(call)
        blocks = name in BLOCKING or (name == "result" and not scope.coroutine)
        return blocks and not call.args and not self._timed(call)

    def _asks(self, call: ast.expr) -> bool:
        """An HTTP request of a client."""
        return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in HTTP

    def _timed(self, call: ast.Call) -> bool:
        given = [k.value for k in call.keywords if k.arg in ("timeout", "deadline_s")]
        given = [v for v in given if not (isinstance(v, ast.Name) and v.id in self._endless)]
        return any(not _none([value]) and not _endless(value) for value in given)

    def _found(self, scope: _Scope, node: ast.expr, how: str) -> Found:
        return Found(f"{self._name}:{scope.function}", f"{how} {ast.unparse(node)}")


def _bounds(call: ast.Call) -> bool:
    return _callee(call) == "wait_for" and len(call.args) > 1 and not _none(call.args[1:])


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _none(values: list[ast.expr]) -> bool:
    return not values or (isinstance(values[0], ast.Constant) and values[0].value is None)


def _endless(value: ast.expr) -> bool:
    """A `ClientTimeout` that bounds no whole request."""
    if not isinstance(value, ast.Call) or _callee(value) != "ClientTimeout":
        return False
    return _none([keyword.value for keyword in value.keywords if keyword.arg == "total"])
