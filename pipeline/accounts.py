"""Where every finished train sample is, worked out from the log alone.

The buffer takes results in the order of their stream: an event of it that a result caused says that it took all before
that one too. What it took is in a batch, rejected, in a dropped group, lost with a `bus.data_lost`, or held for a group
that is not decided yet. Two things say that a group is held and not forgotten: `buffer.depth`, which counts them with
each batch, and the staleness bound, at which a complete group is trained or dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from contracts import events
from pipeline.dead import REQUEUED

DROPPED = 0
"""In place of a batch's number."""


class Sample(msgspec.Struct, frozen=True):
    """A finished sample whose fate is open: `number` of its event in the log, `oldest` step among its versions."""

    id: str
    number: int
    index: int
    sample: int
    key: str
    oldest: int | None


class Group(msgspec.Struct):
    """One that is neither in a batch nor dropped. `settled`: sample -> number of its first result in the log, of which
    `first` is the lowest and `last` the highest."""

    size: int
    settled: dict[int, int] = {}
    samples: dict[str, Sample] = {}
    first: int = 0
    last: int = 0

    def settle(self, sample: int, number: int) -> None:
        if sample not in self.settled:
            self.settled[sample] = self.last = number
            self.first = self.first or number

    def keep(self, settled: dict[int, int]) -> None:
        """Only these samples have a result."""
        self.settled = settled
        self.first, self.last = min(settled.values(), default=0), max(settled.values(), default=0)

    def begun(self, taken: int) -> bool:
        return 0 < self.first <= taken

    def complete(self, taken: int) -> bool:
        return len(self.settled) >= self.size and self.last <= taken

    def oldest(self, taken: int) -> int | None:
        known = [each.oldest for each in self.samples.values() if each.number <= taken and each.oldest is not None]
        return min(known, default=None)


class Doubt(msgspec.Struct, frozen=True):
    """Something is missing: what, the event that showed it, and the groups it may be about."""

    message: str
    event: str
    indexes: frozenset[int]


class Accounts:
    """Fed by the checker, in log order. `staleness`: the bound, None if unknown."""

    def __init__(self, staleness: int | None) -> None:
        self._staleness = staleness
        self._results: dict[str, int] = {}
        self._taken = 0
        self._groups: dict[int, Group] = {}
        self._closed: dict[int, int] = {}
        self._late: dict[str, Sample] = {}
        self._doubts: list[Doubt] = []
        self._short = {"complete": 0, "held": 0}
        self._stale: set[int] = set()

    @property
    def taken(self) -> int:
        """Number of the last result that the buffer is known to have taken: it took all before, too."""
        return self._taken

    def caused(self, cause: str | None) -> None:
        """An event followed from `cause`."""
        if cause is not None:
            self._taken = max(self._taken, self._results.get(cause, 0))

    # --- what comes ---

    def result(self, event: events.TrajectoriesEvent, id: str, number: int, oldest: int | None) -> None:
        """A sample finished or failed. A requeued dead letter comes in place of its original."""
        original, again, _ = id.partition(REQUEUED)
        if again:
            self.lost({self._results.get(original, 0)})
        self._results[id] = number
        if event.split != "train":
            return
        batch = self._closed.get(event.index)
        group = None if batch is not None else self._groups.setdefault(event.index, Group(event.samples))
        if group is not None:
            group.settle(event.sample, number)
        if isinstance(event, events.TrajectoryFinished) and batch != DROPPED:
            held = self._late if group is None else group.samples
            known = oldest if event.valid else None
            held[id] = Sample(id, number, event.index, event.sample, event.payload.key, known)

    def issued_again(self, event: events.TaskIssued) -> None:
        """Samples `only` have no result any more."""
        group = self._groups.get(event.index)
        if group is not None:
            group.keep({sample: number for sample, number in group.settled.items() if sample not in event.only})

    def lost(self, numbers: set[int]) -> None:
        """Results that will not be read, as the log says."""
        for index, group in self._groups.items():
            settled = {sample: number for sample, number in group.settled.items() if number not in numbers}
            if len(settled) < len(group.settled):
                group.keep(settled)
                self._doubts = [doubt for doubt in self._doubts if index not in doubt.indexes]
            group.samples = {id: each for id, each in group.samples.items() if each.number not in numbers}
        self._late = {id: each for id, each in self._late.items() if each.number not in numbers}

    # --- what becomes of it ---

    def rejected(self, event: events.TrajectoryRejected, cause: str | None) -> None:
        group = self._groups.get(event.index)
        held = self._late if group is None else group.samples
        if cause is None:  # a log that says no causes
            same = (each.id for each in held.values() if (each.index, each.sample) == (event.index, event.sample))
            cause = next(same, "")
        held.pop(cause, None)

    def dropped(self, index: int) -> None:
        self._groups.pop(index, None)
        self._closed[index] = DROPPED

    def batched(self, event: events.BatchReady, target: int | None, id: str) -> None:
        """A batch that is trained from step `target`: what it lacks of its groups must have been rejected."""
        for each in event.groups:
            group = self._groups.pop(each.index, None)
            self._closed[each.index] = event.batch
            if group is not None:
                keys = {sample.payload.key for sample in each.samples}
                self._late |= {held.id: held for held in group.samples.values() if held.key not in keys}
        if target is not None and self._staleness is not None:
            self._check_age(event.batch, target - self._staleness, id)

    def _check_age(self, batch: int, eldest: int, id: str) -> None:
        for index, group in self._groups.items():
            if index in self._stale or not group.complete(self._taken):
                continue
            oldest = group.oldest(self._taken)
            if oldest is None or oldest >= eldest:
                continue
            self._stale.add(index)
            message = (
                f"group {index} is complete since event {group.last} with tokens of step {oldest}; "
                f"batch {batch} may hold none older than {eldest}, and the group was neither trained nor dropped"
            )
            self._doubts.append(Doubt(message, id, frozenset({index})))

    def counted(self, event: events.BufferDepth, id: str) -> None:
        """What the buffer says it holds, against what it took."""
        complete = [index for index, group in self._groups.items() if group.complete(self._taken)]
        begun = [index for index, group in self._groups.items() if group.begun(self._taken)]
        self._compare("complete", complete, event.ready, event.batch, id)
        self._compare("held", begun, event.ready + event.open, event.batch, id)

    def _compare(self, what: str, indexes: list[int], said: int, batch: int, id: str) -> None:
        short = len(indexes) - said
        if short <= self._short[what]:
            return
        self._short[what] = short
        state = "complete" if what == "complete" else "begun or complete"
        listed = ", ".join(map(str, indexes[:12])) + (", ..." if len(indexes) > 12 else "")
        message = (
            f"{len(indexes)} groups are {state} after batch {batch} ({listed}), the buffer says that it holds {said}"
        )
        self._doubts.append(Doubt(message, id, frozenset(indexes)))

    # --- results ---

    @property
    def closed(self) -> int:
        """Groups that are in a batch or dropped."""
        return len(self._closed)

    def findings(self) -> Iterator[tuple[str, str]]:
        """(what is missing, the event that showed it)."""
        for doubt in self._doubts:
            yield doubt.message, doubt.event
        for late in self._late.values():
            if late.number < self._taken:
                batch = self._closed[late.index]
                yield (
                    f"sample {late.sample} of group {late.index} is not in batch {batch} with its group, and nothing "
                    "rejected it",
                    late.id,
                )

    def owed(self) -> tuple[int, int]:
        """Undecided groups that are complete, and that have some results."""
        complete = sum(len(group.settled) >= group.size for group in self._groups.values())
        return complete, len(self._groups) - complete
