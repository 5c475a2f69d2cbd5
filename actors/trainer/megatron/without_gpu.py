"""Lets megatron-core compute on a CPU, where it names CUDA without asking.

Two layers. Functions of `torch.cuda` that megatron calls for the current device, its streams and its generator answer
for the CPU; that holds for the whole process, which has no GPU anyway. And on the thread that called `enable`, tensors
asked for on a CUDA device are made on the CPU.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # megatron needs it, and it must see the functions of torch.cuda before they are replaced
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_on_this_thread = threading.local()


def enable() -> None:
    """Do it for the calling thread, for as long as it lives; nothing where there is a GPU. Idempotent."""
    if torch.cuda.is_available() or getattr(_on_this_thread, "mode", None) is not None:
        return
    _functions()
    _on_this_thread.mode = _CpuForCuda()
    _on_this_thread.mode.__enter__()
    _megatron()


class _CpuForCuda(TorchFunctionMode):
    """Calls of torch with a CUDA device get the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizers sort parameters by this name, and know those of CUDA only.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if func is torch.Tensor.to and any(map(_is_cuda, args[1:])):
            args = (args[0], *(_CPU if _is_cuda(value) else value for value in args[1:]))
        return func(*args, **kwargs)


class _Stream:
    """A stream or an event of the CPU: what was queued is done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> _Stream:
        return self

    def _nothing(self, *_: Any) -> None:
        return None

    record = wait = synchronize = wait_stream = wait_event = _nothing


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _functions() -> None:
    cuda = torch.cuda
    answers: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda *_, **__: contextlib.nullcontext(),
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        **dict.fromkeys(("set_device", "synchronize", "empty_cache"), lambda *_, **__: None),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda *_, **__: 0),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    torch.compile = _as_it_is  # type: ignore[assignment]  # it would trip over the functions above
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None  # type: ignore[attr-defined]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _as_it_is(model: Any = None, **_: Any) -> Any:
    return _as_it_is if model is None else model


def _megatron() -> None:
    """What megatron-core does by other means than a call of torch."""
    from megatron.core import jit
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    jit.disable_jit_fuser()

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    tracker: Any = random.CudaRNGStatesTracker
    tracker.fork = _fork
    token_dispatcher.maybe_move_tensor_to_cpu = _counts


@contextlib.contextmanager
def _fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """`CudaRNGStatesTracker.fork` with the CPU's generator."""
    before = torch.get_rng_state()
    torch.set_rng_state(self.states_[name])
    try:
        yield
    finally:
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)


def _counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Counts of tokens an expert gets; numpy is asked for by those that need lists."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
