"""A run of which only parts are read answers as the whole does, with an index of earlier looks and without one."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from actors.buffer import samplers
from actors.recorder import archive
from actors.recorder.archive import Writer
from actors.recorder.ordering import number
from config.schema import RunConfig
from contracts.core import Entry
from contracts.envelope import decode, encode
from contracts.events import EngineDrained
from contracts.sampler import Pool
from pipeline import cli, moments
from pipeline.errors import Exit, PipelineError
from pipeline.replay import apart, blocks, index
from pipeline.replay.check import check
from pipeline.replay.index import NAME, Index
from pipeline.replay.proof import check_run
from pipeline.replay.recorded import Recorded
from pipeline.replay.sought import Sought, last_states, open_course
from pipeline.rundir import RunDir, config_of
from pipeline.simulate import archive as simulated
from tests.stalls.scene import BASE, Scene


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, and ways between states, so small that a short run has many."""
    monkeypatch.setattr(blocks, "SIZE", 60)
    monkeypatch.setattr(index, "EVERY", 25)


def fill(writer: Writer, entries: Iterable[Entry], *, frame: int = 20, segment: int = 150) -> None:
    """Frames and files as of a recorder; the last file stays open."""
    for count, entry in enumerate(entries, 1):
        writer.append(entry.stream, entry.entry, entry.data)
        if count % segment == 0:
            writer.rotate(0.0)
        elif count % frame == 0:
            writer.flush(0.0)
    writer.flush(0.0)


def journal(scene: Scene) -> list[Entry]:
    return list(simulated.by_time(scene.world.store.journals))


def rewritten(run: RunDir, folder: Path, events: Iterable[Entry] | None = None) -> RunDir:
    """A copy of a run, with another log."""
    shutil.copytree(run.path, folder)
    if events is not None:
        shutil.rmtree(folder / "events")
        writer = Writer(folder / "events", 0.0)
        fill(writer, events)
        writer.close(0.0)
    return RunDir.open(folder)


