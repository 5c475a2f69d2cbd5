"""Where the model and the evidence of a run come from: its archive, and the store and the processes while it lives."""

from __future__ import annotations

import copy
import os
import socket
import time
from typing import Any

import msgspec

from actors import registry
from actors.recorder import archive
from actors.recorder.ordering import START, advance, number, settled
from actors.startup import uncollected
from config.schema import RunConfig
from contracts.core import Entry
from contracts.envelope import STREAMS, WORK_STREAMS, Envelope, decode
from contracts.events import ActorBooted, RunStopping
from pipeline import eventlog, reading
from pipeline.errors import PipelineError
from pipeline.eventlog import Batch
from pipeline.moments import Moment
from pipeline.rundir import RunDir
from pipeline.verdict import NORMAL
from pipeline.why.diagnosis import diagnose
from pipeline.why.look import FLOOR_S
from pipeline.why.model import Model
from pipeline.why.result import Diagnosis, Evidence, StoreFacts

PAGE = 2000
CONNECT_S = 2.0
LOOKED_INTO = ("gateway", "collector", "engine")
"""Kinds of actors whose state tells what no event does."""
NOTED = (ActorBooted, RunStopping)
"""Kinds of which a `Follower` itself takes note."""


class Case(msgspec.Struct, frozen=True):
    """What is to be analysed. `stopped`: the run was stopped at `now` for this reason; the model ends before it."""

    model: Model
    config: RunConfig
    now: float
    evidence: Evidence
    live: bool = False
    stopped: str = ""

    @property
    def ended(self) -> bool:
        """Nobody writes the log any more, although the run has not finished."""
        return not self.live and not self.stopped and self.model.finished is None


class Follower:
    """Folds events and remembers the model as it was before the run was stopped."""

    def __init__(self, until: Moment | None = None) -> None:
        self.model = Model()
        self.before_stop: tuple[Model, str, float] | None = None
        self.last: dict[str, str] = {}
        self.pids: dict[str, tuple[str, int]] = {}
        self.done = False
        self._until = until

    def take(self, entry: Entry, envelope: Envelope[Any], position: int | None = None) -> bool:
        """Fold one event, in place `position` (that of its entry); False once the moment is passed."""
        model, body = self.model, envelope.body
        position = number(entry.entry) if position is None else position
        if self._until is not None and self._passed(envelope, position):
            self.done = True
            return False
        kind = type(body)
        if kind is ActorBooted:
            self.pids[body.actor] = (body.host, body.pid)
        elif kind is RunStopping and self.before_stop is None:
            self.before_stop = (copy.deepcopy(model), body.reason, envelope.wall_ns / 1e9)
        model.apply(envelope, position)
        self.last[entry.stream] = entry.entry
        if model.stopping is None:
            self.before_stop = None
        if self._until is not None and self._until.id == envelope.id:
            self.done = True
            return False
        return True

    def extend(self, batch: Batch) -> bool:
        """Fold the next events; False once the moment is passed."""
        kinds = {type(envelope.body) for envelope in batch.envelopes}
        if self._until is not None or self.before_stop is not None or not kinds.isdisjoint(NOTED):
            return all(self.take(*item) for item in batch.items())
        self.model.extend(batch.envelopes, batch.positions)
        self.last.update({entry.stream: entry.entry for entry in batch.entries})
        return True

    def _passed(self, envelope: Envelope[Any], position: int) -> bool:
        assert self._until is not None
        at, started = envelope.wall_ns / 1e9, self.model.started_at
        return self._until.passed(position, envelope.id, at, started or at)


def gather(run: RunDir, config: RunConfig, until: Moment | None = None, *, look: bool = True) -> Case:
    """Read a run up to `until`, or to its end and into the store while it is live. `look`: also into its actors.

    The moment is the present for a live run, the last event for one that is read `until`, else the archive's end.

    Raises `PipelineError` if the archive is damaged.
    """
    follower = Follower(until)
    with uncollected():
        for batch in reading.told(run, eventlog.batches(run)):
            if not follower.extend(batch):
                break
    live = until is None and follower.model.finished is None and archive.has_writer(run.events)
    evidence = Evidence()
    if live:
        import asyncio

        evidence = asyncio.run(_ask_store(run, config, follower, look=look))
        evidence = msgspec.structs.replace(evidence, alive=alive(follower.pids))
    elif look and until is None:
        evidence = look_into(run, config)
    if follower.before_stop is not None and follower.before_stop[1] not in NORMAL:
        model, reason, at = follower.before_stop
        return Case(model, config, at, Evidence(), stopped=reason)
    now = time.time() if live else follower.model.last_at if until is not None else end_of(run, follower.model)
    return Case(follower.model, config, now, evidence, live=live)


