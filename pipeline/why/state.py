"""What is known of a run: who is up, what is under way, what is awaited. `pipeline.why.model` folds events into it."""

from __future__ import annotations

from collections import Counter, deque

from contracts import events as ev
from pipeline.why.clocks import Clocks
from pipeline.why.facts import (
    Actor,
    Barrier,
    Batch,
    Engine,
    Failed,
    Group,
    Loss,
    Problem,
    SampleProblem,
    Wait,
    Waited,
)

KEPT = 256
"""Newest samples, problems and epochs that are remembered."""


class State:
    """Times are seconds since the Unix epoch, as the emitting actors read them."""

    def __init__(self) -> None:
        self.run = ""
        self.events = 0
        self.position = 0
        """Place of the last event in the log."""
        self.started_at: float | None = None
        self.last_at = 0.0
        self.moved_at = 0.0
        """Time of the last event that is progress, rather than a wait or a complaint."""
        self.actors: dict[str, Actor] = {}
        self.engines: dict[str, Engine] = {}
        self.wanted_engines: int | None = None
        """The size that the fleet was scaled to, None while it has the configured one."""
        self.waits: dict[tuple[str, str], Wait] = {}
        self.waited: dict[tuple[str, str], deque[Waited]] = {}
        self.groups: dict[int, Group] = {}
        self.batches: dict[int, Batch] = {}
        self.group_s: deque[float] = deque(maxlen=KEPT)
        """Seconds from issue to the last sample, of the latest complete groups."""
        self.issued = 0
        self.credit = 0
        self.evals = 0
        self.exhausted = False
        self.drops: Counter[str] = Counter()
        self.recent_drops: deque[tuple[float, int, str]] = deque(maxlen=KEPT)
        self.rejected: Counter[str] = Counter()
        self.results: deque[tuple[float, bool]] = deque(maxlen=KEPT)
        """(time, usable) of the latest samples' results."""
        self.sample_problems: deque[SampleProblem] = deque(maxlen=KEPT)
        self.barrier: Barrier | None = None
        self.past: deque[Barrier] = deque(maxlen=KEPT)
        self.commit: ev.RefitCommitted | None = None
        self.commit_at = 0.0
        self.failed_epochs: deque[Failed] = deque(maxlen=KEPT)
        """Epochs that failed since the last commit."""
        self.requesters: dict[tuple[str, int], int] = {}
        """(actor, boot) -> newest epoch that it requested."""
        self.usurped: list[tuple[str, int, int, float]] = []
        """(actor, boot, boot after it, time): it went on writing after its successor had booted."""
        self.policy_ready = False
        self.trainer_boot = 0
        self.step = 0
        self.step_at: float | None = None
        self.step_s: deque[float] = deque(maxlen=KEPT)
        self.steps_at: deque[float] = deque(maxlen=KEPT)
        self.checkpoint: ev.CheckpointSaved | None = None
        self.trained_out = False
        self.losses: list[Loss] = []
        self.problems: deque[Problem] = deque(maxlen=KEPT)
        self.failed: Problem | None = None
        """What ended the run, since it was started last."""
        self.clocks = Clocks(self.actors)
        self.stopping: tuple[str, float] | None = None
        self.finished: str | None = None

    def untrained(self) -> dict[int, Batch]:
        """Batches that were emitted and are not trained, or are to be trained again."""
        return {number: batch for number, batch in self.batches.items() if batch.version is None}

    def complete(self) -> dict[int, Group]:
        """Groups of which every sample has ended, and that are in no batch yet."""
        return {index: group for index, group in self.groups.items() if group.complete_at is not None}

    def begun(self) -> dict[int, Group]:
        """Groups of which some samples have ended, not all."""
        return {i: group for i, group in self.groups.items() if group.complete_at is None and group.results}

    def untouched(self) -> dict[int, Group]:
        """Groups that were issued and of which no sample has ended."""
        return {index: group for index, group in self.groups.items() if not group.results}
