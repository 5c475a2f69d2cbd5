"""Two runs part at the event that one of them lacks, whatever their timing was before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from actors.recorder.ordering import number
from contracts.envelope import Envelope, decode
from contracts.events import ActorFailed
from pipeline import cli, parting
from pipeline.causality import Key, Order, key_of, spoken
from pipeline.parting import Difference, Source, compare
from pipeline.simulate import archive
from tests.stalls.gallery import GALLERY, Stall
from tests.stalls.scene import BASE, Scene


def log_of(scene: Scene) -> list[tuple[int, Envelope[Any]]]:
    return [(number(e.entry), decode(e.stream, e.data)) for e in scene.world.store.log]


def source(log: list[tuple[int, Envelope[Any]]]) -> Source:
    return lambda behind: iter([each for each in log if each[0] > behind])


def graph(log: list[tuple[int, Envelope[Any]]]) -> dict[Key, tuple[int, tuple[Key, ...]]]:
    """Key -> the place of its first event, and what that follows from."""
    found: dict[Key, tuple[int, tuple[Key, ...]]] = {}
    order = Order(found.__contains__, len(log))
    for place, envelope in log:
        key = order.read(envelope)
        if key is not None and key not in found:
            found[key] = (place, order.parents(envelope, key))
            order.add(envelope.body, key)
    return found


def healthy(config: Any = BASE, seed: int = 7, seconds: float = 15.0, pace: Any = None) -> Scene:
    scene = Scene(config, seed=seed, pace=pace)
    scene.start()
    scene.run(seconds)
    return scene


def parting_of(name: str, seed: int = 7, seconds: float = 60.0) -> Difference:
    stall: Stall = next(stall for stall in GALLERY if stall.name == name)
    scene = Scene(stall.config, pace=stall.pace)
    stall.arrange(scene)
    scene.start()
    scene.run(seconds)
    first = healthy(stall.config, seed, pace=stall.pace, seconds=40.0 if stall.pace else 15.0)
    return compare(source(log_of(first)), source(log_of(scene)), scene.world.now())


@pytest.mark.parametrize(
    ("name", "how", "key"),
    [
        ("one straggler in a group", "missing", "trajectory.finished(14, 2)"),
        ("optimizer step hangs", "missing", "step.finished(6)"),
        ("trainer waits for a refit that waits for the trainer", "missing", "transfer.offered(6)"),
        ("engine dead mid-transfer", "extra", "engine.dead(engine-1, 1)"),
        ("producer hangs", "missing", "task.issued("),
        ("health probe blocked by a broadcast", "extra", "engine.dead(engine-0, 1)"),
        ("engine never starts", "missing", "engine.ready(engine-1, 1)"),
        ("environment fails every task", "extra", "sample.failed(20, "),
        ("dataset ends after one epoch", "extra", "data.exhausted"),
    ],
)
def test_a_stalled_run_parts_from_one_of_another_seed_where_it_went_wrong(name: str, how: str, key: str):
    parting = parting_of(name).parting
    assert parting is not None
    assert (parting.how, parting.key[: len(key)]) == (how, key), parting


def test_a_broadcast_that_never_ends_is_missed_by_all_its_members():
    found = parting_of("broadcast never ends")
    assert found.parting is not None
    assert found.parting.after == ("transfer.started(4)",)
    missing = {found.parting.key, *(each.key for each in found.others)}
    assert missing >= {"transfer.finished(4)", "engine.loaded(4, engine-0)", "engine.loaded(4, engine-1)"}


def test_what_each_run_did_next_is_shown_from_the_same_causes_on():
    found = parting_of("optimizer step hangs")
    assert found.next_first[0].text.startswith("step.finished version=6")
    assert found.next_second
    assert found.parting is not None
    assert "batch.ready(6)" in found.parting.after
    assert all("step.finished version=6" not in each.text for each in found.next_second)


def test_where_trouble_is_extra_common_events_are_those_before_it_and_the_other_goes_on_behind_the_last_of_them():
    first = log_of(healthy())
    place, before = first[150]
    trouble = ActorFailed(actor="source", error="KeyError", message="'question'", fatal=False)
    at = replace(before, id="source:999.0", wall_ns=before.wall_ns + 1, body=trouble, causation_id=None)
    second = [*first[:151], (place + 1, at), *((later + 1, envelope) for later, envelope in first[151:])]
    found = compare(source(first), source(second))
    assert found.parting is not None
    assert (found.parting.how, found.parting.key) == ("extra", "actor.failed(source, KeyError)")
    named = [place for place, (_, envelope) in enumerate(first[:151]) if key_of(envelope.body) is not None]
    assert found.common == len(named) < 151
    assert [each.entry for each in found.next_second] == [place + n for n in range(1, 7)]
    begin = first[named[-1]][0] + 1
    assert [each.entry for each in found.next_first] == [begin + n for n in range(6)]


@pytest.mark.parametrize("name", ["optimizer step hangs", "engine dead mid-transfer", "environment fails every task"])
def test_what_is_forgotten_of_the_common_past_changes_no_parting(name: str, monkeypatch: pytest.MonkeyPatch):
    whole = parting_of(name)
    monkeypatch.setattr(parting, "KEPT", 64)
    monkeypatch.setattr(parting, "AHEAD", 32)
    monkeypatch.setattr(parting, "CHUNK", 8)
    assert parting_of(name) == whole


def test_a_long_log_is_compared_while_it_is_read_and_little_of_it_is_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parting, "KEPT", 64)
    monkeypatch.setattr(parting, "AHEAD", 32)
    monkeypatch.setattr(parting, "CHUNK", 8)
    log = log_of(healthy())
    ahead, most = [0, 0], 0

    def reading(side: int) -> Iterator[tuple[int, Envelope[Any]]]:
        nonlocal most
        for each in log:
            ahead[side] += 1
            most = max(most, abs(ahead[0] - ahead[1]))
            yield each

    both = parting._Both(0.0)
    both.read(reading(0), reading(1))
    assert both.due() == []
    assert len(both.common[0]) > 300
    assert most <= 48, "the runs are read side by side"
    assert not both._open
    assert len(both._known) <= 2 * (64 + 8), "besides what is asked for, a chunk more than it keeps, twice"


@pytest.mark.parametrize("seed", [2, 3])
def test_healthy_runs_of_other_seeds_do_not_part(seed: int):
    found = compare(source(log_of(healthy(seed=7))), source(log_of(healthy(seed=seed))))
    assert found.parting is None, found.parting
    assert found.common > 300


def test_a_run_is_the_same_as_itself_and_as_its_beginning():
    log = log_of(healthy(seconds=8.0))
    whole, half = source(log), source(log[: len(log) // 2])
    assert compare(whole, whole).parting is None
    assert compare(whole, half).parting is None, "a log that ends is no stall"
    assert compare(whole, source([])).parting is None


def test_every_event_follows_from_earlier_ones_only():
    nodes = graph(log_of(healthy(seconds=8.0)))
    assert all(nodes[parent][0] < place for place, parents in nodes.values() for parent in parents)
    assert sum(not parents for _, parents in nodes.values()) <= 2, "only what precedes run.started stands alone"


def test_keys_name_events_and_leave_out_what_timing_decides():
    log = log_of(healthy(seconds=4.0))
    keys = [key for _, envelope in log if (key := key_of(envelope.body)) is not None]
    assert len(keys) == len(set(keys)), "in a run without faults no two events are the same"
    assert spoken(("engine.drained", 17, "engine-3")) == "engine.drained(17, engine-3)"
    assert {type(e.body).__name__ for _, e in log if key_of(e.body) is None} <= {
        "WaitStarted", "WaitEnded", "BufferDepth", "CreditGranted", "EngineHealth"
    }  # fmt: skip


def test_the_command_compares_run_directories(tmp_path: Path):
    stall = next(stall for stall in GALLERY if stall.name == "optimizer step hangs")
    bad = Scene(stall.config)
    stall.arrange(bad)
    bad.start()
    bad.run(60.0)
    one = archive.write(healthy().world, BASE, tmp_path / "good").path
    two = archive.write(bad.world, BASE, tmp_path / "bad").path
    result = CliRunner().invoke(cli.main, ["diff", str(one), str(two)])
    assert result.exit_code == 1
    assert "the runs part at step.finished(6)" in result.output
    assert "bad has gone on for" in result.output
    assert "other settings" not in result.output
    other = archive.write(healthy().world, replace(BASE, seed=5), tmp_path / "other").path
    text = CliRunner().invoke(cli.main, ["diff", str(one), str(other)]).output
    assert text.splitlines()[:2] == ["the runs have other settings, so they may part without a fault", "  seed: 0 -> 5"]
    told = json.loads(CliRunner().invoke(cli.main, ["diff", str(one), str(other), "--json"]).output)
    assert told["settings"] == [{"path": "seed", "before": 0, "after": 5}]
    same = CliRunner().invoke(cli.main, ["diff", str(one), str(one), "--json"])
    assert (same.exit_code, '"parting":null' in same.output) == (0, True)
    (two / "events" / "index.json").write_text("{")
    damaged = CliRunner().invoke(cli.main, ["diff", str(one), str(two)])
    assert (damaged.exit_code, type(damaged.exception)) == (1, SystemExit)
    assert "index.json" in damaged.output