def explain(
    run: RunDir, config: RunConfig, until: Moment | None = None, now: Moment | None = None, floor_s: float = FLOOR_S
) -> tuple[Case, Diagnosis]:
    """`gather` and `diagnose`; actors are looked into only if the run is stuck, for that may take longer.

    `now` stands in for the moment of the case. Raises `PipelineError` as they do.
    """
    case = gather(run, config, until, look=False)
    if now is not None:
        case = msgspec.structs.replace(case, now=now.time(case.model.started_at or case.now))
    found = diagnose(case.model, config, case.now, case.evidence, floor_s)
    if not found.stuck or until is not None or case.stopped:
        return case, found
    if case.live:
        import asyncio

        seen = asyncio.run(_look_live(run, config))
    else:
        seen = look_into(run, config)
    evidence = msgspec.structs.replace(case.evidence, states=seen.states, heard=seen.heard)
    case = msgspec.structs.replace(case, evidence=evidence)
    return case, diagnose(case.model, config, case.now, evidence, floor_s)


async def _look_live(run: RunDir, config: RunConfig) -> Evidence:
    """The states of a live run's actors; nothing if the store does not answer."""
    from pipeline.bus import Bus, BusError

    try:
        bus = await Bus.connect(url_of(run), run.info().run, actor="why", connect_s=CONNECT_S, outage_s=CONNECT_S)
    except BusError:
        return Evidence()
    try:
        return Evidence(states=await states(bus, config))
    except BusError:
        return Evidence()
    finally:
        await bus.close()


def url_of(run: RunDir) -> str:
    return os.environ.get("REDIS_URL") or run.info().redis_url or ""


def end_of(run: RunDir, model: Model) -> float:
    """The last moment of which an archive tells. `model`: its events, folded."""
    last = model.last_at
    if model.finished is not None:
        return last
    return max([last, *(segment.closed_at for segment in eventlog.segments(run)[-1:])])


def look_into(run: RunDir, config: RunConfig, position: int | None = None) -> Evidence:
    """The states of an archived run's actors, at its end or at a place of its log; nothing if its journals can't be
    folded by this version."""
    from pipeline.replay.index import Index
    from pipeline.replay.sought import last_states

    index = Index(run)
    names = [name for name in registry.names(config) if registry.kind_of(name) in LOOKED_INTO]
    try:
        found = last_states(run, config, index, names, position)
    except (PipelineError, msgspec.DecodeError):
        return Evidence()
    index.save()
    return Evidence(
        states={name: state for name, (state, _) in found.items()}, heard={name: at for name, (_, at) in found.items()}
    )


def alive(pids: dict[str, tuple[str, int]]) -> dict[str, bool]:
    """Whether the newest process of each actor of this host exists."""
    here = socket.gethostname()
    return {name: os.path.exists(f"/proc/{pid}") for name, (host, pid) in pids.items() if host == here and pid}


async def _ask_store(run: RunDir, config: RunConfig, follower: Follower, *, look: bool) -> Evidence:
    """Fold what the archive does not hold yet, and ask the store for itself and for the actors' states."""
    from pipeline.bus import Bus, BusError

    try:
        bus = await Bus.connect(url_of(run), run.info().run, actor="why", connect_s=CONNECT_S, outage_s=CONNECT_S)
    except BusError as error:
        return Evidence(store=StoreFacts(error=str(error)))
    try:
        cursors = {stream: follower.last.get(stream, START) for stream in STREAMS}
        while found := settled(await bus.read_after(cursors, count=PAGE, block_ms=None), PAGE):
            cursors = advance(cursors, found)
            for entry in found:
                follower.take(entry, decode(entry.stream, entry.data))
        seen = await states(bus, config) if look else {}
        return Evidence(states=seen, store=await store_facts(bus))
    except BusError as error:
        return Evidence(store=StoreFacts(error=str(error)))
    finally:
        await bus.close()


async def states(bus: Any, config: RunConfig) -> dict[str, Any]:
    """Each actor's state: its snapshot and the journal after it."""
    from pipeline.cores import core_of
    from pipeline.runtime.journal import Journal, JournalDiverged

    found: dict[str, Any] = {}
    for name in registry.names(config):
        if registry.kind_of(name) in LOOKED_INTO:
            snapshot = await bus.snapshot(name)
            records = await bus.journal(name, after=0 if snapshot is None else snapshot[0])
            try:
                found[name] = Journal(core_of(config, name)).fold(snapshot, records)[1]
            except (JournalDiverged, msgspec.DecodeError):
                continue
    return found


async def store_facts(bus: Any) -> StoreFacts:
    used, limit = await bus.memory()
    depths = await bus.depths([*WORK_STREAMS, *(f"dead:{stream}" for stream in WORK_STREAMS)], group="readers")
    return StoreFacts(
        used=used,
        limit=limit,
        dead={stream: depths[f"dead:{stream}"].length for stream in WORK_STREAMS},
        waiting={stream: depths[stream].lag or 0 for stream in WORK_STREAMS},
    )
