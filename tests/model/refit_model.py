"""The real coordinator, gateway and engine cores in one world with a trainer, a store and servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any

from msgspec.structs import replace

from actors.buffer.core import BufferCore
from actors.buffer.state import refusal
from actors.engine.state import (
    Abandon,
    Drain,
    Drained,
    DrainFailed,
    Exit,
    Lease,
    LeaseLapsed,
    LeaseRenewed,
    Loaded,
    LoadFailed,
    Receive,
    Resume,
    Resumed,
    ServerDead,
    ServerReady,
    StartServer,
    Watch,
)
from actors.gateway import state as gateway
from actors.gateway.state import AbortCall, Answered, Arrived, CallFailed, Listening, Part
from actors.gateway.state import Call as Dispatch
from actors.refit.state import FsyncHigh, Gateway, Heard, HighWritten, Missed
from config.schema import RunConfig
from contracts.core import Booted
from contracts.events import (
    ActorBooted,
    DrainPolicy,
    EngineDead,
    EngineHealth,
    EngineQuarantined,
    EngineReady,
    GatewayReady,
    Member,
    PayloadRef,
    PolicyReady,
    Provenance,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    TrajectoryFinished,
    TransferFailed,
    TransferFinished,
    TransferOffered,
    TransferStarted,
)
from tests.model import mechanisms, tables
from tests.model.search import Label, Move, search
from tests.model.tables import NEVER, TICK, Stepped, Table
from tests.model.world import (
    DUMMY,
    FLEET,
    OTHER,
    PARTIAL,
    REFIT,
    Call,
    Engine,
    Gate,
    History,
    World,
    drop_call,
    end_runs,
    move_call,
    note,
    orphan,
    put_engine,
    runs,
    set_engine,
    swap_call,
    tell,
    tell_gate,
)

CRASHES = frozenset({f"crash {who}" for who in ("refit", "trainer", "gateway", "engine", "server")})
FAULTS = CRASHES | frozenset({"early", "fail", "corrupt", "lapse", "lost", "late", "repeat", "silent", "stale"})
FOR_GATE = (RefitRequested, RefitCommitted, EngineQuarantined)
FOR_ENGINE = (RefitRequested, TransferOffered, TransferStarted, RefitCommitted, RefitFailed, EngineQuarantined)
FOR_TRAINER = (RefitRequested, TransferStarted, RefitFailed)
_LOUD = Gateway(boot=0, up=False)
SENSITIVE = ("resuming", "serving", "lapsed")
"""Modes of an engine in which what others do now may matter to what it does next."""


def digest(version: int) -> str:
    return f"d{version}"


class RefitModel:
    def __init__(
        self,
        *,
        engines: int = 2,
        without: AbstractSet[str] = frozenset(),
        faults: int = 1,
        kinds: AbstractSet[str] = FAULTS,
        steps: int = 1,
        epochs: int = 3,
        committed: bool = True,
        reduce: bool = True,
        drain: DrainPolicy = "interrupt",
        stepped: bool = False,
        backoff_s: float = 1.0,
    ) -> None:
        """`stepped`: faults strike once the last optimizer step is made, so in a refit and after it only.

        `backoff_s`: pause after a failed epoch; with 0 the next one begins at once.
        """
        self.names = tuple(f"engine-{i}" for i in range(engines))
        self.gate_sender, self.trainer_sender = engines, engines + 1
        self._without: set[str] = set()
        self.coordinator = Table(mechanisms.coordinator(engines, self._without, drain, backoff_s), tables.coordinator)
        self.tables = [Table(mechanisms.MutatedEngine(name, self._without), tables.engine) for name in self.names]
        self.gateway = Table(mechanisms.MutatedGateway(self._without), tables.gate)
        self.buffer = Table(BufferCore(RunConfig()), tables.buffer)
        self._kinds = kinds
        self._epochs = epochs
        self._reduce = reduce
        self._stepped = stepped
        world = World(
            coordinator=self.coordinator.step(self.coordinator.first, Booted(1))[0],
            engines=tuple(Engine(table.first) for table in self.tables),
            gate=Gate(self.gateway.first, boot=0, inboxes=((),) * (engines + 2)),
            buffer=self.buffer.first,
            queues=((),) * (2 * (engines + 2)),
        )
        for index in range(engines):
            world = self._engine_step(world, index, Booted(1))
        world = self._boot_gate(world, announce=False)
        ready = PolicyReady(version=0, step=0, parent_version=None, trainer_boot=1)
        world = tell(world, self.trainer_sender, FLEET, ready)
        while committed and not (
            self.settled(world) and all(self._mode(world, i) == "serving" for i in range(engines))
        ):
            world = next(after for _, after, _ in self._regular(world))
        self.start = replace(world, faults=faults, steps=steps)
        self._without |= without
        for table in (self.coordinator, self.gateway, *self.tables):
            table.forget()

    # --- looking -----------------------------------------------------------------------------------------------------

    def _mode(self, world: World, index: int) -> str:
        return self.tables[index].states[world.engines[index].core].mode

    def wrong(self, world: World) -> str:
        return world.wrong

    def settled(self, world: World) -> bool:
        """The newest epoch is committed, the gate is open, an engine serves, and no caller waits."""
        history, gate = world.history, self.gateway.states[world.gate.core]
        serving = any(
            e.lease == history.committed and self.tables[i].states[e.core].mode == "serving"
            for i, e in enumerate(world.engines)
        )
        fine = gateway.gate(gate) == "open" and gate.epoch == history.requested == history.committed
        return fine and serving and not gate.requests

    def cut(self, world: World) -> bool:
        return world.writes > self._epochs

    # --- moves -------------------------------------------------------------------------------------------------------

    def moves(self, world: World) -> Iterator[Move[World]]:
        """Everything that can happen next; or what one process can do, when nothing else can bear on it."""
        chosen = self._independent(world) if self._reduce else None
        if chosen is not None:
            yield from ((label, after, False) for label, after in chosen[0])
            yield from self._struck(world, chosen[1])
            return
        regular = list(self._regular(world))
        yield from regular
        yield from self._struck(world, self._faults(world, bool(regular)))

    def _struck(self, world: World, faults: Iterator[tuple[str, Label, World]]) -> Iterator[Move[World]]:
        if world.faults and not (self._stepped and world.steps):
            for kind, label, after in faults:
                if kind in self._kinds:
                    yield label, replace(after, faults=world.faults - 1), True

    def _independent(self, world: World) -> tuple[list[tuple[Label, World]], Iterator[tuple[str, Label, World]]] | None:
        """All moves and faults of one process that no other process can disturb, see docs/explanation/refit-barrier."""
        trainer = world.trainer
        for call in world.calls:
            if call.place == "net" and self._hopeless(world, call):
                return [(("call", call.number, "comes too late"), self._arrive(world, call))], iter(())
        if trainer.inbox or trainer.sending:
            return list(self._trainer(world)), self._trainer_faults(world)
        for index, engine in enumerate(world.engines):
            busy = engine.inbox or engine.ops or self._mode(world, index) == "dead"
            # a load may be given up on while it runs, and leaves other weights then than one that was over
            loads = engine.ops and isinstance(engine.ops[0], Receive)
            alone = busy and not loads and self._mode(world, index) not in SENSITIVE and not runs(world, index)
            if alone and (moves := list(self._engine(world, index))):
                return moves, self._engine_faults(world, index)
        return None

    def _regular(self, world: World) -> Iterator[Move[World]]:
        found = [*self._coordinator(world), *self._trainer(world), *self._gateway(world)]
        for index in range(len(self.names)):
            found += self._engine(world, index)
        found += self._network(world)
        busy = [(label, after) for label, after in found if label[0] != "a caller"]
        yield from ((label, after, False) for label, after in found)
        if not busy:
            yield from ((label, after, False) for label, after in self._ticks(world))

    def _ticks(self, world: World) -> Iterator[tuple[Label, World]]:
        if self.coordinator.wakes(world.coordinator) and "deadlines" not in self._without:
            yield ("time passes to refit's next deadline",), self._tick(world)
        if self.gateway.wakes(world.gate.core):
            yield ("time passes to gateway-0's next deadline",), self._gate_step(world, TICK)

    def _tick(self, world: World) -> World:
        """No lease that was taken before the request outlasts the drain's deadline, nor any later one."""
        if self.coordinator.states[world.coordinator].phase in ("draining", "transferring"):
            for index, engine in enumerate(world.engines):
                if engine.lease and engine.lease < world.history.requested:
                    world = set_engine(world, index, lease=0)
        return self._take(world, TICK)

    # --- the coordinator ---------------------------------------------------------------------------------------------

    def _coordinator(self, world: World) -> Iterator[tuple[Label, World]]:
        if world.writes:
            yield ("epoch", world.writes, "is on disk"), self._take(replace(world, writes=0), HighWritten(world.writes))
        queues = world.queues
        for index, queue in enumerate(queues):
            if queue:
                popped = replace(world, queues=(*queues[:index], queue[1:], *queues[index + 1 :]))
                yield ("refit reads", queue[0]), self._take(popped, queue[0])
        state = self.coordinator.states[world.coordinator]
        if state.gateways.get("gateway-0", _LOUD).silent:
            yield ("gateway-0 answers refit again",), self._take(world, Heard("gateway-0", world.gate.boot))
        for index, engine in enumerate(world.engines):
            known = state.engines.get(self.names[index])
            lost = known is not None and known.health == "dead" and known.boot == engine.boot
            if lost and self._mode(world, index) not in ("dead", "starting"):
                yield (
                    (self.names[index], "answers refit again"),
                    self._take(world, Heard(self.names[index], engine.boot)),
                )

    def _take(self, world: World, input: Any) -> World:
        """One step of the coordinator; what it says goes to everybody."""
        number, said = self.coordinator.step(world.coordinator, input)
        world = self._answers(replace(world, coordinator=number))
        for output in said:
            if isinstance(output, FsyncHigh):
                world = replace(world, writes=output.epoch)
            elif isinstance(output, EngineHealth):
                index = self.names.index(output.engine)
                if output.ordered and world.engines[index].boot <= output.boot:
                    world = self._restart(world, index)
            else:
                world = self._publish(self._recorded(world, output), output)
        return world

    def _answers(self, world: World) -> World:
        """The coordinator's next answers, without those to epochs that are over: it takes them as nothing for good."""
        if not self._reduce or self._without:
            return world
        barrier = self.coordinator.states[world.coordinator].barrier
        epoch = NEVER if barrier is None else barrier.epoch
        queues = world.queues
        for index in range(REFIT, len(queues), 2):
            queue = tuple([n for n in queues[index] if n.event.epoch >= epoch])
            if len(queue) != len(queues[index]):
                for left in set(queues[index]) - set(queue):
                    assert self.coordinator.step(world.coordinator, left) == (world.coordinator, ())
                queues = (*queues[:index], queue, *queues[index + 1 :])
        return world if queues is world.queues else replace(world, queues=queues)

    def _news(self, world: World, index: int) -> World:
        """What an engine has to read, without what it takes as nothing for good: older epochs, and others' faults."""
        engine, table = world.engines[index], self.tables[index]
        if not self._reduce or not engine.inbox:
            return world
        epoch, name = table.states[engine.core].epoch, self.names[index]
        inbox = tuple([n for n in engine.inbox if n.event.epoch >= epoch and getattr(n.event, "engine", name) == name])
        if len(inbox) == len(engine.inbox):
            return world
        for left in set(engine.inbox) - set(inbox):
            assert table.step(engine.core, left) == (engine.core, ())
        return set_engine(world, index, inbox=inbox)

    def _publish(self, world: World, event: Any) -> World:
        if isinstance(event, FOR_ENGINE):
            for index, engine in enumerate(world.engines):
                world = set_engine(world, index, inbox=(*engine.inbox, note(event)))
                world = self._news(world, index)
        if isinstance(event, FOR_GATE):
            world = tell_gate(world, 0, event)
        if isinstance(event, FOR_TRAINER):
            world = replace(world, trainer=replace(world.trainer, inbox=(*world.trainer.inbox, note(event))))
        return world

    def _recorded(self, world: World, event: Any) -> World:
        history = world.history
        if isinstance(event, (RefitCommitted, EngineQuarantined)):
            world = replace(world, buffer=self.buffer.step(world.buffer, event)[0])
        match event:
            case RefitRequested():
                wrong = "" if event.epoch > history.requested else f"S3: epoch {event.epoch} is requested again"
                history = replace(history, requested=event.epoch, started=frozenset(), loads=frozenset())
            case TransferStarted():
                wrong = "" if event.epoch == history.requested else f"S5: a transfer of epoch {event.epoch} starts late"
                history = replace(history, started=frozenset(Member(m.engine, m.boot) for m in event.members))
            case RefitCommitted():
                wrong = _wrong_commit(history, event)
                sources = frozenset((event.version, m.actor, m.boot) for m in event.engines)
                history = replace(
                    history,
                    committed=event.epoch,
                    version=event.version,
                    members=frozenset(event.engines),
                    sources=history.sources | sources,
                )
                history = replace(history, barred=history.barred - set(event.engines))
            case EngineQuarantined():
                wrong, history = "", replace(history, barred=history.barred | {Member(event.engine, event.boot)})
            case _:
                return world
        return replace(world, history=history, wrong=world.wrong or wrong)

    # --- the trainer -------------------------------------------------------------------------------------------------

    def _trainer(self, world: World) -> Iterator[tuple[Label, World]]:
        trainer, me = world.trainer, self.trainer_sender
        if trainer.inbox:
            event = trainer.inbox[0].event
            after = replace(world, trainer=replace(trainer, inbox=trainer.inbox[1:]))
            match event:
                case RefitRequested():
                    after = replace(after, trainer=replace(after.trainer, sending=0))
                    after = self._offer(after, event)
                case TransferStarted():
                    after = replace(after, trainer=replace(after.trainer, sending=event.epoch))
                case RefitFailed() if event.epoch == trainer.sending:
                    after = replace(after, trainer=replace(after.trainer, sending=0))
            yield ("trainer reads", event), after
        if trainer.sending:
            ended = replace(world, trainer=replace(trainer, sending=0))
            sent = TransferFinished(epoch=trainer.sending, version=0, seconds=0.0, bytes=1)
            yield ("trainer has sent everything",), self._answers(tell(ended, me, REFIT, sent))
        if world.steps:
            version = trainer.version + 1
            stepped = replace(world, trainer=replace(trainer, version=version), steps=world.steps - 1)
            yield ("trainer makes version", version), tell(stepped, me, FLEET, Stepped(trainer.boot, version))

    def _offer(self, world: World, event: RefitRequested) -> World:
        trainer = world.trainer
        answer: Any = TransferFailed(epoch=event.epoch, phase="offer", error="VersionGone", reason="r")
        if trainer.first <= event.version <= trainer.version:
            answer = TransferOffered(
                epoch=event.epoch,
                version=event.version,
                trainer_boot=trainer.boot,
                address="a",
                port=1,
                bytes=1,
                digest=digest(event.version),
            )
            world = self._publish(world, answer)
        return self._answers(tell(world, self.trainer_sender, REFIT, answer))

    def _trainer_faults(self, world: World) -> Iterator[tuple[str, Label, World]]:
        trainer, me = world.trainer, self.trainer_sender
        if trainer.sending:
            broke = replace(world, trainer=replace(trainer, sending=0))
            event = TransferFailed(epoch=trainer.sending, phase="send", error="E", reason="r")
            yield "fail", ("trainer fails to send",), self._answers(tell(broke, me, REFIT, event))
        boot, version = trainer.boot + 1, trainer.version + 1
        again = replace(world, trainer=replace(trainer, boot=boot, first=version, version=version, sending=0))
        booted = ActorBooted(actor="trainer", boot=boot, pid=1, host="h")
        ready = PolicyReady(version=version, step=version, parent_version=None, trainer_boot=boot)
        reborn = tell(again, me, FLEET, booted, ready)
        yield "crash trainer", ("trainer crashes and restarts as boot", boot, "with version", version), reborn

    # --- the engines -------------------------------------------------------------------------------------------------

    def _engine(self, world: World, index: int) -> Iterator[tuple[Label, World]]:
        engine, name, mode = world.engines[index], self.names[index], self._mode(world, index)
        if mode == "dead":
            yield (name, "ends and is restarted"), self._restart(world, index)
            return
        if engine.inbox:
            read = set_engine(world, index, inbox=engine.inbox[1:])
            yield (name, "reads", engine.inbox[0]), self._engine_step(read, index, engine.inbox[0])
        for call in world.calls:
            if call.engine == index and call.place == "run":
                yield from self._run_ends(world, call)
        if engine.ops:
            yield from self._operation(world, index, engine.ops[0])
        if "one by one" in self._without and len(engine.ops) > 1:
            turned = set_engine(world, index, ops=(engine.ops[-1], *engine.ops[:-1]))
            yield from self._operation(turned, index, engine.ops[-1])
        if mode in SENSITIVE:
            newest, committed = world.history.requested, world.history.committed
            seen = committed if newest == committed else 0
            if seen != engine.lease:
                after = set_engine(world, index, lease=seen)
                if mode == "lapsed" and seen == self.tables[index].states[engine.core].epoch:
                    after = self._engine_step(after, index, LeaseRenewed(seen))
                yield (name, "reads the registers"), after

    def _run_ends(self, world: World, call: Call) -> Iterator[tuple[Label, World]]:
        name = self.names[call.engine]
        if not call.number:
            yield (name, "ends a sequence that nobody waits for"), drop_call(world, call)
            return
        if not world.engines[call.engine].frozen:
            yield (name, "ends the sequence of call", call.number), self._samples_last(world, call)
        if call.aborting:
            yield (name, "aborts the sequence of call", call.number), move_call(world, call, place="cut")

    def _samples_last(self, world: World, call: Call) -> World:
        """A held sequence goes on from what its engine was loaded with; the first token came at its admission."""
        engine, name = world.engines[call.engine], self.names[call.engine]
        sampled = call.sampled if engine.weights in call.sampled else (*call.sampled, engine.weights)
        wrong = ""
        if (
            engine.weights in (DUMMY, PARTIAL, OTHER)
            or (engine.weights, name, engine.boot) not in world.history.sources
        ):
            wrong = f"S4: {name} goes on with weights {engine.weights}, which no commit made whole"
        return replace(move_call(world, call, place="ok", sampled=sampled), wrong=world.wrong or wrong)

    def _operation(self, world: World, index: int, op: Any) -> Iterator[tuple[Label, World]]:
        engine, name = world.engines[index], self.names[index]
        done = set_engine(world, index, ops=engine.ops[1:], receiving=False)
        match op:
            case StartServer():
                ready = ServerReady("u", 1, 0.0)
                yield (name, "boot", engine.boot, "is up"), self._engine_step(done, index, ready)
            case Drain(hold=True):
                held = self._engine_step(set_engine(done, index, frozen=True), index, Drained(op.epoch, 0.0))
                yield (name, "boot", engine.boot, "holds still for epoch", op.epoch), held
            case Drain() if not runs(world, index):
                drained = self._engine_step(set_engine(done, index, frozen=False), index, Drained(op.epoch, 0.0))
                yield (name, "boot", engine.boot, "drained for epoch", op.epoch), drained
            case Receive() if not engine.receiving:
                wrong = ""
                if runs(world, index) and not engine.frozen:
                    wrong = f"S1: {name} receives weights while a sequence runs"
                if Member(name, engine.boot) not in world.history.started and not wrong:
                    wrong = f"S5: {name} receives in epoch {op.epoch} what was not started for it"
                begun = set_engine(world, index, receiving=True, weights=PARTIAL)
                if world.history.requested != op.epoch:  # given up by others, which it has not read yet
                    wrong = "" if wrong.startswith("S5") else wrong
                yield (name, "receives its first bucket of epoch", op.epoch), replace(begun, wrong=wrong)
            case Receive():
                yield (name, "has loaded epoch", op.epoch), self._load(done, index, op, op.version)
            case Resume():
                goes_on = set_engine(done, index, frozen=False)
                yield (name, "goes on"), self._engine_step(goes_on, index, Resumed(op.epoch))

    def _load(self, world: World, index: int, op: Receive, weights: int) -> World:
        history, me = world.history, Member(self.names[index], world.engines[index].boot)
        if weights == op.version and op.epoch == history.requested:
            world = replace(world, history=replace(history, loads=history.loads | {me}))
        world = set_engine(world, index, weights=weights)
        return self._engine_step(world, index, Loaded(op.epoch, digest(weights), 0.0))

    def _engine_step(self, world: World, index: int, input: Any) -> World:
        number, said = self.tables[index].step(world.engines[index].core, input)
        world = set_engine(world, index, core=number)
        for output in said:
            match output:
                case EngineReady() | EngineDead():
                    world = tell_gate(tell(world, index, FLEET, output), 1 + index, output)
                case Abandon():
                    engine = world.engines[index]
                    kept = tuple(op for op in engine.ops if op.epoch > output.epoch)
                    receiving = engine.receiving and kept[:1] == engine.ops[:1]
                    late = engine.ops[0] if "stale" in self._kinds and engine.ops[:1] != kept[:1] else engine.given_up
                    given_up = set_engine(world, index, ops=kept, receiving=receiving, frozen=False, given_up=late)
                    world = end_runs(given_up, index, "cut")
                case StartServer() | Drain() | Receive() | Resume():
                    world = set_engine(world, index, ops=(*world.engines[index].ops, output))
                case Watch() | Exit():
                    pass
                case _:
                    world = self._answers(tell(world, index, REFIT, output))
        return self._news(world, index)

    def _restart(self, world: World, index: int) -> World:
        engine, name, mode = world.engines[index], self.names[index], self._mode(world, index)
        boot = engine.boot + 1
        world = end_runs(world, index, "infra")
        world = put_engine(world, index, Engine(engine.core, boot, engine.inbox))
        booted = ActorBooted(actor=name, boot=boot, pid=1, host="h")
        world = tell(world, index, FLEET, booted)
        if not (self._reduce and mode == "dead"):  # to a gateway, news of a boot is the death of the boots before
            world = tell_gate(world, 1 + index, booted)
        return self._engine_step(world, index, Booted(boot))

    def _engine_faults(self, world: World, index: int) -> Iterator[tuple[str, Label, World]]:
        engine, name, mode = world.engines[index], self.names[index], self._mode(world, index)
        yield "crash engine", (name, "crashes and restarts as boot", engine.boot + 1), self._restart(world, index)
        if mode not in ("starting", "dead"):
            dies = self._engine_step(end_runs(set_engine(world, index, ops=()), index, "infra"), index, ServerDead("r"))
            yield "crash server", ("the server of", name, "dies"), dies
        op = engine.ops[0] if engine.ops else None
        done = set_engine(world, index, ops=engine.ops[1:], receiving=False)
        if isinstance(op, Drain):
            yield "fail", (name, "does not drain"), self._engine_step(done, index, DrainFailed(op.epoch, "E", "r"))
        if isinstance(op, Receive) and engine.receiving:
            yield "corrupt", (name, "loads other weights"), self._load(done, index, op, OTHER)
            for phase in ("receive", "verify"):
                failed = self._engine_step(done, index, LoadFailed(op.epoch, phase, "E", "r"))
                yield "fail", (name, "fails to", phase), failed
        if isinstance(engine.given_up, Receive):
            given_up, gone = engine.given_up, set_engine(world, index, given_up=None)
            result = Loaded(given_up.epoch, digest(given_up.version), 0.0)
            yield "stale", (name, "says that it loaded for", given_up.epoch), self._engine_step(gone, index, result)
        if engine.inbox:
            again = self._engine_step(world, index, engine.inbox[0])
            yield "repeat", (name, "reads", engine.inbox[0], "and will again"), again
        if mode == "serving" and engine.lease:
            epoch = self.tables[index].states[engine.core].epoch
            old = end_runs(set_engine(world, index, lease=0), index, "cut")
            yield "lapse", ("the lease of", name, "runs out"), self._engine_step(old, index, LeaseLapsed(epoch))

    # --- the gateway and its calls -----------------------------------------------------------------------------------

    def _gateway(self, world: World) -> Iterator[tuple[Label, World]]:
        gate = world.gate
        for at, inbox in enumerate(gate.inboxes):
            if inbox:
                boxes = (*gate.inboxes[:at], inbox[1:], *gate.inboxes[at + 1 :])
                read = replace(world, gate=replace(gate, inboxes=boxes))
                yield ("gateway-0 reads", inbox[0]), self._gate_step(read, inbox[0])
        for call in world.calls:
            if call.place in ("ok", "cut", "infra"):
                yield ("gateway-0 takes the answer to call", call.number, call.place), self._answer(world, call)
        state = self.gateway.states[gate.core]
        if not state.requests and not state.calls:
            yield ("a caller", "asks gateway-0"), self._gate_step(world, Arrived(1, 1, "s", NEVER))

    def _answer(self, world: World, call: Call) -> World:
        after = drop_call(world, call)
        if call.place == "infra":
            return self._gate_step(after, CallFailed(call.number, "infra", "r"))
        for version in call.sampled:
            source = (version, self.names[call.engine], call.boot)
            if source not in world.history.sources:
                after = replace(after, wrong=f"S6: tokens of {source} were never committed")
        if self._admits(world, call) and Member(self.names[call.engine], call.boot) in world.history.barred:
            after = replace(after, wrong=f"S6: tokens of {self.names[call.engine]}, which is quarantined, count")
        if "spans" in self._without and set(call.sampled) - {call.version}:
            after = replace(after, wrong=f"S1: tokens of versions {call.sampled} are labelled with {call.version}")
        finish = "stop" if call.place == "ok" else "abort"
        return self._gate_step(after, Answered(call.number, (Part(0, 1, finish),)))

    def _admits(self, world: World, call: Call) -> bool:
        """Whether the buffer takes a trajectory of these tokens, should it end with them."""
        name, buffer = self.names[call.engine], self.buffer.states[world.buffer]
        sources = tuple(Provenance(version, name, call.boot) for version in call.sampled)
        return "buffer" in self._without or refusal(buffer, trajectory(sources)) is None

    def _gate_step(self, world: World, input: Any) -> World:
        number, said = self.gateway.step(world.gate.core, input)
        world = replace(world, gate=replace(world.gate, core=number))
        for output in said:
            match output:
                case Dispatch():
                    index = self.names.index(output.engine)
                    call = Call("net", output.call, index, output.boot, output.epoch, output.version)
                    world = replace(world, calls=tuple(sorted((*world.calls, call))))
                case AbortCall():
                    for call in world.calls:
                        if call.number == output.call and call.place in ("net", "run"):
                            world = move_call(world, call, aborting=True)
                case GatewayReady():
                    world = tell_gate(tell(world, self.gate_sender, FLEET, output), len(self.names) + 1, output)
                case gateway.Announce():
                    world = self._gate_step(world, Listening("u"))
                case gateway.AbortAll() | gateway.Reply() | gateway.Refuse():
                    pass
                case _:
                    world = self._answers(tell(world, self.gate_sender, REFIT, output))
        return world

    def _boot_gate(self, world: World, announce: bool = True) -> World:
        boot = world.gate.boot + 1
        calls = [orphan(c) for c in world.calls if c.place in ("net", "run")]
        world = replace(world, gate=replace(world.gate, boot=boot), calls=tuple(sorted(calls)))
        if announce:
            booted = ActorBooted(actor="gateway-0", boot=boot, pid=1, host="h")
            world = tell(world, self.gate_sender, FLEET, booted)
        return self._gate_step(world, Booted(boot))

    def _network(self, world: World) -> Iterator[tuple[Label, World]]:
        for call in dict.fromkeys(world.calls):
            if call.place == "net":
                yield ("call", call.number, "arrives at", self.names[call.engine]), self._arrive(world, call)

    def _arrive(self, world: World, call: Call) -> World:
        index, engine = call.engine, world.engines[call.engine]
        table = self.tables[index]
        state = table.states[engine.core]
        lease = Lease(engine.lease, engine.lease, 0.0)
        now = 0.0 if engine.lease else table.core.lease_s
        if engine.boot != call.boot or not table.core.admits(state, call.epoch, lease, now):
            return move_call(world, call, place="infra") if call.number else drop_call(world, call)
        running = replace(call, place="run", sampled=(engine.weights,))
        begun = swap_call(world, call, running if call.number else orphan(running))
        return replace(begun, wrong=self._wrong_admission(world, call))

    def _hopeless(self, world: World, call: Call) -> bool:
        """Its engine will never let it in: boots and epochs only rise."""
        engine = world.engines[call.engine]
        late = not self._without and self.tables[call.engine].states[engine.core].epoch > call.epoch
        return late or engine.boot != call.boot

    def _wrong_admission(self, world: World, call: Call) -> str:
        history, engine, name = world.history, world.engines[call.engine], self.names[call.engine]
        if engine.weights in (DUMMY, PARTIAL, OTHER):
            return f"S4: {name} generates from weights that no commit made whole"
        if engine.weights != call.version:
            return f"S1: {name} generates from version {engine.weights} what is labelled with {call.version}"
        if call.epoch != history.committed or Member(name, engine.boot) not in history.members:
            return f"S2: {name} boot {engine.boot} generates under epoch {call.epoch}, committed is {history.committed}"
        return ""

    # --- faults ------------------------------------------------------------------------------------------------------

    def _faults(self, world: World, busy: bool) -> Iterator[tuple[str, Label, World]]:
        if world.history.requested or world.writes:
            crashed = self._take(replace(world, writes=0), Booted(1))
            yield "crash refit", ("refit crashes and restarts",), crashed
        if busy:
            for label, after in self._ticks(world):
                yield "early", (*label, "early"), after
        if world.writes:
            yield "repeat", ("epoch", world.writes, "is on disk, twice"), self._take(world, HighWritten(world.writes))
        for queue in world.queues:
            if queue:
                yield "repeat", ("refit reads", queue[0], "and will again"), self._take(world, queue[0])
        for inbox in world.gate.inboxes:
            if inbox:
                yield "repeat", ("gateway-0 reads", inbox[0], "and will again"), self._gate_step(world, inbox[0])
        yield from self._trainer_faults(world)
        known = self.coordinator.states[world.coordinator]
        gateway_known = known.gateways.get("gateway-0", _LOUD)
        if gateway_known.boot == world.gate.boot and not gateway_known.silent:
            yield (
                "silent",
                ("gateway-0 answers no probe",),
                self._take(world, Missed("gateway-0", world.gate.boot, 3, "r")),
            )
        for index, name in enumerate(self.names):
            yield from self._engine_faults(world, index)
            if name in known.engines and known.engines[name].up:
                silent = self._take(world, Missed(name, known.engines[name].boot, 3, "r"))
                yield "silent", (name, "answers no probe"), silent
        yield "crash gateway", ("gateway-0 crashes and restarts as boot", world.gate.boot + 1), self._boot_gate(world)
        for call in world.calls:
            if call.place == "net" and call.number:
                yield "lost", ("call", call.number, "is lost"), move_call(world, call, place="infra")
            if call.place in ("net", "run") and call.aborting and call.number:
                left = swap_call(world, call, orphan(call))
                cut = self._gate_step(left, CallFailed(call.number, "infra", "it was cut off"))
                yield "late", ("gateway-0 cuts off call", call.number), cut


