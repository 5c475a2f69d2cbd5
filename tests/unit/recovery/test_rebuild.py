"""A plan made from an archive is the store that the archive was made from."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.core import Core
from pipeline import rebuild
from pipeline.rebuild import Eras, NotRebuildable, Plan, plan
from pipeline.runtime.journal import Journal
from pipeline.simulate.shells import shells
from pipeline.simulate.world import World
from tests.chaos.schedules import config


def half_way(seed: int = 1, steps: int = 3) -> World:
    """A run in the middle of its work, with a few kills behind it."""
    from contracts.events import RunStarted

    world = World(seed)
    for name, shell in shells(config(seed)).items():
        world.add(name, shell)
    world.start()
    world.post(RunStarted(config_digest="x"), "start")
    for name in ("trainer", "collector-0", "engine-1"):
        world.later(world.random.uniform(3.0, 6.0), world.actors[name].kill)
    assert world.run(lambda: trained(world) >= steps, 600.0)
    return world


PLANS = "plan:"
"""Every boot of the trainer writes the plan of its transfers again."""


def trained(world: World) -> int:
    state = world.actors["trainer"].state
    return 0 if state is None else state.step


def cores(world: World) -> dict[str, Eras]:
    return {name: [(None, actor.core)] for name, actor in world.actors.items()}


def made(world: World, **changes: Any) -> Plan:
    return plan(**{"events": world.store.log, "journals": world.store.journals, "cores": cores(world)} | changes)


def decoded(core: Core[Any], data: bytes) -> Any:
    return msgspec.msgpack.decode(data, type=core.state_type)


@pytest.mark.parametrize("seed", range(3))
def test_a_whole_archive_gives_the_store_as_it_was(seed: int) -> None:
    world = half_way(seed)
    store, wanted = world.store, made(world)
    assert wanted.cut == len(store.log)
    assert wanted.boots == dict(store.boots)
    assert wanted.registers == {name: value for name, value in store.registers.items() if value}
    assert set(wanted.payloads) == {key for key in store.payloads if not key.startswith(PLANS)}
    for name, actor in world.actors.items():
        seq, state = wanted.states[name]
        assert seq == store.seqs[name]
        if actor.machine is not None:
            assert decoded(actor.core, state) == actor.machine.state
    for stream, held in wanted.work.items():
        pending = store.streams[stream].pending
        assert {at: owner for at, owner in held.pending} == {
            at: item.consumer for at, item in pending.items() if at <= held.delivered
        }


def test_entries_that_everybody_has_read_and_acked_are_left_out() -> None:
    world = half_way()
    wanted = made(world)
    assert 0 < len(wanted.events) < wanted.cut
    kept = {entry.entry for entry in wanted.events}
    for stream, held in wanted.work.items():
        assert {f"{at}-0" for at, _ in held.pending} <= kept, stream


def test_a_cut_that_lies_further_back_than_the_kept_states_gives_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    world = half_way()
    wanted = made(world, events=world.store.log[:-60])
    monkeypatch.setattr(rebuild, "LAST", 1)
    assert made(world, events=world.store.log[:-60]) == wanted
    assert any(seq < world.store.seqs[name] - 1 for name, (seq, _) in wanted.states.items())


@pytest.mark.parametrize("missing", [1, 7, 40])
def test_no_state_is_ahead_of_the_events_that_are_left(missing: int) -> None:
    world = half_way()
    wanted = made(world, events=world.store.log[:-missing])
    assert wanted.cut <= len(world.store.log) - missing
    emitted = [entry for entry in world.store.log if int(entry.entry.partition("-")[0]) <= wanted.cut]
    assert len(emitted) == wanted.cut
    assert all(seq <= world.store.seqs[name] for name, (seq, _) in wanted.states.items())
    assert any(seq < world.store.seqs[name] for name, (seq, _) in wanted.states.items())


def test_events_of_a_step_whose_journal_is_missing_do_not_count() -> None:
    world = half_way()
    journals = dict(world.store.journals)
    journals["buffer"] = journals["buffer"][:-20]
    wanted = made(world, journals=journals)
    seq, state = wanted.states["buffer"]
    assert seq <= len(journals["buffer"])
    assert wanted.cut < len(world.store.log)
    assert decoded(world.actors["buffer"].core, state) is not None


def test_a_hole_in_the_log_is_where_the_cut_is_made() -> None:
    world = half_way()
    hole = len(world.store.log) - 50
    wanted = made(world, events=[e for e in world.store.log if e.entry != f"{hole}-0"])
    assert wanted.cut < hole


def test_an_archive_without_its_beginning_is_refused() -> None:
    world = half_way()
    with pytest.raises(NotRebuildable, match="begins with event 5"):
        made(world, events=world.store.log[4:])


def test_a_journal_without_its_beginning_is_refused_by_name() -> None:
    world = half_way()
    with pytest.raises(NotRebuildable, match="journal of source jumps from 0 to 3"):
        made(world, journals={**world.store.journals, "source": world.store.journals["source"][2:]})


def test_a_core_that_decides_otherwise_is_refused_by_step() -> None:
    world = half_way()
    other = shells(msgspec.structs.replace(config(1), seed=99))["source"].core
    with pytest.raises(NotRebuildable, match=r"of source .* decides otherwise"):
        made(world, cores={**cores(world), "source": [(None, other)]})


def test_each_era_is_taken_again_under_the_settings_that_it_had() -> None:
    world = half_way()
    core = world.actors["source"].core
    other = shells(msgspec.structs.replace(config(1), seed=99))["source"].core
    seq = world.store.seqs["source"]
    wanted = made(world, cores={**cores(world), "source": [(seq, core), (None, other)]})
    assert wanted.states["source"][0] == seq
    assert decoded(core, wanted.states["source"][1]) == world.actors["source"].state
    assert Journal(other).snapshot(world.actors["source"].state) == wanted.states["source"][1]


def test_an_empty_archive_gives_an_empty_store() -> None:
    world = World(1)
    wanted = plan([], {}, cores(world))
    assert (wanted.cut, wanted.events, wanted.states, wanted.version) == (0, (), {}, -1)
