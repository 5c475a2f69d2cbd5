"""The checker: folds a run's log and says whether the pipeline kept its promises.

Each rule has a name, explained in docs/reference/invariants.md. The chaos tests and `pipeline verify` run the same
code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from actors.recorder.ordering import number
from config.schema import RunConfig
from contracts import events
from contracts.envelope import Envelope
from contracts.events import Event, Member, Provenance
from pipeline.accounts import Accounts
from pipeline.dead import REQUEUED
from pipeline.invocation import command
from pipeline.restoring import Restores
from pipeline.rundir import BUNDLE, RunDir
from pipeline.verdict import NORMAL

RESUMABLE = "resumable"
"""The one rule about files: a run that has not finished can be resumed. No bundle can."""
SHOWN = 10
"""Findings of one rule that a person is shown."""


class Finding(msgspec.Struct, frozen=True):
    """A broken rule: its name, what was seen, and the event that showed it (None: the end of the log)."""

    rule: str
    message: str
    event: str | None


class Taint(msgspec.Struct):
    """A result, the `number`-th event of the log, that has tokens of engines which were in quarantine: `sources`."""

    number: int
    sources: set[Provenance]
    message: str


class Summary(msgspec.Struct, frozen=True):
    """What the log amounts to. `owed` tasks are neither trained nor dropped: a resume goes on with them.

    They are in batches that are not trained, or complete, or begun, or nothing came of them yet: `owed_...`.
    `boots` are starts of actors' processes. Their numbers say more: a resume that changes settings takes one, too.
    """

    events: int
    tasks: int
    trajectories: int
    trained: int
    dropped: int
    owed: int
    owed_batched: int
    owed_complete: int
    owed_begun: int
    owed_untouched: int
    steps: int
    commits: int
    quarantines: int
    failed_refits: int
    boots: int


class Verifier:
    """Feed every event of a run in log order to `apply`, then read `findings()`.

    `max_staleness` and `groups` of a batch are the run's settings; rules that need one are left out without it.
    """

    def __init__(self, max_staleness: int | None = None, groups: int | None = None) -> None:
        self._max_staleness = max_staleness
        self._in_flight = None if max_staleness is None or groups is None else groups * (1 + max_staleness)
        self._credit = 0
        self._accounts = Accounts(max_staleness)
        self._barred: dict[Member, int] = {}
        self._tainted: dict[str, Taint] = {}
        self._number = 0
        self._cause: str | None = None
        self._findings: list[Finding] = []
        self._events = 0
        self._ids: set[str] = set()
        self._boots: Counter[str] = Counter()
        self._starts = 0
        self._issued: dict[int, events.TaskIssued] = {}
        self._sources: dict[str, tuple[Provenance, ...]] = {}
        self._batched: dict[tuple[int, int], int] = {}
        self._batches: dict[int, events.BatchReady] = {}
        self._dropped: dict[int, str] = {}
        self._parents: dict[int, int | None] = {}
        self._steps: dict[int, events.StepFinished] = {}
        self._step_of: dict[int, int] = {}
        self._base: int | None = None
        self._tip: int | None = None
        self._abandoned: set[int] = set()
        self._epochs: dict[int, str] = {}
        self._newest_epoch = 0
        self._requested: dict[int, events.RefitRequested] = {}
        self._offered: dict[int, str] = {}
        self._loaded: dict[tuple[int, str, int], str] = {}
        self._committed: set[Provenance] = set()
        self._last_commit: events.RefitCommitted | None = None
        self._quarantines = 0

    @classmethod
    def of(cls, config: RunConfig) -> Verifier:
        """The checker of a run with these settings."""
        return cls(config.staleness, config.buffer.groups)

    def apply(self, envelope: Envelope[Event], number: int | None = None) -> None:
        """Consume one event; `number` in the log, else it follows the last. A requeued one was seen already."""
        self._events += 1
        self._number = self._number + 1 if number is None else number
        self._event, self._cause = envelope.id, envelope.causation_id
        if envelope.id in self._ids:
            self._find("unique-ids", f"{envelope.id} appears twice")
        self._ids.add(envelope.id)
        if not envelope.id.startswith("post:") and envelope.boot:
            if envelope.boot < self._boots[envelope.actor]:
                self._find(
                    "fencing", f"{envelope.actor} boot {envelope.boot} spoke after boot {self._boots[envelope.actor]}"
                )
            self._boots[envelope.actor] = max(self._boots[envelope.actor], envelope.boot)
        self._accounts.caused(envelope.causation_id)
        body = envelope.body
        if isinstance(body, events.TrajectoryFinished | events.SampleFailed):
            oldest = self._oldest(body.sources) if isinstance(body, events.TrajectoryFinished) else None
            self._accounts.result(body, envelope.id, self._number, oldest)
        if REQUEUED in envelope.id:
            return
        handler = getattr(self, "_on_" + events.kind(envelope.body).replace(".", "_"), None)
        if handler is not None:
            handler(envelope.body)

    def apply_all(self, log: Iterable[Envelope[Event]]) -> Verifier:
        for envelope in log:
            self.apply(envelope)
        return self

    def _find(self, rule: str, message: str, *, at_end: bool = False) -> None:
        self._findings.append(Finding(rule, message, None if at_end else self._event))

    def _on_actor_booted(self, event: events.ActorBooted) -> None:
        self._starts += 1

    # --- tasks and trajectories ---

    def _on_task_issued(self, event: events.TaskIssued) -> None:
        if event.only and event.index not in self._issued:
            self._find("task-issued-once", f"samples {event.only} of index {event.index} were issued before the task")
        elif event.only:
            self._accounts.issued_again(event)
        elif event.split == "train":
            if event.index in self._issued:
                self._find("task-issued-once", f"index {event.index} was issued twice")
            elif event.index != len(self._issued):
                self._find("no-task-skipped", f"index {event.index} follows {len(self._issued) - 1}")
            self._issued[event.index] = event
            self._check_window(event.index)

    def _check_window(self, index: int) -> None:
        """As many tasks may be undecided as the next batches within the bound can hold."""
        if index >= self._credit:
            self._find("within-credit", f"index {index} was issued with credit for {self._credit} tasks")
        undecided = len(self._issued) - self._accounts.closed
        if self._in_flight is not None and undecided > self._in_flight:
            self._find("in-flight", f"{undecided} tasks are undecided with index {index}, bound {self._in_flight}")

    def _on_credit_granted(self, event: events.CreditGranted) -> None:
        self._credit = max(self._credit, event.total)

    def _on_trajectory_finished(self, event: events.TrajectoryFinished) -> None:
        if event.split == "train":
            self._sources[event.payload.key] = event.sources
            barred = {source for source in event.sources if Member(source.engine, source.boot) in self._barred}
            if barred:
                first = next(source for source in event.sources if source in barred)
                epoch = self._barred[Member(first.engine, first.boot)]
                message = f"{first}, finished while epoch {epoch}'s quarantine lasted"
                self._tainted[event.payload.key] = Taint(self._number, barred, message)

    def _let_in_again(self, sources: set[Provenance]) -> None:
        """What the buffer has yet to take of these may be read behind the commit that they are of."""
        for key, taint in list(self._tainted.items()):
            if taint.number > self._accounts.taken:
                taint.sources -= sources
                if not taint.sources:
                    del self._tainted[key]

    def _on_trajectory_rejected(self, event: events.TrajectoryRejected) -> None:
        if not event.reason:
            self._find("recorded-reason", f"sample {(event.index, event.sample)} was rejected without a reason")
        self._accounts.rejected(event, self._cause)

    def _on_bus_data_lost(self, event: events.DataLost) -> None:
        if event.stream == "trajectories":
            self._accounts.lost({number(entry) for entry in event.entries})

    def _on_buffer_depth(self, event: events.BufferDepth) -> None:
        self._accounts.counted(event, self._event)

    def _on_group_dropped(self, event: events.GroupDropped) -> None:
        if event.index in self._dropped:
            self._find(
                "dropped-once", f"group {event.index} dropped for {self._dropped[event.index]}, then {event.reason}"
            )
        if not event.reason:
            self._find("recorded-reason", f"group {event.index} was dropped without a reason")
        self._dropped[event.index] = event.reason
        self._accounts.dropped(event.index)

    def _on_batch_ready(self, event: events.BatchReady) -> None:
        if event.batch != len(self._batches) + 1:
            self._find("batches-dense", f"batch {event.batch} follows {len(self._batches)}")
        self._batches[event.batch] = event
        for group in event.groups:
            if group.index in self._dropped:
                self._find("dropped-not-trained", f"group {group.index} was dropped before batch {event.batch}")
            for sample in group.samples:
                self._check_sample(event.batch, group.index, sample)
        self._accounts.batched(event, None if self._base is None else self._base + event.batch - 1, self._event)

    def _check_sample(self, batch: int, index: int, sample: events.SampleRef) -> None:
        name = (index, sample.sample)
        if name in self._batched:
            self._find("batched-once", f"sample {name} is in batches {self._batched[name]} and {batch}")
        self._batched[name] = batch
        sources = self._sources.get(sample.payload.key)
        if sources is None:
            self._find("from-the-log", f"sample {name} of batch {batch} has no trajectory.finished")
            return
        for source in sources:
            if source not in self._committed:
                self._find(
                    "committed-sources", f"sample {name} of batch {batch} has tokens of {source}, never committed"
                )
        if sample.payload.key in self._tainted:
            self._find(
                "quarantine",
                f"sample {name} of batch {batch} has tokens of {self._tainted[sample.payload.key].message}",
            )
        lag = self._lag(batch, sources)
        if lag is not None and lag != sample.lag:
            self._find("staleness", f"sample {name} of batch {batch} says it lags {sample.lag}, the log says {lag}")
        if self._max_staleness is not None and sample.lag > self._max_staleness:
            self._find("staleness", f"sample {name} of batch {batch} lags {sample.lag}, bound {self._max_staleness}")

    def _lag(self, batch: int, sources: tuple[Provenance, ...]) -> int | None:
        """Batch `b` is trained from step `base + b - 1`; None if a version's step is not known."""
        oldest = self._oldest(sources)
        if self._base is None or (sources and oldest is None):
            return None
        return 0 if oldest is None else self._base + batch - 1 - oldest

    def _oldest(self, sources: tuple[Provenance, ...]) -> int | None:
        """The oldest step among these versions, None without any or if one is not known."""
        steps = [step for source in sources if (step := self._step_of.get(source.version)) is not None]
        return min(steps) if steps and len(steps) == len(sources) else None

    # --- policy ---

    def _on_policy_ready(self, event: events.PolicyReady) -> None:
        self._new_version(event.version, event.parent_version)
        self._abandoned.update(event.abandoned)
        self._step_of[event.version] = event.step
        self._base = event.step if self._base is None else self._base

    def _on_step_finished(self, event: events.StepFinished) -> None:
        if event.parent_version != self._tip:
            self._find("lineage", f"version {event.version} grew from {event.parent_version}, newest is {self._tip}")
        batch = self._batches.get(event.batch)
        if batch is None:
            self._find("from-the-log", f"step {event.step} trained batch {event.batch}, which was never ready")
        elif event.tasks != (held := tuple(group.index for group in batch.groups)):
            self._find("from-the-log", f"step {event.step} trained groups {event.tasks}, its batch holds {held}")
        if self._base is not None and event.step != self._base + event.batch:
            self._find(
                "trained-in-order", f"step {event.step} trained batch {event.batch}, not {event.step - self._base}"
            )
        self._new_version(event.version, event.parent_version)
        self._steps[event.version] = event
        self._step_of[event.version] = event.step

    def _new_version(self, version: int, parent: int | None) -> None:
        if self._parents and version <= max(self._parents):
            self._find("versions-rise", f"version {version} follows {max(self._parents)}")
        self._parents[version] = parent
        self._tip = version

    def lineage(self) -> list[events.StepFinished]:
        """The steps that made the newest weights, oldest first."""
        steps, version = [], self._tip
        while version is not None and version in self._parents:
            if version in self._steps:
                steps.append(self._steps[version])
            parent = self._parents[version]
            version = parent if parent is not None and parent < version else None
        return steps[::-1]

    # --- refit ---

    def _on_refit_requested(self, event: events.RefitRequested) -> None:
        self._epoch_begins(event.epoch)
        self._requested[event.epoch] = event

    def _on_release_requested(self, event: events.ReleaseRequested) -> None:
        self._epoch_begins(event.epoch)

    def _epoch_begins(self, epoch: int) -> None:
        if epoch <= self._newest_epoch:
            self._find("epochs-rise", f"epoch {epoch} follows {self._newest_epoch}")
        self._newest_epoch = max(self._newest_epoch, epoch)

    def _on_transfer_offered(self, event: events.TransferOffered) -> None:
        self._offered[event.epoch] = event.digest

    def _on_engine_loaded(self, event: events.EngineLoaded) -> None:
        self._loaded[(event.epoch, event.engine, event.boot)] = event.digest

    def _on_engine_quarantined(self, event: events.EngineQuarantined) -> None:
        self._quarantines += 1
        self._barred[Member(event.engine, event.boot)] = event.epoch

    def _on_refit_failed(self, event: events.RefitFailed) -> None:
        self._end_epoch(event.epoch, "failed")

    def _on_refit_committed(self, event: events.RefitCommitted) -> None:
        self._end_epoch(event.epoch, "committed")
        if event.epoch != self._newest_epoch:
            self._find("commit-newest-epoch", f"epoch {event.epoch} committed after a newer one began")
        last = self._last_commit
        if last is not None and event.version < last.version:
            self._find("commits-rise", f"version {event.version} committed after {last.version}")
        self._let_in_again({Provenance(event.version, engine.actor, engine.boot) for engine in event.engines})
        for member in event.engines:
            self._barred.pop(member, None)
            digest = self._loaded.get((event.epoch, member.actor, member.boot))
            if digest is None:
                self._find(
                    "loaded-before-commit", f"{member} was committed in epoch {event.epoch} without engine.loaded"
                )
            elif digest and digest != self._offered.get(event.epoch):
                self._find("digest", f"{member} was committed in epoch {event.epoch} with digest {digest}")
            self._committed.add(Provenance(event.version, member.actor, member.boot))
        self._last_commit = event

    def _end_epoch(self, epoch: int, how: str) -> None:
        if epoch not in self._requested:
            self._find("intent-before-effect", f"epoch {epoch} {how} without refit.requested")
        if epoch in self._epochs:
            self._find("one-end-an-epoch", f"epoch {epoch} {self._epochs[epoch]}, then {how}")
        self._epochs[epoch] = how

    # --- results ---

    def findings(self) -> list[Finding]:
        """Everything broken, in log order, then what only the end shows."""
        seen = list(self._findings)
        trained = Counter(index for step in self.lineage() for index in step.tasks)
        for index, times in trained.items():
            if times > 1:
                self._find("trained-once", f"group {index} was trained {times} times in the final lineage", at_end=True)
        for index in sorted(set(self._issued) & set(trained) & set(self._dropped)):
            self._find("dropped-not-trained", f"group {index} was trained and dropped", at_end=True)
        for index in sorted(set(trained) | set(self._dropped)):
            issued = self._issued.get(index)
            if issued is None:
                self._find("from-the-log", f"group {index} was never issued", at_end=True)
        self._findings += [Finding("accounted", message, event) for message, event in self._accounts.findings()]
        result, self._findings = self._findings, seen
        return result

    def summary(self) -> Summary:
        trained = {index for step in self.lineage() for index in step.tasks}
        owed = set(self._issued) - trained - set(self._dropped)
        batched = len(owed & {group.index for batch in self._batches.values() for group in batch.groups})
        complete, begun = self._accounts.owed()
        return Summary(
            events=self._events,
            tasks=len(self._issued),
            trajectories=len(self._sources),
            trained=len(trained),
            dropped=len(self._dropped),
            owed=len(owed),
            owed_batched=batched,
            owed_complete=complete,
            owed_begun=begun,
            owed_untouched=len(owed) - batched - complete - begun,
            steps=len(self.lineage()),
            commits=sum(how == "committed" for how in self._epochs.values()),
            quarantines=self._quarantines,
            failed_refits=sum(how == "failed" for how in self._epochs.values()),
            boots=self._starts,
        )


