"""What a refit needs of a GPU's memory beside what is there anyway, and which size of bucket that leaves. Pure.

A sender lays buckets out before they travel, and a receiver stages what it takes before it is loaded: SGLang's own one
every bucket twice, ours only what has to be cut for a rank. Where both are on one GPU, both have to fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from config import gpus, memory
from config.schema import RunConfig, is_direct

MIB = 2**20
ON_CPU = 256 * MIB
LEAST, SMALL, LARGE = memory.LEAST_BUCKET, 64 * MIB, 512 * MIB
"""Automatic sizes on a GPU: an eighth of its free memory between the last two, and down to the first one if a refit
would not fit otherwise."""
SHORT = ("out of memory", "no memory for", "no space left", "allocate memory")
"""What CUDA, an engine of ours, the host's shared memory, and torch on a CPU say."""


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
    transport, direct = config.refit.transport, is_direct(config)
    mine = gpus.of_trainer(config)[:1]
    shares = [gpus.of_engine(config, index) for index in range(config.engine.count)]
    beside = sum(len(set(mine) & set(share)) for share in shares)
    # ours stages at most one bucket, of what has to be cut; our engine one over gloo too, though in the host's memory
    staged = max(memory.staged_buckets(config), int(transport != "ipc" or direct))
    sent = memory.sent_buckets(config)
    return Staging(sent=sent, whole=transport == "ipc" and direct, taken=staged, beside=beside)


def choose(setting: int | None, free: int, sizes: Sequence[int], staging: Staging, most: int = LARGE) -> Choice:
    """The bucket that is set, or one of up to `most` bytes that suits `free` bytes of GPU memory. Raises `NoRoom`."""
    usual = min(most, LARGE, max(SMALL, free // 8))
    size = usual if setting is None else setting
    if setting is None:
        while staging.needs(size, sizes) > free and size > LEAST:
            size = max(LEAST, size // 2)
    needed = staging.needs(size, sizes)
    if needed > free:
        raise NoRoom(_no_room(setting, size, needed, free, sizes, staging))
    if size == usual or setting is not None:
        return Choice(size)
    least = mib(staging.needs(usual, sizes))
    return Choice(size, f"buckets of {mib(size)} instead of {mib(usual)}, which need {least}: {mib(free)} is free")


def is_short(reason: str) -> bool:
    """Whether a transfer failed because somebody, perhaps an engine on another GPU, had no memory for a bucket."""
    return any(words in reason.lower() for words in SHORT)


def _no_room(setting: int | None, size: int, needed: int, free: int, sizes: Sequence[int], staging: Staging) -> str:
    parts = []
    if staging.whole:
        parts.append(f"a copy of the model, {mib(sum(sizes))}")
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
        f"the refit needs {mib(needed)} of GPU memory ({', '.join(parts)}; a bucket has up to {mib(bucket)}), but "
        f"{mib(free)} is free: {', '.join(fixes)}"
    )


def mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
