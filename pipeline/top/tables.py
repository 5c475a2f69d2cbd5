"""The panels of `top` as plain rows. Pure: the moment is handed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from actors import registry
from actors.collector import core as collector
from actors.gateway import state as gateway
from config.schema import RunConfig
from contracts.core import Entry
from contracts.envelope import STREAMS, WORK_STREAMS, Envelope
from contracts.events import Event, kind
from pipeline.bus.model import Depth
from pipeline.oneline import summary
from pipeline.progress import figures
from pipeline.top.board import Board
from pipeline.why.diagnosis import NOTHING
from pipeline.why.look import FLOOR_S, Look, span
from pipeline.why.result import Evidence

Row = tuple[str, ...]

ACTORS = ("actor", "state", "boots", "last event", "waits for", "since", "why")
ENGINES = ("engine", "state", "version", "in flight", "boot", "since", "reason")
STREAMS_HEAD = ("stream", "events", "length", "unread", "in hand", "oldest")
UNKNOWN = "?"
EVENTS = ("entry", "time", "actor", "kind", "what")
BUFFER = ("groups", "count", "oldest")


def headline(config: RunConfig, board: Board, now: float, *, live: bool) -> list[tuple[str, str]]:
    """Name and text of the figures on top."""
    mode = "live" if live else f"archive, at {clock(board.at)}"
    run = board.model.run or "no event yet"
    state = board.view.finished or board.view.stopping or "running"
    return [("run", f"{run}  ({mode}; {state})"), *figures(config, board.view, now)]


def actors(config: RunConfig, board: Board, now: float) -> list[Row]:
    model = board.model
    names = registry.names(config)
    rows: list[Row] = []
    for name in [*names, *sorted(set(model.actors) - {*names, "driver"})]:
        known = model.actors.get(name)
        waits = sorted((w for (actor, _), w in model.waits.items() if actor == name), key=lambda wait: wait.since)
        if known is None or not known.boots:
            rows.append((name, "not started", "0", "", "", "", ""))
            continue
        state = "failed" if known.failed else "left" if known.left else "waits" if waits else "up"
        first = waits[0] if waits else None
        waiting = ("", "", known.failed) if first is None else (first.on, span(now - first.since), first.cause)
        rows.append((name, state, str(known.boots), f"{span(now - known.last_at)} ago", *waiting))
    return rows


def titles(evidence: Evidence | None, *, live: bool) -> dict[str, str]:
    """What stands above the tables, with what is not known there and why. `evidence` None: not looked into yet."""
    engines, streams = "engines", "streams"
    if evidence is None:
        engines += "   (in flight: reading the gateways' journals)"
    elif not any(isinstance(state, gateway.State) for state in evidence.states.values()):
        engines += "   (in flight: not known, no gateway has a journal that can be read)"
    if not live:
        streams += (
            "   (length, unread: the store's, known while the run lives; in hand: of tasks, what collectors hold)"
        )
    return {"engines": engines, "streams": streams}


def engines(config: RunConfig, board: Board, now: float, evidence: Evidence | None) -> list[Row]:
    """Requests in flight are known where a gateway could be looked into."""
    serving = board.view.serving
    requests = Look(board.model, config, now, evidence or NOTHING, FLOOR_S).requests()
    return [
        (
            name,
            each.mode,
            str(serving.get(name, "")),
            UNKNOWN if requests is None else str(requests[name]),
            str(each.boot),
            f"{span(now - each.since)} ago",
            each.reason,
        )
        for name, each in sorted(board.model.engines.items())
    ]


def streams(
    board: Board, now: float, depths: Mapping[str, Depth] | None, evidence: Evidence | None = None
) -> list[Row]:
    """`depths`: what the store of a live run says of its streams. Without, collectors tell which tasks they hold."""
    oldest, held = _oldest(board), _held(evidence)
    rows: list[Row] = []
    for name in STREAMS:
        depth = None if depths is None else depths.get(name)
        work = name in WORK_STREAMS
        in_hand = str(held) if name == "tasks" and held is not None else UNKNOWN
        facts = (UNKNOWN, UNKNOWN if work else "", in_hand if work else "")
        if depth is not None:
            unread = "?" if depth.lag is None else f"{depth.lag:,}"
            facts = (f"{depth.length:,}", unread if work else "", f"{depth.pending:,}" if work else "")
        since = oldest.get(name)
        rows.append((name, f"{board.streams[name]:,}", *facts, "" if since is None else f"{span(now - since)} ago"))
    return rows


def _held(evidence: Evidence | None) -> int | None:
    """Tasks that collectors hold; None if none of them can be looked into."""
    states = [each for each in (evidence or NOTHING).states.values() if isinstance(each, collector.State)]
    return sum(len(state.open) for state in states) if states else None


def _oldest(board: Board) -> dict[str, float]:
    """Work stream -> when the oldest thing in it that is not finished with was put there."""
    model = board.model
    found = {
        "tasks": [group.issued_at for group in model.groups.values() if group.complete_at is None],
        "trajectories": [group.complete_at for group in model.groups.values() if group.complete_at is not None],
        "batches": [batch.ready_at for batch in model.untrained().values()],
    }
    return {name: min(times) for name, times in found.items() if times}


def buffer(board: Board, now: float) -> list[Row]:
    """Train groups by what they are, with the age of the oldest; then what was dropped."""
    model = board.model
    kinds = {
        "complete": [group.complete_at or 0.0 for group in model.complete().values()],
        "begun": [group.issued_at for group in model.begun().values()],
        "untouched": [group.issued_at for group in model.untouched().values()],
        "in batches not trained": [batch.ready_at for batch in model.untrained().values()],
    }
    rows = [(name, str(len(times)), f"{span(now - min(times))} ago" if times else "") for name, times in kinds.items()]
    rows += [(f"dropped: {reason}", str(count), "") for reason, count in model.drops.most_common(3)]
    ages = Counter(int(now - group.issued_at) // 10 for group in model.groups.values())
    rows += [(f"age {10 * decade}-{10 * decade + 9} s", str(ages[decade]), "") for decade in sorted(ages)[:6]]
    return rows


def events(items: Sequence[tuple[Entry, Envelope[Event]]], zero: float) -> Iterator[Row]:
    """The newest first. `zero`: the time of the run's first event."""
    for entry, envelope in reversed(items):
        yield (
            entry.entry,
            clock(envelope.wall_ns / 1e9),
            envelope.actor,
            kind(envelope.body),
            summary(envelope.body, zero),
        )


def clock(at: float) -> str:
    """`14:03:10.250`, UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.%f")[:-3]


def plots(board: Board) -> dict[str, list[float]]:
    """Title -> the values of the newest steps or refits, oldest first."""
    rows = list(board.view.rows)
    return {
        "reward": board.view.rewards(),
        "staleness": _known(row.flat().get("staleness/mean") for row in rows),
        "mismatch (mean exp|train - generation logprob|)": _known(row.policy.get("mismatch_exp") for row in rows),
        "refit pause, s": [refit.pause_s for refit in board.view.refits],
        "groups ready": _known(row.ready_groups for row in rows),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]


def legend(title: str, values: Sequence[float]) -> str:
    """`reward  0.812 (0.031 to 0.850)`."""
    if not values:
        return f"{title}  none yet"
    return f"{title}  {values[-1]:.3g} ({min(values):.3g} to {max(values):.3g})"


def slider(position: int, end: int, at: float, width: int) -> str:
    """Where in the log the shown moment lies."""
    width = max(width, 10)
    done = width if not end else min(width, round(width * position / end))
    return f"{'━' * done}{'─' * (width - done)} {position:,} of {end:,}  {clock(at) if at else ''}"
