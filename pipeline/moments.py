"""A moment of a run, as a person names it: the n-th event, an event's id, a time, or seconds since the start."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec

from pipeline.errors import Exit, PipelineError

FORMS = (
    "an entry (1234 or 1234-0), an event's id (trainer:17.0), a time (2026-11-29T14:03:10Z) or +SECONDS since the start"
)

_SECONDS = re.compile(r"\d{1,12}(\.\d*)?|\.\d+", re.ASCII)


class Moment(msgspec.Struct, frozen=True):
    """Exactly one field is set. `after_s`: seconds since the run's first event; `at`: seconds since the Unix epoch."""

    position: int | None = None
    id: str | None = None
    at: float | None = None
    after_s: float | None = None

    def passed(self, position: int, id: str, wall: float, started: float) -> bool:
        """Whether an event lies behind this moment; the event that it names does not."""
        if self.position is not None:
            return position > self.position
        if self.at is not None:
            return wall > self.at
        if self.after_s is not None:
            return wall > started + self.after_s
        return False

    def time(self, started: float) -> float:
        """The time that it names. Raises `PipelineError` if it names an event instead."""
        if self.at is not None:
            return self.at
        if self.after_s is not None:
            return started + self.after_s
        raise PipelineError("a time is needed here: 2026-11-29T14:03:10Z, or +SECONDS since the start", Exit.USAGE)


def parse(text: str) -> Moment:
    """Read what a person wrote. Raises `PipelineError` naming the forms."""
    head = text.removesuffix("-0")
    if head.isascii() and head.isdigit():
        return Moment(position=int(head))
    if text.startswith("+"):
        if _SECONDS.fullmatch(text[1:]) is None:
            raise _unknown(text)
        return Moment(after_s=float(text[1:]))
    if ":" in text and "T" not in text:
        return Moment(id=text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise _unknown(text) from None
    return Moment(at=(at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())


def _unknown(text: str) -> PipelineError:
    return PipelineError(f"{text!r} names no moment: write {FORMS}", Exit.USAGE)
