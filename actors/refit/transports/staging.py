"""What a refit needs of a GPU's memory beside what is there anyway, and which size of bucket that leaves. Pure.

A sender lays buckets out before they travel, and a receiver stages what it takes before it is loaded: SGLang's own one
every bucket twice, ours only what has to be cut for a rank. Where both are on one GPU, both have to fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from config import gpus
from config.schema import RunConfig, is_direct

MIB = 2**20
ON_CPU = 256 * MIB
LEAST, SMALL, LARGE = 16 * MIB, 64 * MIB, 512 * MIB
"""Automatic sizes on a GPU: an eighth of its free memory between the last two, and down to the first one if a refit
would not fit otherwise."""


class Staging(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the sender's GPU, in buckets.

    `sent`: that the sender lays out; with `whole` a copy of the whole model. `taken`: that each receiving rank stages,
    of which `beside` are on this GPU too.
    """

    sent: int = 0
    whole: bool = False
    taken: int = 0
    beside: int = 0

    def needs(self, bucket: int, sizes: Sequence[int]) -> int:
        """Bytes that a refit of tensors of `sizes` takes on the sender's GPU at its worst moment."""
        model = sum(sizes)
        size = min(model, max([bucket, *sizes]))  # a tensor above the limit has a bucket of its own
        return size * (self.sent + self.taken * self.beside) + (model if self.whole else 0)


class NoRoom(ValueError):
    """A refit does not fit: says what it needs, what there is, and what to change."""


class Choice(msgspec.Struct, frozen=True):
    """Bytes of a bucket; `note` says why it is smaller than usual."""

    size: int
    note: str = ""


def of(config: RunConfig) -> Staging:
    """Of a run's sender, which is the trainer's rank 0."""
    transport, direct, kind = config.refit.transport, is_direct(config), config.engine.kind
    mine = gpus.of_trainer(config)[:1]
    shares = [gpus.of_engine(config, index) for index in range(config.engine.count)]
    beside = sum(len(set(mine) & set(share)) for share in shares)
    # memory that is opened where it is needs no staging before SGLang's loader, or our engine, reads it
    taken = 0 if transport == "ipc" and not direct else 2 if kind != "torch" and not direct else 1
    if transport == "ipc":
        return Staging(sent=0 if direct else 2, whole=direct, taken=taken, beside=beside)
    return Staging(sent=2 if transport == "nccl" and not direct else 0, taken=taken, beside=beside)


def choose(setting: int | None, free: int, sizes: Sequence[int], staging: Staging) -> Choice:
    """The bucket that is set, or one that suits `free` bytes of GPU memory. Raises `NoRoom`."""
    usual = min(LARGE, max(SMALL, free // 8))
    size = usual if setting is None else setting
    if setting is None:
        while staging.needs(size, sizes) > free and size > LEAST:
            size = max(LEAST, size // 2)
    needed = staging.needs(size, sizes)
    if needed > free:
        raise NoRoom(_no_room(setting, size, needed, free, sizes, staging))
    if size == usual or setting is not None:
        return Choice(size)
    least = _mib(staging.needs(usual, sizes))
    return Choice(size, f"buckets of {_mib(size)} instead of {_mib(usual)}, which need {least}: {_mib(free)} is free")


def _no_room(setting: int | None, size: int, needed: int, free: int, sizes: Sequence[int], staging: Staging) -> str:
    parts = []
    if staging.whole:
        parts.append(f"a copy of the model, {_mib(sum(sizes))}")
    if staging.sent:
        parts.append(f"{staging.sent} buckets of the trainer")
    if staging.taken and staging.beside:
        parts.append(f"{staging.taken * staging.beside} of engines on the same GPU")
    bucket = max([size, *sizes])
    fixes = ["lower engine.max_total_tokens or --mem-fraction-static in engine.args", "set trainer.offload"]
    if staging.whole:
        fixes.insert(0, "use refit.receiver=sglang, which takes buckets")
    elif setting is not None and size > max(sizes):
        fixes.insert(0, f"lower refit.bucket_mib={size / MIB:g}")
    return (
        f"the refit needs {_mib(needed)} of GPU memory ({', '.join(parts)}; a bucket has up to {_mib(bucket)}), but "
        f"{_mib(free)} is free: {', '.join(fixes)}"
    )


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
