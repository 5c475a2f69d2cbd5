"""The real SGLang server, on the CPU. A missing environment fails this lane: it is never skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("SLUICE_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
"""The interpreter that has sglang; `make sglang` makes it."""


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """Path of an interpreter that can run the server."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is not there: run `make sglang`, or name another one in SLUICE_SGLANG_PYTHON")
    return str(PYTHON)
