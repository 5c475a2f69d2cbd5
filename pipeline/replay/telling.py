"""Steps and changes of state, in words or as JSON: one object a line, with whole values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from contracts.core import Delivered, Emit
from contracts.events import kind
from pipeline.replay.states import changes, command, differences, plain
from pipeline.replay.tracks import describe
from pipeline.runtime.journal import Record


class Telling(msgspec.Struct, frozen=True):
    """One way to tell. `step`: of an actor, its record, input and commands, and the states before and after it.

    `change`: of an actor, how many inputs it had taken at two moments, and its states then."""

    step: Callable[[str, Record, Any, Sequence[Any], Any, Any], Iterator[str]]
    change: Callable[[str, tuple[int, int], Any, Any], Iterator[str]]


def clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _step_in_words(
    actor: str, record: Record, input: Any, commands: Sequence[Any], before: Any, after: Any
) -> Iterator[str]:
    yield f"{actor} step {record.seq} at {clock(record.now)}: {describe(input)}"
    yield from (f"  does {command(each)}" for each in commands)
    yield from (f"  state {line}" for line in differences(plain(before), plain(after)))


def _change_in_words(actor: str, counts: tuple[int, int], before: Any, after: Any) -> Iterator[str]:
    changed = list(differences(plain(before), plain(after)))
    if changed:
        yield f"{actor}: inputs {counts[0]} to {counts[1]}"
        yield from (f"  {line}" for line in changed)


def _step_as_json(
    actor: str, record: Record, input: Any, commands: Sequence[Any], before: Any, after: Any
) -> Iterator[str]:
    yield _json(
        {
            "actor": actor,
            "step": record.seq,
            "at": clock(record.now),
            "input": _input(input),
            "commands": list(map(_command, commands)),
            "changes": list(changes(plain(before), plain(after))),
        }
    )


def _change_as_json(actor: str, counts: tuple[int, int], before: Any, after: Any) -> Iterator[str]:
    changed = list(changes(plain(before), plain(after)))
    if changed:
        yield _json({"actor": actor, "inputs": counts, "changes": changed})


def _input(input: Any) -> dict[str, Any]:
    """An event with where it came from, or what the actor itself or its runtime put in."""
    if not isinstance(input, Delivered):
        return {"kind": describe(input), "body": plain(input)}
    envelope = input.envelope
    place = {"id": envelope.id, "entry": input.ref.entry, "deliveries": input.deliveries}
    return {"kind": kind(envelope.body), **place, "body": plain(envelope.body)}


def _command(command: Any) -> dict[str, Any]:
    if isinstance(command, Emit):
        return {"command": "emit", "kind": kind(command.event), "body": plain(command.event)}
    return {"command": type(command).__name__, "body": plain(command)}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


WORDS = Telling(_step_in_words, _change_in_words)
JSON = Telling(_step_as_json, _change_as_json)
