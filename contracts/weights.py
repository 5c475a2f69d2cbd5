"""Digest of a set of weights, computed alike by the sender and by the engines that can."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

Checksum = Literal["xxh3_128", "mix64"]
"""How the bytes of one tensor are summed up: mix64 is the one that a GPU computes in place."""


def digest(checksums: Mapping[str, str]) -> str:
    """SHA-256 over the sorted `name=checksum` lines; `checksums` maps tensor name -> hex checksum of its bytes."""
    lines = "\n".join(f"{name}={checksums[name]}" for name in sorted(checksums))
    return hashlib.sha256(lines.encode()).hexdigest()