@pytest.fixture(scope="module")
def long(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The scene in many files, all written to their end."""
    run = simulated.write(scene.world, BASE, tmp_path_factory.mktemp("runs") / "made")
    for name, entries in (("events", scene.world.store.log), ("journals", journal(scene))):
        shutil.rmtree(run / name)
        writer = Writer(run / name, 0.0)
        fill(writer, entries)
        writer.close(0.0)
    return run


@pytest.fixture
def run(long: RunDir, tmp_path: Path) -> RunDir:
    return rewritten(long, tmp_path / "run")


@pytest.fixture(scope="module")
def whole(long: RunDir) -> Recorded:
    return Recorded.read(long, BASE)


def opened(run: RunDir, kept: Index | None = None) -> Sought:
    course = open_course(run, config_of(run), kept or Index(run))
    assert isinstance(course, Sought)
    return course


class Counted:
    """How many steps cores take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        from pipeline.replay import recorded

        make = recorded.core_of

        def counting(config: RunConfig, name: str) -> Any:
            core: Any = make(config, name)
            step = core.step

            def count(*given: Any) -> Any:
                self.steps += 1
                return step(*given)

            core.step = count
            return core

        monkeypatch.setattr(recorded, "core_of", counting)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


# --- a part is as the whole ---


def test_every_place_is_found_as_in_the_whole_log(run: RunDir, whole: Recorded):
    log, course = whole.log, opened(run)
    assert course.log.ends == log.ends
    started = log.events[0][1].wall_ns / 1e9
    for position, envelope in log.events[::7]:
        assert course.log.envelope(position) == envelope
        at = envelope.wall_ns / 1e9
        for moment in (moments.Moment(position=position), moments.Moment(id=envelope.id), moments.Moment(at=at)):
            assert course.log.place(moment) == log.place(moment)
        assert course.log.place(moments.Moment(after_s=at - started + 0.01)) == log.place(
            moments.Moment(after_s=at - started + 0.01)
        )
        for name in whole.tracks:
            assert course.log.around(name, position) == log.around(name, position)
    assert course.log.around("nobody", 50) == (0, None)
    assert course.log.envelope(0) is course.log.envelope(10**9) is None
    for moment in (moments.Moment(position=10**9), moments.Moment(id="nobody:1.0"), moments.Moment(id="odd:x")):
        with pytest.raises(PipelineError):
            course.log.place(moment)


def test_every_state_is_as_in_the_whole_run_the_first_time_and_from_what_was_kept(run: RunDir, whole: Recorded):
    for _ in range(2):
        kept = Index(run)
        course = opened(run, kept)
        for position in whole.log.positions[:: len(whole.log.positions) // 9]:
            place = whole.log.place(moments.Moment(position=position))
            assert course.states_at(place) == whole.states_at(place)
            assert {n: t.state_at(place) for n, t in course.tracks.items()} == {
                n: state for n, (_, state) in whole.states_at(place).items()
            }
        kept.save()
        assert kept.notes == []


def test_a_journal_that_is_read_in_parts_is_a_sequence_as_any(run: RunDir, whole: Recorded):
    for name, track in whole.tracks.items():
        records = opened(run).tracks[name].records
        assert list(records) == list(track.records)
        assert (len(records), records[0], records[-1]) == (len(track.records), track.records[0], track.records[-1])
        assert list(records[3:17]) == list(track.records[3:17])
        assert list(records[5:][2:4]) == list(track.records[7:9])
        assert list(records[9:4]) == []
        with pytest.raises(IndexError):
            records[len(records)]


def test_the_command_says_the_same_with_an_index_and_without(run: RunDir):
    questions = (
        ["--until", "120"],
        ["--until", "120", "--actor", "buffer"],
        ["--until", "90", "--diff", "300"],
        ["--until", "90", "--step", "9"],
        ["--json"],
        ["--check"],
        ["--check", "--json"],
    )
    first = [CliRunner().invoke(cli.main, ["replay", str(run.path), *words]).output for words in questions]
    assert (run / NAME).exists()
    again = [CliRunner().invoke(cli.main, ["replay", str(run.path), *words]).output for words in questions]
    (run / NAME).unlink()
    alone = []
    for words in questions:
        alone.append(CliRunner().invoke(cli.main, ["replay", str(run.path), *words]).output)
        (run / NAME).unlink()
    assert first == again == alone
    assert all(alone)


def test_a_second_look_folds_the_tail_only(run: RunDir, whole: Recorded, counted: Counted):
    kept = Index(run)
    end = whole.log.place(None)
    opened(run, kept).states_at(end)
    first, counted.steps = counted.steps, 0
    kept.save()
    assert first == sum(len(track.records) for track in whole.tracks.values())
    opened(run).states_at(end)
    assert 0 < counted.steps < first / 3


def test_the_end_of_all_journals_is_where_the_actors_ended(run: RunDir, scene: Scene):
    found = last_states(run, BASE, Index(run), [*scene.world.actors, "nobody"])
    assert {name: state for name, (state, _) in found.items()} == {
        name: actor.state for name, actor in scene.world.actors.items()
    }


def test_a_file_that_is_being_written_is_read_and_nothing_of_it_is_kept(scene: Scene, long: RunDir, tmp_path: Path):
    run = rewritten(long, tmp_path / "live")
    shutil.rmtree(run / "journals")
    writer = Writer(run / "journals", 0.0)
    fill(writer, journal(scene), segment=10**9)
    kept = Index(run)
    course = opened(run, kept)
    assert course.states_at(course.log.place(None)) == Recorded.read(run, BASE).states_at(course.log.place(None))
    assert check_run(run, BASE, kept).divergences == ()
    assert kept.content.journals == kept.content.checked == {}
    assert not any(kept.content.states.values())
    writer.close(0.0)


# --- an index that can't be believed ---


def notes_of(run: RunDir) -> str:
    result = CliRunner().invoke(cli.main, ["replay", str(run.path), "--until", "120", "--actor", "buffer"])
    assert result.exit_code == 0
    return result.stderr


def test_a_damaged_index_is_named_and_made_anew(run: RunDir):
    assert notes_of(run) == ""
    good = (run / NAME).read_bytes()
    for bad in (good[:-1], good[:40] + bytes([good[40] ^ 1]) + good[41:], b"", index._sealed(b"text")):  # type: ignore[arg-type]
        (run / NAME).write_bytes(bad)
        assert f"{run / NAME} can't be used and is made anew" in notes_of(run)
        assert (run / NAME).read_bytes() == good
    assert notes_of(run) == ""


def test_an_index_of_other_code_or_settings_is_named_and_made_anew(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    assert notes_of(run) == ""
    monkeypatch.setattr("pipeline.rundir.code", lambda: "another")
    assert "was made by other code or for other settings" in notes_of(run)
    assert notes_of(run) == ""
    config = msgspec.to_builtins(config_of(run))
    run.update(config={**config, "steps": config["steps"] + 1})
    assert "was made by other code or for other settings" in notes_of(run)


def test_an_index_that_can_not_be_written_is_named(run: RunDir):
    (run / NAME).mkdir()
    assert "can't be written, so the next look begins anew" in notes_of(run)


def otherwise(entry: Entry) -> Entry:
    """The same input of the buffer, a second later; at step 20 with another answer."""
    if entry.stream != "journal:buffer":
        return entry
    seq, now, answer, given = msgspec.msgpack.decode(entry.data)
    record = [seq, now + 1.0, b"another." if seq == 20 else answer, given]
    return Entry(entry.stream, entry.entry, msgspec.msgpack.encode(record))


def test_states_from_other_journals_are_not_believed(run: RunDir, scene: Scene, whole: Recorded, tmp_path: Path):
    kept = Index(run)
    end = whole.log.place(None)
    opened(run, kept).states_at(end)
    assert check_run(run, BASE, kept).divergences == ()
    other = rewritten(run, tmp_path / "other")
    shutil.rmtree(other / "journals")
    writer = Writer(other / "journals", 0.0)
    fill(writer, map(otherwise, journal(scene)))
    writer.close(0.0)
    kept._run, kept._path = other, other / NAME
    kept.save()
    expected = Recorded.read(other, BASE)
    assert opened(other).states_at(end)["buffer"] == expected.states_at(end)["buffer"] != whole.states_at(end)["buffer"]
    assert check_run(other, BASE, Index(other)).divergences == check(expected).divergences != ()


def test_what_a_rebuild_cuts_off_is_forgotten(run: RunDir, whole: Recorded):
    kept = Index(run)
    end = whole.log.place(None)
    opened(run, kept).states_at(end)
    assert check_run(run, BASE, kept).divergences == ()
    kept.save()
    upto = len(whole.tracks["buffer"].records) - 30
    archive.cut(run / "journals", {"journal:buffer": upto})
    for position in whole.log.positions[-60::20]:
        place = whole.log.place(moments.Moment(position=position))
        assert opened(run).states_at(place)["buffer"] == Recorded.read(run, BASE).states_at(place)["buffer"]
    assert opened(run).states_at(end)["buffer"][0] == upto
    assert check_run(run, BASE, Index(run)) == check(Recorded.read(run, BASE))


def test_kept_states_are_few_where_journals_are_small(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    def kept() -> int:
        known = Index(run)
        course = opened(run, known)
        course.states_at(course.log.place(None))
        known.save()
        return sum(len(mark.state) for marks in known.content.states.values() for mark in marks)

    all_of_them = kept()
    monkeypatch.setattr(index, "LEAST", all_of_them // 3)
    monkeypatch.setattr(index, "SHARE", 10**9)
    assert 0 < kept() <= all_of_them // 3


# --- damaged archives ---


def test_a_journal_with_a_gap_is_refused(long: RunDir, scene: Scene, tmp_path: Path):
    for lacking in (4, 21):
        run = rewritten(long, tmp_path / f"gap{lacking}")
        shutil.rmtree(run / "journals")
        writer = Writer(run / "journals", 0.0)
        fill(writer, (e for e in journal(scene) if (e.stream, number(e.entry)) != ("journal:refit", lacking)))
        writer.close(0.0)
        with pytest.raises(PipelineError, match=f"the journal of refit lacks record {lacking}: it goes on"):
            opened(run)
        assert open_course(run, BASE, Index(run), "buffer").tracks


def test_a_log_that_is_not_in_order_is_read_as_a_whole(long: RunDir, scene: Scene, tmp_path: Path):
    log = list(scene.world.store.log)
    log[150], log[151] = log[151], log[150]
    run = rewritten(long, tmp_path / "mixed", log)
    held = [number(entry.entry) for entry in archive.read(run.events)]
    assert held != sorted(held)
    assert isinstance(open_course(run, BASE, Index(run)), Recorded)
    assert check_run(run, BASE, Index(run)).divergences == ()


def test_a_damaged_file_and_one_that_is_changed_meanwhile_are_named(run: RunDir):
    course = opened(run)
    file = run / "journals" / "000002.zst"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(PipelineError, match=r"000002\.zst was changed while it was read"):
        course.states_at(course.log.place(None))
    with pytest.raises(PipelineError, match=r"000002\.zst is damaged"):
        opened(run)
    file.unlink()
    with pytest.raises(PipelineError, match=r"000002\.zst is missing"):
        opened(run)


def test_an_event_that_can_not_be_read_is_refused_with_the_version_that_wrote_it(
    long: RunDir, scene: Scene, tmp_path: Path
):
    log = list(scene.world.store.log)
    strange = msgspec.msgpack.decode(log[100].data)
    for broken in (b"\xc1", msgspec.msgpack.encode({**strange, "body": {"kind": "unheard.of"}})):
        changed = [*log[:100], msgspec.structs.replace(log[100], data=broken), *log[101:]]
        run = rewritten(long, tmp_path / f"odd{len(broken)}", changed)
        with pytest.raises(PipelineError, match="written by another version"):
            open_course(run, BASE, Index(run)).log.envelope(number(log[100].entry))
        with pytest.raises(PipelineError, match="written by another version"):
            check_run(run, BASE, Index(run))


# --- check ---


@pytest.fixture(params=[1, 3])
def workers(request: pytest.FixtureRequest) -> int:
    return request.param


def test_a_check_by_blocks_and_processes_is_that_of_the_whole(run: RunDir, whole: Recorded, workers: int):
    kept = Index(run)
    assert check_run(run, BASE, kept, workers=workers) == check(whole)
    assert {name: checked.seq for name, checked in kept.content.checked.items()} == {
        name: len(track.records) for name, track in whole.tracks.items()
    }
    assert any(kept.content.states.values())


def test_a_divergence_is_told_as_of_the_whole(run: RunDir, workers: int):
    changed = msgspec.structs.replace(BASE, buffer=msgspec.structs.replace(BASE.buffer, max_staleness=2))
    expected = check(Recorded.read(run, changed))
    kept = Index(run)
    assert expected.divergences
    assert check_run(run, changed, kept, workers=workers) == expected
    assert "buffer" not in kept.content.checked
    assert check_run(run, changed, kept, workers=workers) == expected


@pytest.mark.parametrize("kind", ["changed", "missing", "twice"])
def test_what_was_done_to_the_log_is_found(long: RunDir, whole: Recorded, tmp_path: Path, kind: str, scene: Scene):
    position, envelope = next((p, e) for p, e in whole.log.events if isinstance(e.body, EngineDrained) and p > 100)
    log, place = list(scene.world.store.log), position - 1
    assert number(log[place].entry) == position
    if kind == "changed":
        body = msgspec.structs.replace(envelope.body, seconds=9.0)
        log[place] = Entry(log[place].stream, log[place].entry, encode(msgspec.structs.replace(envelope, body=body)))
    elif kind == "missing":
        del log[place]
    else:
        log.append(Entry(log[place].stream, f"{number(log[-1].entry) + 1}-0", log[place].data))
    before = Index(long)
    assert check_run(long, BASE, before).divergences == ()
    run = rewritten(long, tmp_path / kind, log)
    expected = {each.actor: each for each in check(Recorded.read(run, BASE)).divergences}[envelope.actor]
    before._path, before._run = run / NAME, run
    before.save()
    for _ in range(2):
        found = {each.actor: each for each in check_run(run, BASE, Index(run)).divergences}
        assert found[envelope.actor] == expected
        (run / NAME).unlink(missing_ok=True)


def test_what_was_checked_is_not_checked_again(run: RunDir, counted: Counted):
    kept = Index(run)
    first = check_run(run, BASE, kept)
    kept.save()
    assert counted.steps == first.steps
    assert check_run(run, BASE, Index(run)) == first
    assert counted.steps == first.steps


SAMPLER = {"now": samplers.load(BASE.buffer.sampler)}


def plugged(pool: Pool) -> Sequence[int]:
    return SAMPLER["now"](pool)


def test_a_plug_in_that_decides_otherwise_by_now_is_found(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    """Its code is not what the index knows."""
    settings = msgspec.to_builtins(BASE)
    run.update(config={**settings, "buffer": {**settings["buffer"], "sampler": f"{__name__}:plugged"}})
    kept = Index(run)
    first = check_run(run, config_of(run), kept)
    kept.save()
    assert first.divergences == ()
    assert check_run(run, config_of(run), Index(run)) == first
    monkeypatch.setitem(SAMPLER, "now", lambda pool: samplers.fifo(pool)[:-1])
    assert [found.actor for found in check_run(run, config_of(run), Index(run)).divergences] == ["buffer"]


@pytest.mark.parametrize("closed", [True, False])
def test_a_run_that_went_on_is_checked_from_where_it_was(
    long: RunDir, scene: Scene, tmp_path: Path, counted: Counted, closed: bool
):
    run = rewritten(long, tmp_path / "going")
    log, records = list(scene.world.store.log), journal(scene)
    for name in ("events", "journals"):
        shutil.rmtree(run / name)
    ahead = len(records) * 2 // 3
    at = msgspec.msgpack.decode(records[ahead].data)[1]
    known = [entry for entry in log if decode(entry.stream, entry.data).wall_ns / 1e9 < at]
    writers = Writer(run / "events", 0.0), Writer(run / "journals", 0.0)
    for writer, part in zip(writers, (known, records[: ahead + 25]), strict=True):
        fill(writer, part)
        if closed:
            writer.rotate(0.0)
    kept = Index(run)
    assert check_run(run, BASE, kept).divergences == ()
    kept.save()
    first, counted.steps = counted.steps, 0
    for writer, part in zip(writers, (log[len(known) :], records[ahead + 25 :]), strict=True):
        fill(writer, part)
        writer.close(0.0)
    verdict, taken = check_run(run, BASE, Index(run)), counted.steps
    assert verdict == check(Recorded.read(long, BASE))
    assert taken < verdict.steps - first / 2


@pytest.mark.parametrize("known", [False, True])
def test_an_event_of_a_step_long_past_is_found_where_the_log_goes_on(run: RunDir, scene: Scene, known: bool):
    if known:
        kept = Index(run)
        assert check_run(run, BASE, kept).divergences == ()
        kept.save()
    log = scene.world.store.log
    old = next(entry for entry in log if isinstance(decode(entry.stream, entry.data).body, EngineDrained))
    writer = Writer(run.events, 0.0)
    assert writer.append(old.stream, f"{number(log[-1].entry) + 1}-0", old.data)
    writer.close(0.0)
    expected = check(Recorded.read(run, BASE))
    assert [each.actor for each in expected.divergences] == [decode(old.stream, old.data).actor]
    assert check_run(run, BASE, Index(run)) == expected


def test_work_that_is_shared_out_comes_back_in_order_and_errors_with_it():
    def dying() -> bytes:
        os._exit(9)

    def refusing() -> bytes:
        raise PipelineError("no such block", Exit.FAILED)

    def fine(word: bytes) -> Callable[[], bytes]:
        return lambda: word

    assert apart.side_by_side([]) == []
    assert apart.side_by_side([fine(b"a"), fine(b"b"), fine(b"c")]) == [b"a", b"b", b"c"]
    with pytest.raises(PipelineError, match="no such block"):
        apart.side_by_side([fine(b"a"), refusing])
    with pytest.raises(PipelineError, match=r"ended \(exit code 9\)"):
        apart.side_by_side([fine(b"a"), dying])


def test_work_is_dealt_out_evenly_and_to_one_alone_beside_threads(monkeypatch: pytest.MonkeyPatch):
    assert apart.shared({"a": 5, "b": 3, "c": 3, "d": 1}, 2) == [["a", "d"], ["b", "c"]]
    assert apart.shared({"a": 5}, 4) == [["a"]]
    assert apart.shared({}, 4) == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert (apart.hands(10, 10), apart.hands(9, 10)) == (3, 1)
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert apart.hands(10, 10) == 1


def test_tables_that_several_processes_make_are_the_same(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    alone = opened(run)
    monkeypatch.setattr(blocks, "hands", lambda work, least: 3)
    together = opened(run)
    for one, other in ((alone.events, together.events), (alone.journals, together.journals)):
        assert (one.blocks, one.chains, one.tables) == (other.blocks, other.chains, other.tables)
        assert one.blocks
