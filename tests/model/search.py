"""Breadth-first search over every reachable world of a model."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Hashable, Iterator, Sequence
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
    """Worlds are numbered as they are found; `sources[i]` leads to `targets[i]` without a fault."""
    numbers: dict[World, int] = {model.start: 0}
    worlds: list[World] = [model.start]
    found: list[tuple[int, Label] | None] = [None]
    sources, targets = array("I"), array("I")
    alive: set[int] = set()
    cut = 0
    for number, world in enumerate(worlds):  # it grows meanwhile
        if most is not None and len(worlds) > most:
            raise TooLarge(f"more than {most} worlds")
        if wrong := model.wrong(world):
            return Result(len(worlds), cut, wrong, _path(found, number))
        if model.cut(world):
            cut += 1
            alive.add(number)
            continue
        if liveness and model.settled(world):
            alive.add(number)
        for label, after, fault in model.moves(world):
            target = numbers.setdefault(after, len(worlds))
            if target == len(worlds):
                worlds.append(after)
                found.append((number, label))
            if liveness and not fault:
                sources.append(number)
                targets.append(target)
    if liveness:
        _spread(alive, sources, targets)
        for number in range(len(worlds)):
            if number not in alive:
                return Result(len(worlds), cut, "no way leads on from here", _path(found, number))
    return Result(len(worlds), cut)


def _spread(alive: set[int], sources: Sequence[int], targets: Sequence[int]) -> None:
    """Add whatever leads to a world that is alive. Most worlds were found before those that they lead to."""
    size = -1
    while size != len(alive):
        size = len(alive)
        for source, target in zip(reversed(sources), reversed(targets), strict=True):
            if target in alive:
                alive.add(source)


def _path(found: Sequence[tuple[int, Label] | None], number: int) -> tuple[str, ...]:
    labels = []
    while (step := found[number]) is not None:
        number, label = step
        labels.append(" ".join(map(str, label)))
    return tuple(reversed(labels))
