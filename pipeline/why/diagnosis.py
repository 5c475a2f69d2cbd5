"""`diagnose`: is the run stuck, on what, and why. Pure: the moment is handed in."""

from __future__ import annotations

from collections.abc import Sequence

from config.schema import RunConfig
from pipeline.why.look import FLOOR_S, Look, counted, finding, some, span
from pipeline.why.model import Model
from pipeline.why.pressure import pressure
from pipeline.why.refits import Refits, frontier
from pipeline.why.result import Diagnosis, Edge, Evidence, Finding
from pipeline.why.walk import Walk

FULL = 0.95
"""Share of its memory from which a store is called full."""
NOTHING = Evidence()


def diagnose(
    model: Model, config: RunConfig, now: float, evidence: Evidence = NOTHING, floor_s: float = FLOOR_S
) -> Diagnosis:
    """What the run waits for at `now`. A wait shorter than `floor_s` never counts as a stall."""
    look = Look(model, config, now, evidence, floor_s)
    walk = Walk(look)
    symptom = _symptom(walk) if model.finished is None else None
    failed = _failed(model)
    if failed is not None and symptom is not None and symptom.code == "actor_gone":
        symptom = None  # all are gone, and one of them is why
    above = _above(look, stuck=symptom is not None)
    cause = above[0] if above and symptom is not None else symptom
    if cause is None and above and above[0].code in ("store_unreachable", "store_full"):
        cause = above[0]
    cause = cause or failed
    also = [each for each in (*above, *_sick(look), symptom, failed) if each is not None and not _same(each, cause)]
    return Diagnosis(
        at=now,
        stuck=cause is not None,
        headline=_headline(look, cause, symptom),
        cause=cause,
        path=tuple(walk.path),
        edges=_edges(look, walk.path),
        cycles=cycles(walk.path),
        barrier=None if model.barrier is None else frontier(model.barrier),
        pressure=pressure(look),
        also=tuple(also),
    )


def _same(finding: Finding, cause: Finding | None) -> bool:
    """The cause once more, in other words."""
    return cause is not None and (finding is cause or (finding.code, finding.culprit) == (cause.code, cause.culprit))


def _symptom(walk: Walk) -> Finding | None:
    """The cause behind the first thing that does not move: steps, else a refit, else the gate."""
    found = walk.trainer()
    if found is not None:
        return found
    walk.path.clear()
    refits = Refits(walk)
    since = refits.overdue()
    if since is not None:
        walk.follow("gateway", "refit", "the gate is closed", since)
        return refits.open("gateway")
    held = refits.gate_held()
    if held is not None:
        walk.follow(held.culprit, "refit", "it does not know of the commit", held.since)
    return held


def _above(look: Look, *, stuck: bool) -> list[Finding]:
    """What explains any stall, whatever it looks like from below."""
    model, store, found = look.model, look.evidence.store, []
    if store is not None and store.error:
        found.append(finding("store_unreachable", "store", f"the store does not answer: {store.error}", model.last_at))
    elif store is not None and store.limit and store.used >= FULL * store.limit:
        text = f"the store is full: {store.used:,} of {store.limit:,} bytes, so it refuses every write"
        found.append(
            finding("store_full", "store", text, model.last_at, [f"last event {span(look.age(model.last_at))} ago"])
        )
    found += _writers(look)
    if stuck and model.clocks.skews:
        skew = max(model.clocks.skews.values(), key=lambda each: abs(each.seconds))
        way = "ahead" if skew.seconds > 0 else "behind"
        text = f"the clock of {skew.actor} is {span(abs(skew.seconds))} {way}: deadlines mean something else there"
        found.append(finding("clock_jump", skew.actor, text, skew.at, [skew.how]))
    return found


def _failed(model: Model) -> Finding | None:
    """What ended a run that no stall explains."""
    problem = model.failed
    if problem is None or model.finished is not None:
        return None
    return finding("actor_failed", problem.actor, f"{problem.actor} ended the run: {problem.message}", problem.at)


def _writers(look: Look) -> list[Finding]:
    """Two processes that take themselves for one actor, or two coordinators of one run."""
    model = look.model
    recent = [each for each in model.usurped if each[3] >= model.moved_at - look.floor_s]
    found = [
        finding("two_writers", name, f"boot {boot} of {name} wrote after boot {after} had taken over", at)
        for name, boot, after, at in recent[:1]
    ]
    writers = {name for name, _ in model.requesters}
    if len(writers) > 1:
        names = some(sorted(writers))
        lines = [f"{name} boot {boot} asked for epoch {epoch}" for (name, boot), epoch in model.requesters.items()]
        since = model.started_at or look.now
        found.append(finding("two_writers", names, f"{names} both coordinate the refits of this run", since, lines))
    return found


