"""Gateways and engines on virtual time.

An engine knows which version its weights really are, and every token is checked against the version that the gateway
stamps it with, so that a protocol that mixes versions shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actors.engine import state as engine
from actors.engine.core import LOOK_S
from actors.gateway import state as gateway
from contracts.events import Provenance
from pipeline.simulate.process import START, Broken
from pipeline.simulate.quiet import Quiet
from pipeline.simulate.weights import PLAN, Wires, digest_of

if TYPE_CHECKING:
    from pipeline.simulate.process import SimActor


class Caller:
    """One request at a gateway and whom to tell."""

    def __init__(self, owner: SimActor, n: int, done: Any, refused: Any, gone: Callable[[], None]) -> None:
        self.owner, self.life, self.n = owner, owner.life, n
        self.done, self.refused, self.gone = done, refused, gone
        self.spans: dict[int, list[Provenance]] = {sample: [] for sample in range(n)}

    def alive(self) -> bool:
        return self.owner.life == self.life and self.owner.machine is not None


class GatewayTable:
    """URL -> the gateway process that listens there."""

    def __init__(self) -> None:
        self._listening: dict[str, tuple[SimActor, GatewaySim]] = {}

    def listen(self, url: str, actor: SimActor, shell: GatewaySim) -> None:
        self._listening[url] = (actor, shell)

    def close(self, url: str) -> None:
        self._listening.pop(url, None)

    def request(
        self, owner: SimActor, url: str, session: str, n: int, done: Any, refused: Any, gone: Callable[[], None]
    ) -> None:
        caller = Caller(owner, n, done, refused, gone)
        if url not in self._listening:
            owner.do(0.001, gone)
            return
        actor, shell = self._listening[url]
        shell.arrive(actor, caller, session)


class EngineTable:
    """URL -> the engine process that listens there."""

    def __init__(self) -> None:
        self.listening: dict[str, tuple[SimActor, EngineSim]] = {}


class GatewaySim(Quiet):
    """Requests, calls in flight, and the stamps on tokens."""

    def __init__(self, core: Any, table: GatewayTable, engines: EngineTable, deadline_s: float) -> None:
        super().__init__(core)
        self._table, self._engines, self._deadline_s = table, engines, deadline_s
        self._callers: dict[int, Caller] = {}
        self._calls: dict[int, tuple[gateway.Call, EngineSim | None]] = {}
        self._number = 0
        self._url = ""

    def arrive(self, actor: SimActor, caller: Caller, session: str) -> None:
        self._number += 1
        self._callers[self._number] = caller
        arrived = gateway.Arrived(self._number, caller.n, session, actor.now() + self._deadline_s)
        actor.after(actor.world.draw(actor.world.pace.hop), arrived)

    def killed(self, actor: SimActor) -> None:
        self._table.close(self._url)
        for caller in self._callers.values():
            if caller.alive():
                caller.owner.do(0.001, caller.gone)
        self._callers.clear()
        self._calls.clear()

    def perform(self, actor: SimActor, command: Any) -> None:
        match command:
            case gateway.Announce():
                self._url = f"sim://{actor.name}/{actor.life}"
                self._table.listen(self._url, actor, self)
                actor.after(0.001, gateway.Listening(self._url))
            case gateway.Call():
                self._call(actor, command)
            case gateway.AbortCall():
                call, target = self._calls.get(command.call, (None, None))
                if call is not None and target is not None:
                    target.abort(call.rid)
            case gateway.AbortAll():
                for url in command.urls:
                    if url in self._engines.listening:
                        self._engines.listening[url][1].abort(*command.prefixes)
            case gateway.Reply():
                self._reply(command.request)
            case gateway.Refuse():
                caller = self._callers.pop(command.request, None)
                if caller is not None and caller.alive():
                    caller.refused(command.kind, command.reason)

    def _call(self, actor: SimActor, call: gateway.Call) -> None:
        self._calls[call.call] = (call, None)
        sent_at = actor.now()

        def reached() -> None:
            found = self._engines.listening.get(call.url)
            if found is None:
                self._failed(actor, call, "infra", "connection refused")
                return
            server, shell = found
            if server.stopped:
                actor.do(server.paused_until - actor.world.now(), reached)
                return
            if shell.core.about_to_serve(server.state, call.epoch, actor.now() - sent_at):
                actor.do(LOOK_S, reached)
                return
            why = shell.refuses(server, call)
            if why is not None:
                self._failed(actor, call, "not_serving", why)
                return
            self._calls[call.call] = (call, shell)
            shell.generate(server, call, lambda finish, versions: self._ended(actor, call, finish, versions))

        actor.do(actor.world.draw(actor.world.pace.hop), reached)

    def _failed(self, actor: SimActor, call: gateway.Call, kind: Any, reason: str) -> None:
        self._calls.pop(call.call, None)
        actor.after(0.0, gateway.CallFailed(call.call, kind, reason))

    def _ended(self, actor: SimActor, call: gateway.Call, finish: str, versions: list[int]) -> None:
        if self._calls.pop(call.call, None) is None:
            return
        if finish == "lost":
            actor.after(0.0, gateway.CallFailed(call.call, "infra", "connection reset"))
            return
        caller = self._callers.get(call.request)
        for sample in call.samples if caller is not None else ():
            caller.spans[sample] += [Provenance(v, call.engine, call.boot) for v in versions]  # type: ignore[union-attr]
        parts = tuple(gateway.Part(sample, 2, finish) for sample in call.samples)  # type: ignore[arg-type]
        actor.after(actor.world.draw(actor.world.pace.hop), gateway.Answered(call.call, parts))

    def _reply(self, number: int) -> None:
        caller = self._callers.pop(number, None)
        if caller is not None and caller.alive():
            caller.done([tuple(dict.fromkeys(caller.spans[sample])) for sample in range(caller.n)])


class Running:
    """A generation on an engine, and the versions that it had tokens of. `over`: it only waits to be let go on."""

    def __init__(self, call: gateway.Call, version: int, ended: Callable[[str, list[int]], None]) -> None:
        self.call, self.versions, self._ended = call, [version], ended
        self.over = False

    def end(self, finish: str) -> None:
        self._ended(finish, self.versions)


class EngineSim(Quiet):
    """Sidecar and server in one: real weights are `version`, None while unknown or partial."""

    def __init__(self, core: Any, table: EngineTable, wires: Wires) -> None:
        super().__init__(core)
        self._table, self._wires = table, wires
        self.version: int | None = None
        self.groups: set[str] = set()
        self._running: dict[str, Running] = {}
        self._frozen = False
        self._url = ""
        self._lease = engine.Lease(0, 0, 0.0)
        self._held_at = 0.0
        self._lapse_told = False

    def killed(self, actor: SimActor) -> None:
        self._table.listening.pop(self._url, None)
        self.version, self.groups, self._frozen = None, set(), False
        self._wires.lost(actor.name)
        self._end_all("lost")

    def _end_all(self, finish: str) -> None:
        running, self._running = self._running, {}
        for item in running.values():
            item.end(finish)

    def perform(self, actor: SimActor, command: Any) -> None:
        world = actor.world
        match command:
            case engine.StartServer():
                actor.do(command.delay_s + world.draw(world.pace.server_start), lambda: self._started(actor))
            case engine.Drain():
                self._drain(actor, command, actor.now())
            case engine.Release():
                self._release(actor, command, actor.now())
            case engine.Receive():
                self._receive(actor, command)
            case engine.Resume():
                self._held_at, self._lapse_told = actor.now(), False
                self._read_lease(actor)
                self._thaw(actor)
                actor.after(0.001, engine.Resumed(command.epoch))
            case engine.Abandon():
                self._wires.lost(actor.name)
                self._end_all("abort")
                self._frozen = False
            case engine.Exit():
                actor.world.later(0.0, actor.kill)
            case engine.Watch():
                pass

    def _started(self, actor: SimActor) -> None:
        self._url = f"sim://{actor.name}/{actor.life}"
        self._table.listening[self._url] = (actor, self)
        actor.push(engine.ServerReady(self._url, 1, 1.0))

    def refuses(self, actor: SimActor, call: gateway.Call) -> str | None:
        """The sidecar's check, with the lease that it polled last: one that was stopped goes on with an old lease."""
        if self.core.admits(actor.state, call.epoch, self._lease, actor.now()):
            return None
        return self.core.refusal(actor.state, call.epoch, self._lease, actor.now())

    def booting(self, actor: SimActor) -> None:
        self._lease, self._held_at, self._lapse_told = engine.Lease(0, 0, 0.0), 0.0, False
        self._poll(actor)

    def _poll(self, actor: SimActor) -> None:
        if not actor.stopped:
            self._read_lease(actor)
            state = actor.state
            if (
                state.mode in engine.SERVED
                and actor.now() >= self._held_at + self.core.lease_s
                and not self._lapse_told
            ):
                self._lapse_told = True
                actor.push(engine.LeaseLapsed(state.epoch))
                self._end_all("abort")
        actor.do(self.core.lease_s / 4, lambda: self._poll(actor))

    def _read_lease(self, actor: SimActor) -> None:
        if actor.world.down:
            return
        registers = actor.world.store.registers
        self._lease = engine.Lease(registers["committed"], registers["epoch"], actor.now())
        if self._lease.confirms(actor.state.epoch):
            self._held_at, self._lapse_told = actor.now(), False
            if actor.state.mode == "lapsed":
                actor.push(engine.LeaseRenewed(actor.state.epoch))

    def _thaw(self, actor: SimActor) -> None:
        """What was held goes on under the weights that are here now."""
        self._frozen = False
        for rid, item in list(self._running.items()):
            if self.version is None:
                raise Broken(f"S4: {actor.name} goes on with a sequence, and holds unknown weights")
            item.versions.append(self.version)
            if item.over:
                actor.do(0.001, lambda rid=rid: self._over(actor, rid))

    def _over(self, actor: SimActor, rid: str) -> None:
        item = self._running.get(rid)
        if item is None:
            return
        if self._frozen:
            item.over = True
            return
        if self.version != item.versions[-1]:
            raise Broken(f"S1: {actor.name} labels what {self.version} sampled with {item.versions[-1]}")
        del self._running[rid]
        item.end("stop")

    def generate(self, actor: SimActor, call: gateway.Call, end: Callable[[str, list[int]], None]) -> None:
        if self.version is None or self.version != call.version:
            raise Broken(f"S2: {actor.name} holds {self.version} and was asked for tokens of {call.version}")
        store = actor.world.store
        age = actor.world.now() - store.raised_at.get("committed", START)
        if store.registers["committed"] > call.epoch and age > self.core.lease_s and not actor.world.losses:
            raise Broken(f"S2: {actor.name} serves epoch {call.epoch} {age:.1f} s after a later one was committed")
        self._running[call.rid] = Running(call, self.version, end)
        actor.do(actor.world.draw(actor.world.pace.generate), lambda: self._over(actor, call.rid))

    def abort(self, *prefixes: str) -> None:
        for rid in [rid for rid in self._running if rid.startswith(prefixes)]:
            self._running.pop(rid).end("abort")

    def _drain(self, actor: SimActor, command: engine.Drain, since: float) -> None:
        now = actor.now()
        if actor.state.epoch != command.epoch:
            return
        self._frozen = command.hold
        if not self._running or command.hold:
            actor.push(engine.Drained(command.epoch, now - since, len(self._running)))
        elif now >= command.deadline_at:
            actor.push(engine.DrainFailed(command.epoch, "TimeoutError", "requests still run"))
        else:
            if now >= command.abort_at:
                self._end_all("abort")
            actor.do(0.005, lambda: self._drain(actor, command, since))

    def _release(self, actor: SimActor, command: engine.Release, since: float) -> None:
        """With its memory, its weights go."""
        now = actor.now()
        if actor.state.epoch != command.epoch:
            return
        if not self._running:
            self.version = None
            actor.push(engine.Released(command.epoch, ("kv_cache", "weights"), now - since, 0.001))
        elif now >= command.deadline_at:
            actor.push(engine.ServerDead("requests still run"))
        else:
            if now >= command.abort_at:
                self._end_all("abort")
            actor.do(0.005, lambda: self._release(actor, command, since))

    def _receive(self, actor: SimActor, command: engine.Receive) -> None:
        if self._running and not self._frozen:
            raise Broken(f"S1: {actor.name} receives weights while {len(self._running)} requests run")
        if actor.world.store.payloads.get(command.plan) != PLAN:
            actor.push(
                engine.LoadFailed(command.epoch, "plan", "PayloadMissing", f"{command.plan} is not in the store")
            )
            return
        self.version = None
        if command.fresh:
            self.groups = {command.group}

        def done(phase: str | None) -> None:
            if phase is not None:
                actor.push(engine.LoadFailed(command.epoch, phase, "RuntimeError", "the transfer broke"))
                return
            self.version = command.version
            actor.push(engine.Loaded(command.epoch, digest_of(command.version), 0.01))

        self._wires.join(actor, actor.name, command.epoch, command.group, command.deadline_at, done)
