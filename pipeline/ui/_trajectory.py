"""One trajectory, token by token: text, log-probability, and the policy version that sampled it."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder import archive
from actors.recorder.actor import PAYLOADS, Payload
from actors.recorder.ordering import number
from contracts import trajectory as contract
from contracts.trajectory import Trajectory

TOKENS = 16_384
"""Most tokens of one sequence that are shown."""
CHUNK = 6
"""Tokens before one that its text may depend on."""


def archived(folder: Path, position: int) -> bytes | None:
    """The payload of the `position`-th event of the log; None if it is not in the archive.

    Raises `archive.ArchiveError` if that is damaged.
    """
    for entry in archive.read(folder, {PAYLOADS}, {PAYLOADS: position - 1}):
        if number(entry.entry) == position:
            return msgspec.msgpack.decode(entry.data, type=Payload).data
        if number(entry.entry) > position:
            break
    return None


def shown(data: bytes, tokenizer: Any | None) -> dict[str, Any]:
    """A trajectory for the page; without a tokenizer its tokens are their ids. Raises `TrajectoryError`."""
    found = contract.decode(data)
    return {**_facts(found), "sequences": [_sequence(each, tokenizer) for each in found.sequences]}


def _facts(found: Trajectory) -> dict[str, Any]:
    return {
        "task": found.task,
        "index": found.index,
        "sample": found.sample,
        "attempt": found.attempt,
        "reward": found.reward,
        "components": found.components,
        "mask_reason": found.mask_reason,
        "info": found.info,
    }


def _sequence(found: contract.Sequence, tokenizer: Any | None) -> dict[str, Any]:
    """`logprobs` is None and `mask` 0 where a token was not sampled."""
    ids = struct.unpack(f"<{found.length}i", found.ids)[:TOKENS]
    logprobs = struct.unpack(f"<{found.length}f", found.logprobs)[:TOKENS]
    sampled = [False] * len(ids)
    for span in found.spans:
        for at in range(span.start, min(span.end, len(ids))):
            sampled[at] = span.origin == "sampled"
    return {
        "length": found.length,
        "tokens": [str(id) for id in ids] if tokenizer is None else texts(ids, tokenizer),
        "ids": ids,
        "logprobs": [
            round(value, 4) if yes and math.isfinite(value) else None
            for value, yes in zip(logprobs, sampled, strict=True)
        ],
        "mask": list(found.loss_mask[:TOKENS]),
        "spans": [msgspec.to_builtins(span) for span in found.spans if span.start < len(ids)],
        "stop_reason": found.stop_reason,
        "temperature": found.sampling.temperature,
    }


def texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each token adds to what stands before it; a character of several tokens comes with the last."""
    found: list[str] = []
    start = 0
    for at in range(len(ids)):
        start = max(start, at - CHUNK)
        before = tokenizer.decode(ids[start:at], skip_special_tokens=False)
        whole = tokenizer.decode(ids[start : at + 1], skip_special_tokens=False)
        if whole.endswith("\ufffd"):
            found.append("")
            continue
        found.append(whole[len(before.rstrip("\ufffd")) :] if whole.startswith(before.rstrip("\ufffd")) else whole)
    return found


def load_tokenizer(source: str, params: dict[str, Any]) -> Any:
    """The run's tokenizer. Raises `ModelError` or OSError if its files are not here."""
    from tokenizers import Tokenizer

    from actors import models

    path = models.resolve(source, models.cache_dir(), params) / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(2, "no tokenizer", str(path))
    return Tokenizer.from_file(str(path))
