"""Why a refit does not end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.why.facts import Barrier
from pipeline.why.look import FIRST_S, counted, finding, some, span
from pipeline.why.result import Finding, Frontier, Missing

if TYPE_CHECKING:
    from pipeline.why.walk import Walk

PROBE = ("health", "answer", "probe", "respond")
"""Words of an engine's end that tell of a probe rather than of a crash."""


class Refits:
    """The questions about epochs that a `Walk` asks."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.look = walk.look
        self.model = walk.model

    def overdue(self) -> float | None:
        """Since when generation has been waiting for a commit, if that is too long."""
        model, look = self.model, self.look
        usual = [b.ended_at - b.since for b in model.past if b.ended_at is not None and b.end == "committed"]
        patience = look.patience(max(usual)) if usual else FIRST_S if look.floor_s > 1 else look.floor_s
        begun = [model.barrier.since] if model.barrier is not None else []
        begun += [model.failed_epochs[0].at] if model.failed_epochs else []
        if not begun and model.commit is None:
            begun = [model.started_at or look.now]
        if begun and usual:
            patience = min(patience, look.patience(sorted(usual)[len(usual) // 2]))
        return min(begun) if begun and look.age(min(begun)) >= patience else None

    def open(self, asker: str) -> Finding:
        """The cause of a refit that is overdue. `asker` came here waiting for it."""
        look, model = self.look, self.model
        gone = look.gone("refit")
        if gone is not None:
            return gone
        if len(model.failed_epochs) >= 2:
            return self._gateway_gone() or self._fail_again()
        barrier = model.barrier
        if barrier is None:
            return self._not_begun()
        if barrier.started_at is None:
            return self._draining(barrier, asker)
        return self._transferring(barrier)

    # --- no epoch ---

    def _not_begun(self) -> Finding:
        look, model = self.look, self.model
        wait = next((wait for (actor, _), wait in model.waits.items() if actor == "refit"), None)
        absent = [name for name in look.names if not model.actors.get(name) and name != "recorder"]
        since = (model.started_at or look.now) if wait is None else wait.since
        names = wait.on.split(",") if wait is not None else absent
        if names:
            self.walk.follow("refit", names[0], f"{some(names)} not ready", since, wait.deadline_at if wait else None)
            lines = [text for name in names if (text := self._start_of(name))]
            text = f"no refit can begin: {some(names)} not ready after {span(look.age(since))}"
            return finding("not_ready", names[0], text, since, lines)
        text = f"refit asks for no epoch, {span(look.age(since))} after the last one"
        return finding("actor_silent", "refit", text, since)

    def _start_of(self, name: str) -> str:
        model = self.model
        actor, engine = model.actors.get(name), model.engines.get(name)
        last = next((p for p in reversed(model.problems) if p.actor == name), None)
        if actor is None or not actor.boots:
            return f"{name} has not booted" + (f": {last.error}: {last.message}" if last else "")
        state = "" if engine is None else f", {engine.mode} {engine.reason}".rstrip()
        words = "" if last is None else f", last words {last.error}: {last.message}"
        return f"{name} booted {actor.boots} times{state}{words}"

    def _gateway_gone(self) -> Finding | None:
        """No epoch can commit without a gateway."""
        gone = [each for each in map(self.look.gone, self.look.of_kind("gateway")) if each is not None]
        if not gone:
            return None
        failed = list(self.model.failed_epochs)
        text = f"{len(failed)} epochs failed in a row, the last one in {failed[-1].phase}: {failed[-1].reason}"
        self.walk.follow("refit", gone[0].culprit, text, failed[0].at)
        return gone[0]

    def _fail_again(self) -> Finding:
        """Epochs fail one after another."""
        failed = list(self.model.failed_epochs)
        last, since = failed[-1], failed[0].at
        self.walk.follow("refit", "engines", f"{len(failed)} epochs failed in a row", since)
        lines = [f"epoch {each.epoch} failed in {each.phase}: {each.reason}" for each in failed[-3:]]
        dead = [name for name in last.dead if sum(name in each.dead for each in failed) * 2 > len(failed)]
        for name in dead:
            reason = self.model.engines[name].reason or last.reason
            if any(word in f"{reason} {last.reason}".lower() for word in PROBE):
                text = f"{name} was declared dead in {len(failed)} epochs in a row while receiving: {last.reason}"
                return finding("probe_in_transfer", name, text, since, lines)
            text = f"{name} died in {len(failed)} epochs in a row: {last.reason}"
            return finding("engine_dead", name, text, since, lines)
        text = f"{len(failed)} epochs failed in a row, the last one in {last.phase}: {last.reason}"
        return finding("refits_fail", "refit", text, since, lines)

    # --- within an epoch ---

    def _draining(self, barrier: Barrier, asker: str) -> Finding:
        look = self.look
        missing = barrier.missing()
        left = (
            f"deadline in {span(barrier.deadline_at - look.now)}"
            if barrier.deadline_at > look.now
            else "deadline passed"
        )
        for name in [
            *missing.get("gate.closed", ()),
            *missing.get("engine.drained", ()),
            *missing.get("transfer.offered", ()),
        ]:
            lost = look.engine_lost(name) if name.startswith("engine-") else None
            gone = look.gone(name)
            if lost is not None or gone is not None:
                text = lost or (gone.text if gone else "")
                self._owes(barrier, name, text)
                code = "engine_dead" if name.startswith("engine-") else "actor_gone"
                return finding(code, name, f"epoch {barrier.epoch} waits for {name}: {text}", barrier.since, [left])
        silent = self._silent(barrier, missing.get("engine.drained", []), left)
        if silent is not None:
            return silent
        if "transfer.offered" in missing and (asker == "trainer" or self._trainer_waits()):
            self._owes(barrier, "trainer", "transfer.offered is missing")
            text = (
                f"trainer waits for refit {barrier.epoch}, which waits for trainer to offer version {barrier.version}"
            )
            return finding("cycle", "trainer, refit", text, barrier.since, [left])
        busy = missing.get("engine.drained") or missing.get("gate.closed")
        if busy:
            return self._drain_tail(barrier, busy, left)
        self._owes(barrier, "trainer", "transfer.offered is missing")
        text = f"epoch {barrier.epoch} is drained, and trainer has not offered version {barrier.version}"
        return finding("trainer_not_offering", "trainer", text, barrier.since, [left])

    def _silent(self, barrier: Barrier, names: list[str], left: str) -> Finding | None:
        """One of these engines is not answered by its server."""
        for name in names:
            wait = self.look.silent(name)
            if wait is not None:
                self._owes(barrier, name, f"{name} waits for its server")
                self.walk.follow(name, wait.on, wait.cause, wait.since)
                text = f"refit epoch {barrier.epoch} waits for {name}, whose server has not answered"
                return finding(
                    "server_silent",
                    name,
                    f"{text} for {span(self.look.age(wait.since))}",
                    wait.since,
                    [wait.cause, left],
                )
        return None

    def _trainer_waits(self) -> bool:
        return ("trainer", "refit") in self.model.waits

    def _drain_tail(self, barrier: Barrier, busy: list[str], left: str) -> Finding:
        """Requests still run, or a gate's owner says nothing."""
        look = self.look
        calls = look.in_flight()
        engines = [name for name in busy if name.startswith("engine-")]
        gates = barrier.missing().get("gate.closed", [])
        told = [wait.cause for (actor, on), wait in self.model.waits.items() if on == "drain" and actor in gates]
        if not calls and not told and not engines and gates:
            self._owes(barrier, gates[0], "gate.closed is missing")
            text = f"{gates[0]} has not said that its gate is closed for epoch {barrier.epoch}"
            return finding("gate_not_closed", gates[0], text, barrier.since, [left])
        name = calls[0].engine if calls else engines[0] if engines else gates[0]
        mine = [call for call in calls if call.engine == name]
        oldest = min(mine, key=lambda call: call.deadline_at, default=None)
        self._owes(barrier, name, f"{counted(len(mine), 'request')} in flight" if mine else "requests in flight")
        text = f"refit epoch {barrier.epoch} waits for {name} to drain since {span(look.age(barrier.since))}"
        if oldest is not None:
            text += f": {counted(len(mine), 'request')} in flight, oldest episode {oldest.session}"
        policy = f"refit.drain={barrier.drain}"
        return finding("drain_tail", name, f"{text}, {left}", barrier.since, [*told, policy])

    def _transferring(self, barrier: Barrier) -> Finding:
        look, missing = self.look, barrier.missing()
        since = barrier.started_at or barrier.since
        left = (
            f"deadline in {span(barrier.deadline_at - look.now)}"
            if barrier.deadline_at > look.now
            else "deadline passed"
        )
        names = [name for owed in missing.values() for name in owed]
        phase = "transfer" if barrier.finished_at is None else "verification"
        for name in names:
            lost = look.engine_lost(name) if name.startswith("engine-") else None
            if lost is not None:
                self._owes(barrier, name, lost)
                text = f"epoch {barrier.epoch} is in its {phase} and waits for {name}: {lost}"
                return finding("engine_dead", name, text, since, [left])
        silent = self._silent(barrier, missing.get("engine.loaded", []), left)
        if silent is not None:
            return silent
        gone = look.gone("trainer") if "trainer" in names else None
        if gone is not None:
            self._owes(barrier, "trainer", gone.text)
            return gone
        if barrier.finished_at is not None and names:
            self._owes(barrier, names[0], "engine.loaded is missing")
            text = f"{some(names)} received the weights of version {barrier.version} and has not confirmed them"
            return finding("engine_hangs", names[0], text, barrier.finished_at, [left])
        self._owes(barrier, names[0] if names else "refit", "the broadcast has not ended")
        text = f"the broadcast of epoch {barrier.epoch} to {some(barrier.loaded)} runs for {span(look.age(since))}"
        return finding("transfer_hangs", some(names), text, since, [left])

    def _owes(self, barrier: Barrier, name: str, why: str) -> None:
        self.walk.follow("refit", name, f"epoch {barrier.epoch}: {why}", barrier.since, barrier.deadline_at)

    # --- the gate ---

    def gate_held(self) -> Finding | None:
        """A gateway that holds requests although the newest epoch is committed."""
        look, model = self.look, self.model
        if model.barrier is not None or model.commit is None:
            return None
        for (actor, on), wait in model.waits.items():
            since = max(wait.since, model.commit_at)
            if on == "refit" and actor.startswith("gateway-") and look.age(since) >= look.floor_s:
                epoch = model.commit.epoch
                ago = span(look.age(model.commit_at))
                text = f"{actor} holds requests ({wait.cause}) although epoch {epoch} was committed {ago} ago"
                state = dict(look.gateways()).get(actor)
                known = (
                    ""
                    if state is None or state.committed is None
                    else f"the last commit that it knows is epoch {state.committed.epoch}"
                )
                return finding("gate_held", actor, text, since, [known])
        return None


def frontier(barrier: Barrier) -> Frontier:
    """How far an epoch has come, and who is missing."""
    answered = [("gate.closed", barrier.gates), ("engine.drained", barrier.drained), ("engine.loaded", barrier.loaded)]
    arrived = [f"{event} {name}" for event, members in answered for name, at in members.items() if at is not None]
    arrived += [f"{event} trainer" for event, at in _trainer(barrier) if at is not None]
    missing = tuple(Missing(name, event) for event, names in barrier.missing().items() for name in names)
    return Frontier(
        epoch=barrier.epoch,
        version=barrier.version,
        phase=barrier.phase,
        since=barrier.since,
        deadline_at=barrier.deadline_at,
        missing=missing,
        arrived=tuple(arrived),
    )


def _trainer(barrier: Barrier) -> list[tuple[str, float | None]]:
    return [("transfer.offered", barrier.offered_at), ("transfer.finished", barrier.finished_at)]
