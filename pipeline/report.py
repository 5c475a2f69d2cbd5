"""report.html: one file that tells how a run went, folded from its archive; it opens without a network."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from config.schema import RunConfig
from pipeline.charts import Chart, charts
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir, RunInfo
from pipeline.view import View

LAYOUT = {
    "height": 340,
    "margin": {"l": 64, "r": 16, "t": 10, "b": 48},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#334155"},
    "legend": {"orientation": "h", "y": 1.12, "x": 0},
    "hovermode": "closest",
}
AXIS = {"gridcolor": "#e2e8f0", "zerolinecolor": "#cbd5e1", "automargin": True}


def write(run: RunDir) -> Path:
    """Write report.html into the run directory; answers its path.

    Raises `PipelineError` if the archive is damaged or holds no training step.
    """
    from pipeline.eventlog import archived

    view = View().apply_all(envelope for _, envelope in archived(run))
    if not view.rows:
        raise PipelineError(f"{run.path} has no finished training step to report; see `pipeline log`", Exit.FAILED)
    info = run.info()
    draft = run.path / ".report.html"
    draft.write_text(render(info, msgspec.convert(info.config, RunConfig), view), encoding="utf-8")
    os.replace(draft, run.report)
    return run.report


def render(info: RunInfo, config: RunConfig, view: View) -> str:
    """The page."""
    drawn = charts(config, view)
    wide = [chart for chart in drawn if not chart.name.startswith("policy-")]
    small = [chart for chart in drawn if chart.name.startswith("policy-")]
    body = [
        f"<h1>{text(info.run)}</h1><p class=lead>{text(config.description)}</p>",
        cards(figures(info, view)),
        *(section(chart) for chart in wide),
        "<h2>Policy</h2><div class=grid>" + "".join(section(chart, level=3) for chart in small) + "</div>"
        if small
        else "",
        table("What went wrong", ("when", "who", "what"), mishaps(view)),
        table("Where it ran", ("", ""), [*facts(info, config)]),
        f"<details><summary>Configuration</summary><pre>{text(dump(config))}</pre></details>",
    ]
    return PAGE.format(title=text(info.run), style=STYLE, body="\n".join(body), plotly=plotly(), plots=plots(drawn))


# --- facts -----------------------------------------------------------------------------------------------------------


def figures(info: RunInfo, view: View) -> list[tuple[str, str]]:
    """The numbers at the top."""
    rewards = view.rewards()
    last = view.evaluations[-1] if view.evaluations else None
    pauses = sorted(refit.pause_s for refit in view.refits)
    seconds = (view.last_at or 0.0) - (view.started_at or 0.0)
    return [
        ("ended", view.finished or info.ended or "not yet"),
        ("steps", f"{view.step}"),
        ("reward", f"{rewards[0]:.3f} to {rewards[-1]:.3f}" if rewards else "none"),
        ("held out", f"{last.reward:.3f}" if last else "not evaluated"),
        ("time", f"{int(seconds) // 60}:{int(seconds) % 60:02d}"),
        ("rollouts", f"{view.totals['trajectories']:,}"),
        ("tokens generated", f"{view.totals['generated_tokens']:,}"),
        ("refits", f"{view.totals['refits']:,}"),
        ("median pause", f"{pauses[len(pauses) // 2]:.2f} s" if pauses else "none"),
        ("failed epochs", f"{view.totals['failed_refits']}"),
        ("quarantines", f"{view.totals['quarantines']}"),
        ("restarts", f"{sum(len(boots) - 1 for boots in view.boots.values())}"),
    ]


def mishaps(view: View) -> list[tuple[str, str, str]]:
    """Failures, lost epochs and quarantines, dropped groups and failed samples."""
    begin = view.started_at or 0.0
    timed = [(f.wall, f.actor, f"{f.error}: {f.message}") for f in view.failures]
    timed += [(m.wall, m.engine or f"epoch {m.epoch}", m.reason) for m in view.mishaps]
    rows = [(f"{wall - begin:.1f} s", who, what) for wall, who, what in sorted(timed)]
    rows += [("", "buffer", f"{n} groups dropped: {reason}") for reason, n in view.drops.most_common()]
    counted = [(key.partition(":"), n) for key, n in sorted(view.totals.items()) if ":" in key]
    rows += [("", "rollouts", f"{n} {what}: {why}") for (what, _, why), n in counted]
    return rows


def facts(info: RunInfo, config: RunConfig) -> list[tuple[str, str]]:
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


# --- html ------------------------------------------------------------------------------------------------------------


def text(value: Any) -> str:
    return html.escape(str(value))


def cards(items: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<div><span>{text(name)}</span><b>{text(value)}</b></div>" for name, value in items)
    return f"<div class=cards>{cells}</div>"


def section(chart: Chart, level: int = 2) -> str:
    caption = f"<p>{text(chart.caption)}</p>" if chart.caption else ""
    return f"<section><h{level}>{text(chart.title)}</h{level}>{caption}<div id=chart-{chart.name}></div></section>"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, or nothing if it has no rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{text(name)}</th>" for name in head) if any(head) else ""
    lines = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<section><h2>{text(title)}</h2><table><tr>{top}</tr>{lines}</table></section>"


def plots(drawn: Sequence[Chart]) -> str:
    """JavaScript that draws the charts; data can't end the script element."""
    calls = []
    for chart in drawn:
        layout = {**LAYOUT, **chart.layout}
        for axis in ("xaxis", "yaxis"):
            given = layout.get(axis, {})
            title = {"title": {"text": given["title"]}} if "title" in given else {}
            layout[axis] = {**AXIS, **given, **title}
        payload = msgspec.json.encode([f"chart-{chart.name}", chart.data, layout]).decode()
        calls.append(f"draw(...{payload});")
    return "\n".join(calls).replace("</", "<\\/")


def plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#0f172a;background:#f8fafc;margin:0}
main{max-width:1060px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:22px;margin:0}h2{font-size:17px;margin:0}h3{font-size:13px;margin:0;color:#475569}
p{margin:2px 0 0;color:#475569;font-size:13px}.lead{font-size:15px;margin-bottom:18px}
section{background:#fff;border:1px solid #e2e8f0;border-radius:10px;padding:16px 18px;margin:16px 0}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px}
.cards div{background:#fff;border:1px solid #e2e8f0;border-radius:10px;padding:10px 14px}
.cards span{display:block;font-size:12px;color:#64748b}.cards b{font-size:17px;font-weight:600}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:16px;margin-top:12px}
.grid section{margin:0}
table{border-collapse:collapse;width:100%;font-size:13px;margin-top:8px}
td,th{text-align:left;vertical-align:top;padding:4px 12px 4px 0;border-top:1px solid #f1f5f9}
td{overflow-wrap:anywhere}pre{font-size:12px;overflow:auto}
details{background:#fff;border:1px solid #e2e8f0;border-radius:10px;padding:12px 18px}
summary{cursor:pointer;font-weight:600}
"""

PAGE = """<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width,initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main>
<script>{plotly}</script>
<script>
function draw(id, data, layout) {{
  Plotly.newPlot(id, data, layout, {{responsive: true, displayModeBar: false}});
}}
{plots}
</script></body></html>
"""
