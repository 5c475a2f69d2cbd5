"""The coordinator's real core among small machines that stand for the other actors.

All interleavings are moves: who reads next, who answers next, which fault strikes. The log is append-only and read in
order, so nothing that was emitted is lost, but any reader may lag, and the coordinator may read the streams of its
senders in any order. What was not emitted yet dies in a crash. The other actors are weaker than the real ones, so that
the coordinator alone has to be right:

- engines answer whoever names them, under whatever boot, and one that serves admits any request: there are no leases;
- a sequence runs as long as it likes, and goes on when its gateway dies;
- a gateway opens as soon as the newest epoch that it has read is a committed one.

Time is abstract: the coordinator's next deadline comes when nothing else can happen, or early, as a fault.
`python -m tests.model.refit_model N` searches with N faults; two take about a minute and half a million worlds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from contracts.events import Member
from tests.model.refit_coordinator import ENGINES, Coordinator, Message, digest
from tests.model.search import Label, Move, search

FAULTS = frozenset({"crash", "early", "repeat", "fail", "corrupt"})
"""A process dies and restarts; a deadline comes early; an input is taken twice, the second time late; a transfer or a
load fails; an engine ends up with other weights."""
SENDERS = (*ENGINES, "gateway-0", "trainer")
GATE, TRAINER = 2, 3
FLEET, REFIT = 0, 1
"""The two streams of a sender that the coordinator reads; `policy` counts as the trainer's fleet."""