@cache
def trajectory(sources: tuple[Provenance, ...]) -> TrajectoryFinished:
    """A finished one whose tokens are from `sources`."""
    return TrajectoryFinished(
        task="t",
        index=0,
        sample=0,
        attempt=1,
        samples=2,
        reward=0.0,
        components={},
        valid=True,
        payload=PayloadRef("p", 1),
        prompt_tokens=1,
        completion_tokens=1,
        sources=sources,
        seconds=0.0,
    )


def _wrong_commit(history: History, event: RefitCommitted) -> str:
    if event.epoch == history.committed:
        return f"S3: epoch {event.epoch} is committed twice"
    if event.epoch != history.requested:
        return f"S3: epoch {event.epoch} is committed after epoch {history.requested} began"
    if event.version < history.version:
        return f"S3: version {event.version} is committed after version {history.version}"
    for member in event.engines:
        if member not in history.loads:
            return f"S4: {member.actor} boot {member.boot} is committed without having loaded in epoch {event.epoch}"
    return ""


def main(words: list[str]) -> None:
    """`words`: arguments of the model as name=value; `kinds=crash` names every crash."""
    import time

    named: dict[str, Any] = dict(word.split("=") for word in words)
    if "kinds" in named:
        kinds = set(named["kinds"].split(","))
        named["kinds"] = (kinds - {"crash"}) | CRASHES if "crash" in kinds else kinds
    if "without" in named:
        named["without"] = set(named["without"].split("+"))
    for name in named.keys() - {"kinds", "without", "drain"}:
        named[name] = float(named[name]) if name == "backoff_s" else int(named[name])
    began = time.process_time()
    result = search(RefitModel(**named), liveness=True)
    print(result, f"{time.process_time() - began:.1f} s of CPU")


if __name__ == "__main__":
    main(sys.argv[1:])
