"""Weights on virtual time: the trainer's, its checkpoints, and the collective that carries them to engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actors.trainer import state as trainer
from contracts import plan
from contracts.events import Bucket, TensorSpec
from pipeline.simulate.quiet import Quiet

if TYPE_CHECKING:
    from pipeline.simulate.process import SimActor

KEEP = 2
"""Checkpoints that the simulated disk keeps."""
PLAN = plan.encode([Bucket((TensorSpec("w", "float32", (1,)),), 4)])


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
                digest = digest_of(command.version)
                offered = trainer.Offered(
                    command.epoch, command.version, "sim", 1, 4, digest, plan="w", plan_bytes=len(PLAN)
                )
                actor.after(0.002, offered)
            case trainer.Send():
                self._send(actor, command)
            case trainer.Prune():
                kept = sorted(self.disk, key=version_of)[-KEEP:]
                self.disk = {path: self.disk[path] for path in kept}
            case trainer.Abandon():
                self._wires.lost("trainer")

    def payload(self, handle: str) -> bytes:
        assert handle == "w"
        return PLAN

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


def version_of(path: str) -> int:
    """Of a checkpoint on the simulated disk."""
    return int(path.rpartition("/")[2])


def digest_of(version: int) -> str:
    return f"digest-{version}"
