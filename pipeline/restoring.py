"""What a resume would load, as the log tells it, and whether that is still there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.trainer import checkpoint
from contracts.events import ActorFailed, CheckpointSaved

INITIAL = ""
"""Stands for the weights that the run began with, which need no checkpoint."""


class Restores:
    """Feed every event in log order to `apply`. `paths`: what a resume loads, the last one first of all."""

    def __init__(self) -> None:
        self.paths: tuple[str, ...] = (INITIAL,)
        self._refused = False
        """The trainer could load none of them."""

    def apply(self, event: Any) -> None:
        """The trainer goes on from the newest checkpoint, or from the one before; from no other."""
        if isinstance(event, CheckpointSaved):
            self.paths, self._refused = (self.paths[-1], event.path), False
        elif isinstance(event, ActorFailed) and event.error == "CheckpointDamaged":
            self.paths, self._refused = self.paths[:1], event.fatal

    def lost(self, root: Path) -> str | None:
        """Why nothing under `root` can be loaded; None if something can.

        Files are held to their sizes, and to their digests once the trainer has refused them.
        """
        problems = []
        for path in reversed(self.paths):
            if not checkpoint.is_name(Path(path).name):  # the initial weights, or a simulated run
                return None
            try:
                checkpoint.read_meta(checkpoint.own(root, path), verify=self._refused)
            except checkpoint.CheckpointError as error:
                problems.append(str(error).partition("; ")[0])
            else:
                return None
        return "; ".join(problems)
