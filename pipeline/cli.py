"""The command `pipeline`. Exit codes are those of `pipeline.errors.Exit`.

The commands are in `pipeline.commands`. Whatever one needs is imported when it runs, so that `--help` and bad usage
answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

import click

from pipeline.commands import extending, letters, looking, running
from pipeline.errors import Exit, PipelineError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a place that takes no more: a disk, a quota, a limit of the shell."""


class Commands(click.Group):
    """Ends a command with the code and the message of its `PipelineError`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PipelineError as error:
            click.echo(f"pipeline: {error}", err=True)
            raise click.exceptions.Exit(error.code) from error
        except OSError as error:
            if error.errno not in FULL:
                raise
            click.echo(f"pipeline: {error.filename or 'the output'} can't be written: {error.strerror}", err=True)
            _drop_output()
            raise click.exceptions.Exit(Exit.FAILED) from error
        except KeyboardInterrupt as error:
            raise click.exceptions.Exit(Exit.INTERRUPTED) from error


def _drop_output() -> None:
    """What standard output still holds can't be written either, and would only fail once more at the exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())
    os.close(null)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Asynchronous reinforcement learning of language models, driven by events.

    RUN is a run directory, the name of one under runs/, or left out for the newest.
    """
    _check_installation()
    _printable()


def _printable() -> None:
    """What the terminal's encoding has no sign for, such as the bars of a panel, becomes a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


def _check_installation() -> None:
    """A stray config.py beside the caller must not stand in for our packages. Raises `PipelineError` naming it."""
    from importlib.util import find_spec

    ours = Path(__file__).resolve().parent.parent
    for package in ("contracts", "actors", "config"):
        spec = find_spec(package)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin != ours / package / "__init__.py":
            raise PipelineError(
                f"the package {package!r} resolves to {origin or 'nothing'}, not to this installation in {ours}: "
                "rename that file, run from another directory, or set PYTHONSAFEPATH=1",
                Exit.MISSING,
            )


COMMANDS = (
    running.up,
    running.recipes,
    running.actor,
    running.simulate,
    running.scale,
    running.chaos,
    looking.log,
    looking.verify,
    looking.why,
    looking.replay,
    looking.diff,
    looking.ui,
    looking.top,
    looking.trace,
    looking.export,
    looking.bundle,
    looking.report,
    letters.dead,
    extending.producers,
    extending.new,
    extending.version,
)
for _command in COMMANDS:
    main.add_command(_command)
