"""Settings that are fine alone and contradict each other, or that this machine has no room for: what to say of them."""

from __future__ import annotations

import re

from config import gpus
from config.schema import MegatronConfig, RunConfig, TrainerConfig
from contracts import limits

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a run may be called: it becomes part of keys and paths."""

Rule = tuple[bool, str]
"""Whether it holds, and what to say if not."""


def across_fields(config: RunConfig) -> list[str]:
    """Settings that are fine alone and contradict each other."""
    rules = [
        (
            NAME.fullmatch(config.name) is not None,
            f"name={config.name!r}: use 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit",
        ),
        (
            config.launch.mode == "ray" or config.launch.ray_address is None,
            f"launch.ray_address={config.launch.ray_address} is for launch.mode=ray: with external, Ray starts nothing",
        ),
        *_refit(config),
        *_engines(config),
        *_rollouts(config),
        *_buffer(config),
        *_trainer(config),
        *_sizes(config),
        *_ranks(config.trainer),
        *_gpus(config),
        *_memory(config),
    ]
    return [problem for holds, problem in rules if not holds]


def _refit(config: RunConfig) -> list[Rule]:
    """When a barrier may run, and how weights travel."""
    refit, engine, trainer, staleness = config.refit, config.engine, config.trainer, config.staleness
    return [
        (
            refit.drain_deadline_s < refit.deadline_s,
            f"refit.drain_deadline_s={refit.drain_deadline_s:g} must be under refit.deadline_s={refit.deadline_s:g}: "
            "draining is a part of the refit",
        ),
        (
            refit.drain != "in_flight" or engine.kind == "torch",
            f"refit.drain=in_flight needs engine.kind=torch, but the kind is {engine.kind}: such a server does not say "
            "which version sampled which token of an answer; use interrupt, which goes on after the commit, or finish",
        ),
        (
            refit.drain != "in_flight" or refit.verify != "probe",
            "refit.verify=probe generates before the commit, which refit.drain=in_flight can't allow while requests "
            "are held on the engine: use refit.verify=digest",
        ),
        (
            refit.verify != "fleet" or engine.count > 1,
            f"refit.verify=fleet compares engines with each other, but engine.count={engine.count} leaves nothing to "
            "compare: use digest, or more engines",
        ),
        (
            refit.transport != "nccl" or "cpu" not in (trainer.device, engine.device),
            f"refit.transport=nccl is for GPUs, but trainer.device={trainer.device} and engine.device={engine.device}: "
            "use gloo, or ipc on one host",
        ),
        (
            refit.every <= staleness + 1,
            f"refit.every={refit.every} must not exceed buffer.max_staleness + 1 = {staleness + 1}: "
            "what the next steps train on would be too stale before the engines get new weights",
        ),
    ]


def _engines(config: RunConfig) -> list[Rule]:
    """Who starts the servers."""
    engine = config.engine
    return [
        (
            engine.kind == "external" or not engine.urls,
            f"engine.urls is for engine.kind=external, but the kind is {engine.kind}",
        ),
        (
            engine.kind != "external" or len(engine.urls) == engine.count,
            f"engine.kind=external needs one URL an engine: engine.count={engine.count}, "
            f"engine.urls has {len(engine.urls)}",
        ),
    ]


def _rollouts(config: RunConfig) -> list[Rule]:
    """What a rollout is held to."""
    rollout = config.rollout
    return [
        (
            rollout.score_deadline_s <= rollout.deadline_s,
            f"rollout.score_deadline_s={rollout.score_deadline_s:g} must not exceed "
            f"rollout.deadline_s={rollout.deadline_s:g}: scoring is a part of the rollout",
        ),
        *[
            (
                _compiles(pattern),
                f"rollout.invalid_tool_call_patterns: {pattern!r} is no regular expression",
            )
            for pattern in rollout.invalid_tool_call_patterns
        ],
    ]


def _buffer(config: RunConfig) -> list[Rule]:
    """What may train next."""
    return [
        (
            config.buffer.window is None or config.buffer.sampler not in ("in_order", "fifo", "ready_first"),
            f"buffer.window={config.buffer.window} is for buffer.sampler=windowed or a plug-in: "
            f"{config.buffer.sampler} has no use for it",
        ),
        (
            config.window <= max(1, config.widest_window),
            f"buffer.window={config.buffer.window} must not exceed {config.widest_window} = 1 + buffer.groups x "
            "(buffer.max_staleness + 1 - refit.every): what it holds back would be missing in the next batch",
        ),
    ]


def _trainer(config: RunConfig) -> list[Rule]:
    """How a batch is trained on."""
    trainer, rollout = config.trainer, config.rollout
    batch = config.buffer.groups * rollout.samples
    return [
        (
            trainer.minibatches <= batch,
            f"trainer.minibatches={trainer.minibatches} can't split a batch of {batch} samples "
            f"(buffer.groups={config.buffer.groups} x rollout.samples={rollout.samples})",
        ),
        (
            1.0 not in trainer.betas,
            f"trainer.betas={list(trainer.betas)}: each must be at least 0 and under 1",
        ),
    ]


def _sizes(config: RunConfig) -> list[Rule]:
    """What goes through the store must fit: a batch in one entry, in the trainer's state all that it may yet repeat."""
    groups, samples, every = config.buffer.groups, config.rollout.samples, config.checkpoint.every
    size = limits.batch(groups, samples)
    held = 2 * min(every, config.steps) + 2
    return [
        (
            size <= limits.ENTRY,
            f"buffer.groups={groups} x rollout.samples={samples}: a batch of them takes up to {size:,} bytes in the "
            f"store, limit {limits.ENTRY:,}: use buffer.groups={limits.groups(samples)} or fewer, or fewer samples",
        ),
        (
            size > limits.ENTRY or held * size <= limits.SNAPSHOT,
            f"checkpoint.every={every}: with batches of up to {size:,} bytes the trainer would remember up to {held}, "
            f"which no checkpoint to fall back on covers, limit {limits.SNAPSHOT:,} bytes: use "
            f"checkpoint.every={(limits.SNAPSHOT // size - 2) // 2} or less",
        ),
    ]


