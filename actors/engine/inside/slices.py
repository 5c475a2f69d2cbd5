"""Which part of which live parameter each tensor of a checkpoint goes to, as the model's own loader has it.

The loader is run once over tensors without memory (torch's `meta` device), and every copy from one of them into a
parameter is noted in place of being made. So q, k and v find their rows of a fused matrix, a shard its columns, and a
padded vocabulary its beginning, whatever the architecture. What the loader computes (a cast, a quantisation, a value
derived from a parameter) is no slice: `Layout.problem` says so, and the model has to be loaded by its loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .mix64 import Piece, contiguous_stride

ALIGNMENT = 256
"""Where a tensor begins in memory that is shared whole: at a multiple of so many bytes."""


class Spec(NamedTuple):
    """A tensor as it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Mismatch(ValueError):
    """What is sent is not what the model has: names the tensor."""


class Layout(NamedTuple):
    """`slices` of each name: parts of live parameters with their place in what is sent. `problem`: why not."""

    slices: Mapping[str, tuple[Piece, ...]]
    problem: str | None


def target_of(spec: Spec, pieces: Sequence[Piece]) -> torch.Tensor | None:
    """The one contiguous memory that takes the whole tensor; None when it has to be staged."""
    if len(pieces) != 1:
        return None
    piece = pieces[0]
    entire = piece.offset == 0 and piece.tensor.shape == torch.Size(spec.shape)
    if entire and piece.tensor.is_contiguous() and _same(piece.stride, contiguous_stride(spec.shape), spec.shape):
        return piece.tensor
    return None


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where each tensor begins in memory that is shared whole, and how large that is, in bytes."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def derive(model: torch.nn.Module, specs: Sequence[Spec], load: Callable[[Iterator[Any]], Any]) -> Layout:
    """Run `load` over tensors like `specs` and see where they land. Nothing but padding is written.

    Raises `Mismatch` when a parameter gets nothing, or a tensor has none (a second name of a tied matrix may).
    """
    probe = _Probe(model, specs)
    try:
        with torch.no_grad(), probe:
            load(probe.tensors())
    except Exception as error:  # whatever the loader raises, it can't be followed
        probe.flaw(f"the model's loader does not take tensors without memory: {type(error).__name__}: {error}")
    if probe.problem is None:
        probe.check()
    return Layout({name: tuple(pieces) for name, pieces in probe.pieces.items()}, probe.problem)


class _Probe(TorchDispatchMode):
    def __init__(self, model: torch.nn.Module, specs: Sequence[Spec]) -> None:
        super().__init__()
        self.problem: str | None = None
        self.pieces: dict[str, list[Piece]] = {spec.name: [] for spec in specs}
        self._specs = specs
        self._sent: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []
        self._names: dict[int, str] = {}
        self._needed: dict[int, int] = {}
        self._written: dict[int, dict[tuple[Any, ...], int]] = {}
        for name, parameter in model.named_parameters():
            key = _storage(parameter)
            self._names.setdefault(key, name)
            self._needed[key] = self._needed.get(key, 0) + parameter.numel()
            self._written[key] = {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._specs:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            self._alive.append(tensor)  # its storage stays the key of its name
            self._sent[_storage(tensor)] = spec.name
            yield spec.name, tensor

    def flaw(self, reason: str) -> None:
        self.problem = self.problem or reason

    def check(self) -> None:
        """Every parameter is written whole, once, and every tensor goes somewhere."""
        for key, written in self._written.items():
            count = sum(written.values())
            if not count and self._needed[key]:
                raise Mismatch(f"the model's {self._names[key]!r} is not among what is sent")
            if count != self._needed[key]:
                self.flaw(f"{count} of {self._needed[key]} elements of {self._names[key]!r} are slices of what is sent")
                return
        astray = [name for name, pieces in self.pieces.items() if not pieces]
        tied = [name for name in astray if name.endswith("lm_head.weight")]
        if len(astray) > len(tied):
            first = next(name for name in astray if name not in tied)
            raise Mismatch(f"{len(astray)} tensors are sent that the model has no parameter for, first {first!r}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if not any(_storage(t) in self._sent or _storage(t) in self._names for t in tensors):
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            return self._copy(func, *args[:2])
        if func in _FILLS:
            self._note(args[0])
            return func(*args, **kwargs)
        if not _is_view(func) and func not in _LIKE:
            named = [self._sent.get(_storage(t)) or self._names.get(_storage(t)) for t in tensors]
            self.flaw(f"the model's loader computes {func} of {next(name for name in named if name)!r}")
        return func(*args, **kwargs)

    def _copy(self, func: Any, into: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        name, parameter = self._sent.get(_storage(source)), self._names.get(_storage(into))
        if name is None:
            if _storage(source) in self._names or source.numel() > 1:
                self.flaw(f"the model's loader copies something derived into {parameter!r}")
            self._note(into)
            return func(into, source)
        if parameter is None:
            self.flaw(f"the model's loader copies {name!r} to where no parameter is")
        elif into.dtype != source.dtype or into.shape != source.shape:
            self.flaw(
                f"{name!r} as {source.dtype} {tuple(source.shape)} is loaded into {into.dtype} {tuple(into.shape)} "
                f"of {parameter!r}"
            )
        elif into.numel():
            self._note(into)
            self.pieces[name].append(Piece(into.detach(), int(source.storage_offset()), tuple(source.stride())))
        return into

    def _note(self, into: torch.Tensor) -> None:
        written = self._written.get(_storage(into))
        place = (into.storage_offset(), tuple(into.shape), tuple(into.stride()))
        if written is None or not into.numel():
            return
        if place in written:
            self.flaw(f"{self._names[_storage(into)]!r} is written twice")
        written[place] = into.numel()


_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
_LIKE = (torch.ops.aten.zeros_like.default, torch.ops.aten.empty_like.default)


def _is_view(func: Any) -> bool:
    returned = [entry.alias_info for entry in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _same(left: Sequence[int], right: Sequence[int], shape: Sequence[int]) -> bool:
    return all(a == b for a, b, size in zip(left, right, shape, strict=True) if size != 1)
