"""What makes a process start sooner changes nothing else."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys

import pytest

from actors.startup import absent, uncollected


def test_collection_is_on_again_after_imports_even_after_one_that_failed() -> None:
    def failing() -> None:
        with uncollected():
            assert not gc.isenabled()
            importlib.import_module("no_such_module")

    with pytest.raises(ImportError):
        failing()
    assert gc.isenabled()
    gc.unfreeze()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_package_is_absent_inside_alone() -> None:
    program = (
        "import sys\n"
        "from actors.startup import lean\n"
        "with lean():\n"
        "    import redis.asyncio, structlog\n"
        "assert not any(name.split('.')[0] == 'rich' or name.startswith('opentelemetry.sdk') for name in sys.modules)\n"
        "import opentelemetry.sdk.metrics, rich.console\n"
        "print(structlog.get_logger() is not None)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


def test_a_package_that_is_there_stays() -> None:
    with absent("pytest"):
        assert importlib.import_module("pytest") is pytest
