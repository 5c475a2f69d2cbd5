"""A directory that several processes may ask for at the same time, and that is there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """Answer `path`, filled by `build(scratch)` unless it exists already.

    One caller of a host builds, the others wait for it; if it dies, the next one builds anew.
    """
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f".{path.name}.lock")):
        if path.is_dir():
            return path
        for left in path.parent.glob(f".{path.name}-*"):
            shutil.rmtree(left)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            build(scratch)
            scratch.chmod(0o755)
            os.rename(scratch, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the system lets go of it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
