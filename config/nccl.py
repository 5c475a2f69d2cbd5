"""NCCL's settings that a refit's ranks have to share. Pure: whoever asks brings its environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from config.schema import RunConfig

AGREE = (
    *("NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CUMEM_ENABLE", "NCCL_IB_DISABLE", "NCCL_MAX_NCHANNELS"),
    *("NCCL_MIN_NCHANNELS", "NCCL_NET", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO"),
    "NCCL_SHM_DISABLE",
)
"""A communicator whose ranks differ in one of these may fail, or hang."""
NEVER_ENDED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Keeps torch from ending a process whose collective failed: it is aborted, and the process goes on."""


def defaults(config: RunConfig) -> dict[str, str]:
    """What trainer and engines get where the environment says nothing: what SGLang would set for itself."""
    symmetric = int("--enable-symm-mem" in config.engine.args)
    nvls = int(symmetric or "--enable-nccl-nvls" in config.engine.args)
    return {"NCCL_CUMEM_ENABLE": str(symmetric), "NCCL_NVLS_ENABLE": str(nvls), **NEVER_ENDED}


def aligned(config: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Of `defaults`, what a process of this environment gets: its own where it has one. Nothing without NCCL."""
    if config.refit.transport != "nccl":
        return {}
    return {name: environment.get(name, value) for name, value in defaults(config).items()}


def told(environment: Mapping[str, str]) -> tuple[str, ...]:
    """What ranks have to agree on, as `NAME=value`, for events."""
    return tuple(f"{name}={environment[name]}" for name in AGREE if name in environment)


def of_server(config: RunConfig, environment: Mapping[str, str]) -> tuple[str, ...]:
    """`told` of the server that an engine actor starts in its environment; nothing where that isn't known.

    SGLang's flags for NVLS and symmetric memory go before its environment.
    """
    if config.refit.transport != "nccl" or config.engine.kind == "external":
        return ()
    forced = {name: value for name, value in defaults(config).items() if value == "1"}
    return told({**environment, **aligned(config, environment), **forced})


def differing(mine: Sequence[str], trainers: Sequence[str]) -> str:
    """In words, where two `told` differ; empty where they don't, or where one isn't known."""
    if not mine or not trainers:
        return ""
    here, there = _parsed(mine), _parsed(trainers)
    names = [name for name in AGREE if here.get(name) != there.get(name)]
    return ", ".join(
        f"{n} is {here.get(n, 'not set')} here and {there.get(n, 'not set')} at the trainer" for n in names
    )


def _parsed(lines: Iterable[str]) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition("=") for line in lines)}