def _ranks(trainer: TrainerConfig) -> list[Rule]:
    """How the policy may be spread."""
    ranks, sizes = trainer.ranks, trainer.megatron
    if trainer.backend == "torch":
        return [
            (sizes == MegatronConfig(), "trainer.megatron is for trainer.backend=megatron, but the backend is torch"),
        ]
    only = [name for name in ("packed", "activation_checkpointing") if getattr(trainer, name)]
    model = sizes.tensor_parallel * sizes.pipeline_parallel
    experts = sizes.expert_parallel * sizes.pipeline_parallel
    return [
        (not only, f"trainer.{' and trainer.'.join(only)} is for trainer.backend=torch, but the backend is megatron"),
        (
            ranks % model == 0,
            f"trainer.ranks={ranks} must be a multiple of trainer.megatron.tensor_parallel={sizes.tensor_parallel} x "
            f"pipeline_parallel={sizes.pipeline_parallel} = {model}: what is left over has no part of the model",
        ),
        (
            ranks % experts == 0,
            f"trainer.ranks={ranks} must be a multiple of trainer.megatron.expert_parallel={sizes.expert_parallel} x "
            f"pipeline_parallel={sizes.pipeline_parallel} = {experts}: what is left over has no experts",
        ),
    ]


def _gpus(config: RunConfig) -> list[Rule]:
    """Which GPUs trainer and engines are on."""
    engine, trainer = config.engine, config.trainer
    listed, count = list(engine.gpus), engine.count
    shares = [gpus.of_engine(config, index) for index in range(count)] if len(listed) % count == 0 else []
    here = config.launch.mode == "ray" and config.launch.ray_address is None
    both = sorted(set(gpus.of_trainer(config)[:1]) & set(gpus.of_engines(config)))
    return [
        (
            trainer.device == "auto" or _is_device(trainer.device),
            f"trainer.device={trainer.device!r}: expected auto, cpu, cuda or cuda:N",
        ),
        (_is_device(engine.device), f"engine.device={engine.device!r}: expected cpu, cuda or cuda:N"),
        (
            not listed or engine.device == "cuda",
            f"engine.gpus={listed} needs engine.device=cuda, without a number, but it is {engine.device}",
        ),
        (
            len(set(listed)) == len(listed),
            f"engine.gpus={listed} names a GPU twice: name a single one to have all engines share it",
        ),
        (
            len(listed) <= 1 or len(listed) % count == 0,
            f"engine.gpus={listed} can't be shared out among engine.count={count}: name 1 or a multiple of {count}",
        ),
        (
            engine.kind != "torch" or all(len(share) <= 1 for share in shares),
            f"engine.gpus={listed} gives each of engine.count={count} several GPUs, which engine.kind=torch has no use "
            "for: name one an engine",
        ),
        (
            all(share == tuple(range(share[0], share[0] + len(share))) for share in shares if share),
            f"engine.gpus={listed}: the GPUs of one engine must follow each other, as in [2, 3]",
        ),
        (
            config.refit.transport != "nccl" or not here or not both,
            f"refit.transport=nccl can't send from a GPU to itself, but trainer.device={trainer.device} and engines "
            f"share GPU {', '.join(map(str, both))}: move one, with engine.gpus or engine.device, or use ipc",
        ),
    ]


def _memory(config: RunConfig) -> list[Rule]:
    """Who gives memory back to whom, and when."""
    engine, refit, trainer = config.engine, config.refit, config.trainer
    offload = [
        (
            trainer.offload == "none" or trainer.device != "cpu" or engine.release != "none",
            f"trainer.offload={trainer.offload} makes room on a GPU, but trainer.device=cpu: leave it out (with "
            "engine.release the whole turn can be tried on a CPU)",
        ),
    ]
    setting = f"engine.release={engine.release}"
    if engine.release == "none":
        return offload
    return [
        *offload,
        (
            config.staleness == 0,
            f"{setting} keeps engines from generating during each step, but buffer.max_staleness="
            f"{config.buffer.max_staleness} has them generate ahead: use sync=true, or engine.release=none",
        ),
        (
            gpus.colocated(config),
            f"{setting} makes room on the device that trainer and engines share, but trainer.device={trainer.device}, "
            f"engine.device={engine.device} and engine.gpus={list(engine.gpus)} put them apart: name one GPU for both "
            "(trainer.device=cuda:0 engine.device=cuda:0), or use engine.release=none",
        ),
        (
            engine.kind != "external",
            f"{setting} can't be asked of engine.kind=external: whether that server can give memory back is not known, "
            "and it can't be ended when it fails to; use torch or sglang, or engine.release=none",
        ),
        (
            engine.kind != "sglang" or engine.device != "cpu",
            f"{setting} needs a GPU with engine.kind=sglang, but engine.device=cpu: there SGLang gives nothing back; "
            "use engine.release=none",
        ),
        (
            refit.drain != "in_flight",
            f"{setting} gives back the cache that refit.drain=in_flight keeps: use finish or interrupt",
        ),
    ]


def _is_device(name: str) -> bool:
    return re.fullmatch(r"cpu|cuda(:\d+)?", name) is not None


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


# --- the schema's shape ----------------------------------------------------------------------------------------------
