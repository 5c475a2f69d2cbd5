"""What makes a process start sooner."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import inside: modules are never garbage, and collecting meanwhile costs a sixth of the import.

    What was allocated is left out of later collections too. Does nothing where collection is off already.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def rarely_collected() -> None:
    """For a process with much in flight that is freed by its references: cycles are looked for a fifteenth as often.

    The interpreter's own pace cost a gateway with 512 requests in flight a tenth of its CPU, and found next to nothing.
    """
    gc.set_threshold(10_000, 20, 20)


@contextlib.contextmanager
def absent(package: str) -> Iterator[None]:
    """Import inside what uses `package` if it is there, and does without if not.

    structlog imports rich for tracebacks on a terminal, half of its own time; an actor's log is a file of JSON lines.
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Import an actor's modules inside: `uncollected`, and without packages that its libraries only use if they can.

    Besides rich for structlog that is OpenTelemetry's SDK for redis, a third of whose import it is.
    """
    with uncollected(), absent("rich"), absent("opentelemetry.sdk"):
        yield
