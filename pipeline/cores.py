"""The deciding half of any actor by name, without its shell: no torch, no network, nothing to start."""

from __future__ import annotations

from typing import Any

from actors import registry
from actors.buffer.core import BufferCore
from actors.collector.core import CollectorCore
from actors.engine.core import EngineCore
from actors.gateway.core import GatewayCore
from actors.recorder.core import RecorderCore
from actors.refit.core import RefitCore
from actors.source.core import SourceCore
from actors.trainer.core import TrainerCore
from config.schema import RunConfig
from contracts.core import Core


def core_of(config: RunConfig, name: str) -> Core[Any]:
    """The core that the shell of actor `name` has. Raises `registry.UnknownActor` for a kind that no run has."""
    return _make(config, name)


def _make(config: RunConfig, name: str) -> Any:
    match registry.kind_of(name):
        case "source":
            return SourceCore(config, name)
        case "collector":
            return CollectorCore(config.rollout, name)
        case "buffer":
            return BufferCore(config)
        case "trainer":
            return TrainerCore(config)
        case "refit":
            return RefitCore(
                config.refit, config.engine, config.gateway, config.launch, config.fleet, name, config.trainer
            )
        case "engine":
            return EngineCore(name, config.engine, config.refit)
        case "gateway":
            return GatewayCore(name, config.gateway, config.refit)
        case "recorder":
            return RecorderCore(config.recorder, registry.names(config))
    raise registry.UnknownActor(f"no actor {name!r} in this run; it has {', '.join(registry.names(config))}")
