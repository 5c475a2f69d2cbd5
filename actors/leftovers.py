"""Files of this host that a killed process left behind: whoever lives holds a lock on what is its own.

Only the standard library is used here: the reaper runs this file by its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

SHARED = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
"""`contracts.handles.DIRECTORY`."""
BUCKET = "sluice-bucket-"
"""What the name of a bucket's file in `SHARED` begins with."""
MEETING = "sluice-offer-"
"""What the directory of a socket, under the directory for temporary files, begins with."""
LOADS = "sglang_loads_*.shm"
"""Files in `SHARED` in which a server of SGLang counts its load. It holds no lock on them, and leaves them behind."""
NEW = ".new-"
"""In front of a name until it is locked: nobody else looks at it before."""


class Claim:
    """A file or directory that is there, locked, as long as this process lives, or until `drop`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptors = [descriptor]

    @classmethod
    def file(cls, path: Path, size: int) -> Claim:
        """Make a file of `size` bytes that only this user may read. Raises `OSError`, also when there is no room."""
        made = path.with_name(f"{NEW}{path.name}")
        descriptor = os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # a full file system answers here, and not by a signal at the first write
            os.posix_fallocate(descriptor, 0, size)
            return cls._locked(made, path, descriptor)
        except BaseException:
            os.close(descriptor)
            made.unlink()
            raise

    @classmethod
    def directory(cls, path: Path) -> Claim:
        """Make a directory that only this user may enter. Raises `OSError`."""
        made = path.with_name(f"{NEW}{path.name}")
        made.mkdir(0o700)
        return cls._locked(made, path, os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    @classmethod
    def _locked(cls, made: Path, path: Path, descriptor: int) -> Claim:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.rename(path)
        return cls(path, descriptor)

    def drop(self) -> None:
        """Remove it; whoever has it open keeps it. From any thread, and more than once."""
        _remove(self.path)
        with contextlib.suppress(IndexError):
            os.close(self._descriptors.pop())


def sweep() -> list[Path]:
    """Remove what this user's processes made in `SHARED`, and for sockets, and did not live to remove."""
    found = [*SHARED.glob(f"{BUCKET}*"), *Path(tempfile.gettempdir()).glob(f"{MEETING}*"), *_unused(SHARED.glob(LOADS))]
    return [path for path in dict.fromkeys(found) if _left(path)]


def _unused(paths: Iterable[Path]) -> list[Path]:
    """Those that no process that can be seen has open; none without /proc."""
    left = {str(path) for path in paths}
    if not left or not Path("/proc/self/fd").is_dir():
        return []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    left.discard(os.readlink(folder / name))
    return [Path(name) for name in left]


def _left(path: Path) -> bool:
    """Remove `path` if it is ours and nobody claims it."""
    try:
        if path.lstat().st_uid != os.getuid():
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
