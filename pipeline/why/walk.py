"""From what is noticed to its cause: who waits for whom, up to an actor that waits for nobody, or round a cycle."""

from __future__ import annotations

from collections import Counter

from pipeline.why.facts import Batch, Group
from pipeline.why.look import FIRST_S, Look, counted, finding, first_line, some, span
from pipeline.why.refits import Refits
from pipeline.why.result import Edge, Finding

RECENT = 64
"""Results over which an environment's failures are counted."""
SICK = ("suspect", "quarantined", "dead")
"""Modes of an engine that gives no answers."""


class Walk:
    """One walk: `path` holds the edges taken so far."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.model = look.model
        self.path: list[Edge] = []

    def follow(self, waiter: str, on: str, why: str, since: float, deadline_at: float | None = None) -> None:
        self.path.append(Edge(waiter, on, why, since, deadline_at))

    # --- trainer ---

    def trainer(self) -> Finding | None:
        """Why no optimizer step follows; None if nothing is overdue."""
        look, model = self.look, self.model
        if model.trained_out:
            return None
        since = max(model.step_at or 0.0, model.started_at or 0.0)
        if model.step_at is None:
            since = model.started_at or look.now
        if look.age(since) < look.step_patience():
            return None
        gone = look.gone("trainer")
        if gone is not None:
            return gone
        if not model.policy_ready:
            return self._loading()
        other = self._trainer_waits_elsewhere()
        if other is not None:
            return other
        wait = model.waits.get(("trainer", "buffer"))
        untrained = model.untrained()
        if untrained and wait is None:
            return self._step(untrained)
        waits_since = since if wait is None else wait.since
        if look.age(waits_since) < look.patience(look.usual("trainer", "buffer")):
            return None
        if untrained and wait is not None:
            return self._batch_lost(untrained, waits_since)
        self.follow("trainer", "buffer", f"no batch for step {model.step + 1}", waits_since)
        return self.buffer(waits_since)

    def _loading(self) -> Finding:
        booted = self.model.actors["trainer"].booted_at
        return finding(
            "not_ready", "trainer", f"trainer has been loading its weights for {span(self.look.age(booted))}", booted
        )

    def _trainer_waits_elsewhere(self) -> Finding | None:
        for (actor, on), wait in self.model.waits.items():
            if actor != "trainer" or on == "buffer":
                continue
            if self.look.age(wait.since) < self.look.patience(self.look.usual("trainer", on)):
                continue
            self.follow("trainer", on, wait.cause, wait.since, wait.deadline_at)
            if on == "refit":
                return Refits(self).open("trainer")
            return finding("actor_silent", on, f"{on} does not answer the trainer: {wait.cause}", wait.since)
        return None

    def _step(self, untrained: dict[int, Batch]) -> Finding | None:
        number, batch = min(untrained.items())
        since = max(batch.ready_at, self.model.step_at or 0.0, self.model.actors["trainer"].booted_at)
        usual = list(self.model.step_s)
        patience = self.look.patience(max(usual)) if usual else FIRST_S
        if self.look.age(since) < patience:
            return None
        text = f"trainer has been at step {self.model.step + 1} (batch {number}) for {span(self.look.age(since))}"
        usually = f"the longest of its last {len(usual)} steps took {span(max(usual))}" if usual else ""
        return finding("step_hangs", "trainer", text, since, [usually])

    def _batch_lost(self, untrained: dict[int, Batch], since: float) -> Finding | None:
        number, batch = min(untrained.items())
        if self.look.age(batch.ready_at) < self.look.floor_s:
            return None
        self.follow("trainer", "buffer", f"no batch for step {self.model.step + 1}", since)
        why = f"{len(untrained)} batches are out (batch {number} since {span(self.look.age(batch.ready_at))})"
        self.follow("buffer", "trainer", why, batch.ready_at)
        if batch.lost:
            loss = self.model.losses[-1]
            text = f"batch {number} was given up: {loss.reason}"
            return finding("dead_letter", f"batches/{batch.position}-0", text, loss.at)
        text = (
            f"batch {number} was emitted {span(self.look.age(batch.ready_at))} ago for step {self.model.step + 1}; "
            "it is not trained, yet trainer says that it has no batch"
        )
        boots = self.model.actors["trainer"].boots
        again = (
            f"trainer has booted {boots} times, last {span(self.look.age(self.model.actors['trainer'].booted_at))} ago"
        )
        return finding("batch_lost", f"batch {number}", text, batch.ready_at, [again if boots > 1 else ""])

    # --- buffer ---

    def buffer(self, since: float) -> Finding:
        """Why the buffer gives no batch."""
        look, model, need = self.look, self.model, self.look.config.buffer.groups
        gone = look.gone("buffer")
        if gone is not None:
            return gone
        complete = {i: g for i, g in model.complete().items() if not g.lost}
        lost = {index: group for index, group in model.groups.items() if group.lost}
        out = {i: g for i, g in model.groups.items() if g.complete_at is None and not g.lost}
        state = f"{len(complete)} of {need} groups complete, {len(out)} out"
        if lost and len(complete) < need + self._overtaken(lost, complete):
            return self._dead_letter(lost, state)
        if len(complete) >= need:
            return self._full(complete, out, state)
        if not out:
            self.follow("buffer", "source", f"{state}: no task is out", since)
            return self.source(state)
        return self.rollouts("buffer", out, state)

    def _overtaken(self, lost: dict[int, Group], complete: dict[int, Group]) -> int:
        """With `in_order`, complete groups behind a lost one are of no use."""
        if self.look.config.buffer.sampler != "in_order":
            return 0
        return sum(index > min(lost) for index in complete)

    def _dead_letter(self, lost: dict[int, Group], state: str) -> Finding:
        index, group = min(lost.items())
        loss = self.model.losses[-1]
        entries = sum(len(each.entries) for each in self.model.losses)
        text = (
            f"group {index} will never be complete by itself: the result of sample {some(group.lost)} was given up "
            f"({loss.reason})"
        )
        all_of = f"{entries} entries given up so far, last of stream {loss.stream}"
        self.follow("buffer", f"dead:{loss.stream}", f"{state}; {some(lost)} lost", loss.at)
        return finding("dead_letter", f"{loss.stream}/{loss.entries[0]}", text, loss.at, [all_of])

    def _full(self, complete: dict[int, Group], out: dict[int, Group], state: str) -> Finding:
        """Enough groups, and no batch: a hole before them, or a buffer that doesn't act."""
        if self.look.config.buffer.sampler == "in_order" and out and min(out) < max(complete):
            index, group = min(out.items())
            behind = sum(later > index for later in complete)
            where = self._where(group)
            self.follow(
                "buffer",
                where,
                f"in_order: group {index} comes next, {behind} later ones are complete",
                group.issued_at,
            )
            text = (
                f"in_order waits for group {index}, issued {span(self.look.age(group.issued_at))} ago, "
                f"{len(group.results)} of {group.size} samples in; {behind} later groups are complete"
            )
            return finding("hole", f"group {index}", text, group.issued_at, [f"it is with {where}"])
        last = max(group.complete_at or 0.0 for group in complete.values())
        text = f"buffer has {state} and emits no batch"
        return finding("actor_silent", "buffer", text, last, self._buffer_notes())

    def _buffer_notes(self) -> list[str]:
        drops = ", ".join(f"{count} {reason}" for reason, count in self.model.drops.most_common(3))
        return [f"dropped so far: {drops}" if drops else ""]

    def _where(self, group: Group) -> str:
        """Who works on a group."""
        known = self.look.holder(group.task)
        if known is None and group.results:
            known = next(iter(group.results.values())).actor
        return known or "the collectors"

    # --- source ---

    def source(self, state: str) -> Finding:
        """Why no task is out."""
        look, model = self.look, self.model
        failed = [each for each in model.problems if each.actor == "source" and each.fatal and each.boot]
        booted = model.actors["source"].booted_at if "source" in model.actors else 0.0
        failed = [each for each in failed if each.at >= booted]
        if failed:
            text = f"source can't get tasks: {failed[-1].error}: {failed[-1].message}"
            return finding("producer_failed", "producer", text, failed[-1].at)
        gone = look.gone("source")
        if gone is not None:
            return gone
        if model.exhausted:
            text = f"the producer has no more tasks after {model.issued}, and a batch needs more: {state}"
            return finding("data_exhausted", "producer", text, model.last_at)
        if model.issued < model.credit:
            wait = model.waits.get(("source", "producer"))
            since = model.moved_at if wait is None else wait.since
            self.follow("source", "producer", "the next task is awaited" if wait is None else wait.cause, since)
            text = f"the producer has not given task {model.issued} for {span(look.age(since))}"
            return finding("producer_silent", "producer", text, since)
        self.follow("source", "buffer", f"credit for {model.credit} tasks is used up", model.moved_at)
        if model.credit >= self._due_credit():
            return self._credit_of_a_commit()
        dropped = sum(model.drops.values())
        text = (
            f"every issued task has ended and the credit is used up: the {look.config.buffer.groups} groups of a batch "
            f"can't come together: {state}"
        )
        trained = sum(len(batch.groups) for batch in model.batches.values())
        facts = f"granted {model.credit}, issued {model.issued}, dropped {dropped}, in uncovered batches {trained}"
        return finding("buffer_short", "buffer", text, model.moved_at, [facts, *self._buffer_notes()])

    def _due_credit(self) -> int:
        """Tasks that may be issued by the rule of credit: those of the batches after the committed step."""
        commit = self.model.commit
        if commit is None:
            return 0
        batches = min(commit.step + 1 + self.look.staleness, self.look.config.steps)
        return self.look.config.buffer.groups * batches + sum(self.model.drops.values())

    def _credit_of_a_commit(self) -> Finding:
        """The buffer has granted what it may: more follows from a commit."""
        commit = self.model.commit
        done = "none is" if commit is None else f"that of step {commit.step} is the last"
        since = self.model.started_at or self.look.now
        if commit is not None:
            since = self.model.commit_at
        self.follow("buffer", "refit", f"credit follows the committed weights: {done}", since)
        return Refits(self).open("buffer")

    # --- rollouts ---

    def rollouts(self, waiter: str, out: dict[int, Group], state: str) -> Finding:
        """Why tasks that are out don't come back."""
        look = self.look
        oldest = min(group.issued_at for group in out.values())
        failing = self._environment_failing(state)
        if failing is not None:
            self.follow(waiter, "environment", state, oldest)
            return failing
        collectors = look.of_kind("collector")
        gone = [each for each in map(look.gone, collectors) if each is not None]
        if gone and len(gone) == len(collectors):
            self.follow(waiter, gone[0].culprit, state, oldest)
            return gone[0]
        blocked = self._serving(waiter, state, oldest)
        if blocked is not None:
            return blocked
        missing = sum(len(group.missing()) for group in out.values())
        answered = sum(len(group.results) for group in self.model.groups.values())
        if answered and missing <= answered:
            return self._straggler(waiter, out, state)
        return self._silent(waiter, out, state, oldest)

    def _environment_failing(self, state: str) -> Finding | None:
        results = list(self.model.results)[-RECENT:]
        failed = [at for at, usable in results if not usable]
        if len(failed) < 4 or len(failed) * 2 < len(results):
            return None
        reasons = Counter(f"{p.failure}: {p.reason}" for p in list(self.model.sample_problems)[-len(failed) :])
        text = f"{len(failed)} of the last {len(results)} samples failed for good, so groups are dropped: {state}"
        lines = [f"{count} x {reason}" for reason, count in reasons.most_common(3)]
        return finding("environment_failing", "environment", text, failed[0], [*lines, *self._buffer_notes()])

    def _serving(self, waiter: str, state: str, since: float) -> Finding | None:
        """What keeps gateway and engines from generating."""
        look, model = self.look, self.model
        barrier = model.barrier
        refits = Refits(self)
        gateways = [each for each in map(look.gone, look.of_kind("gateway")) if each is not None]
        if gateways:
            self.follow(waiter, "collectors", state, since)
            self.follow("collectors", gateways[0].culprit, "nobody answers there", gateways[0].since)
            return gateways[0]
        stale = refits.overdue()
        if stale is not None:
            self.follow(waiter, "gateway", state, since)
            self.follow("gateway", "refit", "the gate is closed", stale)
            return refits.open("gateway")
        held = refits.gate_held()
        if held is not None and barrier is None:
            self.follow(waiter, held.culprit, state, since)
            self.follow(held.culprit, "refit", "it does not know of the commit", held.since)
            return held
        if barrier is None and model.commit is not None and not look.serving():
            self.follow(waiter, "gateway", state, since)
            self.follow("gateway", "engines", "none serves", model.commit_at)
            lines = [
                f"{name}: {e.mode} since {span(look.age(e.since))} {e.reason}" for name, e in model.engines.items()
            ]
            return finding("no_engine", some(model.engines), "no engine serves the last commit", model.commit_at, lines)
        return None

    def _straggler(self, waiter: str, out: dict[int, Group], state: str) -> Finding:
        index, group = min(out.items(), key=lambda item: item[1].issued_at)
        where = self._where(group)
        self.follow(waiter, where, f"{state}; group {index} lacks sample {some(group.missing())}", group.issued_at)
        usual = sorted(self.model.group_s)
        text = (
            f"group {index} lacks sample {some(group.missing())} of {group.size}, issued "
            f"{span(self.look.age(group.issued_at))} ago"
        )
        typical = f"half of the groups were complete within {span(usual[len(usual) // 2])}" if usual else ""
        calls = [call for call in self.look.in_flight() if call.session in (group.task,) or where in call.session]
        place = f"it is generating on {calls[0].engine}" if calls else ""
        if not calls and self.look.running():
            place = f"{where} rolls it out and no request of it is at an engine: it is in the environment"
        return finding("straggler", f"group {index}", text, group.issued_at, [typical, place, f"it is with {where}"])

    def _silent(self, waiter: str, out: dict[int, Group], state: str, since: float) -> Finding:
        """Most of what is out gives no answer at all."""
        look = self.look
        calls, running = look.in_flight(), look.running()
        last = max((at for at, _ in self.model.results), default=since)
        quiet = span(look.age(max(last, since)))
        sick = [(e.since, name, e) for name, e in self.model.engines.items() if e.mode in SICK and e.since >= last]
        if sick:
            at, name, engine = max(sick)
            self.follow(waiter, "gateway", state, since)
            self.follow("gateway", name, f"it is {engine.mode}", at)
            how = f"({first_line(engine.reason)}); no sample has ended since then"
            code, text = "engine_hangs", f"{name} is {engine.mode} since {span(look.age(at))} {how}"
            if engine.mode == "dead":
                code, text = "engine_dead", f"{name} has ended {span(look.age(at))} ago {how}"
            return finding(code, name, text, at, [f"sessions {some(call.session for call in calls)}"])
        silent = [wait for name in self.model.engines if (wait := look.silent(name)) is not None]
        if silent:
            wait = min(silent, key=lambda each: each.since)
            self.follow(waiter, "gateway", state, since)
            self.follow("gateway", wait.actor, "requests are there", since)
            self.follow(wait.actor, wait.on, wait.cause, wait.since)
            text = f"the server of {wait.actor} has not answered for {span(look.age(wait.since))}"
            held = [call.session for call in calls if call.engine == wait.actor]
            return finding("server_silent", wait.actor, text, wait.since, [wait.cause, f"sessions {some(held)}"])
        if calls:
            engine, count = Counter(call.engine for call in calls).most_common(1)[0]
            self.follow(waiter, "gateway", state, since)
            self.follow("gateway", engine, f"{counted(count, 'request')} there", since)
            text = f"{engine} has {counted(count, 'request')} in flight and no sample has ended for {quiet}"
            return finding("engine_hangs", engine, text, since, [f"sessions {some(call.session for call in calls)}"])
        self.follow(waiter, "environment", state, since)
        if running:
            text = (
                f"collectors roll out {running} samples, none of them is at an engine, and none has ended for {quiet}"
            )
            return finding("environment_silent", "environment", text, since, [f"groups {some(out)}"])
        if running == 0:
            text = f"{len(out)} groups are out and no collector works on them"
            return finding("actor_silent", "collector", text, since, [f"groups {some(out)}"])
        text = f"{len(out)} groups are out and no sample has ended for {quiet}"
        return finding("environment_silent", "environment", text, since, [f"groups {some(out)}"])
