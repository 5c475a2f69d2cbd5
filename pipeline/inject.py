"""Signals to the processes of a run: crash injection, and the end of one that hangs."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import msgspec

from contracts.events import ActorBooted
from pipeline.errors import Exit, PipelineError
from pipeline.eventlog import Filter, everything
from pipeline.rundir import RunDir

LATE_S = 2.0
"""A process that began so long after the boot that named its number is another one."""


class Process(msgspec.Struct, frozen=True):
    """What `actor.booted` says of a process: its number, its host, and when it said so (seconds since the epoch)."""

    pid: int
    host: str
    at: float

    @property
    def here(self) -> bool:
        """It is, or was, on this host."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """It still is the process that booted; a number that was given to another one since does not count."""
        began = _began(self.pid)
        return began is not None and began <= self.at + LATE_S

    def kill(self, number: int = signal.SIGKILL) -> bool:
        """Send it a signal; False when it is gone."""
        if not self.lives:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def _began(pid: int) -> float | None:
    """When a process started, in seconds since the epoch; None when there is none. Without /proc it is 0."""
    if not Path("/proc/self/stat").exists():
        return 0.0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZX":
        return None
    return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def inject(run: RunDir, actor: str, name: str) -> Process:
    """Send signal `name`, such as KILL, to the process of an actor. Raises `PipelineError` when there is none."""
    found: dict[str, Process] = {}
    for envelope in everything(run, Filter(kinds=("actor.booted",))):
        if isinstance(envelope.body, ActorBooted):
            found[envelope.body.actor] = Process(envelope.body.pid, envelope.body.host, envelope.wall_ns / 1e9)
    if actor not in found:
        known = ", ".join(sorted(found)) or "none yet"
        raise PipelineError(f"no actor {actor!r} has booted in this run; there are {known}", Exit.USAGE)
    process = found[actor]
    if not process.here:
        raise PipelineError(
            f"{actor} runs on {process.host} as process {process.pid}, this is {socket.gethostname()}: "
            f"run the command there, or `kill -{name} {process.pid}`",
            Exit.USAGE,
        )
    if not process.kill(getattr(signal, f"SIG{name}")):
        raise PipelineError(f"{actor} (process {process.pid}) does not run any more", Exit.FAILED)
    return process
