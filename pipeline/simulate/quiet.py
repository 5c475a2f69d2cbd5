"""The base of all simulated shells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.simulate.process import SimActor


class Quiet:
    """A shell without effects, and the base of the others."""

    def __init__(self, core: Any) -> None:
        self.core = core

    def perform(self, actor: SimActor, command: Any) -> None:
        raise TypeError(f"{actor.name} can't perform {command!r}")

    def killed(self, actor: SimActor) -> None:
        pass

    def booting(self, actor: SimActor) -> None:
        pass

    def payload(self, handle: str) -> bytes:
        return handle.encode()
