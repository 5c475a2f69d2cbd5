"""A simulated run as a run directory, so that every tool that reads one reads it."""

from __future__ import annotations

from pathlib import Path

from actors.recorder.archive import Writer
from config import loading
from config.schema import RunConfig
from pipeline import rundir
from pipeline.rundir import RunDir
from pipeline.simulate.world import World

FRAME = 8192
"""Events of one frame: who reads the log need not hold all of it."""


def write(world: World, config: RunConfig, out: Path) -> RunDir:
    """Log, journals and configuration of `world` in `out`. Raises `PipelineError` if `out` holds something else."""
    info = rundir.describe("simulated", config, loading.digest(config))
    directory = RunDir.create(out, info, loading.dump(config))
    events, journals = Writer(directory.events, world.now()), Writer(directory / "journals", world.now())
    try:
        for entry in world.store.log:
            events.append(entry.stream, entry.entry, entry.data)
            if events.waiting() == FRAME:
                events.flush(world.now())
        for actor, records in world.store.journals.items():
            for number, record in enumerate(records, 1):
                journals.append(f"journal:{actor}", f"{number}-0", record)
        for actor, (seq, state) in world.store.snapshots.items():
            journals.append(f"snapshot:{actor}", f"{seq}-0", state)
        directory.update(run=world.run_id, ended="simulated")
    finally:
        events.close(world.now())
        journals.close(world.now())
        directory.unlock()
    return directory
