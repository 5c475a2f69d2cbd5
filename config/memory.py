"""What a run needs of each GPU's memory, by number, as far as it is known before anything is loaded. Pure.

Left out: activations, and what libraries take. So a run that does not fit by this can't work; one that fits may not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from config import gpus
from config.schema import RunConfig, is_direct

GIB = 2**30
COPIES = 2
"""Frozen copies of the weights that the trainer keeps on its GPU."""
CONTEXT = GIB // 2
"""What CUDA itself takes for each process."""
LEAST_BUCKET = 16 * 2**20
"""How small an automatic bucket of a refit gets."""
BYTES = {"float32": 4, "bfloat16": 2}
Moment = Literal["a step", "a refit", "generation"]


class Model(msgspec.Struct, frozen=True):
    """`kv_values`: keys and values of one token, 0 if not known."""

    parameters: int
    kv_values: int = 0


class Part(msgspec.Struct, frozen=True):
    """Bytes of one GPU, of whom and what for."""

    name: str
    size: int


Needs = dict[Moment, dict[int, list[Part]]]


def needs(config: RunConfig, model: Model, free: Mapping[int, int]) -> Needs:
    """What is on each GPU at three moments that follow each other in a synchronous run, and mix otherwise.

    `free` bytes before the run, by GPU: SGLang's cache takes a part of what it finds.
    """
    found: Needs = {"a step": defaultdict(list), "a refit": defaultdict(list), "generation": defaultdict(list)}
    _trainer(config, model, found)
    for index in range(config.engine.count):
        _engine(config, model, index, free, found)
    return found


def fraction(args: Sequence[str]) -> float | None:
    """SGLang's --mem-fraction-static, where `engine.args` has it."""
    for place, word in enumerate(args):
        name, _, value = word.partition("=")
        if name == "--mem-fraction-static":
            value = value or (args[place + 1] if place + 1 < len(args) else "")
            try:
                return float(value)
            except ValueError:
                return None
    return None


def too_much(found: Needs, free: Mapping[int, int]) -> str | None:
    """The first GPU whose `free` bytes don't do, in words."""
    for moment, by_gpu in found.items():
        for gpu, parts in sorted(by_gpu.items()):
            total = sum(part.size for part in parts)
            if gpu in free and total > free[gpu]:
                listed = ", ".join(f"{part.name} {part.size / GIB:.1f}" for part in parts if part.size)
                return (
                    f"GPU {gpu} has {free[gpu] / GIB:.1f} GiB free, but {moment} needs {total / GIB:.1f} there "
                    f"without activations: {listed}"
                )
    return None


class _Share(NamedTuple):
    """Bytes that one rank of the trainer has of each; `reference` of the initial weights, for a KL term."""

    weights: int
    reference: int
    gradients: int
    optimizer: int


def _share(config: RunConfig, model: Model) -> _Share:
    """At the least, for megatron: what it pads, and vocabularies that two pipeline stages hold, are left out."""
    trainer, size = config.trainer, BYTES[config.model.dtype]
    again = 1 if trainer.loss.kl_coef else 0
    if trainer.backend == "torch":
        share = 4 * model.parameters // trainer.ranks
        return _Share(share, again * share, share, 2 * share)
    sizes = trainer.megatron
    part = model.parameters // max(sizes.tensor_parallel, sizes.expert_parallel)
    copies = 4 if size < 4 else 0  # what is float32 is optimized in place
    return _Share(size * part, again * size * part, 4 * part, (8 + copies) * model.parameters // trainer.ranks)


def _trainer(config: RunConfig, model: Model, found: Needs) -> None:
    """Pipeline stages are not told: they may be unlike each other."""
    trainer, places = config.trainer, gpus.of_trainer(config)
    if trainer.megatron.pipeline_parallel > 1:
        return
    megatron = trainer.backend == "megatron"
    sent = BYTES[config.model.dtype] * model.parameters
    share = _share(config, model)
    weights = share.weights + share.reference
    kept = 0 if trainer.offload == "all" else weights
    if trainer.offload == "none":
        kept += share.optimizer + (share.gradients if megatron else 0)
    whole = config.refit.transport == "ipc" and is_direct(config)
    laid_out = Part("buckets that the trainer lays out", sent_buckets(config) * _bucket(config, model))
    for rank, gpu in enumerate(places):
        own = [Part("trainer's frozen copies", COPIES * sent)] if rank == 0 else []
        own.append(Part("CUDA of the trainer", CONTEXT))
        buffer = [Part("the copy that engines read", sent)] if whole and rank == 0 else []
        between = [Part("trainer between steps", kept)] if kept else []
        step = [
            Part("trainer's weights", weights),
            Part("gradients", share.gradients),
            Part("optimizer", share.optimizer),
        ]
        found["a step"][gpu] += [*own, *buffer, *step]
        found["a refit"][gpu] += [*own, *buffer, *between, *([laid_out] if rank == 0 and laid_out.size else [])]
        found["generation"][gpu] += [*own, *buffer, *between]


def _engine(config: RunConfig, model: Model, index: int, free: Mapping[int, int], found: Needs) -> None:
    engine, places = config.engine, gpus.of_engine(config, index)
    size = BYTES[config.model.dtype]
    for gpu in places:
        weights = Part(f"weights of engine-{index}", size * model.parameters // len(places))
        cache = Part(f"cache of engine-{index}", _cache(config, model, gpu, weights.size, len(places), free))
        own = Part(f"CUDA of engine-{index}", CONTEXT)
        held = {"none": [weights, cache], "kv": [weights], "all": []}[engine.release]
        staged = Part(f"buckets that engine-{index} stages", staged_buckets(config) * _bucket(config, model))
        found["a step"][gpu] += [own, *held]
        found["a refit"][gpu] += [own, weights] if engine.release != "none" else [own, weights, cache]
        found["a refit"][gpu] += [staged] if staged.size else []
        found["generation"][gpu] += [own, weights, cache]


def sent_buckets(config: RunConfig) -> int:
    """That the trainer's rank 0 lays out on its GPU."""
    return 2 if config.refit.transport in ("nccl", "ipc") and not is_direct(config) else 0


def staged_buckets(config: RunConfig) -> int:
    """That each rank of an engine surely stages on its GPU: SGLang's own receiver every one twice.

    Ours stages what has to be cut for a rank, which is not known here. Memory that is opened needs none.
    """
    transport = config.refit.transport
    if transport == "ipc" or is_direct(config):
        return 0
    return 2 if config.engine.kind != "torch" else int(transport == "nccl")


def _bucket(config: RunConfig, model: Model) -> int:
    """At the least: one tensor may be larger."""
    set_size = config.refit.bucket_mib
    size = LEAST_BUCKET if set_size is None else int(set_size * 2**20)
    return min(size, BYTES[config.model.dtype] * model.parameters)


def _cache(config: RunConfig, model: Model, gpu: int, weights: int, ranks: int, free: Mapping[int, int]) -> int:
    """The least that it will be, should the trainer have loaded its model before: SGLang fits it to what is left."""
    part = fraction(config.engine.args)
    if part is None or gpu not in free:
        return 0
    size = BYTES[config.model.dtype]
    loaded = 0
    if gpu in gpus.of_trainer(config):
        loaded = _share(config, model).weights + COPIES * size * model.parameters
    wished = size * model.kv_values * config.engine.max_total_tokens // ranks
    return max(0, min(wished, int(part * (free[gpu] - loaded)) - weights))
