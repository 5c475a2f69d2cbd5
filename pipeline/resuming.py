"""Which settings a resume may change, and why the others stay."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from config import loading
from config.schema import RunConfig
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir

CHANGEABLE = (
    "steps",
    "target_reward",
    "target_window",
    "launch.*",
    "broker.*",
    "network.*",
    "recorder.*",
    "refit.*",
    "checkpoint.*",
    "producer.task_deadline_s",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.deadline_s",
    "rollout.score_deadline_s",
    "rollout.attempts.*",
    "rollout.overlong",
    "rollout.retry_backoff_s",
    "rollout.open_groups",
    "buffer.sampler",
    "buffer.group_deadline_s",
    "buffer.group_policy",
    "buffer.replacements",
    "buffer.window",
    "buffer.skip_flat_groups",
    "trainer.lr",
    "trainer.schedule",
    "trainer.warmup_steps",
    "trainer.grad_clip",
    "trainer.minibatches",
    "trainer.epochs",
    "trainer.microbatch_tokens",
    "trainer.threads",
    "trainer.device",
    "trainer.ranks",
    "trainer.*_deadline_s",
    "trainer.megatron.*",
    "trainer.loss.*",
    "engine.args",
    "engine.python",
    "engine.device",
    "engine.threads",
    "engine.max_running",
    "engine.max_total_tokens",
    "engine.lease_s",
    "engine.restart_backoff_s",
    "engine.restarts",
    "gateway.port",
    "gateway.request_deadline_s",
    "gateway.retries",
    "gateway.max_body_mib",
)
"""They bear on what is decided from now on only."""

REASONS = {
    "name": "it is part of the run's keys and directory",
    "description": "it describes the run as it was started",
    "run_dir": "the run stays where it is",
    "seed": "the tasks issued so far came from it",
    "sync": "the staleness bound holds for the whole log",
    "buffer.max_staleness": "the staleness bound holds for the whole log",
    "buffer.groups": "batches and credit are counted in it",
    "rollout.samples": "groups in hand have that many",
    "model.*": "the checkpoints hold that model",
    "producer.*": "the place among its tasks belongs to that producer",
    "trainer.betas": "the saved optimizer state brings its own",
    "trainer.weight_decay": "the saved optimizer state brings its own",
    "trainer.backend": "the checkpoints were written by it",
    "engine.*": "the run's actors, and what they remember, are those it was started with",
    "gateway.*": "the run's actors, and what they remember, are those it was started with",
    "eval.*": "the numbers of held-out tasks are counted in it",
}


def refusals(before: RunConfig, after: RunConfig, edited: Collection[str] = ()) -> list[str]:
    """One sentence for each setting that differs and may not. `edited`: those that config.yaml brings."""
    return [
        f"{key}={wanted!r}: a resumed run keeps {key}={was!r}, for {_reason(key)}: "
        + ("put that back in its config.yaml" if key in edited else "leave it out")
        + ", or start a new run"
        for key, (was, wanted) in changes(before, after).items()
        if not any(fnmatchcase(key, pattern) for pattern in CHANGEABLE)
    ]


def written(run: RunDir, before: RunConfig) -> RunConfig:
    """What config.yaml says, which a person may have edited since; one that is missing is written anew.

    Raises `PipelineError` if it can't be read.
    """
    path = run / "config.yaml"
    if not path.exists():
        path.write_text(loading.dump(before))
    try:
        return loading.load(path)
    except loading.ConfigError as error:
        raise PipelineError(
            "\n".join(error.problems) + f"\nCorrect {path}, or delete it: the settings of the run are in run.json too",
            Exit.USAGE,
        ) from error


def changes(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Setting -> its value before and after, of those that differ."""
    was, wanted = dict(_leaves(before)), dict(_leaves(after))
    return {key: (was[key], wanted[key]) for key in was if was[key] != wanted[key]}


def _reason(key: str) -> str:
    return next(reason for pattern, reason in REASONS.items() if fnmatchcase(key, pattern))


def _leaves(section: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, msgspec.Struct):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
