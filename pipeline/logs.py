"""Structured logging: JSON lines in the run directory, readable lines on a terminal, no secrets in either."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import MutableMapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

import structlog

CONSOLE = "SLUICE_CONSOLE"
"""Environment variable: `none` keeps a process from logging to stderr, `auto` (default) is readable on a terminal and
JSON lines elsewhere."""

LOG_BYTES = 32 << 20
"""Most bytes of a log file, before it becomes the older one of two."""

_CREDENTIALS = re.compile(r"(\w+://[^/\s:@]*):[^\s/]*@")
_QUERY = re.compile(r"([?&](?:password|token)=)[^&\s]+", re.IGNORECASE)


def redact(text: str) -> str:
    """`redis://user:secret@host` -> `redis://user:***@host`."""
    return _QUERY.sub(r"\1***", _CREDENTIALS.sub(r"\1:***@", text))


class _Console(logging.StreamHandler[TextIO]):
    """Whoever read along may leave (`| head -1`): the run goes on, and what it says is in its file."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
            return
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)


class _File(RotatingFileHandler):
    """On a disk that is full the console tells what matters."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def configure(run_dir: Path | None, actor: str, *, console: bool | None = None, stream: TextIO | None = None) -> None:
    """Send structlog and the standard library's loggers to `logs/<actor>.jsonl` of the run and to the console.

    A file has at most `LOG_BYTES`; those before are in `<actor>.jsonl.1`. `console` defaults to what `SLUICE_CONSOLE`
    says, `stream` to stderr. May be called again: earlier handlers are replaced.
    """
    if console is None:
        console = os.environ.get(CONSOLE, "auto") != "none"
    output: TextIO = sys.stderr if stream is None else stream
    handlers: list[logging.Handler] = []
    if run_dir is not None:
        path = Path(run_dir) / "logs" / f"{actor}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _File(path, maxBytes=LOG_BYTES, backupCount=1, delay=True)
        handlers.append(_handler(file, json=True))
    if console:
        handlers.append(_handler(_Console(output), json=not output.isatty()))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    for handler in handlers or [logging.NullHandler()]:
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=False,
    )


def _shared() -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _handler(handler: logging.Handler, *, json: bool) -> logging.Handler:
    if json:
        render: list[Any] = [structlog.processors.format_exc_info, _redact, _order, structlog.processors.JSONRenderer()]
    else:
        render = [_redact, structlog.dev.ConsoleRenderer()]
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_shared(), structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    return handler


def _redact(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        event[key] = _clean(value)
    return event


def _order(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """When, how grave and what come first."""
    first = {key: event[key] for key in ("timestamp", "level", "event") if key in event}
    return {**first, **event}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
