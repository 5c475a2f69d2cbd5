"""Reads a run's log from its beginning, follows it while it is live, and hands every event to the sinks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from threading import Event, Lock
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from actors.recorder import archive
from actors.recorder.metrics import Row
from actors.recorder.ordering import number
from config.schema import RunConfig
from contracts.envelope import Envelope
from contracts.events import Event as Happened
from pipeline import eventlog
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir
from pipeline.top.board import Board

LOOK_S = 60.0
"""A signal ends the wait for it at once; it begins anew so often."""


class Sink(Protocol):
    """Takes every event of the log once; `row` is that of a step which the event finished."""

    def take(self, envelope: Envelope[Happened], row: Row | None) -> None: ...

    def close(self) -> None: ...


class Targets(msgspec.Struct, frozen=True):
    """Where to export to. `prometheus`: `PORT` or `HOST:PORT`; `otlp`: base URL; `wandb`: a project."""

    prometheus: str | None = None
    otlp: str | None = None
    wandb: str | None = None


def run(directory: RunDir, config: RunConfig, targets: Targets, say: Callable[[str], None]) -> int:
    """Export until the run has finished, or its archive ends; answers how many events were read.

    Of a run that was over before, figures are served for Prometheus until SIGINT or SIGTERM.

    Raises `PipelineError` for a target that is malformed, can't be served, or lacks its package, and at the end for a
    collector that refused something.
    """
    board, lock = Board(), Lock()
    over = not (directory.driven() or archive.has_writer(directory.events))
    with ExitStack() as opened:
        sinks = _open(directory.info().run, config, targets, board, lock, say, opened, over=over)
        for entry, envelope in eventlog.follow(directory):
            with lock:
                rows = board.extend(eventlog.gathered([(entry, envelope, number(entry.entry))]))
            for sink in sinks:
                sink.take(envelope, rows[0] if rows else None)
    return board.model.events


def _open(
    run: str,
    config: RunConfig,
    targets: Targets,
    board: Board,
    lock: Lock,
    say: Callable[[str], None],
    opened: ExitStack,
    *,
    over: bool,
) -> Sequence[Sink]:
    """The sinks; `opened` closes them, also when a later one can't be had. `over`: nobody goes on with the run."""
    sinks: list[Sink] = []
    try:
        if targets.prometheus is not None:
            host, port = address(targets.prometheus)
            from pipeline.export.prometheus import Prometheus

            served = Prometheus(run, board, lock, host, port, live=not over)
            say(f"prometheus: {served.url}")
            sinks.append(opened.enter_context(closing(served)))
            if over:
                opened.push(partial(_serve, say))  # it is left behind all others, which end with the archive
        if targets.otlp is not None:
            base = endpoint(targets.otlp)
            from pipeline.export.otlp import Otlp

            say(f"otlp: {base}/v1/metrics and {base}/v1/traces")
            sinks.append(opened.enter_context(closing(Otlp(run, board, lock, base))))
        if targets.wandb is not None:
            from pipeline.export.tracking import WandB

            tracked = WandB(run, targets.wandb, msgspec.to_builtins(config))
            say(f"wandb: {tracked.url}")
            sinks.append(opened.enter_context(closing(tracked)))
    except ModuleNotFoundError as error:
        raise PipelineError(
            f"the package {error.name!r} is not installed: pip install 'sluice-rl[export]' (wandb: pip install wandb)",
            Exit.MISSING,
        ) from error
    if not sinks:
        raise PipelineError("nowhere to export to: give --prometheus, --otlp or --wandb", Exit.USAGE)
    return sinks


def _serve(say: Callable[[str], None], failed: type[BaseException] | None, *_: object) -> None:
    """Wait for SIGINT or SIGTERM, unless something failed."""
    if failed is not None:
        return
    stop = Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        say("the archive is read, its last figures are served until Ctrl-C")
        while not stop.wait(LOOK_S):
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def address(text: str) -> tuple[str, int]:
    """`PORT` at loopback, or `HOST:PORT`. Raises `PipelineError`."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or not 0 <= int(port) < 65536:
        raise PipelineError(f"--prometheus {text!r}: write PORT or HOST:PORT, PORT from 0 to 65535", Exit.USAGE)
    return host.strip("[]") or "127.0.0.1", int(port)


def endpoint(text: str) -> str:
    """The base URL of a collector, without a slash at its end. Raises `PipelineError`."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PipelineError(f"--otlp {text!r}: write a base URL such as http://127.0.0.1:4318", Exit.USAGE)
    return text.rstrip("/")
