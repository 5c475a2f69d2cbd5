"""Which parameters a model has: names and shapes, from the headers of its safetensors files. Nothing is loaded.

An engine ignores what it has no parameter for (SGLang answers success), so names are checked on our side.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from contracts.events import Bucket, TensorSpec

Manifest = Mapping[str, tuple[int, ...]]
"""Name -> shape."""
HEADER_LIMIT = 100 * 2**20
"""Bytes of a header, as safetensors itself limits it."""
FLOATS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that a weight may travel in; the engine casts to its own."""
TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""One matrix under two names: either side may leave out the first."""


class _Entry(msgspec.Struct):
    shape: tuple[int, ...]


def read(model_dir: Path) -> Manifest | None:
    """The manifest of a checkpoint directory; None when it holds no safetensors files. Raises `ValueError`."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        found |= _header(file)
    return found or None


def problem(manifest: Manifest, buckets: Iterable[Bucket]) -> str | None:
    """What keeps these tensors from being the whole model; None when they are."""
    sent: dict[str, TensorSpec] = {}
    for spec in (spec for bucket in buckets for spec in bucket.tensors):
        if spec.name in sent:
            return f"{spec.name!r} is sent twice"
        sent[spec.name] = spec
        if spec.dtype not in FLOATS:
            return f"{spec.name!r} is sent as {spec.dtype}; weights travel as {', '.join(FLOATS)}"
        shape = manifest.get(spec.name)
        if shape is not None and shape != spec.shape:
            return f"{spec.name!r} is sent with shape {list(spec.shape)}, the model has {list(shape)}"
    return _names(set(manifest), set(sent))


def strangers(held: Collection[str], buckets: Iterable[Bucket]) -> str | None:
    """What was sent and is not held, or held and was not sent; None when the names are the same."""
    return _names(set(held), {spec.name for bucket in buckets for spec in bucket.tensors})


def _names(held: set[str], sent: set[str]) -> str | None:
    for few, many in ((held, sent), (sent, held)):
        if TIED[0] in many - few and TIED[1] in few:
            few.add(TIED[0])
    if unknown := sorted(sent - held):
        return f"{len(unknown)} parameters are sent that the model has not, first {unknown[0]!r}"
    if missing := sorted(held - sent):
        return f"{len(missing)} parameters of the model are not sent, first {missing[0]!r}"
    return None


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    with file.open("rb") as opened:
        start = opened.read(8)
        if len(start) < 8 or (size := struct.unpack("<Q", start)[0]) > HEADER_LIMIT:
            raise ValueError(f"{file} is no safetensors file: its header has no length")
        data = opened.read(size)
    try:
        entries = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return {name: msgspec.json.decode(entry, type=_Entry).shape for name, entry in entries.items()}
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from error
