"""Checkpoints on disk: written whole or not at all, named by version, verified before they are trusted.

A checkpoint is a directory. It is written beside its final place, made durable and renamed; `meta.json` lists the size
and SHA-256 of every other file, so that damage after the rename is found too. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors import atomic

FORMAT = 1
META = "meta.json"
_NAME = re.compile(r"v(\d{10})-step(\d{8})")
_SCRATCH = ".scratch-"
ASIDE = "aside-"

Writer = Callable[[Path], object]
"""Writes one file at the given path."""


class CheckpointError(Exception):
    """A checkpoint is torn, damaged or of another model: names the file and what to do."""


def directory(root: Path, version: int, step: int) -> Path:
    """Where the checkpoint of `version` goes. Versions are never reused and order the names."""
    return root / f"v{version:010d}-step{step:08d}"


def write(path: Path, files: Mapping[str, Writer], meta: Mapping[str, Any]) -> int:
    """Write a checkpoint durably and atomically; answers its bytes. One writer a path.

    `meta` is JSON. A checkpoint already at `path` is replaced. After a crash at any point, `path` is absent, the old
    one or the new one.
    """
    scratch = path.with_name(f"{_SCRATCH}{path.name}")
    _remove(scratch)
    scratch.mkdir(parents=True)
    for name, writer in files.items():
        writer(scratch / name)
        atomic.sync(scratch / name)
    listing = {name: {"bytes": (scratch / name).stat().st_size, "sha256": _sha256(scratch / name)} for name in files}
    text = json.dumps({"format": FORMAT, "meta": dict(meta), "files": listing}, indent=1)
    (scratch / META).write_text(text)
    atomic.sync(scratch / META)
    atomic.sync(scratch)
    if path.exists():
        replaced = path.with_name(f"{_SCRATCH}replaced-{path.name}")
        _remove(replaced)
        path.rename(replaced)
        scratch.rename(path)
        _remove(replaced)
    else:
        scratch.rename(path)
    atomic.sync(path.parent)
    return len(text.encode()) + sum(entry["bytes"] for entry in listing.values())


def read_meta(path: Path, *, verify: bool = True) -> dict[str, Any]:
    """The `meta` of a checkpoint, after holding its files to their listed sizes and, with `verify`, to their digests.

    Raises `CheckpointError`.
    """
    if not path.exists():
        raise CheckpointError(f"{path} is gone")
    try:
        document = json.loads((path / META).read_text())
        version, meta, files = document["format"], document["meta"], document["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no whole checkpoint ({META}: {error}); {_REMEDY}") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {version}, this release reads {FORMAT}")
    for name, listed in files.items():
        _verify(path / name, listed, verify)
    return meta


def latest(root: Path) -> Path | None:
    """The checkpoint of the greatest version under `root`, intact or not; None if there is none.

    For what is told to a person: a run loads the one that its log names, or the one before it if that is damaged.
    """
    found = _all(root)
    return found[-1] if found else None


def is_name(name: str) -> bool:
    """Whether a checkpoint may be called so."""
    return _NAME.fullmatch(name) is not None


def own(root: Path, recorded: str) -> Path:
    """Where the checkpoint that the log names is under `root`: the run's directory may have been moved, or copied."""
    return root / Path(recorded).name


def prune(root: Path, keep: int, archived: int) -> list[Path]:
    """Delete all but the `keep` >= 1 newest checkpoints and what interrupted writes left; answers the former.

    Those of versions above `archived` stay and don't count: should the store be lost, the run goes on from what the
    archive knows. A checkpoint may be written meanwhile: it is newer than all that are there.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep={keep} would delete the newest checkpoint; use 1 or more")
    whole = _all(root)
    removed = [path for path in whole if _version(path) <= archived][:-keep]
    for path in removed:
        # Renamed first, so that a crash half way through the deletion leaves nothing that looks like a checkpoint.
        scratch = path.with_name(f"{_SCRATCH}{path.name}")
        _remove(scratch)
        path.rename(scratch)
    newest = max(map(_version, whole), default=-1)
    for path in root.glob(f"{_SCRATCH}*"):
        if _version(path) <= newest:
            _remove(path)
    return removed


def set_aside(root: Path, newest: int) -> list[Path]:
    """Take checkpoints of versions above `newest` out of the way, by a rename; answers where they are now."""
    moved: list[Path] = []
    for path in _all(root):
        if _version(path) > newest:
            target = path.with_name(f"{ASIDE}{path.name}")
            _remove(target)
            moved.append(path.rename(target))
    return moved


_REMEDY = "delete it to resume from the one before"


def _all(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("v*-step*") if _NAME.fullmatch(path.name))


def _version(path: Path) -> int:
    """Of a checkpoint or its scratch directory; -1 of anything else."""
    found = _NAME.search(path.name)
    return -1 if found is None else int(found[1])


def _verify(path: Path, listed: Mapping[str, Any], digest: bool) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing from its checkpoint; {_REMEDY}")
    if path.stat().st_size != listed["bytes"]:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, {listed['bytes']} were written; {_REMEDY}")
    if digest and _sha256(path) != listed["sha256"]:
        raise CheckpointError(f"{path} differs from what was written (SHA-256); {_REMEDY}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
