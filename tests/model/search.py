"""Breadth-first search over every reachable world of a model."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Protocol, TypeVar

import msgspec

World = TypeVar("World", bound=Hashable)
Label = tuple[object, ...]
"""What happened, in words and messages."""
Move = tuple[Label, World, bool]
"""What happens, the world after it, whether it is a fault."""


class TooLarge(RuntimeError):
    """The search was given up."""


class Explorable(Protocol[World]):
    """A model: where it starts, what can happen, and what must hold."""

    start: World

    def moves(self, world: World) -> Iterator[Move[World]]: ...

    def wrong(self, world: World) -> str:
        """What this world violates, or nothing."""
        ...

    def settled(self, world: World) -> bool:
        """A world that everything must be able to come to."""
        ...

    def cut(self, world: World) -> bool:
        """The search looks no further than this world."""
        ...


class Result(msgspec.Struct, frozen=True):
    """`wrong` is empty if all is well; otherwise `path` is a shortest way to get there."""

    states: int
    cut: int
    wrong: str = ""
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((f"{self.states} states: {self.wrong or 'nothing is wrong'}", *(f"  {x}" for x in self.path)))


def search(model: Explorable[World], liveness: bool = False, most: int | None = None) -> Result:
    """Visit every reachable world, nearest first, up to the first violation.

    With `liveness`, every world must also have a way to a settled one that takes no further fault. Raises `TooLarge`
    beyond `most` worlds.
    """
    gc.disable()  # nothing here is ever garbage
    try:
        return _search(model, liveness, most)
    finally:
        gc.enable()


def _search(model: Explorable[World], liveness: bool, most: int | None) -> Result:
    parents: dict[World, tuple[World, Label] | None] = {model.start: None}
    before: dict[World, list[World]] = {}
    frontier = deque([model.start])
    alive: set[World] = set()
    cut = 0
    while frontier:
        if most is not None and len(parents) > most:
            raise TooLarge(f"more than {most} worlds")
        world = frontier.popleft()
        if wrong := model.wrong(world):
            return Result(len(parents), cut, wrong, _path(parents, world))
        if model.cut(world):
            cut += 1
            alive.add(world)
            continue
        if liveness and model.settled(world):
            alive.add(world)
        for label, after, fault in model.moves(world):
            if after not in parents:
                parents[after] = (world, label)
                frontier.append(after)
            if liveness and not fault:
                before.setdefault(after, []).append(world)
    if liveness:
        _spread(alive, before)
        for world in parents:
            if world not in alive:
                return Result(len(parents), cut, "no way leads on from here", _path(parents, world))
    return Result(len(parents), cut)


def _spread(alive: set[World], before: dict[World, list[World]]) -> None:
    """Add whatever leads to a world that is alive."""
    rest = list(alive)
    while rest:
        for world in before.get(rest.pop(), ()):
            if world not in alive:
                alive.add(world)
                rest.append(world)


def _path(parents: dict[World, tuple[World, Label] | None], world: World) -> tuple[str, ...]:
    labels = []
    while (step := parents[world]) is not None:
        world, label = step
        labels.append(" ".join(map(str, label)))
    return tuple(reversed(labels))
