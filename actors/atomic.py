"""Files that are written whole: whoever reads one finds what it held before or all that it is to hold."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace `path`, or make it. With `durable` it is on disk when this returns, over a power failure too."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        if durable:
            sync(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Have what a file or a folder holds on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