class Engine(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """`mode`: uncertain, draining, drained, loading, loaded or serving, all for `epoch`."""

    boot: int = 1
    mode: str = "uncertain"
    epoch: int = 0
    version: int = -1
    running: int = 0
    """Boot of the gateway whose sequence runs, 0 for none."""
    inbox: tuple[Message, ...] = ()


class Gate(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """`current`: it has read the log up to its own start. `acked`: it said that it closed for `epoch`."""

    boot: int = 1
    epoch: int = 0
    committed: int = 0
    members: tuple[str, ...] = ()
    current: bool = True
    acked: bool = True
    inbox: tuple[Message, ...] = ()

    @property
    def open(self) -> bool:
        return self.current and 0 < self.committed == self.epoch


class Trainer(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """`sending`: the epoch whose broadcast runs, or 0."""

    boot: int = 1
    version: int = 0
    sending: int = 0
    inbox: tuple[Message, ...] = ()


class History(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """What the checks need of the past. `loads`: who acknowledged the newest epoch with the right digest."""

    requested: int = 0
    committed: int = 0
    version: int = -1
    loads: frozenset[tuple[str, int]] = frozenset()


class World(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """`writes`: epochs on their way to disk. `queues`: what the coordinator has not read, by sender and stream."""

    coordinator: int
    writes: tuple[int, ...] = ()
    queues: tuple[tuple[Message, ...], ...] = ((),) * 8
    engines: tuple[Engine, Engine] = (Engine(), Engine())
    gate: Gate = Gate()
    trainer: Trainer = Trainer()
    faults: int = 0
    steps: int = 0
    """Optimizer steps that may still be made."""
    history: History = History()
    wrong: str = ""


def tell(world: World, sender: int, stream: int, *messages: Message) -> World:
    """Append to what the coordinator will read."""
    index, queues = 2 * sender + stream, world.queues
    return replace(world, queues=(*queues[:index], (*queues[index], *messages), *queues[index + 1 :]))


def set_engine(world: World, index: int, **changes: Any) -> World:
    changed = replace(world.engines[index], **changes)
    return replace(world, engines=(changed, world.engines[1]) if index == 0 else (world.engines[0], changed))


def concerns(engine: str, message: Message) -> bool:
    """Whether reading this could change anything for the engine."""
    if message[0] == "started":
        return engine in message[3]
    return message[0] != "expelled" or message[2] == engine


class RefitModel:
    """`without`: the mechanism to take out. The search is bounded by `faults`, `steps` and `epochs`.

    With `committed`, it starts when everybody serves epoch 1, otherwise when everybody has just booted.
    """

    def __init__(
        self,
        *,
        without: str | None = None,
        faults: int = 1,
        kinds: frozenset[str] = FAULTS,
        steps: int = 1,
        epochs: int = 4,
        committed: bool = False,
    ) -> None:
        self.coordinator = Coordinator(without)
        self._kinds = kinds
        self._epochs = epochs
        world = World(coordinator=self.coordinator.step(self.coordinator.first, "boot")[0])
        for sender in (0, 1, GATE):
            world = tell(world, sender, FLEET, ("ready", 1))
        world = tell(world, TRAINER, FLEET, ("ready", 1, 0))
        while committed and not (self.settled(world) and all(e.mode == "serving" for e in world.engines)):
            _, world, _ = next(self.moves(world))
        self.start = replace(world, faults=faults, steps=steps)

    # --- checks ---

    def wrong(self, world: World) -> str:
        return world.wrong

    def settled(self, world: World) -> bool:
        """The newest epoch is committed, the gate is open and an engine serves."""
        newest = world.history.requested
        serving = any(e.mode == "serving" and e.epoch == newest for e in world.engines)
        return world.gate.open and world.gate.epoch == newest == world.history.committed and serving

    def cut(self, world: World) -> bool:
        return any(epoch > self._epochs for epoch in world.writes)

    def _wrong_commit(self, history: History, epoch: int, version: int, members: tuple[Member, ...]) -> str:
        if epoch == history.committed:
            return f"epoch {epoch} is committed twice"
        if epoch != history.requested:
            return f"epoch {epoch} is committed after epoch {history.requested} began"
        if version < history.version:
            return f"version {version} is committed after version {history.version}"
        for member in members:
            if (member.actor, member.boot) not in history.loads:
                return f"{member.actor} boot {member.boot} is committed without having loaded in epoch {epoch}"
        return ""

    # --- the coordinator ---

    def _take(self, world: World, input: Any) -> World:
        """One step of the coordinator; what it says goes to everybody."""
        number, said, opened = self.coordinator.step(world.coordinator, input)
        writes = (*world.writes, opened) if opened else world.writes
        world = replace(world, coordinator=number, writes=writes)
        for message in said:
            history = world.history
            if message[0] == "requested":
                world = replace(world, history=replace(history, requested=message[1], loads=frozenset()))
            elif message[0] == "committed":
                wrong = self._wrong_commit(history, *message[1:])
                world = replace(world, wrong=wrong, history=replace(history, committed=message[1], version=message[2]))
        return self._spread(world, said) if said else world

    def _spread(self, world: World, said: tuple[Message, ...]) -> World:
        gate, trainer = world.gate, world.trainer
        first, second = (
            replace(engine, inbox=(*engine.inbox, *(m for m in said if concerns(name, m))))
            for name, engine in zip(ENGINES, world.engines, strict=True)
        )
        for_gate = (m for m in said if m[0] in ("requested", "committed"))
        for_trainer = (m for m in said if m[0] in ("requested", "started", "aborted"))
        return replace(
            world,
            engines=(first, second),
            gate=replace(gate, inbox=(*gate.inbox, *for_gate)),
            trainer=replace(trainer, inbox=(*trainer.inbox, *for_trainer)),
        )

    def _coordinator(self, world: World) -> Iterator[tuple[Label, World]]:
        for epoch in world.writes:
            rest = tuple(w for w in world.writes if w != epoch)
            yield ("epoch", epoch, "is on disk"), self._take(replace(world, writes=rest), epoch)
        queues = world.queues
        for index, queue in enumerate(queues):
            if queue:
                sender, message = SENDERS[index // 2], queue[0]
                popped = replace(world, queues=(*queues[:index], queue[1:], *queues[index + 1 :]))
                yield ("refit reads", message, "of", sender), self._take(popped, (sender, message))

    # --- the others ---

    def moves(self, world: World) -> Iterator[Move[World]]:
        """Everything that can happen next."""
        regular = [*self._coordinator(world), *self._trainer(world), *self._gate(world)]
        regular += [*self._engine(world, 0), *self._engine(world, 1)]
        for label, after in regular:
            yield label, after, False
        for label, after in self._sequences(world):
            yield label, after, False
        if not regular and self.coordinator.wake(world.coordinator) is not None:
            yield ("time passes to the next deadline",), self._take(world, "tick"), False
        if world.faults:
            spent = replace(world, faults=world.faults - 1)
            for kind, label, after in self._faults(spent, bool(regular)):
                if kind in self._kinds:
                    yield label, after, True

    def _trainer(self, world: World) -> Iterator[tuple[Label, World]]:
        trainer = world.trainer
        if trainer.inbox:
            message = trainer.inbox[0]
            sending = message[1] if message[0] == "started" else 0
            after = replace(world, trainer=replace(trainer, inbox=trainer.inbox[1:], sending=sending))
            if message[0] == "requested":
                after = tell(after, TRAINER, REFIT, ("offered", message[1], trainer.boot, trainer.version))
            yield ("trainer reads", message), after
        if trainer.sending:
            ended = replace(world, trainer=replace(trainer, sending=0))
            yield ("trainer has sent everything",), tell(ended, TRAINER, REFIT, ("sent", trainer.sending))
        if world.steps:
            version = trainer.version + 1
            stepped = replace(world, trainer=replace(trainer, version=version), steps=world.steps - 1)
            yield ("trainer makes version", version), tell(stepped, TRAINER, FLEET, ("stepped", trainer.boot, version))

    def _gate(self, world: World) -> Iterator[tuple[Label, World]]:
        gate = world.gate
        if gate.inbox:
            message = gate.inbox[0]
            read = replace(gate, inbox=gate.inbox[1:])
            if message[0] == "requested":
                read = replace(read, epoch=message[1], acked=False)
            elif message[0] == "committed":
                members = tuple(m.actor for m in message[3])
                read = replace(read, epoch=max(gate.epoch, message[1]), committed=message[1], members=members)
            else:
                read = replace(read, current=True)
            yield ("gateway-0 reads", message), replace(world, gate=read)
        runs = any(e.running == gate.boot for e in world.engines)
        if gate.current and not gate.open and not gate.acked and not runs:
            closed = replace(world, gate=replace(gate, acked=True))
            after = tell(closed, GATE, REFIT, ("closed", gate.epoch, gate.boot))
            yield ("gateway-0 boot", gate.boot, "closed for epoch", gate.epoch), after

    def _sequences(self, world: World) -> Iterator[tuple[Label, World]]:
        """On engine-0 only, which is enough to be wrong."""
        engine, gate = world.engines[0], world.gate
        if engine.running:
            yield ("engine-0 ends a sequence",), set_engine(world, 0, running=0)
        elif gate.open and ENGINES[0] in gate.members and engine.mode == "serving":
            begun = set_engine(world, 0, running=gate.boot)
            if engine.epoch != gate.committed:
                wrong = f"engine-0 generates under epoch {engine.epoch} what is labelled with epoch {gate.committed}"
                begun = replace(begun, wrong=wrong)
            yield ("engine-0 begins a sequence",), begun

    def _engine(self, world: World, index: int) -> Iterator[tuple[Label, World]]:
        engine, name = world.engines[index], ENGINES[index]
        if engine.inbox:
            after = self._heard(set_engine(world, index, inbox=engine.inbox[1:]), index, engine.inbox[0])
            yield (name, "reads", engine.inbox[0]), after
        if engine.mode == "draining" and not engine.running:
            drained = set_engine(world, index, mode="drained")
            after = tell(drained, index, REFIT, ("drained", engine.epoch, engine.boot))
            yield (name, "boot", engine.boot, "drained for epoch", engine.epoch), after
        if engine.mode == "loading":
            after = self._loaded(world, index, digest(engine.version))
            yield (name, "boot", engine.boot, "loaded in epoch", engine.epoch), after

    def _heard(self, world: World, index: int, message: Message) -> World:
        engine, name = world.engines[index], ENGINES[index]
        kind, epoch, *rest = message
        if kind == "requested":
            return set_engine(world, index, mode="draining" if name in rest[1] else "uncertain", epoch=epoch)
        if kind == "started" and engine.epoch == epoch:
            if engine.running:
                world = replace(world, wrong=f"{name} loads weights while a sequence runs")
            return set_engine(world, index, mode="loading", version=rest[0])
        if kind == "committed":
            mine = Member(name, engine.boot) in rest[1] and engine.mode == "loaded" and engine.epoch == epoch
            return set_engine(world, index, mode="serving" if mine else "uncertain")
        if kind == "aborted" or (kind == "expelled" and engine.boot == rest[1]):
            return set_engine(world, index, mode="uncertain")
        return world

    def _loaded(self, world: World, index: int, held: str) -> World:
        engine, history = world.engines[index], world.history
        if held == digest(engine.version) and engine.epoch == history.requested:
            history = replace(history, loads=history.loads | {(ENGINES[index], engine.boot)})
        world = replace(set_engine(world, index, mode="loaded"), history=history)
        return tell(world, index, REFIT, ("loaded", engine.epoch, engine.boot, held))

    # --- faults ---

    def _faults(self, world: World, busy: bool) -> Iterator[tuple[str, Label, World]]:
        if world.history.requested or world.writes:
            yield "crash", ("refit crashes and restarts",), self._take(replace(world, writes=()), "boot")
        if busy and self.coordinator.wake(world.coordinator) is not None:
            yield "early", ("the next deadline comes early",), self._take(world, "tick")
        for epoch in world.writes:
            yield "repeat", ("epoch", epoch, "is on disk, and will be again"), self._take(world, epoch)
        for index, queue in enumerate(world.queues):
            if queue:
                sender, message = SENDERS[index // 2], queue[0]
                label = ("refit reads", message, "of", sender, "and will again")
                yield "repeat", label, self._take(world, (sender, message))
        yield from self._trainer_faults(world)
        yield from self._engine_faults(world, 0)
        yield from self._engine_faults(world, 1)
        gate = world.gate
        again = replace(gate, boot=gate.boot + 1, current=False, acked=False, inbox=(*gate.inbox, ("itself",)))
        reborn = tell(replace(world, gate=again), GATE, FLEET, ("booted", again.boot), ("ready", again.boot))
        yield "crash", ("gateway-0 crashes and restarts as boot", again.boot), reborn

    def _trainer_faults(self, world: World) -> Iterator[tuple[str, Label, World]]:
        trainer = world.trainer
        if trainer.sending:
            broke = replace(world, trainer=replace(trainer, sending=0))
            yield "fail", ("trainer fails to send",), tell(broke, TRAINER, REFIT, ("broke", trainer.sending))
        boot, version = trainer.boot + 1, trainer.version + 1
        again = replace(world, trainer=replace(trainer, boot=boot, version=version, sending=0))
        reborn = tell(again, TRAINER, FLEET, ("booted", boot), ("ready", boot, version))
        yield "crash", ("trainer crashes and restarts as boot", boot, "with version", version), reborn

    def _engine_faults(self, world: World, index: int) -> Iterator[tuple[str, Label, World]]:
        engine, name = world.engines[index], ENGINES[index]
        if engine.mode == "loading":
            yield "corrupt", (name, "loads other weights"), self._loaded(world, index, "other")
            for phase in ("receive", "verify"):
                failed = set_engine(world, index, mode="uncertain")
                after = tell(failed, index, REFIT, ("failed", engine.epoch, engine.boot, phase))
                yield "fail", (name, "fails to", phase), after
        boot = engine.boot + 1
        # Only engine-0 has a sidecar that lives to tell.
        last_words = (("dead", engine.boot),) if index == 0 else ()
        again = set_engine(world, index, boot=boot, mode="uncertain", version=-1, running=0)
        reborn = tell(again, index, FLEET, *last_words, ("booted", boot), ("ready", boot))
        yield "crash", (name, "crashes and restarts as boot", boot), reborn


if __name__ == "__main__":
    print(search(RefitModel(faults=int(sys.argv[1]), steps=0, committed=True), liveness=True))
