"""What is wrong with a configuration, in sentences: key, value, what was expected, the nearest known key."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from config import gpus
from config.schema import MegatronConfig, RunConfig, TrainerConfig
from contracts import limits

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a run may be called: it becomes part of keys and paths."""

_WHERE = re.compile(r" - at `\$(.*)`$")


def against_schema(data: Mapping[str, Any]) -> list[str]:
    """Unknown keys and values that do not fit, in the order of the data; empty if `RunConfig` accepts it."""
    return list(_section(RunConfig, data, ""))


def unmergeable(data: Any) -> list[str]:
    """What a layer puts where a section or a free-form mapping belongs: no other layer could be merged with it."""
    return list(_unmergeable(RunConfig, data, "")) if isinstance(data, Mapping) else []


def is_text(key: str) -> bool:
    """Whether the setting at dotted `key` holds a string and nothing that a number could stand for."""
    kind = leaves().get(key)
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return all(isinstance(k, inspect.StrType | inspect.NoneType | inspect.LiteralType) for k in kinds)


def across_fields(config: RunConfig) -> list[str]:
    """Settings that are fine alone and contradict each other."""
    refit, engine, rollout, trainer = config.refit, config.engine, config.rollout, config.trainer
    batch = config.buffer.groups * rollout.samples
    staleness = config.staleness
    rules = [
        (
            NAME.fullmatch(config.name) is not None,
            f"name={config.name!r}: use 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit",
        ),
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
            rollout.score_deadline_s <= rollout.deadline_s,
            f"rollout.score_deadline_s={rollout.score_deadline_s:g} must not exceed "
            f"rollout.deadline_s={rollout.deadline_s:g}: scoring is a part of the rollout",
        ),
        (
            engine.kind == "external" or not engine.urls,
            f"engine.urls is for engine.kind=external, but the kind is {engine.kind}",
        ),
        (
            engine.kind != "external" or len(engine.urls) == engine.count,
            f"engine.kind=external needs one URL an engine: engine.count={engine.count}, "
            f"engine.urls has {len(engine.urls)}",
        ),
        (
            config.launch.mode == "ray" or config.launch.ray_address is None,
            f"launch.ray_address={config.launch.ray_address} is for launch.mode=ray: with external, Ray starts nothing",
        ),
        (
            trainer.minibatches <= batch,
            f"trainer.minibatches={trainer.minibatches} can't split a batch of {batch} samples "
            f"(buffer.groups={config.buffer.groups} x rollout.samples={rollout.samples})",
        ),
        (
            refit.every <= staleness + 1,
            f"refit.every={refit.every} must not exceed buffer.max_staleness + 1 = {staleness + 1}: "
            "what the next steps train on would be too stale before the engines get new weights",
        ),
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
        *[
            (
                _compiles(pattern),
                f"rollout.invalid_tool_call_patterns: {pattern!r} is no regular expression",
            )
            for pattern in rollout.invalid_tool_call_patterns
        ],
        *_sizes(config),
        *_ranks(trainer),
        *_gpus(config),
        *_memory(config),
        (
            1.0 not in trainer.betas,
            f"trainer.betas={list(trainer.betas)}: each must be at least 0 and under 1",
        ),
    ]
    return [problem for holds, problem in rules if not holds]


def _sizes(config: RunConfig) -> list[tuple[bool, str]]:
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


def _ranks(trainer: TrainerConfig) -> list[tuple[bool, str]]:
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


def _gpus(config: RunConfig) -> list[tuple[bool, str]]:
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


