"""The bus: typed, fenced, exactly-once effects on Redis streams. Entries are bytes.

bus = await Bus.connect(url, run, actor="collector-0")
boot, seq = await bus.boot()
work = await bus.read_work({"tasks": 4}, "readers", block_ms=1000)
events = await bus.read_after(cursors, block_ms=None, count=256)
await bus.commit(Commit(boot=boot, seq_from=seq, seq_to=seq + 1, journal=[record], adds=[("trajectories", data)]))
"""

from __future__ import annotations

from pipeline.bus.address import redact
from pipeline.bus.client import Bus
from pipeline.bus.errors import (
    BusError,
    BusUnavailable,
    Fenced,
    LeaseLostError,
    PayloadMissing,
    RegisterStale,
    SequenceConflict,
    TooLarge,
)
from pipeline.bus.keys import Keys
from pipeline.bus.letters import Letter
from pipeline.bus.link import probe
from pipeline.bus.model import (
    Claimed,
    Commit,
    Committed,
    Depth,
    Followed,
    Gap,
    Lease,
    Limits,
    Position,
    Received,
    Trimmed,
    WorkEntry,
)
from pipeline.bus.sizes import check_commit

__all__ = [
    "Bus",
    "BusError",
    "BusUnavailable",
    "Claimed",
    "Commit",
    "Committed",
    "Depth",
    "Fenced",
    "Followed",
    "Gap",
    "Keys",
    "Lease",
    "LeaseLostError",
    "Letter",
    "Limits",
    "PayloadMissing",
    "Position",
    "Received",
    "RegisterStale",
    "SequenceConflict",
    "TooLarge",
    "Trimmed",
    "WorkEntry",
    "check_commit",
    "probe",
    "redact",
]
