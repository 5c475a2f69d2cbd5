"""A diagnosis in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from pipeline.why.look import span
from pipeline.why.result import Diagnosis, Edge, Finding


def lines(found: Diagnosis, stopped: str = "", *, ended: bool = False) -> Iterator[str]:
    """The diagnosis for a terminal. `stopped`: why the run was ended at that moment, if it was. `ended`: nobody writes
    the log any more, although the run has not finished."""
    headline = found.headline if not stopped else f"when the run was stopped ({stopped}): {found.headline}"
    yield headline[0].upper() + headline[1:] + "."
    if ended and not found.stuck:
        yield "The log ends there and nobody writes it: --now +SECONDS tells how long it had been so."
    if found.path:
        yield ""
        for depth, edge in enumerate(found.path):
            yield f"{'  ' * depth}{_edge(edge, found.at)}"
    if found.cause is not None:
        yield ""
        yield from _finding(found.cause, "cause")
    for cycle in found.cycles:
        yield f"cycle  {' -> '.join((*cycle, cycle[0]))}"
    yield from _barrier(found)
    if found.pressure is not None:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in found.pressure.shares.items() if share >= 0.005)
        yield ""
        yield f"pace   {found.pressure.text}"
        yield f"       over the last {span(found.pressure.window_s)}: {shares or 'nobody was busy or waited'}"
    others = _merged(edge for edge in found.edges if edge not in found.path)
    if others:
        yield ""
        yield "announced waits"
        yield from (f"  {_edge(edge, found.at)}" for edge in others)
    if found.also:
        yield ""
        yield "also noticed"
        for each in found.also:
            yield f"  {each.code}: {each.text}"


def _merged(edges: Iterable[Edge]) -> list[Edge]:
    """One line for an actor that waits for several at once."""
    found: dict[tuple[str, str, float], Edge] = {}
    for edge in edges:
        key = (edge.waiter, edge.why, edge.since)
        first = found.get(key)
        found[key] = edge if first is None else msgspec.structs.replace(first, on=f"{first.on}, {edge.on}")
    return list(found.values())


def _edge(edge: Edge, now: float) -> str:
    left = "" if edge.deadline_at is None else f", {_left(edge.deadline_at - now)}"
    return f"{edge.waiter} waits for {edge.on} since {span(now - edge.since)}: {edge.why}{left}"


def _left(seconds: float) -> str:
    return f"deadline in {span(seconds)}" if seconds >= 0 else f"deadline passed {span(-seconds)} ago"


def _finding(found: Finding, label: str) -> Iterator[str]:
    yield f"{label}  {found.code} ({found.culprit}): {found.text}"
    yield from (f"       {line}" for line in found.evidence)
    yield f"fix    {found.fix}"


def _barrier(found: Diagnosis) -> Iterator[str]:
    barrier = found.barrier
    if barrier is None:
        return
    yield ""
    yield (
        f"refit  epoch {barrier.epoch} to version {barrier.version}, in {barrier.phase} since "
        f"{span(found.at - barrier.since)}, {_left(barrier.deadline_at - found.at)}"
    )
    yield f"       arrived: {', '.join(barrier.arrived) or 'nobody'}"
    yield f"       missing: {', '.join(f'{each.event} from {each.member}' for each in barrier.missing) or 'nobody'}"