def verify(run: RunDir) -> tuple[list[Finding], Summary]:
    """Fold the archive of a run. Raises `PipelineError` if it can't be read."""
    from pipeline.eventlog import archived
    from pipeline.rundir import config_of

    verifier, restores, finished = Verifier.of(config_of(run)), Restores(), None
    for entry, envelope in sorted(archived(run), key=lambda item: number(item[0].entry)):
        verifier.apply(envelope, number(entry.entry))
        restores.apply(envelope.body)
        if isinstance(envelope.body, events.RunStarted | events.RunFinished):
            finished = getattr(envelope.body, "reason", None)
    findings = verifier.findings()
    lost = restores.lost(run / "checkpoints")
    if lost is not None and finished not in NORMAL and not (run / BUNDLE).exists():
        message = f"a resume finds no checkpoint to go on from: {lost}. Put one of them back from a copy"
        findings.append(Finding(RESUMABLE, message, None))
    return findings, verifier.summary()


def told(findings: Sequence[Finding], run: str) -> Iterator[str]:
    """Lines for a person: what is broken, at most `SHOWN` of a rule, and where to look."""
    counts = Counter(finding.rule for finding in findings)
    for rule, count in counts.items():
        for finding in [each for each in findings if each.rule == rule][:SHOWN]:
            yield f"{rule}: {finding.message} (at {finding.event or 'the end'})"
        if count > SHOWN:
            yield f"{rule}: {count - SHOWN} more"
    first = next((finding.event for finding in findings if finding.event is not None), None)
    if findings:
        yield f"broken: {', '.join(counts)}; docs/reference/invariants.md says what each promises and who keeps it"
        until = () if first is None else ("--until", first)
        yield f"look: `{command('log', run, *until)}` for what came before, `{command('replay', run, '--check')}` for"
        yield f"the decisions of each actor; `{command('bundle', run)}` makes the file for a report"
