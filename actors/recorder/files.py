"""The files that a run's rows go to: metrics.jsonl and TensorBoard's."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.recorder.metrics import Row


class Table:
    """metrics.jsonl: one JSON object a row. A version is written once, over restarts too."""

    def __init__(self, path: Path) -> None:
        written = path.read_bytes() if path.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]
        self._versions = {json.loads(line)["version"] for line in whole.splitlines()}
        self._file = path.open("ab")
        if len(whole) < len(written):
            os.ftruncate(self._file.fileno(), len(whole))

    def write(self, row: Row) -> bool:
        """Append a row; False if its version is there already."""
        if row.version in self._versions:
            return False
        self._versions.add(row.version)
        self._file.write(json.dumps({k: _finite(v) for k, v in row.flat().items() if v is not None}).encode() + b"\n")
        self._file.flush()
        return True

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    """JSON has no NaN: a metric that is not finite becomes its name."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Event files in `folder`. The library loads torch where it is installed, so it is left out of the start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: Any = None

    @property
    def _writer(self) -> Any:
        if self._opened is None:
            from tensorboardX import SummaryWriter

            self._opened = SummaryWriter(str(self._folder), flush_secs=5)
        return self._opened

    def write(self, row: Row) -> None:
        values: Mapping[str, float | int | None] = row.flat()
        for tag, value in values.items():
            if value is not None and tag not in ("step", "wall"):
                self._writer.add_scalar(tag, value, row.step, walltime=row.wall)

    def flush(self) -> None:
        if self._opened is not None:
            self._opened.flush()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
