"""report.html: one file that tells how a run went, without a network: the page of `pipeline ui` with its data in it."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from actors import atomic
from config.schema import RunConfig
from pipeline import eventlog
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir, RunInfo, config_of
from pipeline.ui._data import RunData, told
from pipeline.ui._kept import kept
from pipeline.why.diagnosis import NOTHING

STATIC = Path(__file__).parent / "ui" / "static"
MODULES = ("dom.js", "api.js", "charts.js", "timeline.js", "events.js", "samples.js", "app.js")
"""The page's modules, each after those that it imports."""
WIDTH = 2400
"""Pixels that the timeline is made for."""
EVENTS = 3000
"""Most events that are listed."""
DETAILS = 400
"""Newest of them that can be looked into."""
COMMON = ("task.issued", "trajectory.finished", "credit.granted", "wait.started", "wait.ended")
"""Kinds that are left out of a long log's list."""


def write(run: RunDir, *, trajectories: bool = False) -> Path:
    """Write report.html into the run directory; answers its path. `trajectories`: with those of the newest groups.

    Raises `PipelineError` if the archive is damaged or holds no training step.
    """
    data = RunData(run.info(), config_of(run))
    for batch in eventlog.batches(run):
        data.extend(batch)
    if not data.view.rows:
        raise PipelineError(f"{run.path} has no finished training step to report; see `pipeline log`", Exit.FAILED)
    atomic.write(run.report, render(data, kept(run, data) if trajectories else None).encode())
    return run.report


def render(data: RunData, samples: dict[str, Any] | None = None) -> str:
    """The page; `samples` as `kept` answers them.

    Its policy lets nothing run or apply but what is written here, by the hashes of these texts.
    """
    library, style = _read("vendor/uPlot.iife.min.js"), _read("vendor/uPlot.min.css") + _read("app.css")
    script = bundle()
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return PAGE.format(
        policy=policy,
        title=html.escape(data.info.run),
        style=style,
        library=library,
        script=script,
        data=msgspec.json.encode(embedded(data) | {"samples": samples}).decode().replace("<", "\\u003c"),
    )


def embedded(data: RunData) -> dict[str, Any]:
    """Everything that the page would ask the server for, as much of it as a file may hold."""
    now = data.model.last_at
    why = told(data.diagnose(now, NOTHING, live=False))
    rows = shown(data)
    return {
        "status": data.status("archived", now, why, NOTHING),
        "choices": data.choices(),
        "plots": data.charts(),
        "timeline": data.window(None, None, WIDTH),
        "events": [data.line(row) for row in rows],
        "details": {row: data.event(row) for row in rows[-DETAILS:]},
        "record": {
            "facts": facts(data.info, data.config),
            "config": dump(data.config),
            "left_out": len(data.index) - len(rows),
        },
    }


def shown(data: RunData) -> list[int]:
    """Rows of the events that are listed: all, or the newest that are not of the most common kinds."""
    count = len(data.index)
    if count <= EVENTS:
        return list(range(count))
    return [row for row in range(count) if data.index.kind(row) not in COMMON][-EVENTS:]


def bundle() -> str:
    """The page's modules as one: a file can't import another where there is no server."""
    parts = []
    for name in MODULES:
        text = re.sub(r"^import .*;\n", "", _read(name), flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "\n".join(parts)


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def facts(info: RunInfo, config: RunConfig) -> list[tuple[str, str]]:
    """Where a run was made, and from what."""
    created = datetime.fromtimestamp(info.created).astimezone().isoformat(timespec="seconds")
    return [
        ("created", created),
        ("model", config.model.source),
        ("producer", config.producer.name),
        ("engines", f"{config.engine.count} {config.engine.kind}"),
        ("staleness bound", str(config.buffer.max_staleness)),
        ("seed", str(config.seed)),
        ("config digest", info.config_digest),
        *info.versions.items(),
    ]


def dump(config: RunConfig) -> str:
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{title}</title><style>{style}</style></head>
<body><div id="app"></div>
<script id="embedded" type="application/json">{data}</script>
<script>{library}</script>
<script type="module">{script}</script>
</body></html>
"""
