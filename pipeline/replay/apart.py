"""Work shared out to processes of this machine: forks, which know all that this process knows and answer bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

from pipeline.errors import Exit, PipelineError

END_S = 10.0
"""How long a process may take to be gone once it has answered, or closed its end. None outlives this one."""

Key = TypeVar("Key")
Work = Callable[[], bytes]


class Answer(msgspec.Struct, frozen=True):
    """What a process answers. `refused`: what it raised as a `PipelineError`."""

    data: bytes = b""
    refused: str | None = None


def hands(work: int, least: int) -> int:
    """How many processes so much work is worth, this one included, if less than `least` is not worth another.

    One where other threads run: what they hold at a fork stays held in the child.
    """
    return len(os.sched_getaffinity(0)) if work >= least and threading.active_count() == 1 else 1


def shared(sizes: Mapping[Key, int], groups: int) -> list[list[Key]]:
    """The keys in so many groups at most, of about the same size each; the largest keys first."""
    dealt: list[list[Key]] = [[] for _ in range(max(1, min(groups, len(sizes))))]
    totals = [0] * len(dealt)
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        place = totals.index(min(totals))
        dealt[place].append(key)
        totals[place] += sizes[key]
    return [group for group in dealt if group]


def side_by_side(works: Sequence[Work]) -> list[bytes]:
    """What each work answers; the first is done here, each other one by a fork.

    Raises `PipelineError` if a work does, or if a process ends without an answer.
    """
    context = get_context("fork")
    others = []
    for work in works[1:]:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_do, args=(work, theirs), daemon=True)
        process.start()
        theirs.close()
        others.append((process, ours))
    found = [work() for work in works[:1]]
    for process, ours in others:
        try:
            answer = msgspec.msgpack.decode(ours.recv_bytes(), type=Answer)
        except EOFError:
            process.join(END_S)
            text = f"a process that took part ended (exit code {process.exitcode}): was there memory enough?"
            raise PipelineError(text, Exit.FAILED) from None
        process.join(END_S)
        if answer.refused is not None:
            raise PipelineError(answer.refused, Exit.FAILED)
        found.append(answer.data)
    return found


def _do(work: Work, answer: Connection) -> None:
    try:
        found = Answer(work())
    except PipelineError as error:
        found = Answer(refused=str(error))
    answer.send_bytes(msgspec.msgpack.encode(found))
