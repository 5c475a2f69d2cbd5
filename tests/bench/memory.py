"""How much memory a long run takes of its store: `python -m tests.bench.memory [EVENTS]`, 200,000 by default.

The cores of all actors decide as in a run, on the simulator's virtual time; every commit and every reading goes to a
real server through the bus, and the recorder runs as it always does, in a process of its own. Payloads have the size
of a real trajectory, and actors are killed now and then, so that they restart from snapshots and trimmed journals.
Prints a row for each share of the events, then what grew. The archive is verified at the end: nothing was lost.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder import core as recorder
from config import loading
from config.schema import BrokerConfig, RunConfig
from contracts.core import Entry
from contracts.envelope import STREAMS, decode
from contracts.events import RunFinished, RunStarted
from pipeline.broker import choose
from pipeline.bus import Bus, Commit, Committed, WorkEntry
from pipeline.runtime import run_actor
from pipeline.runtime.machine import GROUP
from pipeline.simulate.shells import shells
from pipeline.simulate.world import Pace, World
from pipeline.verify import Verifier

RUN = "memory"
PAYLOAD = os.urandom(2000)
"""As large as some 220 tokens with their log-probabilities."""
EVEN = Pace(hop=(0.002, 0.002), generate=(0.2, 0.2), score=(0.01, 0.01), train=(0.3, 0.3))
"""Even delays, so that much happens at once and is committed at once: the run is about amounts, not about timing."""
ROWS = 20
KILL_EVERY = 5_000
"""Events between two kills of a random actor."""
EVENTS = 200_000


class ServerStore:
    """`pipeline.simulate.store.MemoryStore` in a real server.

    Leases never run out here: virtual time is not the server's, and nobody is paused.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self._loop, self._url = loop, url
        self._buses: dict[str, Bus] = {}
        self._tips: defaultdict[str, int] = defaultdict(int)
        self._taken: defaultdict[str, int] = defaultdict(int)
        self._added: defaultdict[str, int] = defaultdict(int)
        self.added = 0
        self.now = 0.0
        self.registers: defaultdict[str, int] = defaultdict(int)
        self.raised_at: dict[str, float] = {}
        self.snapshots: dict[str, tuple[int, bytes]] = {}
        self.journals: dict[str, list[bytes]] = {}
        self.cursors: dict[str, dict[str, str]] = {}
        self.outside = self._wait(Bus.connect(url, RUN, actor="outside"))

    def _wait(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def boot(self, actor: str) -> tuple[int, int]:
        """As the runtime boots: fence, read snapshot and journal, protect the cursors."""
        if actor in self._buses:
            self._wait(self._buses[actor].close())
        bus = self._buses[actor] = self._wait(Bus.connect(self._url, RUN, actor=actor))
        boot, seq = self._wait(bus.boot())
        snapshot = self._wait(bus.snapshot())
        if snapshot is not None:
            self.snapshots[actor] = snapshot
        self.journals[actor] = self._wait(bus.journal(after=snapshot[0] if snapshot else 0))
        self.cursors[actor] = self._wait(bus.cursors())
        return boot, seq

    def protect(self, actor: str, boot: int, cursors: Mapping[str, str]) -> None:
        self._wait(self._buses[actor].advance(boot, cursors))

    def commit(self, actor: str, commit: Commit) -> Committed:
        done = self._wait(self._buses[actor].commit(commit))
        self.registers.update(commit.registers)
        self.raised_at.update((name, self.now) for name, _ in commit.registers)
        for (stream, _), entry in zip(commit.adds, done.entries, strict=True):
            self._note(stream, entry)
        return done

    def add(self, stream: str, data: bytes) -> str:
        entry = self._wait(self.outside.post(stream, data))
        self._note(stream, entry)
        return entry

    def _note(self, stream: str, entry: str) -> None:
        self.added += 1
        self._added[stream] += 1
        self._tips[stream] = int(entry.partition("-")[0])

    def read_after(self, cursors: Mapping[str, str]) -> list[Entry]:
        fresh = {s: c for s, c in cursors.items() if self._tips[s] > int(c.partition("-")[0])}
        if not fresh:
            return []
        found = self._wait(self.outside.read_after(fresh, count=1_000_000, block_ms=None))
        return sorted(found, key=lambda entry: int(entry.entry.partition("-")[0]))

    def read_own(self, stream: str, actor: str) -> list[WorkEntry]:
        bus = self._buses[actor]
        self._wait(bus.ensure_group(stream, GROUP))
        found = self._wait(bus.read_work({stream: 1_000_000}, GROUP, block_ms=None))
        self._taken[stream] += sum(entry.deliveries == 1 for entry in found)
        return found

    def waiting(self, stream: str) -> int:
        return self._added[stream] - self._taken[stream]

    def read_new(self, stream: str, actor: str, count: int) -> list[WorkEntry]:
        if not self.waiting(stream):
            return []
        found = self._wait(self._buses[actor].read_work({stream: count}, GROUP, block_ms=None))
        self._taken[stream] += len(found)
        return found

    def claim(self, stream: str, actor: str, idle_s: float, count: int) -> Iterable[WorkEntry]:
        return ()

    def renew(self, stream: str, actor: str) -> None:
        pass


class Row(msgspec.Struct, frozen=True):
    """`used` in bytes; `journals`, `streams`, `released`, `pending`: entries; `snapshot`: bytes of the largest."""

    events: int
    seconds: float
    used: int
    keys: int
    payloads: int
    streams: int
    pending: int
    released: int
    journals: int
    snapshots: int
    fields: int


async def measure(bus: Bus, actors: Sequence[str], events: int, seconds: float) -> Row:
    """One look at everything that the run has in the store."""
    link, prefix = bus._link, bus.keys.prefix
    info = dict(line.split(b":", 1) for line in (await link.command("INFO", "memory")).splitlines() if b":" in line)
    keys, cursor = [], b"0"
    while True:
        cursor, page = await link.command("SCAN", cursor, "MATCH", "*", "COUNT", 5000)
        keys += page
        if cursor == b"0":
            break
    depths = await bus.depths(list(STREAMS), GROUP)
    journals = await bus.depths([f"journal:{actor}" for actor in actors])
    snapshots = [await link.command("HSTRLEN", bus.keys.snapshot(actor), "state") for actor in actors]
    hashes = [bus.keys.fences, bus.keys.cursors, bus.keys.registers]
    return Row(
        events=events,
        seconds=seconds,
        used=int(info[b"used_memory"]),
        keys=len(keys),
        payloads=sum(key.startswith(f"{prefix}payload:".encode()) for key in keys),
        streams=sum(depth.length for depth in depths.values()),
        pending=sum(depth.pending for depth in depths.values()),
        released=await link.command("XLEN", bus.keys.released),
        journals=sum(depth.length for depth in journals.values()),
        snapshots=max(snapshots),
        fields=sum([await link.command("HLEN", key) for key in hashes]),
    )


HEAD = (
    "events",
    "s",
    "used MiB",
    "keys",
    "payloads",
    "streams",
    "pending",
    "released",
    "journals",
    "snapshot",
    "fields",
)


def show(row: Row) -> None:
    cells = [getattr(row, field) for field in Row.__struct_fields__]
    cells[1], cells[2] = f"{row.seconds:.0f}", f"{row.used / 2**20:.2f}"
    print("".join(f"{cell:>10}" for cell in cells), "#" * int(row.used / 2**20), flush=True)


def record(url: str, run_dir: str) -> None:
    """The recorder's process. Trims twice as often as in a run: the events come faster than in one."""
    recorder.TRIM_S = 5.0
    run_actor("recorder", url, RUN, Path(run_dir))


def settings() -> RunConfig:
    sizes = ["steps=1000000", "eval.every=10", "eval.groups=4", "engine.count=2", "launch.collectors=2"]
    sizes += ["buffer.groups=64", "rollout.samples=8", "rollout.open_groups=64"]
    return loading.load("simulated", [*sizes, "recorder.tensorboard=false"])


def build(config: RunConfig, store: ServerStore) -> World:
    """The simulated run on `store`."""
    world = World(0, EVEN)
    world.run_id = RUN
    world.store = store  # type: ignore[assignment]
    made = shells(config)
    for name, shell in made.items():
        shell.payload = lambda handle: PAYLOAD
        world.add(name, shell)
        boot = world.actors[name].boot
        world.actors[name].boot = lambda name=name, boot=boot: _boot(world, store, name, boot)  # type: ignore[method-assign]
    return world


def _boot(world: World, store: ServerStore, name: str, boot: Any) -> None:
    boot()
    machine = world.actors[name].machine
    assert machine is not None
    store.protect(name, machine.identity.boot, {**dict.fromkeys(machine.core.watch, "0-0"), **machine.cursors})


def drive(world: World, store: ServerStore, actors: Sequence[str], total: int) -> list[Row]:
    """Run until `total` events are in the log."""
    world.start()
    world.post(RunStarted(config_digest="bench"), "start")
    begun, rows, kill_at = time.monotonic(), [], KILL_EVERY
    for share in range(1, ROWS + 1):
        mark = total * share // ROWS
        while store.added < mark:
            goal = min(mark, kill_at)
            world.run(lambda goal=goal: store.added >= goal, 1e9)
            if store.added >= kill_at:
                kill_at += KILL_EVERY
                world.actors[world.random.choice(list(world.actors))].kill()
        seconds = time.monotonic() - begun
        rows.append(store._wait(measure(store.outside, actors, store.added, seconds)))
        show(rows[-1])
    return rows


def verify(folder: Path) -> None:
    from actors.recorder.archive import read

    verifier = Verifier(1)
    for entry in read(folder / "events"):
        verifier.apply(decode(entry.stream, entry.data))
    for finding in verifier.findings():
        print("BROKEN", finding)
    print(verifier.summary())


def main(total: int) -> None:
    with tempfile.TemporaryDirectory() as name, choose({}, Path(name), BrokerConfig()) as broker:
        folder = Path(name)
        loop = asyncio.new_event_loop()
        store = ServerStore(loop, broker.url)
        config = settings()
        loop.run_until_complete(store.outside.put_config(msgspec.json.encode(config)))
        words = [sys.executable, "-m", "tests.bench.memory", "record", broker.url, name]
        with (folder / "recorder.log").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            world = build(config, store)
            print(broker.describe())
            print("".join(f"{word:>10}" for word in HEAD))
            rows = drive(world, store, ["recorder", *world.actors], total)
            world.post(RunFinished(reason="done"), "finish")
            process.wait(120)
        finally:
            process.kill()
            process.wait()
        half = rows[len(rows) // 4 : len(rows) // 2], rows[len(rows) // 2 :]
        for field in ("used", "keys", "payloads", "streams", "journals", "snapshots", "fields"):
            first, second = (max(getattr(row, field) for row in part) for part in half)
            print(f"most {field:10} in the second quarter {first:>12,}   in the second half {second:>12,}")
        verify(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"]:
        record(*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else EVENTS)
