"""The sender that a configuration asks for."""

from __future__ import annotations

import os

import torch

from actors.refit.transports import Sender, staging
from actors.refit.transports.gloo import GlooSender
from actors.refit.transports.ipc import IpcSender
from config import nccl
from config.schema import RunConfig, is_direct


def sender(config: RunConfig) -> Sender:
    """Rank 0's end of `refit.transport`. Raises `RuntimeError` when this host can't do it."""
    host, size, apart = config.network.host, bucket_bytes(config), is_direct(config)
    needs = staging.of(config)
    match config.refit.transport:
        case "ipc":
            form = "shared" if config.engine.kind == "torch" else "direct" if apart else "pickle"
            return IpcSender(size, form, needs)
        case "nccl":
            from actors.refit.transports.nccl import NcclSender

            device = "cuda" if config.trainer.device == "auto" else config.trainer.device
            for name, value in nccl.aligned(config, os.environ).items():
                os.environ.setdefault(name, value)
            return NcclSender(host, size, torch.device(device), apart, needs)
        case "gloo":
            return GlooSender(host, size, apart, needs)


def bucket_bytes(config: RunConfig) -> int | None:
    """`refit.bucket_mib` in bytes; None leaves it to the sender."""
    return None if config.refit.bucket_mib is None else int(config.refit.bucket_mib * 2**20)


def settings(config: RunConfig) -> dict[str, str]:
    """What the environment says to the transport, for the log."""
    if config.refit.transport != "nccl":
        return {}
    from actors.refit.transports.nccl import environment

    return environment()
