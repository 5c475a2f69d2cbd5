"""Virtual time, a store, and actors whose every delay is drawn from one seeded generator: same seed, same log.

The store can go away for a while, or lose its last second; actors can be killed, stopped, cut off from the store, and
live by clocks of their own. `pipeline.simulate.faults` has the schedule of such things.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import msgspec

from contracts.core import Delivered, Entry, Ref
from contracts.envelope import STREAM_OF, Envelope, decode, encode
from contracts.events import PolicyReady, StepFinished
from pipeline.bus import WorkEntry
from pipeline.simulate.process import START, SimActor, SimShell
from pipeline.simulate.store import MemoryStore

DECODED = 4096
"""Decoded entries that are kept for the readers still to come."""


class Pace(msgspec.Struct, frozen=True):
    """Ranges of the delays, in seconds."""

    hop: tuple[float, float] = (0.0005, 0.003)
    """From a commit to the turn of an actor that it concerns, and each way of a request."""
    restart: tuple[float, float] = (0.5, 2.0)
    server_start: tuple[float, float] = (1.0, 3.0)
    generate: tuple[float, float] = (0.05, 0.4)
    score: tuple[float, float] = (0.001, 0.02)
    train: tuple[float, float] = (0.2, 0.4)
    save: tuple[float, float] = (0.01, 0.05)
    load: tuple[float, float] = (0.2, 0.5)
    transfer: tuple[float, float] = (0.01, 0.03)
    reconnect: tuple[float, float] = (0.02, 0.5)


class World:
    """The clock, the store and the actors. `halted` says why the run can't go on."""

    def __init__(self, seed: int, pace: Pace | None = None) -> None:
        self.random = Random(seed)
        self.pace = pace or Pace()
        self.store = MemoryStore()
        self.actors: dict[str, SimActor] = {}
        self.run_id = f"sim-{seed}"
        self._reading: dict[frozenset[str], list[SimActor]] = {}
        self._decoded: dict[str, tuple[bytes, Delivered]] = {}
        self.halted: str | None = None
        self.back_at = START
        self.losses = 0
        self.skew_s = 0.0
        self._time = START
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def now(self) -> float:
        return self._time

    @property
    def down(self) -> bool:
        """The store does not answer."""
        return self._time < self.back_at

    def draw(self, bounds: tuple[float, float]) -> float:
        return self.random.uniform(*bounds)

    def later(self, delay: float, work: Callable[[], None]) -> None:
        """Do `work` after `delay` seconds of virtual time."""
        self._count += 1
        heapq.heappush(self._queue, (self._time + delay, self._count, work))

    def add(self, name: str, shell: SimShell) -> None:
        self._reading.clear()
        self.actors[name] = SimActor(self, name, shell)

    def start(self) -> None:
        for actor in self.actors.values():
            self.later(self.draw(self.pace.hop), actor.boot)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Go on until `until()`, `limit_s` of virtual time, or a halt; answers whether `until` came true."""
        end = self._time + limit_s
        while self._queue and self.halted is None and not until():
            at, _, work = heapq.heappop(self._queue)
            if at > end:
                self._time = end
                return False
            self._time = self.store.now = at
            work()
        return until()

    def post(self, event: Any, name: str) -> None:
        """Append an event from outside, as the driver does."""
        envelope = Envelope(
            id=f"driver:{name}",
            run=self.run_id,
            stream=STREAM_OF[type(event)],
            actor="driver",
            boot=0,
            epoch=0,
            wall_ns=int(self._time * 1e9),
            mono_ns=int((self._time - START) * 1e9),
            body=event,
        )
        self.store.add(envelope.stream, encode(envelope))
        self.ring({envelope.stream})

    def outage(self, seconds: float) -> None:
        """The store is killed and started again `seconds` later; what it acknowledged is all there."""
        self.back_at = max(self.back_at, self._time + seconds)

    def lose(self, earlier: MemoryStore, seconds: float) -> None:
        """The store comes back after `seconds` as it was earlier: what was written since is lost."""
        self.store = earlier.copy()
        self.store.now = self._time
        self.losses += 1
        self.outage(seconds)

    def halt(self, why: str) -> None:
        """The run ends with an error; the first reason counts."""
        self.halted = self.halted or why

    def versions(self) -> int:
        """The highest version that the log knows."""
        found = (decode(entry.stream, entry.data).body for entry in self.store.log if entry.stream == "policy")
        return max((event.version for event in found if isinstance(event, PolicyReady | StepFinished)), default=-1)

    def delivered(self, entry: Entry | WorkEntry) -> Delivered:
        """An entry as all its readers get it; decoded once for most of them."""
        found = self._decoded.get(entry.entry)
        if found is None or found[0] is not entry.data:
            if len(self._decoded) >= DECODED:
                self._decoded.clear()
            found = entry.data, Delivered(Ref(entry.stream, entry.entry), decode(entry.stream, entry.data))
            self._decoded[entry.entry] = found
        return found[1]

    def ring(self, streams: Iterable[str]) -> None:
        """Wake the readers of streams that got something."""
        low, high = self.pace.hop
        uniform = self.random.uniform
        for actor in self._readers(frozenset(streams)):
            actor.schedule(uniform(low, high))

    def _readers(self, streams: frozenset[str]) -> list[SimActor]:
        if streams not in self._reading:
            self._reading[streams] = [actor for actor in self.actors.values() if streams & actor.reads]
        return self._reading[streams]
