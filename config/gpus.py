"""Which GPU every process of a run uses, by number on its host. Pure; nothing here looks at the machine."""

from __future__ import annotations

from config.schema import RunConfig


def number(device: str) -> int | None:
    """The GPU that a device names: `cuda` -> 0, `cuda:2` -> 2, anything else -> None."""
    kind, _, rest = device.partition(":")
    if kind != "cuda":
        return None
    return int(rest) if rest.isdigit() else 0


def of_trainer(config: RunConfig) -> tuple[int, ...]:
    """One GPU for each rank, in order; none if the trainer is not told to use GPUs."""
    first = number(config.trainer.device)
    return () if first is None else tuple(range(first, first + config.trainer.ranks))


def of_engine(config: RunConfig, index: int) -> tuple[int, ...]:
    """The GPUs of engine `index`: its share of `engine.gpus`, else what `engine.device` names; none on a CPU."""
    engine = config.engine
    first = number(engine.device)
    if first is None or engine.kind == "external":
        return ()
    if not engine.gpus:
        return (first,)
    if len(engine.gpus) == 1:
        return engine.gpus
    share = len(engine.gpus) // engine.count
    return engine.gpus[index * share : (index + 1) * share]


def colocated(config: RunConfig) -> bool:
    """Whether each engine is on a device of the trainer's: a GPU of its, or the CPU."""
    engines = [of_engine(config, index) for index in range(config.engine.count)]
    if not any(engines):
        return config.engine.device == "cpu" and number(config.trainer.device) is None
    trainers = set(of_trainer(config))
    return all(share and trainers.intersection(share) for share in engines)


def of_engines(config: RunConfig) -> tuple[int, ...]:
    """Every GPU that an engine uses, each once, in order."""
    return tuple(sorted({gpu for index in range(config.engine.count) for gpu in of_engine(config, index)}))
