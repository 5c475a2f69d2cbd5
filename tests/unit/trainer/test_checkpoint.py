from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.trainer import checkpoint
from actors.trainer.checkpoint import CheckpointError


def save(root: Path, version: int, text: str = "weights", **files) -> Path:
    path = checkpoint.directory(root, version, version)
    writers = {"a.bin": lambda file: file.write_text(text), **files}
    checkpoint.write(path, writers, {"version": version, "batches": [1, 2]})
    return path


def test_meta_comes_back_and_bytes_are_those_on_disk(tmp_path: Path) -> None:
    path = checkpoint.directory(tmp_path, 3, 2)
    size = checkpoint.write(path, {"a.bin": lambda file: file.write_bytes(b"12345")}, {"version": 3})
    assert checkpoint.read_meta(path) == {"version": 3}
    assert size == sum(file.stat().st_size for file in path.iterdir())


def test_latest_is_the_greatest_version_not_the_greatest_step(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None
    for version, step in ((9, 9), (12, 3), (100, 2)):
        checkpoint.write(checkpoint.directory(tmp_path, version, step), {}, {"version": version})
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert checkpoint.read_meta(newest) == {"version": 100}


def test_a_write_that_dies_leaves_no_checkpoint_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def die(file: Path) -> None:
        file.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 1, b=die)
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.read_meta(save(tmp_path, 1))["version"] == 1


def test_a_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    save(tmp_path, 1, "old", **{"only-old": lambda file: file.write_text("x")})
    path = save(tmp_path, 1, "new")
    assert (path / "a.bin").read_text() == "new"
    assert not (path / "only-old").exists()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "no meta", "half meta", "format"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path, 1)
    meta = path / "meta.json"
    match damage:
        case "truncate":
            (path / "a.bin").write_text("weight")
        case "flip":
            (path / "a.bin").write_text("Weights")
        case "delete":
            (path / "a.bin").unlink()
        case "no meta":
            meta.unlink()
        case "half meta":
            meta.write_text(meta.read_text()[:40])
        case "format":
            meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match=str(path)):
        checkpoint.read_meta(path)


def test_a_damaged_newest_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (newest / "meta.json").unlink()
    assert checkpoint.latest(tmp_path) == newest


def test_pruning_keeps_the_newest_and_sweeps_what_dead_writes_left(tmp_path: Path) -> None:
    paths = [save(tmp_path, version) for version in range(1, 6)]
    (tmp_path / ".scratch-v0000000003-step00000003").mkdir()
    (tmp_path / ".scratch-replaced-v0000000004-step00000004").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoint.prune(tmp_path, 2, 5) == paths[:3]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["notes.txt", paths[3].name, paths[4].name])


def test_pruning_leaves_a_write_that_is_under_way_alone(tmp_path: Path) -> None:
    save(tmp_path, 7)

    def write(file: Path) -> None:
        checkpoint.prune(tmp_path, 1, 7)
        file.write_bytes(b"x")

    path = checkpoint.directory(tmp_path, 9, 9)
    checkpoint.write(path, {"weights": write}, {})
    assert checkpoint.read_meta(path) == {}


def test_pruning_never_deletes_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(ValueError, match=r"checkpoint\.keep=0"):
        checkpoint.prune(tmp_path, 0, 1)
    assert checkpoint.prune(tmp_path, 3, 1) == []


@pytest.mark.parametrize(("archived", "left"), [(0, 5), (1, 5), (3, 4), (4, 3), (5, 2), (99, 2)])
def test_what_the_archive_knows_as_the_newest_stays_with_those_before_it_however_many_are_newer(
    tmp_path: Path, archived: int, left: int
) -> None:
    paths = [save(tmp_path, version) for version in range(1, 6)]
    assert checkpoint.prune(tmp_path, 2, archived) == paths[: 5 - left]
    assert sorted(tmp_path.iterdir()) == paths[5 - left :]


def test_checkpoints_that_a_log_does_not_know_are_moved_out_of_the_way(tmp_path: Path) -> None:
    for version in (3, 4, 5):
        save(tmp_path, version)
    moved = checkpoint.set_aside(tmp_path, 3)
    assert [path.name[:17] for path in moved] == ["aside-v0000000004", "aside-v0000000005"]
    assert all(path.is_dir() for path in moved)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest.name.startswith("v0000000003")
    save(tmp_path, 4)
    assert checkpoint.set_aside(tmp_path, 3) == moved[:1]
