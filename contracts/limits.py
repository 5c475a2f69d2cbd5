"""How large things may be, in bytes. Whoever makes them cuts or refuses them by name; the bus checks all again."""

from __future__ import annotations

ENTRY = 8 << 20
"""One entry of a stream, or one journal record. A commit has 64 of either at most: under Redis' 1 GiB a request."""
PAYLOAD = 64 << 20
"""One payload beside the stream, before it is compressed."""
SNAPSHOT = 256 << 20
"""The state of one actor; Redis takes 512 MiB."""

TASK = 2 << 20
"""A producer's task: id, cursor and payload as JSON. Each actor that has it in hand keeps it in its state."""
TASKS = 128 << 20
"""Tasks that one actor keeps in its state: half of it."""
TASK_ID = 512
"""Id of a task; many events repeat it."""
FETCH = 1 << 20
"""Tasks taken from a producer at a time: no more once they have so many together."""
HELD_OUT = 64 << 20
"""All tasks of one held-out evaluation."""

_HEAD, _GROUP, _SAMPLE = 1024, 56, 128
"""Bytes of a batch's envelope, of a group beside its task's id, and of a sample, with the longest numbers and names."""


def batch(groups: int, samples: int) -> int:
    """Most bytes of a `batch.ready` with so many groups of so many samples each."""
    return _HEAD + groups * (_GROUP + TASK_ID + samples * _SAMPLE)


def groups(samples: int) -> int:
    """Most groups of so many samples that a batch may have."""
    return (ENTRY - _HEAD) // (_GROUP + TASK_ID + samples * _SAMPLE)
