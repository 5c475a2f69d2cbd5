"""Seeded faults in real runs: processes are killed and stopped, the store among them, and everything at once.

    python -m tests.chaos.processes --seeds 5         or: make chaos SEEDS=5
    python -m tests.chaos.processes --seed 3          one of them again

A seed names a schedule of faults and the pauses between them, printed before it begins; what the processes are doing
at those moments is up to the machine. A schedule ends with everything killed, the store's files gone or not. The run
is then resumed, must finish, and `pipeline verify` must find nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from pipeline.inject import Process
from tests.e2e.conftest import TINY, Run, boots, steps

ACTORS = (
    "buffer",
    "collector-0",
    "collector-1",
    "engine-0",
    "engine-1",
    "gateway-0",
    "recorder",
    "refit",
    "source",
    "trainer",
)
ENGINES = ("engine-0", "engine-1")
BLACKOUTS = ("everything", "wipe")
PATIENCE_S = 600.0
"""Longest wait for two steps, or for the end: a schedule on a loaded machine is slow, not wrong."""
GONE_S = 60.0
"""Longest that the store and the recorder may outlive a killed driver."""
Kind = Literal["kill", "stop", "server", "store", "stop store", "everything", "wipe"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """`after` seconds behind the fault before it. Victims of `stop`, and the store of `stop store`, go on after
    `seconds`; `server` kills what serves for an engine; `wipe` kills everything and deletes the store's files."""

    kind: Kind
    after: float = 0.0
    victims: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        words = (f"+{self.after:.1f} s", self.kind, *self.victims, f"{self.seconds:.1f} s" if self.seconds else "")
        return " ".join(word for word in words if word)


def plan(seed: int, faults: int = 10) -> list[Fault]:
    """The schedule of a seed: `faults` of them, now and then everything dies in the middle, and it does at the end."""
    random = Random(f"processes/{seed}")
    weights: dict[Kind, int] = {"kill": 4, "stop": 3, "server": 1, "store": 2, "stop store": 2}
    kinds: list[Kind] = [kind for kind, weight in weights.items() for _ in range(weight)]
    made = [_drawn(random, random.choice(kinds)) for _ in range(faults)]
    if random.random() < 0.5:
        made.insert(random.randrange(1, faults), Fault(kind=random.choice(BLACKOUTS), after=random.uniform(0.0, 2.0)))
    return [*made, Fault(kind=BLACKOUTS[seed % 2], after=random.uniform(0.0, 2.0))]


def _drawn(random: Random, kind: Kind) -> Fault:
    after = random.choice((0.0, random.uniform(0.0, 0.5), random.uniform(0.5, 5.0)))
    match kind:
        case "kill":
            return Fault(kind=kind, after=after, victims=tuple(random.sample(ACTORS, random.choice((1, 1, 2, 3)))))
        case "stop":
            victims = tuple(random.sample(ACTORS, random.choice((1, 2, 3))))
            return Fault(kind=kind, after=after, victims=victims, seconds=random.uniform(0.5, 12.0))
        case "server":
            return Fault(kind=kind, after=after, victims=(random.choice(ENGINES),))
        case "stop store":
            return Fault(kind=kind, after=after, seconds=random.uniform(0.5, 8.0))
    return Fault(kind=kind, after=after)


ONE_OF_EACH = (
    Fault(kind="store"),
    Fault(kind="kill", after=1.0, victims=("trainer", "buffer")),
    Fault(kind="stop", after=1.0, victims=("engine-0", "collector-0"), seconds=3.0),
    Fault(kind="stop store", after=0.5, seconds=2.0),
    Fault(kind="server", after=0.5, victims=("engine-1",)),
    Fault(kind="wipe"),
)
"""A short schedule: every kind of fault, in the end everything is killed and the store's files are gone."""


