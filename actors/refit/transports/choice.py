"""The sender that a configuration asks for."""

from __future__ import annotations

from actors.refit.transports import Sender
from actors.refit.transports.gloo import GlooSender
from actors.refit.transports.ipc import IpcSender
from config.schema import RunConfig


def sender(config: RunConfig) -> Sender:
    """Rank 0's end of `refit.transport`."""
    bucket_bytes = int(config.refit.bucket_mib * 2**20)
    if config.refit.transport == "ipc":
        return IpcSender(bucket_bytes, "shared" if config.engine.kind == "torch" else "pickle")
    return GlooSender(config.network.host, bucket_bytes)
