"""Weights & Biases: a line of metrics a step, under the run's own id, so that a later export goes on with it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from actors.recorder.metrics import Row
from contracts.envelope import Envelope
from contracts.events import Event


class WandB:
    """Logs each step's row once; `WANDB_MODE`, `WANDB_API_KEY` and the others are Weights & Biases' own."""

    def __init__(self, run: str, project: str, config: dict[str, Any]) -> None:
        self._run = import_module("wandb").init(project=project, id=run, name=run, config=config, resume="allow")
        self.url = str(self._run.url or self._run.dir)
        self._logged = self._run.step

    def take(self, envelope: Envelope[Event], row: Row | None) -> None:
        if row is None or row.version < self._logged:
            return
        values = {name: value for name, value in row.flat().items() if value is not None}
        self._run.log(values, step=row.version)

    def close(self) -> None:
        self._run.finish()
