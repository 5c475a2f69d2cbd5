"""A directory that several processes may build at the same time, and that is there whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """Answer `path`, filled by `build(scratch)` unless it exists already.

    Each caller builds in a directory of its own and renames it; the first rename wins, the others' work is dropped.
    """
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        build(scratch)
        scratch.chmod(0o755)
        os.rename(scratch, path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not path.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path
