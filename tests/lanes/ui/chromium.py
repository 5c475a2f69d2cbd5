"""The browser that the lane uses: `python -m tests.lanes.ui.chromium` prints its path, or ends with exit code 1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 60.0


def find() -> str | None:
    """`SLUICE_CHROMIUM`, or the first on PATH that starts: some systems have one that only says what to install."""
    named = os.environ.get("SLUICE_CHROMIUM")
    candidates = [named] if named else [path for name in NAMES if (path := shutil.which(name))]
    return next((path for path in candidates if _starts(path)), None)


def _starts(path: str) -> bool:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=START_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


if __name__ == "__main__":
    found = find()
    if found is None:
        sys.exit(1)
    print(found)
