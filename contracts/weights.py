"""Digest of a set of weights, computed alike by the sender and by the engines that can."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def digest(checksums: Mapping[str, str]) -> str:
    """SHA-256 over the sorted `name=checksum` lines; `checksums` maps tensor name -> hex xxh3_128 of its bytes."""
    lines = "\n".join(f"{name}={checksums[name]}" for name in sorted(checksums))
    return hashlib.sha256(lines.encode()).hexdigest()
