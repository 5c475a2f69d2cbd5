"""Simulated shells: what the real ones do outside the store, as delays and bookkeeping on virtual time.

An engine knows which version its weights really are, and every token is checked against the version that the gateway
stamps it with, so that a protocol that mixes versions shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actors.buffer.core import BufferCore
from actors.collector import core as collector
from actors.engine import core as engine_core
from actors.engine import state as engine
from actors.gateway import core as gateway_core
from actors.gateway import state as gateway
from actors.refit import core as refit_core
from actors.refit import state as refit
from actors.source import core as source
from actors.trainer import core as trainer
from config.schema import RunConfig
from contracts.events import Bucket, Provenance, TensorSpec
from pipeline.simulate.process import START, Broken

if TYPE_CHECKING:
    from pipeline.simulate.process import SimActor

KEEP = 2
"""Checkpoints that the simulated disk keeps."""
BUCKETS = (Bucket((TensorSpec("w", "float32", (1,)),), 4),)


class Quiet:
    """A shell without effects, and the base of the others."""

    def __init__(self, core: Any) -> None:
        self.core = core

    def perform(self, actor: SimActor, command: Any) -> None:
        raise TypeError(f"{actor.name} can't perform {command!r}")

    def killed(self, actor: SimActor) -> None:
        pass

    def booting(self, actor: SimActor) -> None:
        pass

    def payload(self, handle: str) -> bytes:
        return handle.encode()


class SourceSim(Quiet):
    """An endless producer."""

    def perform(self, actor: SimActor, command: Any) -> None:
        first = int(command.cursor or 0)
        numbers = range(first, first + command.n)
        tasks = tuple(source.FetchedTask(f"t{n}", b"{}", str(n + 1)) for n in numbers)
        actor.after(actor.world.draw(actor.world.pace.hop), source.Fetched(command.split, tasks))


class CollectorSim(Quiet):
    """Each group is one request at the gateway; rewards are coin flips."""

    def __init__(self, core: Any, gateways: GatewayTable) -> None:
        super().__init__(core)
        self._gateways = gateways

    def perform(self, actor: SimActor, command: Any) -> None:
        match command:
            case collector.Rollout():
                self._roll_out(actor, command)
            case collector.CancelAll():
                actor.after(0.0, collector.Cancelled())
            case collector.Restart():
                actor.kill()
            case collector.Cancel() | collector.Discard():
                pass

    def _roll_out(self, actor: SimActor, command: collector.Rollout) -> None:
        started = actor.now()

        def done(sources: list[tuple[Provenance, ...]]) -> None:
            for attempt, spans in zip(command.tries, sources, strict=True):
                actor.after(
                    actor.world.draw(actor.world.pace.score), self._result(actor, command, attempt, spans, started)
                )

        def refused(kind: str, reason: str) -> None:
            for attempt in command.tries:
                actor.after(0.0, collector.SampleProblem(command.ref, attempt.sample, attempt.attempt, kind, reason))  # type: ignore[arg-type]

        def gone() -> None:
            actor.after(0.0, collector.GatewayGone(command.ref, command.tries, command.url, "connection reset"))

        self._gateways.request(actor, command.url, command.task.task, len(command.tries), done, refused, gone)

    @staticmethod
    def _result(actor: SimActor, command: Any, attempt: Any, spans: tuple[Provenance, ...], started: float) -> Any:
        reward = float(actor.world.random.random() < 0.5)
        return collector.SampleDone(
            ref=command.ref,
            sample=attempt.sample,
            attempt=attempt.attempt,
            reward=reward,
            components={},
            mask_reason=None,
            prompt_tokens=4,
            completion_tokens=4,
            sources=spans,
            stop_reason="stop",
            handle=f"{command.ref.entry}/{attempt.sample}/{attempt.attempt}",
            size=8,
            seconds=actor.now() - started,
        )


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

        def reached() -> None:
            found = self._engines.listening.get(call.url)
            if found is None:
                self._failed(actor, call, "infra", "connection refused")
                return
            server, shell = found
            if server.stopped:
                actor.do(server.paused_until - actor.world.now(), reached)
                return
            why = shell.refuses(server, call)
            if why is not None:
                self._failed(actor, call, "not_serving", why)
                return
            self._calls[call.call] = (call, shell)
            shell.generate(server, call, lambda finish: self._ended(actor, call, finish))

        actor.do(actor.world.draw(actor.world.pace.hop), reached)

    def _failed(self, actor: SimActor, call: gateway.Call, kind: Any, reason: str) -> None:
        self._calls.pop(call.call, None)
        actor.after(0.0, gateway.CallFailed(call.call, kind, reason))

    def _ended(self, actor: SimActor, call: gateway.Call, finish: str) -> None:
        if self._calls.pop(call.call, None) is None:
            return
        if finish == "lost":
            actor.after(0.0, gateway.CallFailed(call.call, "infra", "connection reset"))
            return
        caller = self._callers.get(call.request)
        for sample in call.samples if caller is not None else ():
            caller.spans[sample].append(Provenance(call.version, call.engine, call.boot))  # type: ignore[union-attr]
        parts = tuple(gateway.Part(sample, 2, finish) for sample in call.samples)  # type: ignore[arg-type]
        actor.after(actor.world.draw(actor.world.pace.hop), gateway.Answered(call.call, parts))

    def _reply(self, number: int) -> None:
        caller = self._callers.pop(number, None)
        if caller is not None and caller.alive():
            caller.done([tuple(dict.fromkeys(caller.spans[sample])) for sample in range(caller.n)])


class Running:
    """A generation on an engine."""

    def __init__(self, call: gateway.Call, version: int, end: Callable[[str], None]) -> None:
        self.call, self.version, self.end = call, version, end


class EngineSim(Quiet):
    """Sidecar and server in one: real weights are `version`, None while unknown or partial."""

    def __init__(self, core: Any, table: EngineTable, wires: Wires) -> None:
        super().__init__(core)
        self._table, self._wires = table, wires
        self.version: int | None = None
        self.groups: set[str] = set()
        self._running: dict[str, Running] = {}
        self._url = ""
        self._lease = engine.Lease(0, 0, 0.0)
        self._held_at = 0.0
        self._lapse_told = False

    def killed(self, actor: SimActor) -> None:
        self._table.listening.pop(self._url, None)
        self.version, self.groups = None, set()
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
            case engine.Receive():
                self._receive(actor, command)
            case engine.Resume():
                self._held_at, self._lapse_told = actor.now(), False
                self._read_lease(actor)
                actor.after(0.001, engine.Resumed(command.epoch))
            case engine.Abandon():
                self._wires.lost(actor.name)
                self._end_all("abort")
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

    def generate(self, actor: SimActor, call: gateway.Call, end: Callable[[str], None]) -> None:
        if self.version is None or self.version != call.version:
            raise Broken(f"S2: {actor.name} holds {self.version} and was asked for tokens of {call.version}")
        store = actor.world.store
        age = actor.world.now() - store.raised_at.get("committed", START)
        if store.registers["committed"] > call.epoch and age > self.core.lease_s and not actor.world.losses:
            raise Broken(f"S2: {actor.name} serves epoch {call.epoch} {age:.1f} s after a later one was committed")
        self._running[call.rid] = Running(call, self.version, end)

        def finish() -> None:
            item = self._running.pop(call.rid, None)
            if item is None:
                return
            if self.version != item.version:
                raise Broken(f"S1: {actor.name} began a sequence on {item.version} and ended it on {self.version}")
            item.end("stop")

        actor.do(actor.world.draw(actor.world.pace.generate), finish)

    def abort(self, *prefixes: str) -> None:
        for rid in [rid for rid in self._running if rid.startswith(prefixes)]:
            self._running.pop(rid).end("abort")

    def _drain(self, actor: SimActor, command: engine.Drain, since: float) -> None:
        now = actor.now()
        if actor.state.epoch != command.epoch:
            return
        if not self._running:
            actor.push(engine.Drained(command.epoch, now - since))
        elif now >= command.deadline_at:
            actor.push(engine.DrainFailed(command.epoch, "TimeoutError", "requests still run"))
        else:
            if now >= command.abort_at:
                self._end_all("abort")
            actor.do(0.005, lambda: self._drain(actor, command, since))

    def _receive(self, actor: SimActor, command: engine.Receive) -> None:
        if self._running:
            raise Broken(f"S1: {actor.name} receives weights while {len(self._running)} requests run")
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


class Wire:
    """One transfer in the making: who has come, whom it waits for."""

    def __init__(self) -> None:
        self.parties: dict[str, Callable[[str | None], None]] = {}
        self.expected: set[str] | None = None


class Wires:
    """The collective: succeeds when rank 0 and all its members are there, breaks for all when one leaves."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], Wire] = {}

    def join(
        self,
        actor: SimActor,
        name: str,
        epoch: int,
        group: str,
        deadline_at: float,
        done: Callable[[str | None], None],
        expected: set[str] | None = None,
    ) -> None:
        wire = self._open.setdefault((epoch, group), Wire())
        life = actor.life
        wire.parties[name] = lambda phase: done(phase) if actor.life == life and actor.machine is not None else None
        wire.expected = expected or wire.expected
        if wire.expected is not None and wire.expected <= set(wire.parties):
            actor.world.later(actor.world.draw(actor.world.pace.transfer), lambda: self._finish(epoch, group, None))
        left = max(0.0, deadline_at - actor.now())
        actor.world.later(left, lambda: self._finish(epoch, group, "join"))

    def lost(self, name: str) -> None:
        """A party is gone: every transfer that it took part in breaks."""
        for epoch, group in [key for key, wire in self._open.items() if name in wire.parties]:
            self._finish(epoch, group, "receive")

    def _finish(self, epoch: int, group: str, phase: str | None) -> None:
        wire = self._open.pop((epoch, group), None)
        for done in wire.parties.values() if wire is not None else ():
            done(phase)


