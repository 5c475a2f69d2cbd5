"""The archive: what was flushed is read back in order, once, whatever a crash tears."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.recorder import archive
from actors.recorder.archive import ArchiveBusy, ArchiveError, Writer, cut, read, read_index
from contracts.core import Entry


def entries(count: int, stream: str = "policy", start: int = 0) -> list[Entry]:
    return [Entry(stream, f"{1000 + n}-0", f"data {n}".encode()) for n in range(start, start + count)]


def fill(writer: Writer, found: list[Entry]) -> None:
    for entry in found:
        assert writer.append(entry.stream, entry.entry, entry.data)


def crash(writer: Writer) -> None:
    """The process dies: what was not flushed is gone, and so is the lock."""
    import os

    os.close(writer._lock)
    if writer._file is not None:
        os.close(writer._file)


def test_what_was_flushed_is_read_back_in_order_over_segments(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1.0)
    for start in range(0, 30, 10):
        fill(writer, entries(10, start=start))
        writer.rotate(2.0) if start == 10 else writer.flush(2.0)
    assert list(read(tmp_path)) == entries(30)
    writer.close(3.0)
    assert list(read(tmp_path)) == entries(30)
    assert [segment.records for segment in read_index(tmp_path).segments] == [20, 10]


def test_a_record_is_archived_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    fill(writer, entries(3))
    assert not writer.append("policy", "1002-0", b"again")
    assert not writer.append("policy", "999-0", b"older")
    assert writer.append("policy", "1003-0", b"new")
    writer.close(0.0)
    writer = Writer(tmp_path, 0.0)
    assert writer.last == {"policy": "1003-0"}
    assert not writer.append("policy", "1003-0", b"again")
    writer.close(0.0)
    assert len(list(read(tmp_path))) == 4


@settings(deadline=None, max_examples=40)
@given(cut=st.integers(1, 200), data=st.data())
def test_a_torn_last_frame_loses_that_frame_only(
    tmp_path_factory: pytest.TempPathFactory, cut: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("archive")
    writer = Writer(folder, 0.0)
    fill(writer, entries(20))
    writer.flush(0.0)
    fill(writer, entries(20, start=20))
    last = writer.flush(0.0)
    crash(writer)
    segment = folder / "000001.zst"
    whole = segment.read_bytes()
    torn = whole[: len(whole) - min(cut, last)]
    garbage = data.draw(st.binary(max_size=20))
    segment.write_bytes(torn + garbage if cut < last else torn)
    assert list(read(folder)) == entries(20)
    writer = Writer(folder, 1.0)
    assert writer.last == {"policy": "1019-0"}
    fill(writer, entries(20, start=20))
    writer.close(2.0)
    assert list(read(folder)) == entries(40)


def test_a_reader_beside_the_writer_sees_whole_frames(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    fill(writer, entries(5))
    assert list(read(tmp_path)) == []
    writer.flush(0.0)
    fill(writer, entries(5, start=5))
    assert list(read(tmp_path)) == entries(5)
    writer.close(0.0)


def test_streams_can_be_picked(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    fill(writer, entries(3))
    fill(writer, entries(2, "refit"))
    writer.rotate(0.0)
    fill(writer, entries(1, "fleet"))
    writer.close(0.0)
    assert list(read(tmp_path, {"refit", "fleet"})) == entries(2, "refit") + entries(1, "fleet")
    spans = read_index(tmp_path).segments[0].streams
    assert (spans["policy"].first, spans["policy"].last, spans["policy"].count) == ("1000-0", "1002-0", 3)


def test_a_damaged_closed_segment_is_an_error_that_names_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    fill(writer, entries(50))
    writer.close(0.0)
    segment = tmp_path / "000001.zst"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    with pytest.raises(ArchiveError, match=r"000001\.zst is damaged: 0 of 50"):
        list(read(tmp_path))
    segment.unlink()
    with pytest.raises(ArchiveError, match=r"000001\.zst is missing"):
        list(read(tmp_path))
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(ArchiveError, match=r"index\.json is damaged"):
        read_index(tmp_path)


def test_an_index_that_was_deleted_is_made_anew(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    fill(writer, entries(4))
    writer.rotate(0.0)
    fill(writer, entries(4, start=4))
    writer.close(0.0)
    (tmp_path / "index.json").unlink()
    assert list(read(tmp_path)) == entries(8)
    Writer(tmp_path, 0.0).close(0.0)
    assert [segment.records for segment in read_index(tmp_path).segments] == [4, 4]


def test_an_archive_has_one_writer(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    with pytest.raises(ArchiveBusy, match="one recorder"):
        Writer(tmp_path, 0.0)
    writer.close(0.0)
    Writer(tmp_path, 0.0).close(0.0)


def test_nothing_new_writes_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    assert writer.flush(0.0) == 0
    assert writer.rotate(0.0) == 0
    writer.close(0.0)
    assert list(tmp_path.glob("*.zst")) == []


def test_a_segment_is_plain_zstd_of_msgpack(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    fill(writer, entries(2))
    writer.close(0.0)
    raw = zstandard.ZstdDecompressor().decompress((tmp_path / "000001.zst").read_bytes(), max_output_size=1 << 20)
    assert msgspec.msgpack.decode(raw) == [[e.stream, e.entry, e.data] for e in entries(2)]


def test_records_survive_a_kill_once_flushed(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from actors.recorder.archive import Writer\n"
        "writer = Writer(Path(sys.argv[1]), 0.0)\n"
        "for n in range(100):\n"
        "    writer.append('policy', f'{1000 + n}-0', f'data {n}'.encode())\n"
        "    if n == 59: writer.flush(0.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    import sys

    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert ended.returncode == -9
    assert list(read(tmp_path)) == entries(60)
    Writer(tmp_path, 0.0).close(0.0)


def test_a_torn_end_is_read_up_to_the_frame_before_wherever_it_is_torn(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    fill(writer, entries(20))
    whole = writer.flush(0.0)
    fill(writer, entries(5, start=20))
    frame = writer.flush(0.0)
    crash(writer)
    path = tmp_path / "000001.zst"
    data = path.read_bytes()
    assert len(data) == whole + frame
    for size in range(whole, whole + frame):
        path.write_bytes(data[:size])
        assert list(read(tmp_path)) == entries(20), size
    path.write_bytes(data)
    assert list(read(tmp_path)) == entries(25)


# --- cutting ---


def test_a_cut_takes_out_what_lies_behind_it_and_nothing_else(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    for start in (0, 10, 20):
        fill(writer, entries(10, start=start))
        fill(writer, entries(10, "control", start=start))
        writer.rotate(0.0)
    assert cut(tmp_path, {"policy": 1014}) == 15
    assert list(read(tmp_path, {"policy"})) == entries(15)
    assert list(read(tmp_path, {"control"})) == entries(30, "control")
    writer.close(0.0)
    again = Writer(tmp_path, 0.0)
    assert again.last == {"policy": "1014-0", "control": "1029-0"}
    fill(again, entries(3, start=15))
    again.close(0.0)
    assert list(read(tmp_path, {"policy"})) == entries(18)


def test_a_cut_of_nothing_leaves_the_files_as_they_are(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    fill(writer, entries(10))
    writer.close(0.0)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert cut(tmp_path, {"policy": 1009, "control": 0}) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_cut_that_dies_leaves_the_old_archive_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path, 0.0)
    fill(writer, entries(10))
    writer.close(0.0)

    def dies(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(archive, "_write_index", dies)
    with pytest.raises(OSError, match="no space"):
        cut(tmp_path, {"policy": 1004})
    assert list(read(tmp_path)) == entries(10)
    monkeypatch.undo()
    monkeypatch.setattr(Path, "unlink", dies)
    with pytest.raises(OSError, match="no space"):
        cut(tmp_path, {"policy": 1004})
    assert list(read(tmp_path)) == entries(5)
    Writer(tmp_path, 0.0).close(0.0)
    assert list(read(tmp_path)) == entries(5)


def test_what_was_cut_may_be_cut_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0.0)
    fill(writer, entries(10))
    writer.close(0.0)
    assert cut(tmp_path, {"policy": 1004}) == 5
    assert cut(tmp_path, {"policy": 1002}) == 2
    assert cut(tmp_path, {"policy": 0}) == 3
    assert list(read(tmp_path)) == []
