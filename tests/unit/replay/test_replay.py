"""A recorded run comes out of its cores again exactly, at every moment, and what differs is found and named."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from actors.recorder.archive import Writer
from actors.recorder.ordering import number
from contracts.core import Delivered, Emit, Entry
from contracts.envelope import decode
from contracts.events import EngineDrained, EngineLoaded, RefitCommitted, RefitRequested, TransferStarted
from pipeline import cli, moments
from pipeline.errors import PipelineError
from pipeline.replay import show
from pipeline.replay.check import check
from pipeline.replay.recorded import Log, Recorded
from pipeline.replay.states import differences, outline, plain
from pipeline.replay.tracks import Place
from pipeline.replay.whatif import what_if
from pipeline.rundir import Era, RunDir
from pipeline.runtime.journal import fingerprint
from tests.stalls.scene import BASE, Scene


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["replay", *words])


def first(recorded: Recorded, kind: type, after: int = 0) -> tuple[int, Any]:
    return next((p, e) for p, e in recorded.log.events if isinstance(e.body, kind) and p > after)


# --- states at a moment ---


def test_every_actor_ends_in_the_state_that_it_had(recorded: Recorded, scene: Scene):
    end = recorded.log.place(None)
    for name, actor in scene.world.actors.items():
        assert recorded.tracks[name].state_at(end) == actor.state, name


def test_a_step_has_happened_exactly_from_its_first_event_on(recorded: Recorded):
    for name, track in recorded.tracks.items():
        for seq, emitted in list(track.emitted.items())[:40]:
            position = emitted[0][0]
            at = recorded.log.by_position[position].wall_ns / 1e9
            assert track.count_at(Place(position, at)) >= seq, name
            assert track.count_at(Place(position - 1, at)) < seq, name


def test_nothing_is_known_before_it_was_written(recorded: Recorded):
    for position, envelope in recorded.log.events[:: len(recorded.log.events) // 25]:
        place = Place(position, envelope.wall_ns / 1e9)
        for track in recorded.tracks.values():
            taken = (track.input(record) for record in track.records[: track.count_at(place)])
            assert all(number(i.ref.entry) <= position for i in taken if isinstance(i, Delivered))


def test_the_same_moment_can_be_named_in_every_form(recorded: Recorded):
    position, envelope = first(recorded, RefitCommitted)
    at = envelope.wall_ns / 1e9
    started = recorded.log.events[0][1].wall_ns / 1e9
    named = [
        moments.Moment(position=position),
        moments.Moment(id=envelope.id),
        moments.Moment(at=at),
        moments.Moment(after_s=at - started),
    ]
    places = [recorded.log.place(moment).position for moment in named]
    assert places[:2] == [position, position]
    same_time = [p for p, e in recorded.log.events if e.wall_ns == envelope.wall_ns]
    assert all(place in same_time for place in places[2:])


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        (moments.Moment(position=999_999), "not in the log"),
        (moments.Moment(id="nobody:1.0"), "no event 'nobody:1.0'"),
        (moments.Moment(at=5.0), "the run began"),
    ],
)
def test_a_moment_outside_the_run_is_refused(recorded: Recorded, moment: moments.Moment, said: str):
    with pytest.raises(PipelineError, match=said):
        recorded.log.place(moment)


# --- check ---


def test_a_run_checks_against_the_cores_that_made_it(recorded: Recorded, scene: Scene):
    verdict = check(recorded)
    assert verdict.divergences == ()
    assert verdict.steps == sum(map(len, scene.world.store.journals.values()))
    assert verdict.events == len(scene.world.store.log)


def test_a_core_that_decides_otherwise_is_found_at_its_first_command_and_both_are_named(recorded: Recorded):
    core: Any = recorded.tracks["refit"].core
    step, commits = core.step, []

    def changed(state: Any, input: Any, now: float) -> Any:
        state, commands = step(state, input, now)
        commits.extend(c for c in commands if isinstance(c, Emit) and isinstance(c.event, RefitCommitted))
        if len(commits) >= 3:
            commands = tuple(
                msgspec.structs.replace(c, event=replace(c.event, version=99))
                if isinstance(c, Emit) and isinstance(c.event, RefitCommitted)
                else c
                for c in commands
            )
        return state, commands

    core.step = changed
    (found,) = check(recorded).divergences
    third = [e for _, e in recorded.log.events if isinstance(e.body, RefitCommitted)][2]
    assert found.actor == "refit"
    assert recorded.log.by_position[found.position].causation_id == third.causation_id
    assert any("refit.committed" in line and "version=99" not in line for line in found.recorded)
    assert any("refit.committed" in line and "version=99" in line for line in found.answered)


def test_a_core_that_raises_diverges_there(recorded: Recorded):
    core: Any = recorded.tracks["source"].core
    core.step = lambda state, input, now: 1 / 0
    (found,) = check(recorded).divergences
    assert (found.actor, found.seq) == ("source", 1)
    assert "ZeroDivisionError" in found.why


def test_an_event_that_was_changed_in_the_log_is_found(recorded: Recorded, scene: Scene):
    position, envelope = first(recorded, EngineDrained)
    events = [
        (p, replace(e, body=replace(e.body, seconds=9.0)) if p == position else e) for p, e in recorded.log.events
    ]
    records = {name: track.records for name, track in recorded.tracks.items()}
    verdict = check(Recorded(BASE, Log(events), records))
    assert envelope.actor in {each.actor for each in verdict.divergences}
    assert verdict.divergences[0].position <= position


def without(entry: Entry, field: str) -> Entry:
    """An entry as a version wrote it whose `engine.loaded` had no such field; else as it is."""
    envelope = msgspec.msgpack.decode(entry.data)
    if envelope["body"]["kind"] != "engine.loaded":
        return entry
    del envelope["body"][field]
    return msgspec.structs.replace(entry, data=msgspec.msgpack.encode(envelope))


def older(scene: Scene, made: Recorded, field: str) -> Recorded:
    """The scene as that version recorded it, whose journals hash what it emitted."""
    entries = [without(entry, field) for entry in scene.world.store.log]
    log = Log([(number(e.entry), decode(e.stream, e.data)) for e in entries], lambda: entries)
    records = {name: list(track.records) for name, track in made.tracks.items()}
    for name, track in made.tracks.items():
        for record, _, _, commands in track.steps():
            plain: list[Any] = [msgspec.to_builtins(command, builtin_types=(bytes,)) for command in commands]
            for each in plain:
                if isinstance(each, dict) and each.get("event", {}).get("kind") == "engine.loaded":
                    del each["event"][field]
                    hashed = fingerprint(commands, plain)
                    records[name][record.seq - 1] = msgspec.structs.replace(record, commands=hashed)
    return Recorded(BASE, log, records)


def test_a_log_from_before_an_event_had_a_field_is_compared_without_it(scene: Scene, recorded: Recorded):
    verdict = check(older(scene, recorded, "fingerprint"))
    assert verdict.divergences == ()
    assert verdict.absent == ("engine.loaded.fingerprint",)
    assert "written by an older version, whose events have no engine.loaded.fingerprint" in "\n".join(
        show.verdict(verdict)
    )


def test_what_a_run_that_goes_on_has_added_since_its_log_was_read_is_left_out(scene: Scene):
    entries = scene.world.store.log
    *read, _ = entries
    log = Log([(number(e.entry), decode(e.stream, e.data)) for e in read], lambda: entries)
    assert log.written(number(read[-1].entry)) == msgspec.msgpack.decode(read[-1].data)["body"]


def test_an_absent_field_hides_no_other_difference(scene: Scene, recorded: Recorded):
    past = older(scene, recorded, "fingerprint")
    track = past.tracks["engine-0"]
    emitted = ((r, getattr(c, "event", None)) for r, _, _, commands in track.steps() for c in commands)
    record = next(record for record, event in emitted if isinstance(event, EngineLoaded))
    other = replace(record, commands=b"another.")
    track.records = [other if each.seq == record.seq else each for each in track.records]
    (found,) = check(past).divergences
    assert (found.actor, found.seq, found.why) == ("engine-0", record.seq, "it answers other commands")


def test_an_event_that_is_missing_from_the_log_is_found(recorded: Recorded):
    position, envelope = first(recorded, EngineDrained)
    events = [(p, e) for p, e in recorded.log.events if p != position]
    records = {name: track.records for name, track in recorded.tracks.items()}
    found = {each.actor: each.why for each in check(Recorded(BASE, Log(events), records)).divergences}
    assert found == {envelope.actor: "the log holds other events than it emits"}


def test_the_first_divergence_is_the_first_in_the_log(recorded: Recorded):
    for name in ("trainer", "buffer"):
        core: Any = recorded.tracks[name].core
        core.step = lambda state, input, now: 1 / 0
    found = check(recorded).divergences
    assert [each.position for each in found] == sorted(each.position for each in found)


def test_a_journal_with_a_gap_is_refused(recorded: Recorded):
    records = {"refit": [*recorded.tracks["refit"].records[:3], *recorded.tracks["refit"].records[4:]]}
    with pytest.raises(PipelineError, match="lacks record 4"):
        Recorded(BASE, recorded.log, records)


def test_each_era_of_settings_is_checked_with_its_own_cores(recorded: Recorded):
    records = {name: track.records for name, track in recorded.tracks.items()}
    changed = replace(BASE, buffer=replace(BASE.buffer, max_staleness=2))
    assert {each.actor for each in check(Recorded(changed, recorded.log, records)).divergences} == {"buffer"}
    era = Era(config=msgspec.to_builtins(BASE), seqs={name: len(found) for name, found in records.items()})
    assert check(Recorded(changed, recorded.log, records, [era])).divergences == ()
    early = Era(config=msgspec.to_builtins(BASE), seqs=dict.fromkeys(records, 5))
    (found,) = check(Recorded(changed, recorded.log, records, [early])).divergences
    assert found.seq > 5


# --- what if ---


def test_without_an_engines_drain_the_transfer_does_not_begin_and_the_deadline_leaves_the_engine_out(
    recorded: Recorded,
):
    request = first(recorded, RefitRequested, after=60)[1]
    _, drained = next(
        (p, e)
        for p, e in recorded.log.events
        if isinstance(e.body, EngineDrained) and e.body.epoch == request.body.epoch
    )
    found = {each.actor: each for each in what_if(recorded, drained.id, None)}["refit"]
    missing = [line for change in found.changes for line in change.missing]
    new = [line for change in found.changes for line in change.new]
    assert any(line.startswith("emit transfer.started") for line in missing)
    assert any("engine.quarantined" in line and "did not drain in 30 s" in line for line in new)
    assert found.unheard > 0, "the answers to a transfer that never began were heard"


def test_a_drain_that_comes_a_little_later_only_delays_the_transfer(recorded: Recorded):
    request = first(recorded, RefitRequested, after=60)[1]
    drained = [
        e for _, e in recorded.log.events if isinstance(e.body, EngineDrained) and e.body.epoch == request.body.epoch
    ][-1]
    found = {each.actor: each for each in what_if(recorded, drained.id, 5.0)}["refit"]
    started = [c for c in found.changes if any("emit transfer.started" in line for line in c.new)]
    assert started
    original = next(
        e for _, e in recorded.log.events if isinstance(e.body, TransferStarted) and e.body.epoch == request.body.epoch
    )
    assert started[0].now - drained.wall_ns / 1e9 == pytest.approx(5.0, abs=0.1)
    assert started[0].now > original.wall_ns / 1e9


def test_dropping_what_nobody_took_is_refused(recorded: Recorded):
    with pytest.raises(PipelineError, match="no event"):
        what_if(recorded, "nobody:1.0", None)


def test_a_what_if_says_where_its_answer_ends(run: RunDir, recorded: Recorded):
    event = first(recorded, EngineDrained)[1].id
    for how in (["--drop", event], ["--delay", event, "--by", "5"]):
        lines = call(str(run.path), *how).output.splitlines()
        told = "the answer ends at refit: what other actors would have done upon that is not followed"
        assert [line for line in lines if "the answer ends at" in line] == [lines[-1]] == [told]
        assert all(json.loads(line) for line in call(str(run.path), *how, "--json").output.splitlines())
    assert "Only those that took it are run again" in " ".join(call("--help").output.split())


# --- words ---


def test_differences_name_each_leaf_once():
    before, after = {"a": 1, "b": {"c": [1], "d": 2}}, {"a": 1, "b": {"c": [2], "e": 3}}
    assert list(differences(before, after)) == ["b.c: [1] -> [2]", "b.d: - 2", "b.e: + 3"]
    assert list(differences(before, before)) == []


def test_every_state_can_be_shown(scene: Scene):
    for actor in scene.world.actors.values():
        assert msgspec.json.encode(plain(actor.state))
        assert list(outline(actor.state))


# --- the command ---


def test_the_command_checks_and_shows(run: RunDir):
    checked = call(str(run.path), "--check")
    assert checked.exit_code == 0, checked.output
    assert "all as recorded" in checked.output
    shown = call(str(run.path), "--until", "100", "--actor", "refit")
    assert "phase: " in shown.output
    assert call(str(run.path), "--until", "100").output.count("inputs taken") == 8


def test_the_command_is_deterministic(run: RunDir):
    for words in (["--until", "120"], ["--until", "90", "--diff", "130"], ["--until", "90", "--step", "9"]):
        assert call(str(run.path), *words).output == call(str(run.path), *words).output != ""


def test_steps_show_input_commands_and_the_change_of_state(run: RunDir, recorded: Recorded):
    position, envelope = first(recorded, RefitRequested)
    output = call(str(run.path), "--until", str(position), "--actor", "gateway-0", "--step", "3").output
    assert envelope.id in output
    assert "does emit gate.closed" in output
    assert "state epoch: 0 -> 1" in output


def test_steps_of_all_actors_come_by_time(run: RunDir):
    output = call(str(run.path), "--until", "60", "--step", "12").output
    heads = [line.split(" at ")[1].split(": ")[0] for line in output.splitlines() if line[0] != " "]
    assert len(heads) == 12
    assert heads == sorted(heads)


def test_steps_and_changes_are_told_as_json_too(run: RunDir, recorded: Recorded):
    position, envelope = first(recorded, RefitRequested)
    place = ["--until", str(position), "--actor", "gateway-0"]
    steps = [json.loads(line) for line in call(str(run.path), *place, "--step", "3", "--json").output.splitlines()]
    words = call(str(run.path), *place, "--step", "3").output
    assert [f"gateway-0 step {each['step']} at {each['at']}: " in words for each in steps] == [True] * 3
    requested = next(each for each in steps if each["input"].get("id") == envelope.id)
    assert (requested["input"]["kind"], requested["input"]["body"]["epoch"]) == ("refit.requested", 1)
    assert {"path": "epoch", "before": 0, "after": 1} in requested["changes"]
    assert "gate.closed" in [command.get("kind") for each in steps for command in each["commands"]]
    place = ["--until", "90", "--diff", "130"]
    changed = {
        each["actor"]: each for each in map(json.loads, call(str(run.path), *place, "--json").output.splitlines())
    }
    words = call(str(run.path), *place).output
    heads = [f"{name}: inputs {each['inputs'][0]} to {each['inputs'][1]}" for name, each in changed.items()]
    assert heads == [line for line in words.splitlines() if line[0] != " "] != []
    assert sum(len(each["changes"]) for each in changed.values()) == len(words.splitlines()) - len(heads)
    trained = next(each for each in changed["trainer"]["changes"] if each["path"] == "step")
    assert trained["before"] < trained["after"]


def test_a_divergence_ends_with_exit_code_1(run: RunDir, tmp_path: Any):
    copy = tmp_path / "other"
    copy.mkdir()
    for name in ("run.json", "config.yaml"):
        (copy / name).write_bytes((run / name).read_bytes().replace(b'"max_staleness": 1', b'"max_staleness": 2'))
    for folder in ("events", "journals"):
        writer = Writer(copy / folder, 0.0)
        from actors.recorder.archive import read

        for entry in read(run / folder):
            writer.append(entry.stream, entry.entry, entry.data)
        writer.close(0.0)
    result = call(str(copy), "--check")
    assert result.exit_code == 1, result.output
    assert "DIVERGES: buffer" in result.output
    assert "other code" not in result.output
    facts = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**facts, "versions": {**facts["versions"], "code": "0"}}))
    assert "the run was started by other code than this" in call(str(copy), "--check").output
    assert "emit credit.granted CreditGranted(total=8)" in result.output
    assert "emit credit.granted CreditGranted(total=12)" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--check", "--step", "2"], "different questions"),
        (["--actor", "nobody"], "no journal of 'nobody'"),
        (["--drop", "nobody:1.0"], "no event"),
        (["--until", "soon"], "names no moment"),
        (["--step", "0"], "0 is not in the range"),
        (["--by", "5"], "give that event with --delay"),
        (["--check", "--until", "5"], "--check goes over the whole run: leave out --until"),
        (["--drop", "trainer:1.0", "--until", "5"], "--drop goes over the whole run"),
    ],
)
def test_wrong_questions_are_refused(run: RunDir, words: list[str], said: str):
    result = call(str(run.path), *words)
    assert result.exit_code == 2
    assert said in result.output
