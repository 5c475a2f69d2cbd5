"""Whether megatron can be imported here, and what it needs to be imported without Transformer Engine.

megatron-bridge imports some packages that only features need which are not used here: Transformer Engine for its LoRA,
ModelOpt for distillation, Triton for one cache of experts. Where such a package is absent, the module that imports it
gets stand-ins, for as long as it is being imported: megatron-core asks elsewhere whether Transformer Engine is there,
and must be told the truth.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
import typing
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from actors.trainer.backend import BackendError

REQUIRED = ("megatron.core", "megatron.bridge", "einops", "omegaconf")
REMEDY = (
    "install megatron-core and megatron-bridge where the trainer runs (`make megatron` makes .venv-megatron, start the "
    "run with .venv-megatron/bin/pipeline), or use trainer.backend=torch"
)
FEATURES = {
    "megatron.bridge.peft.lora_layers": ("transformer_engine",),
    "megatron.bridge.models.gpt_full_te_layer_autocast_spec": ("transformer_engine",),
    "megatron.bridge.models.distillation_provider": ("modelopt",),
    "megatron.bridge.models.bailing.modeling_bailing_moe_v2": ("transformers.modeling_attn_mask_utils",),
    "megatron.core.transformer.moe.ops.paged_stash": ("triton",),
}
"""Module -> packages that it imports for a feature that is not used here."""


def check() -> None:
    """Raises `BackendError` if a package is absent. Imports nothing of it."""
    absent = [name for name in REQUIRED if not _found(name)]
    if absent:
        raise BackendError(f"trainer.backend=megatron needs {', '.join(absent)}, not installed here: {REMEDY}")


def prepare() -> None:
    """Make `import megatron.bridge` work in this process and on this thread, also without a GPU; idempotent."""
    check()
    if not hasattr(typing, "override"):  # megatron-bridge is written for Python 3.12
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    # At every start they tell what is absent, what is deprecated, and how each buffer is laid out.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.|actors\.trainer\.megatron\.")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    from actors.trainer.megatron import without_gpu

    without_gpu.enable()


def transformer_engine() -> bool:
    """Whether it is installed."""
    return _found("transformer_engine")


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


class _Finder(MetaPathFinder):
    """Finds the modules of `FEATURES` where they are, and gives them a loader that lends stand-ins."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in FEATURES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        absent = tuple(package for package in FEATURES[fullname] if not _found(package))
        if spec is not None and spec.loader is not None and absent:
            spec.loader = _Lending(spec.loader, absent)
        return spec


class _Lending(Loader):
    """Runs a module while stand-ins for `packages` and all their submodules can be imported."""

    def __init__(self, loader: Loader, packages: tuple[str, ...]) -> None:
        self._loader = loader
        self._packages = packages

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        lender = _StandIns(self._packages)
        sys.meta_path.insert(0, lender)
        try:
            self._loader.exec_module(module)
        finally:
            sys.meta_path.remove(lender)
            for name in [name for name in sys.modules if lender.lends(name)]:
                del sys.modules[name]


class _StandIns(MetaPathFinder, Loader):
    """Imports empty modules that have whatever is asked of them."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def lends(self, name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in self._packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if self.lends(fullname) else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Anything(type):
    """Metaclass of what stand-ins hold: a class to inherit from, with any attribute, and a decorator."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not settings else cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Anything(name, (), {})
        setattr(self, name, value)
        return value