def _sick(look: Look) -> list[Finding]:
    """What is wrong without holding up the run."""
    model, found = look.model, []
    if model.finished is not None:
        return []
    for name in look.names if model.failed is None else ():
        gone = look.gone(name)
        if gone is not None:
            found.append(gone)
    if model.losses:
        loss = model.losses[-1]
        count = sum(len(each.entries) for each in model.losses)
        text = f"{count} entries were given up, the last one of {loss.stream}: {loss.reason}"
        found.append(finding("dead_letter", f"{loss.stream}/{loss.entries[0]}", text, loss.at))
    failed = list(model.failed_epochs)
    if failed:
        last = failed[-1]
        text = f"{len(failed)} refits failed since the last commit, in {last.phase}: {last.reason}"
        found.append(finding("refits_fail", "refit", text, failed[0].at))
    told = {each.culprit for each in found}
    return [*found, *(each for each in _down(look) if each.culprit not in told)]


def _down(look: Look) -> list[Finding]:
    """Engines of the run that do not serve and have ended or been started again since they did."""
    found = []
    for name, engine in look.model.engines.items():
        if engine.down_at is None or look.age(engine.down_at) <= look.floor_s or name not in look.names:
            continue
        if engine.mode == "retired":
            text = f"{name} was given up {span(look.age(engine.since))} ago: {engine.reason}"
            found.append(finding("engine_retired", name, text, engine.since))
        elif engine.mode in ("quarantined", "dead") or engine.starts:
            last = f"; it ended last with: {engine.ended}" if engine.ended else ""
            again = f"was started again {counted(engine.starts, 'time')}" if engine.starts else "was not started again"
            text = (
                f"{name} has not served for {span(look.age(engine.down_at))} and {again}; it is {engine.mode} "
                f"(boot {engine.boot}){last}"
            )
            found.append(finding("engine_dead", name, text, engine.down_at))
    return found


def _headline(look: Look, cause: Finding | None, symptom: Finding | None) -> str:
    model = look.model
    if model.finished is not None:
        return f"the run has finished ({model.finished}) at step {model.step}"
    if model.events == 0:
        return "the log is empty: the run has not begun"
    steps = f"step {model.step}"
    if cause is None:
        down = [each.culprit for each in _down(look)]
        but = f"; {some(down)} {'does' if len(down) == 1 else 'do'} not serve" if down else ""
        return f"nothing is stuck: {steps} of {look.config.steps}, last event {span(look.age(model.last_at))} ago{but}"
    if cause.code == "actor_failed":
        return f"the run failed at {steps}: {cause.culprit} ended it"
    since = model.step_at or model.started_at or look.now
    moving = "no refit is committed" if symptom is None and model.step_at else f"no optimizer step since {steps}"
    return f"stuck: {moving}, {span(look.age(since))} ago"


def _edges(look: Look, path: Sequence[Edge]) -> tuple[Edge, ...]:
    """The path's edges, then every announced wait that it does not hold, oldest first."""
    known = {(edge.waiter, edge.on) for edge in path}
    others = [
        Edge(wait.actor, on, wait.cause, wait.since, wait.deadline_at)
        for wait in sorted(look.model.waits.values(), key=lambda each: each.since)
        for on in wait.on.split(",")
        if (wait.actor, on) not in known
    ]
    return (*path, *others)


def cycles(path: Sequence[Edge]) -> tuple[tuple[str, ...], ...]:
    """Each cycle in the edges once, beginning with the waiter met first."""
    after: dict[str, list[str]] = {}
    for edge in path:
        after.setdefault(edge.waiter, []).append(edge.on)
    found: dict[frozenset[str], tuple[str, ...]] = {}

    def visit(node: str, trail: tuple[str, ...]) -> None:
        if node in trail:
            cycle = trail[trail.index(node) :]
            found.setdefault(frozenset(cycle), cycle)
            return
        for following in after.get(node, ()):
            visit(following, (*trail, node))

    for node in list(after):
        visit(node, ())
    return tuple(found.values())
