"""Which policy backend a run has, and on how many ranks: where names of the configuration meet classes.

torch and megatron are loaded only by the backend that needs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from config.schema import RunConfig, TrainerConfig
from contracts.policy import PolicyBackend


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank must know to make its part of the policy."""

    model_dir: str
    weights_dir: str = ""
    """Where the initial weights are, if not in `model_dir`."""
    trainer: TrainerConfig
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    total_steps: int = 1


class World(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's place. Ranks of one trainer are on one host and meet at the file `meeting`."""

    rank: int = 0
    size: int = 1
    meeting: str = ""
    timeout_s: float = 600.0
    """Longest collective, where the library heeds it."""


class BackendError(Exception):
    """The chosen backend is not installed, or not for this model or machine: says why, and what to do."""


def job(config: RunConfig, model_dir: Path) -> Job:
    """The job of a run whose model was found at `model_dir`."""
    return Job(
        model_dir=str(model_dir),
        trainer=config.trainer,
        dtype=config.model.dtype,
        seed=config.seed,
        total_steps=config.steps,
    )


def check(trainer: TrainerConfig) -> None:
    """Raises `BackendError` if the backend can't be imported here."""
    if trainer.backend == "megatron":
        from actors.trainer.megatron import installation

        installation.check()


def open_policy(work: Job) -> PolicyBackend:
    """The whole policy, ready to train. Raises `BackendError`, and what making it raises."""
    check(work.trainer)
    if work.trainer.backend == "torch" and work.trainer.ranks == 1:
        return part(work, World())
    from actors.trainer.ranks import RankedPolicy

    return RankedPolicy(work)


def part(work: Job, world: World) -> PolicyBackend:
    """The part of the policy that one rank holds. Its methods are collective: all ranks call the same ones in turn."""
    if work.trainer.backend == "megatron":
        from actors.trainer.megatron import installation

        installation.prepare()
        from actors.trainer.megatron.policy import MegatronPolicy

        return MegatronPolicy(work, world)
    from actors.trainer.torch_policy import TorchPolicy

    return TorchPolicy(
        Path(work.model_dir), work.trainer, dtype=work.dtype, seed=work.seed, total_steps=work.total_steps, world=world
    )
