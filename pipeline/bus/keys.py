"""Names of a run's keys. All share the hash tag `{run}`, so one script may touch any of them, also on Redis Cluster."""

from __future__ import annotations

import re

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Keys:
    """`sluice:{run}:<name>`. `run`: up to 128 letters, digits, dots, dashes, underscores; raises ValueError."""

    def __init__(self, run: str) -> None:
        if not _RUN.fullmatch(run):
            raise ValueError(
                f"run name {run!r}: use 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit"
            )
        self.prefix = f"sluice:{{{run}}}:"
        self.fences = f"{self.prefix}fences"
        """Hash: "<actor>/boot" -> boots so far, "<actor>/seq" -> last committed sequence number, "<actor>/reply" ->
        what its last commit was answered, for a repeated try."""
        self.cursors = f"{self.prefix}cursors"
        """Hash: "<actor>/<stream>" -> id of the last broadcast entry taken in."""
        self.registers = f"{self.prefix}registers"
        """Hash: name -> integer that only rises."""
        self.order = f"{self.prefix}order"
        """Counter of the events of the run: entry `<n>-0` of any stream is the n-th, so ids order the whole log."""
        self.tails = f"{self.prefix}tails"
        """Hash: key of a stream -> id of its last entry. Every entry names the one before it, in its field `p`."""
        self.released = f"{self.prefix}released"
        """Stream: entry `<n>-<k>` lists payloads that nobody needs once the log is archived up to its n-th event."""
        self.config = f"{self.prefix}config"
        """String: the run's configuration."""

    def stream(self, name: str) -> str:
        return self.prefix + name

    def journal(self, actor: str) -> str:
        """Stream `journal:<actor>`: entry `<seq>-0` is the record of that sequence number."""
        return f"{self.prefix}journal:{actor}"

    def snapshot(self, actor: str) -> str:
        """Hash {seq, state}."""
        return f"{self.prefix}snapshot:{actor}"

    def payload(self, id: str) -> str:
        return f"{self.prefix}payload:{id}"

    def dead(self, stream: str) -> str:
        """Dead-letter stream of a work stream."""
        return f"{self.prefix}dead:{stream}"