class Storm:
    """One run under a schedule. `steps` of its last session are trained in peace."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._path = folder / "run"
        self._words = words
        self._run: Run | None = None
        self._stopped: list[tuple[float, int]] = []

    @property
    def run(self) -> Run:
        assert self._run is not None
        return self._run

    def play(self, faults: Sequence[Fault], further: int = 3) -> dict[str, int]:
        """Answers the checker's summary. Raises AssertionError with the run's last words."""
        try:
            done = 0
            self._start("steps=100000")
            for number, fault in enumerate(faults):
                self._wait(fault.after)
                print(f"{time.strftime('%H:%M:%S')} {fault}", flush=True)
                if fault.kind not in BLACKOUTS:
                    self._cause(fault)
                    continue
                self._calm()
                done = self._black_out(lose_store=fault.kind == "wipe")
                last = number == len(faults) - 1
                self._start("--resume", f"steps={done + further if last else 100000}", calm=not last)
            assert self.run.end() == 0, self.run.tail()
            assert self.run.output.read_text().count("rebuilding the store") == sum(f.kind == "wipe" for f in faults)
            return self._check(done + further)
        finally:
            self._go_on()
            if self._run is not None:
                self._run.kill()

    def _start(self, *words: str, calm: bool = True) -> None:
        first = (str(TINY), f"run_dir={self._path}", *self._words)
        if words[0] == "--resume":
            first, words = ("--resume", str(self._path)), words[1:]
        self._run = Run(self._path, *first, *words, patience_s=PATIENCE_S)
        if calm:
            self._further(2)

    def _further(self, more: int) -> None:
        """Wait until the run that was started has trained `more` steps from now on."""
        before = len(steps(self.run.events())) if (self._path / "events").exists() else 0
        self.run.wait_for(lambda log: len(steps(log)) >= before + more)

    def _calm(self) -> None:
        """Nothing goes wrong until two further steps were trained."""
        self._go_on()
        self._further(2)

    def _check(self, expected: int) -> dict[str, int]:
        summary = self.run.verify()
        lost = [event for event in self.run.events() if event["kind"] == "bus.data_lost"]
        assert not lost, lost
        assert summary["steps"] == expected, summary
        return summary

    # --- faults ---

    def _cause(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                for process in self._processes(fault.victims):
                    process.kill()
            case "stop":
                for process in self._processes(fault.victims):
                    if process.kill(signal.SIGSTOP):
                        self._stopped.append((time.monotonic() + fault.seconds, process.pid))
            case "server":
                for process in self._processes(fault.victims):
                    for child in children(process.pid):
                        send(child, signal.SIGKILL)
            case "store":
                send(embedded_server(self.run), signal.SIGKILL)
            case "stop store":
                server = embedded_server(self.run)
                send(server, signal.SIGSTOP)
                self._stopped.append((time.monotonic() + fault.seconds, server))

    def _black_out(self, *, lose_store: bool) -> int:
        """kill -9 of the driver, with which all else goes; answers the steps that are archived."""
        self.run.kill()
        deadline = time.monotonic() + GONE_S
        while _held(self._path / "broker" / "lock") or _held(self._path / "events" / "lock"):
            assert time.monotonic() < deadline, "the store or the recorder outlived the driver"
            time.sleep(0.1)
        if lose_store:
            shutil.rmtree(self._path / "broker")
        return len({event["body"]["step"] for event in steps(self.run.events())})

    def _processes(self, actors: Sequence[str]) -> list[Process]:
        """The newest processes of these actors that the archive knows; one may be gone already."""
        log = self.run.events()
        found = [booted[-1] for actor in actors if (booted := boots(log, actor))]
        return [Process(event["body"]["pid"], event["body"]["host"], event["wall_ns"] / 1e9) for event in found]

    def _wait(self, seconds: float) -> None:
        """Let time pass; who was stopped goes on when it is due."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            due = [item for item in self._stopped if item[0] <= now]
            self._stopped = [item for item in self._stopped if item[0] > now]
            for _, pid in due:
                send(pid, signal.SIGCONT)
            time.sleep(min(0.05, end - now))

    def _go_on(self) -> None:
        """Nobody is stopped any more, each when it is due."""
        if self._stopped:
            self._wait(max(until for until, _ in self._stopped) - time.monotonic() + 0.1)


def embedded_server(run: Run) -> int:
    """The embedded server's process; waits for the one that is being started."""
    supervisor = msgspec.json.decode((run.path / "broker.json").read_bytes())["supervisor"]
    deadline = time.monotonic() + GONE_S
    while not (found := children(supervisor)):
        assert time.monotonic() < deadline, run.tail()
        time.sleep(0.02)
    return found[0]


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def send(pid: int, number: int) -> None:
    """A signal, to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _held(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def play(name: str, schedule: Sequence[Fault], keep: Path | None, again: str) -> bool:
    """Run one schedule; False, and the command that runs it `again`, if it failed."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=keep))
    print(f"{name}: {', '.join(map(str, schedule))}", flush=True)
    begun = time.monotonic()
    try:
        summary = Storm(folder, "launch.collectors=2").play(schedule)
    except AssertionError as error:
        print(f"{name}: {error}\n  kept: {folder}\n  again: python -m tests.chaos.processes {again}", flush=True)
        return False
    print(f"{name}: kept every promise in {time.monotonic() - begun:.0f} s, {summary}", flush=True)
    shutil.rmtree(folder)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Seeded faults in real runs.")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--faults", type=int, default=10, help="of a schedule")
    parser.add_argument("--keep", type=Path, help="where run directories go; that of a failed seed stays")
    parser.add_argument("--short", action="store_true", help="one schedule with a fault of each kind instead")
    given = parser.parse_args()
    if given.short:
        return 0 if play("short", ONE_OF_EACH, given.keep, "--short") else 1
    seeds = range(given.first, given.first + given.seeds) if given.seed is None else [given.seed]
    failed = [
        seed
        for seed in seeds
        if not play(f"seed {seed}", plan(seed, given.faults), given.keep, f"--seed {seed} --faults {given.faults}")
    ]
    print(f"seeds={len(seeds)} failed={len(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
