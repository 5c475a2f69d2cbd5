"""`pipeline replay`: from options to lines and an exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from config.schema import RunConfig
from pipeline import moments
from pipeline.errors import Exit, PipelineError
from pipeline.replay import show, telling
from pipeline.replay.index import Index
from pipeline.replay.proof import check_run
from pipeline.replay.recorded import Recorded
from pipeline.replay.sought import open_course
from pipeline.replay.states import plain
from pipeline.replay.whatif import what_if
from pipeline.rundir import RunDir, config_of

LATER_S = 60.0
"""How much later an event comes with --delay, unless --by says."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The options as they were given."""

    until: str | None = None
    actor: str | None = None
    steps: int | None = None
    other: str | None = None
    check: bool = False
    drop: str | None = None
    delay: str | None = None
    by_s: float | None = None
    as_json: bool = False


def run(directory: RunDir, how: Request, note: Callable[[str], None]) -> tuple[Exit, Iterable[str]]:
    """Do what was asked; `note` is told what a person should know of besides.

    Raises `PipelineError` for options that do not go together, and for a damaged archive, also while lines are taken.
    """
    modes = [name for name in ("steps", "other", "drop", "delay") if getattr(how, name) is not None]
    modes += ["check"] if how.check else []
    if len(modes) > 1:
        names = " and ".join(f"--{'step' if m == 'steps' else 'diff' if m == 'other' else m}" for m in modes)
        raise PipelineError(f"{names} are different questions: ask one at a time", Exit.USAGE)
    if how.by_s is not None and how.delay is None:
        raise PipelineError("--by says how much later an event comes: give that event with --delay", Exit.USAGE)
    whole = [f"--{mode}" for mode in modes if mode in ("check", "drop", "delay")]
    if how.until is not None and whole:
        raise PipelineError(f"{whole[0]} goes over the whole run: leave out --until", Exit.USAGE)
    config = config_of(directory)
    if not modes or how.steps is not None or how.other is not None:
        return Exit.DONE, _look(directory, config, how, note)
    if how.check:
        index = Index(directory)
        verdict = check_run(directory, config, index, how.actor)
        _close(index, note)
        code = Exit.FAILED if verdict.divergences else Exit.DONE
        return code, [_json(verdict)] if how.as_json else show.verdict(verdict)
    recorded = Recorded.read(directory, config, how.actor)
    by_s = None if how.delay is None else LATER_S if how.by_s is None else how.by_s
    found = what_if(recorded, how.drop or how.delay or "", by_s)
    return Exit.DONE, map(_json, found) if how.as_json else show.other_courses(found)


def _look(directory: RunDir, config: RunConfig, how: Request, note: Callable[[str], None]) -> Iterator[str]:
    index = Index(directory)
    course = open_course(directory, config, index, how.actor)
    place = course.log.place(moments.parse(how.until) if how.until else None)
    tell = telling.JSON if how.as_json else telling.WORDS
    if how.other is not None:
        yield from show.between(course, place, course.log.place(moments.parse(how.other)), how.actor, tell)
    elif how.steps is not None:
        yield from show.steps(course, place, how.actor, how.steps, tell)
    elif how.as_json:
        yield from (_json({name: state}) for name, (_, state) in course.states_at(place, how.actor).items())
    else:
        yield from show.moment(course, place, how.actor)
    _close(index, note)


def _close(index: Index, note: Callable[[str], None]) -> None:
    index.save()
    for line in index.notes:
        note(line)


def _json(value: Any) -> str:
    return msgspec.json.encode(plain(value)).decode()