class TrainerSim(Quiet):
    """Weights are the list of batches they saw; checkpoints are kept on a `disk` that outlives the process."""

    def __init__(self, core: Any, wires: Wires) -> None:
        super().__init__(core)
        self._wires = wires
        self.disk: dict[str, list[int]] = {}
        self.torn: set[str] = set()
        self.memory: list[int] = []

    def killed(self, actor: SimActor) -> None:
        self.memory = []
        self._wires.lost("trainer")

    def set_aside(self, newest: int) -> None:
        """Checkpoints of versions above `newest` belong to a log that is lost."""
        self.disk = {path: batches for path, batches in self.disk.items() if version_of(path) <= newest}

    def perform(self, actor: SimActor, command: Any) -> None:
        world, pace = actor.world, actor.world.pace
        match command:
            case trainer.Load():
                self._load(actor, command)
            case trainer.Train():
                actor.do(world.draw(pace.train), lambda: self._trained(actor, command))
            case trainer.Save():
                actor.do(world.draw(pace.save), lambda: self._saved(actor, command))
            case trainer.Offer():
                offered = trainer.Offered(
                    command.epoch, command.version, "sim", 1, BUCKETS, 4, digest_of(command.version)
                )
                actor.after(0.002, offered)
            case trainer.Send():
                self._send(actor, command)
            case trainer.Prune():
                kept = sorted(self.disk, key=version_of)[-KEEP:]
                self.disk = {path: self.disk[path] for path in kept}
            case trainer.Abandon():
                self._wires.lost("trainer")

    def damage(self) -> None:
        """Tear the newest checkpoint on the disk."""
        if self.disk:
            self.torn.add(max(self.disk, key=version_of))

    def _load(self, actor: SimActor, command: trainer.Load) -> None:
        torn = command.path in self.torn or (command.path is not None and command.path not in self.disk)
        answer = trainer.LoadFailed(command.version, f"{command.path} is torn") if torn else None
        self.memory = list(self.disk[command.path]) if command.path and not torn else []
        actor.after(actor.world.draw(actor.world.pace.load), answer or trainer.Loaded(command.version))

    def _trained(self, actor: SimActor, command: trainer.Train) -> None:
        self.memory.append(command.batch.batch)
        actor.push(trainer.Trained(command.version, {"loss": 0.0}, 0.3, 64))

    def _saved(self, actor: SimActor, command: trainer.Save) -> None:
        path = f"sim://checkpoint/{command.version}"
        self.disk[path] = list(self.memory)
        self.torn.discard(path)
        actor.push(trainer.Saved(command.version, path, 8, 0.02))

    def _send(self, actor: SimActor, command: trainer.Send) -> None:
        started = command.started

        def done(phase: str | None) -> None:
            if phase is None:
                actor.push(trainer.Sent(started.epoch, started.version, 0.01, 4))
            else:
                actor.push(trainer.TransferBroke(started.epoch, phase, "RuntimeError", "the transfer broke"))

        expected = {"trainer", *(member.engine for member in started.members)}
        deadline = actor.now() + command.timeout
        self._wires.join(actor, "trainer", started.epoch, started.group, deadline, done, expected)


