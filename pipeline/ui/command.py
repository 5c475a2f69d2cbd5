"""The command `pipeline ui`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import webbrowser

import click

from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir, config_of
from pipeline.ui import _server


def run(directory: RunDir, host: str, port: int | None, *, show: bool) -> None:
    """Serve a run until SIGINT or SIGTERM. Raises `PipelineError` if the address can't be had."""
    if not host or any(letter in host for letter in "/ @"):
        raise PipelineError(
            f"--host {host!r} is no address: write an address of this machine, such as 127.0.0.1", Exit.USAGE
        )
    config = config_of(directory)

    def ready(address: str) -> None:
        click.echo(f"{directory.path.name} at {address} (Ctrl-C ends it)")
        if not _server.is_loopback(host):
            click.echo("whoever reaches this address can read the run's prompts and answers", err=True)
        if show:
            webbrowser.open(address)

    async def serve() -> None:
        task = asyncio.ensure_future(_server.serve(directory, config, host, port, ready))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(serve())
