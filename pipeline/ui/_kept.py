"""The newest trajectories of an archive as far as one file may hold them, for a page that has no server to ask."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.models import ModelError
from actors.recorder import archive
from actors.recorder.actor import PAYLOADS, Payload
from actors.recorder.ordering import number
from config.schema import RunConfig
from contracts.trajectory import TrajectoryError
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir
from pipeline.ui import _samples, _trajectory
from pipeline.ui._data import RunData

BYTES = 4 << 20
"""Most bytes of JSON that tokens may take."""
SAMPLES = 256
"""Most samples that are looked at."""


def kept(run: RunDir, data: RunData) -> dict[str, Any]:
    """The newest samples, group by group as long as there is room, and how many there are in all; `tokens`: row -> its
    trajectory.

    Raises `PipelineError` if the archive holds none, or is damaged.
    """
    total, rows = data.samples.page(_samples.Wanted(), 0, SAMPLES)
    payloads = _payloads(run, {data.index.position(row) for row in rows})
    tokenizer, note = _tokenizer(data.config)
    groups: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        if data.index.position(row) in payloads:
            sample: Any = data.index.envelope(row).body
            groups.setdefault((sample.split, sample.index), []).append(row)
    lines, tokens, room = list[dict[str, Any]](), dict[int, Any](), BYTES
    for members in groups.values():
        found = {row: _told(data, row, payloads[data.index.position(row)], tokenizer, note) for row in members}
        room -= len(msgspec.json.encode(found))
        if room < 0:
            break
        lines += [each["event"] for each in found.values()]
        tokens |= found
    if not lines:
        raise PipelineError(
            f"{run / 'payloads'} holds no trajectory for a report: `recorder.payloads` was off, or the newest "
            f"group takes more than {BYTES >> 20} MiB; `pipeline ui` shows what there is",
            Exit.USAGE,
        )
    return {"of": total, "samples": lines, "tokens": tokens}


def _payloads(run: RunDir, positions: set[int]) -> dict[int, bytes]:
    """The payloads of these places of the log that are archived, read in one pass."""
    found: dict[int, bytes] = {}
    if not positions or not (run / "payloads").is_dir():
        return found
    try:
        for entry in archive.read(run / "payloads", {PAYLOADS}, {PAYLOADS: min(positions) - 1}):
            place = number(entry.entry)
            if place in positions and (data := msgspec.msgpack.decode(entry.data, type=Payload).data) is not None:
                found[place] = data
    except archive.ArchiveError as error:
        raise PipelineError(str(error), Exit.FAILED) from error
    return found


def _tokenizer(config: RunConfig) -> tuple[Any, str]:
    """The run's tokenizer; or None, and why there is none."""
    try:
        return _trajectory.load_tokenizer(config.model.source, config.model.params), ""
    except (ModelError, OSError, ValueError) as error:
        return None, f"Tokens are shown as ids, for the tokenizer can't be loaded: {error}"


def _told(data: RunData, row: int, payload: bytes, tokenizer: Any, note: str) -> dict[str, Any]:
    """One sample as the server would answer it."""
    envelope: Any = data.index.envelope(row)
    line = _samples.line(row, envelope.body, envelope.wall_ns / 1e9, envelope.actor)
    try:
        return {"event": line, "trajectory": _trajectory.shown(payload, tokenizer), "note": note}
    except TrajectoryError as error:
        return {"event": line, "trajectory": None, "note": f"Its tokens can't be read: {error}"}
