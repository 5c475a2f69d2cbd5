"""Commands that a person can copy as they are printed, wherever this installation's `pipeline` is."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def command(*words: object) -> str:
    """`pipeline WORDS...`, quoted for a shell, and with the way to `pipeline` where PATH doesn't lead to this one."""
    return shlex.join([*_program(), *map(str, words)])


def _program() -> list[str]:
    typed, found = Path(sys.argv[0]), shutil.which("pipeline")
    if typed.parts[-2:] == ("pipeline", "__main__.py"):
        return [sys.executable, "-m", "pipeline"]
    if typed.name != "pipeline" or (found and typed.exists() and os.path.samefile(found, typed)):
        return ["pipeline"]
    return [sys.argv[0]]
