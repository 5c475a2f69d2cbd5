"""Exit codes of the command line, and the error that carries one. Listed for users in docs/reference/cli.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """What the command `pipeline` answers to its caller."""

    DONE = 0
    FAILED = 1
    """The run, or what the command was asked to check, failed."""
    USAGE = 2
    """Wrong arguments, an unknown recipe or run, or a configuration that was refused."""
    BROKER = 3
    """No store: REDIS_URL can't be reached or is too old, the embedded broker did not start, or it takes no writes."""
    START = 4
    """No refit was committed before launch.start_deadline_s."""
    MISSING = 5
    """Something that the run needs is not there: a model, a package, a path, a free port."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM; the run can be resumed."""


class PipelineError(Exception):
    """Ends a command with `code`; the message says what happened and what to do."""

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Around what writes a file or folder that the user named: a place that takes none ends the command."""
    try:
        yield
    except OSError as error:
        raise PipelineError(f"{target} can't be written: {error.strerror}", Exit.USAGE) from error
