"""A simulated store that is lost altogether, and filled again from what an archive would hold of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.recorder import ordering
from pipeline.rebuild import Plan, plan
from pipeline.simulate.store import MemoryStore, Pending

if TYPE_CHECKING:
    from pipeline.simulate.world import World


def rebuilt(world: World, behind: int) -> MemoryStore:
    """As `pipeline.recovery` does it; archived are all but up to `behind` of the last events, and of each journal."""
    lost = world.store
    events = lost.log[: len(lost.log) - world.random.randint(0, min(behind, len(lost.log)))]
    journals = {
        actor: records[: len(records) - world.random.randint(0, min(behind, len(records)))]
        for actor, records in lost.journals.items()
    }
    cores = {name: [(None, actor.core)] for name, actor in world.actors.items()}
    return filled(lost, plan(events, journals, cores), journals)


def filled(lost: MemoryStore, wanted: Plan, journals: dict[str, list[bytes]]) -> MemoryStore:
    """A store that holds what `wanted` says."""
    store = MemoryStore()
    store.log = lost.log[: wanted.cut]
    store.archived = dict(lost.archived)
    store.payloads = {key: lost.archived[key] for key in wanted.payloads}
    for entry in wanted.events:
        number = ordering.number(entry.entry)
        store.streams[entry.stream].entries.append((number, entry.data))
    for name, held in wanted.work.items():
        stream = store.streams[name]
        stream.next_new = sum(number <= held.delivered for number, _ in stream.entries)
        stream.pending = {number: Pending(owner, lost.now) for number, owner in held.pending}
    for actor, (seq, state) in wanted.states.items():
        store.seqs[actor], store.snapshots[actor] = seq, (seq, state)
        store.journals[actor] = journals[actor][:seq]
    store.boots.update({actor: boot + 1 for actor, boot in wanted.boots.items()})
    store.registers.update(wanted.registers)
    for actor, cursors in wanted.cursors.items():
        store.cursors[actor] = dict(cursors)
    return store
