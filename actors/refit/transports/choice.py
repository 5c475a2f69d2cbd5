"""The sender that a configuration asks for."""

from __future__ import annotations

import torch

from actors.refit.transports import Sender
from actors.refit.transports.gloo import GlooSender
from actors.refit.transports.ipc import IpcSender
from config.schema import RunConfig


def sender(config: RunConfig) -> Sender:
    """Rank 0's end of `refit.transport`. Raises `RuntimeError` when this host can't do it."""
    host, bucket_bytes = config.network.host, int(config.refit.bucket_mib * 2**20)
    match config.refit.transport:
        case "ipc":
            return IpcSender(bucket_bytes, "shared" if config.engine.kind == "torch" else "pickle")
        case "nccl":
            from actors.refit.transports.nccl import NcclSender

            device = "cuda" if config.trainer.device == "auto" else config.trainer.device
            return NcclSender(host, bucket_bytes, torch.device(device))
        case "gloo":
            return GlooSender(host, bucket_bytes)


def settings(config: RunConfig) -> dict[str, str]:
    """What the environment says to the transport, for the log."""
    if config.refit.transport != "nccl":
        return {}
    from actors.refit.transports.nccl import environment

    return environment()
