"""Actors that somebody else starts and restarts: containers, service managers, other shells."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from actors.recorder.archive import has_writer
from pipeline.host import Left
from pipeline.inject import Process
from pipeline.view import View

RECORDER = "recorder"
LOOK_S = 0.25


class Outside:
    """Stands where `pipeline.cluster.Cluster` does, and starts nothing.

    That an actor has left is known from its `actor.left`, and from the recorder that it let go of the archive, which
    needs a run directory that is shared.
    """

    def __init__(self, view: View, events: Path) -> None:
        self._view = view
        self._events = events

    def prepare(self) -> None:
        """Nothing to prepare."""

    def start(self) -> None:
        """Nothing to start."""

    def launch(self, names: Sequence[str], url: str, run: str) -> None:
        """Nothing to launch."""

    def restart(self, name: str, process: Process | None) -> str:
        """End the process of an actor on this host; whoever started it starts another."""
        if process is not None and process.here and process.kill():
            return "killed"
        return "it runs elsewhere: whoever started it has to restart it"

    def left(self) -> dict[str, Left]:
        """Whoever restarts the actors knows when one of them can't go on; the driver hears of it by events."""
        return {}

    async def wait(self, names: Sequence[str], timeout: float) -> list[str]:
        """Those of `names` that have not left, after at most `timeout` seconds."""
        late = [name for name in names if not self._gone(name)]
        if late:
            await asyncio.sleep(max(0.0, min(timeout, LOOK_S)))
        return [name for name in late if not self._gone(name)]

    def stop(self) -> None:
        """Nothing to stop."""

    def _gone(self, name: str) -> bool:
        return name in self._view.gone or (name == RECORDER and not has_writer(self._events))
