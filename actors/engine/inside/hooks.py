"""Puts the receiver behind a call that SGLang's schedulers have: /update_weights_from_distributed.

A `load_format` of `sluice:` and a JSON object is a command to the receiver; any other goes where it always went.
SGLang's module is changed when it is imported, which only some of its processes do. Every rank does what the command
says, and rank 0 answers for all: `sluice:` and a JSON list with an object a rank.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .receiver import Failed, Held, Receiver
from .slices import Mismatch, Spec

MODULE = "sglang.srt.managers.scheduler_components.weight_updater"
PREFIX = "sluice:"


def install() -> None:
    """Change `MODULE` once it is imported."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def changed(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


def change(module: Any) -> None:
    """Let the manager of weight updates take commands. Raises `AttributeError` when SGLang has no such thing."""
    manager = module.SchedulerWeightUpdaterManager
    before = manager.update_weights_from_distributed

    def update_weights_from_distributed(self: Any, request: Any) -> Any:
        command = request.load_format or ""
        if not command.startswith(PREFIX):
            return before(self, request)
        return module.UpdateWeightsFromDistributedReqOutput(*answer(self, request))

    manager.update_weights_from_distributed = update_weights_from_distributed


def answer(manager: Any, request: Any) -> tuple[bool, str]:
    """Perform the command on this rank; whether all ranks did, and what they say."""
    try:
        mine = perform(manager, request)
    except Exception as error:  # an exception that leaves here ends the server
        mine = {"error": type(error).__name__, "reason": str(error)}
    ranks: list[Any] = [mine]
    group = manager.tp_cpu_group
    if group is not None and torch.distributed.get_world_size(group) > 1:
        ranks = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(ranks, mine, group=group)
    failed = [rank for rank in ranks if "error" in rank]
    if failed:
        return False, f"{failed[0]['error']}: {failed[0]['reason']}"
    return True, PREFIX + json.dumps(ranks, separators=(",", ":"))


def perform(manager: Any, request: Any) -> dict[str, Any]:
    """`prepare`: derive where the named tensors go. `broadcast`, `copy`: take them all, and flush the cache.

    `open`: have the memory that `copy` is about to name ready.
    """
    command = json.loads(request.load_format[len(PREFIX) :])
    runner = manager.tp_worker.model_runner
    receiver = getattr(runner, "sluice_receiver", None)
    if receiver is None:
        model = runner.model
        receiver = Receiver(model, next(model.parameters()).device, model.load_weights)
        runner.sluice_receiver = receiver
    if command["do"] == "prepare":
        shapes = [tuple(shape) for shape in request.shapes]
        dtypes = [getattr(torch, dtype) for dtype in request.dtypes]
        receiver.prepare([Spec(*each) for each in zip(request.names, dtypes, shapes, strict=True)], command["counts"])
        return {"fallback": receiver.fallback, "parts": receiver.parts()}
    if command["do"] == "open":
        return {"fallback": receiver.fallback, "phases": receiver.open(command["places"][runner.tp_rank])}
    if not _idle(manager):
        raise Held("requests are held: weights can't change under them", lost=False)
    if command["do"] == "copy":
        phases = receiver.copy(command["places"][runner.tp_rank], command["timeout"])
    else:
        phases = _broadcast(runner, receiver, request.group_name, command["timeout"])
    begun = time.monotonic()
    sums = receiver.sums()
    checked = time.monotonic()
    flushed = manager.flush_cache(empty_cache=False)
    phases = {**phases, "digest": phases.get("digest", 0.0) + checked - begun, "flush": time.monotonic() - checked}
    return {"fallback": receiver.fallback, "phases": phases, "sums": sums, "flushed": bool(flushed)}


def _idle(manager: Any) -> bool:
    """Whether no rank holds requests: all begin to receive, or none does."""
    idle, group = bool(manager.is_fully_idle()), manager.tp_cpu_group
    if group is None or torch.distributed.get_world_size(group) == 1:
        return idle
    told = torch.tensor([int(idle)])
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MIN, group=group)
    return bool(told.item())


def _broadcast(runner: Any, receiver: Receiver, name: str, timeout: float) -> dict[str, float]:
    group = runner._model_update_group.get(name)
    if group is None:
        raise Failed(f"there is no group {name!r}", lost=False)
    try:
        return receiver.broadcast(group, timeout, _alive(group))
    except Failed as error:
        if error.lost and torch.cuda.is_available():
            group.abort()  # what hangs on the GPU ends, and the server lives
        raise


def _alive(group: Any) -> Callable[[], Any] | None:
    """Asks the store where the ranks met, which is rank 0's. gloo needs none: a closed connection is an error there."""
    if not torch.cuda.is_available():
        return None
    _, store = torch.distributed.distributed_c10d._world.pg_map[group]
    return lambda: store.check(["sluice"])


__all__ = ["Mismatch", "answer", "change", "install", "perform"]
