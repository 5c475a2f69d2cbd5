"""Stands in for a process that has nothing to do: waits until its parent, who holds its stdin, has ended."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    while sys.stdin.buffer.read(4096):
        pass