def _memory(config: RunConfig) -> list[tuple[bool, str]]:
    """Who gives memory back to whom, and when."""
    engine, refit, trainer = config.engine, config.refit, config.trainer
    offload = [
        (
            trainer.offload == "none" or trainer.backend == "torch",
            f"trainer.offload={trainer.offload} is for trainer.backend=torch, but the backend is {trainer.backend}",
        ),
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


@cache
def leaves() -> dict[str, inspect.Type]:
    """Dotted key -> type of every setting that is no section."""
    return dict(_walk(RunConfig, ""))


def _walk(section: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, inspect.Type]]:
    info = inspect.type_info(section)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        if isinstance(field.type, inspect.StructType):
            yield from _walk(field.type.cls, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.type


def _section(section: type[msgspec.Struct], data: Any, path: str) -> Iterator[str]:
    info = inspect.type_info(section)
    assert isinstance(info, inspect.StructType)
    if not isinstance(data, Mapping):
        yield _no_section(info, data, path)
        return
    fields = {field.name: field.type for field in info.fields}
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        kind = fields.get(key)
        if kind is None:
            yield _unknown(where, path, list(fields))
        elif isinstance(kind, inspect.StructType):
            yield from _section(kind.cls, value, where)
        else:
            yield from _value(section, key, value, where, kind)


def _unmergeable(section: type[msgspec.Struct], data: Mapping[str, Any], path: str) -> Iterator[str]:
    info = inspect.type_info(section)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        value, where = data.get(field.name, {}), f"{path}{field.name}"
        if isinstance(field.type, inspect.StructType):
            if isinstance(value, Mapping):
                yield from _unmergeable(field.type.cls, value, f"{where}.")
            else:
                yield _no_section(field.type, value, where)
        elif isinstance(field.type, inspect.DictType) and not isinstance(value, Mapping):
            yield f"{where}={_shown(value)}: expected keys and values, such as {where}.KEY=VALUE; leave it out for none"


def _no_section(info: inspect.StructType, value: Any, path: str) -> str:
    keys = [field.name for field in info.fields]
    return (
        f"{path}={_shown(value)}: {path} is a section, not a value: set its keys, as in {path}.{keys[0]}=..., or leave "
        f"it out for the defaults. The keys of {path} are {', '.join(keys)}"
    )


def _value(section: type[msgspec.Struct], key: str, value: Any, where: str, kind: inspect.Type) -> Iterator[str]:
    try:
        msgspec.convert({key: value}, section)
    except msgspec.ValidationError as error:
        inside = _WHERE.search(str(error))
        deeper = inside.group(1).removeprefix(f".{key}") if inside else ""
        problem = f": {_WHERE.sub('', str(error))} at {where}{deeper}" if deeper else _fix(section, key, value, kind)
        yield f"{where}={_shown(value)}: expected {describe(kind)}{problem}"
    else:
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{where}={_shown(value)}: expected a finite number"


def _shown(value: Any) -> str:
    """A value as one would type it."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return value if isinstance(value, str) and re.fullmatch(r"\S+", value) else repr(value)


def _fix(section: type[msgspec.Struct], key: str, value: Any, kind: inspect.Type) -> str:
    """What to write instead, where that can be told."""
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "nil", "")):
        info = inspect.type_info(section)
        assert isinstance(info, inspect.StructType)
        default = next(field.default for field in info.fields if field.name == key)
        return f"; leave it out for the default, {_shown(default)}" if default is not msgspec.NODEFAULT else ""
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    numeric = next((m for m in members if isinstance(m, inspect.IntType | inspect.FloatType)), None)
    if numeric is None or isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if numeric.le is not None and value > numeric.le:
        return f"; the most is {_number(numeric.le)}"
    return f"; the least is {_number(numeric.ge)}" if numeric.ge is not None and value < numeric.ge else ""


def _unknown(where: str, path: str, siblings: list[str]) -> str:
    key = where.rpartition(".")[2]
    near = get_close_matches(key, siblings, n=1)
    if near:
        hint = f"did you mean {path + '.' if path else ''}{near[0]}?"
    else:
        everywhere = list(leaves())
        same = [known for known in everywhere if known.rpartition(".")[2] == key]
        close = same or get_close_matches(where, everywhere, n=1)
        hint = f"did you mean {' or '.join(close)}?" if close else ""
    known = f"keys of {path}" if path else "keys at the top"
    return f"{where}: no such key{'; ' + hint if hint else '.'} The {known} are {', '.join(siblings)}"


# --- words for types -------------------------------------------------------------------------------------------------


def describe(kind: inspect.Type) -> str:
    """What a value of this type is, in words: `a whole number from 1 to 256`, `one of fifo, in_order`."""
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _bounds(kind)
        case inspect.FloatType():
            return "a number" + _bounds(kind)
        case inspect.StrType():
            return "text"
        case inspect.NoneType():
            return "null"
        case inspect.LiteralType():
            return f"one of {', '.join(map(str, kind.values))}"
        case inspect.UnionType():
            return " or ".join(describe(member) for member in kind.types)
        case inspect.VarTupleType():
            return f"a list of which each is {describe(kind.item_type)}"
        case inspect.TupleType():
            return f"a list of {len(kind.item_types)}: {', '.join(describe(item) for item in kind.item_types)}"
        case inspect.DictType():
            return "keys and values"
    return type(kind).__name__


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    """The range. Every upper bound is one that may be had."""
    low, high = kind.ge if kind.gt is None else kind.gt, kind.le
    if low is None or high is None:
        return ""
    lower = f"from {_number(low)}" if kind.gt is None else f"above {_number(low)}"
    return f" {lower} {'to' if kind.gt is None else 'and up to'} {_number(high)}"


def _number(value: float) -> str:
    return f"{int(value)}" if value == int(value) else f"{value:g}"