class RefitSim(Quiet):
    """Its disk, with the highest epoch used, is instant and outlives everything."""

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.high = 0

    def booting(self, actor: SimActor) -> None:
        known = max(actor.world.store.registers["epoch"], actor.state.epoch)
        if self.high > known:
            actor.world.halt(f"the store knows epoch {known}, but {self.high} was used")

    def perform(self, actor: SimActor, command: Any) -> None:
        if not isinstance(command, refit.FsyncHigh):
            return
        if command.epoch <= self.high:
            actor.kill()
            return
        self.high = command.epoch
        actor.after(0.001, refit.HighWritten(command.epoch))


def version_of(path: str) -> int:
    """Of a checkpoint on the simulated disk."""
    return int(path.rpartition("/")[2])


def digest_of(version: int) -> str:
    return f"digest-{version}"


def shells(config: RunConfig) -> dict[str, Any]:
    """A simulated shell for every actor of the run but the recorder, which decides nothing for the others."""
    gateways, engines, wires = GatewayTable(), EngineTable(), Wires()
    made: dict[str, Any] = {
        "refit": RefitSim(
            refit_core.RefitCore(config.refit, config.engine, config.gateway, config.launch, config.fleet)
        ),
        "trainer": TrainerSim(trainer.TrainerCore(config), wires),
        "buffer": Quiet(BufferCore(config)),
        "source": SourceSim(source.SourceCore(config, "source")),
    }
    for n in range(config.gateway.count):
        core = gateway_core.GatewayCore(f"gateway-{n}", config.gateway, config.refit)
        made[f"gateway-{n}"] = GatewaySim(core, gateways, engines, config.gateway.request_deadline_s)
    for n in range(config.engine.count):
        core = engine_core.EngineCore(f"engine-{n}", config.engine, config.refit)
        made[f"engine-{n}"] = EngineSim(core, engines, wires)
    for n in range(config.launch.collectors):
        made[f"collector-{n}"] = CollectorSim(collector.CollectorCore(config.rollout, f"collector-{n}"), gateways)
    return made
