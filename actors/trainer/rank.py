"""A rank of the policy beside the trainer's own, in a process of its own: `python -m actors.trainer.rank`.

Orders come on standard input, replies go to standard output. The process ends when its trainer does, however that
ended: a thread waits for the end of standard input, also while a collective holds everything else.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import Any

from actors.trainer import backend, orders

ORPHANED = 3
"""Exit status of a rank whose trainer is gone."""


def main() -> None:
    """Carry out orders, for as long as there is a trainer to give them."""
    # Libraries print to standard output: that goes where errors go, and replies keep a handle of their own.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    todo: queue.SimpleQueue[orders.Order] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(todo,), name="orders", daemon=True).start()
    part: Any = None
    while True:
        order = todo.get()
        try:
            part = carry_out(part, order)
        except Exception as error:
            orders.send(replies, orders.Failed(f"{type(error).__name__}: {error}"))
            raise
        orders.send(replies, orders.Done())


def carry_out(part: Any, order: orders.Order) -> Any:
    """Do what is ordered with this rank's part of the policy; answers the part."""
    from pathlib import Path

    match order:
        case orders.Build(job, world):
            return backend.part(job, world)
        case orders.Step(samples):
            part.train_step(orders.unpacked(samples))
        case orders.Score(samples):
            part.logprobs(orders.unpacked(samples))
        case orders.Export():
            for _ in part.export():
                pass
        case orders.Save(path):
            part.save(Path(path), {})
        case orders.Load(path):
            part.load(Path(path))
    return part


def _listen(todo: queue.SimpleQueue[orders.Order]) -> None:
    """Queue what comes on standard input; with its end the process ends at once."""
    while True:
        try:
            order = orders.orders(sys.stdin.buffer)
        except EOFError:
            os._exit(ORPHANED)
        todo.put(order)


if __name__ == "__main__":
    main()
